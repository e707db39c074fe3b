"""`rolltree docs`: what messages name can be read without a checkout."""

import re

from click.testing import CliRunner

from docs_kit import ROOT
from rolltree.cli import app
from rolltree.narrator.detectors import DETECTORS


def run(*words):
    return CliRunner().invoke(app, ["docs", *words])


def test_every_page_is_listed_and_printed():
    listed = [line.split()[0] for line in run().stdout.splitlines()]
    assert listed == sorted(
        path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "README"
    )
    for name in ("settings", "settings.md", "docs/settings.md"):
        assert run(name).stdout == (ROOT / "docs/settings.md").read_text()


def test_a_section_ends_where_the_next_one_of_its_rank_begins():
    text = run("docs/cli.md#eval").stdout
    assert text.startswith("## eval\n")
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 1


def test_a_page_or_a_section_that_is_missing_is_named_with_those_there_are():
    unknown = run("setings")
    assert unknown.exit_code == 2
    assert "no page 'setings'" in unknown.stderr
    assert "settings" in unknown.stderr
    assert "no section 'evals'" in run("cli#evals").stderr


def test_the_page_of_every_advice_can_be_printed():
    pages = {each.page for each in DETECTORS.values() if each.page}
    assert len(pages) > 5
    for page in pages:
        assert run(page).exit_code == 0, page
