"""The pages hang together: links between them lead somewhere, each design page has its own number.

Links to other sites and to headings are left out.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "design", "examples", "environments")


def test_the_design_pages_are_numbered_without_a_gap_or_a_twin():
    pages = sorted((ROOT / "design").glob("*.md"))
    wanted = [f"{number:04}" for number in range(1, len(pages) + 1)]
    assert [page.name.partition("-")[0] for page in pages] == wanted
    headings = [page.read_text().partition("\n")[0] for page in pages]
    numbers = [int(re.match(r"# (\d+)[:.] ", heading)[1]) for heading in headings]
    assert numbers == list(range(1, len(pages) + 1))


def test_links_lead_to_files():
    pages = [*ROOT.glob("*.md"), *(page for top in FOLDERS for page in (ROOT / top).rglob("*.md"))]
    links = {
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^()\s#]+\.\w+)", page.read_text())
        if "://" not in target
    }
    assert len(links) > 20
    assert [link for link in links if not (link[0].parent / link[1]).exists()] == []
