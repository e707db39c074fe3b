"""The pages hang together: their links resolve, and the names, files and settings in them exist.

Links to other sites are left out.
"""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "design", "examples", "environments")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for top in FOLDERS for page in (ROOT / top).rglob("*.md"))]
)
CITED = re.compile(r"(?<=`)[a-z_][\w/]*\.(?:py|md)(?=`)|\b(?:docs|design)/\w+(?:\.md)?")
LINK = re.compile(r"\]\(([^()\s#]*)(?:#([^()\s]*))?\)")


def each(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (page, first group) for each match in a page."""
    for page in PAGES:
        for match in re.finditer(pattern, page.read_text(encoding="utf-8"), re.MULTILINE):
            yield str(page.relative_to(ROOT)), match[1]


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(dotted: str) -> bool:
    """Say whether a dotted path names a module, or an attribute of one."""
    first, *rest = dotted.split(".")
    found = importlib.import_module(first)
    path = first
    for name in rest:
        path = f"{path}.{name}"
        try:
            found = getattr(found, name, None) or importlib.import_module(path)
        except ImportError:
            return False
    return True


def test_the_design_pages_are_numbered_without_a_gap_or_a_twin():
    pages = sorted((ROOT / "design").glob("*.md"))
    wanted = [f"{number:04}" for number in range(1, len(pages) + 1)]
    assert [page.name.partition("-")[0] for page in pages] == wanted
    headings = [page.read_text().partition("\n")[0] for page in pages]
    numbers = [int(re.match(r"# (\d+)[:.] ", heading)[1]) for heading in headings]
    assert numbers == list(range(1, len(pages) + 1))


def test_links_lead_to_files_and_headings():
    links = [
        (page, *found)
        for page in PAGES
        for found in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in found[0]
    ]
    assert len(links) > 50
    for page, target, heading in links:
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.relative_to(ROOT)} links to {target}"
        if heading:
            assert heading in anchors(file), f"{page.relative_to(ROOT)}: {target}#{heading}"


def test_every_page_of_the_documentation_is_listed():
    listed = set(re.findall(r"\((\S+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_dotted_names_exist():
    names = {(page, f"rolltree.{name}") for page, name in each(r"(?<![\w.])rt\.([A-Za-z_]\w*)")}
    names.update(each(r"(?<![\w/.-])(rolltree(?:\.[A-Za-z_]\w*)+)"))
    for page, line in each(r"^(from rolltree[\w.]* import .+)$"):
        _, module, _, *imported = re.findall(r"[\w.]+", line)
        names.update((page, f"{module}.{name}") for name in imported if name != "as")
    assert len(names) > 50
    assert [(page, name) for page, name in sorted(names) if not exists(name)] == []


def test_files_exist():
    files = set(each(r"`([a-z_]+/[\w/.-]+\.(?:py|toml|md))`"))
    assert len(files) > 5
    made_by_the_reader = {
        "environments/my_env/my_env.py",
        "my_agent/agent.py",
        "my_agent/my_agent.py",
        "my_env/my_env.py",
    }
    folders = (ROOT, ROOT / "src" / "rolltree", ROOT / "examples")
    missing = [
        (page, file)
        for page, file in sorted(files)
        if file not in made_by_the_reader and not any((top / file).exists() for top in folders)
    ]
    assert missing == []


def test_files_that_the_code_cites_exist():
    """Beside the module, in the package or in the repository; `design/0003` is a page's number."""
    package = ROOT / "src" / "rolltree"
    cited = {
        (file, name)
        for file in package.rglob("*.py")
        for name in CITED.findall(file.read_text(encoding="utf-8"))
    }
    assert len(cited) > 10
    missing = [
        (str(file.relative_to(ROOT)), name)
        for file, name in sorted(cited)
        if not any(
            [*top.glob(name), *top.glob(f"{name}-*.md")] for top in (file.parent, package, ROOT)
        )
    ]
    assert missing == []


def test_settings_exist():
    from rolltree.training.config import SECTIONS

    sections = {
        name: {field.name for field in msgspec.structs.fields(section)}
        for name, section in SECTIONS.items()
        if name != "env"  # on most pages `env` is an environment
    }
    no_settings = {
        "engine.is_alive",
        "model.forward",
        "model.safetensors",
        "train.toml",
        "run.db",
        "run.lock",
        "run.commits",
    }
    keys = set(each(rf"`((?:{'|'.join(sections)})\.\w+)(?: =[^`]*)?`"))
    assert len(keys) > 30
    for page, key in sorted(keys):
        if page.startswith("docs/from-"):  # names of other trainers
            continue
        section, _, name = key.partition(".")
        assert key in no_settings or name in sections[section], f"{page}: no setting {key}"


def test_the_settings_page_has_every_key_with_its_default():
    from rolltree.training.config import SECTIONS

    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    documented = {}
    for section, body in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        for keys, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", body, re.MULTILINE):
            names, values = re.findall(r"`(\w+)`", keys), re.findall(r"`(.*?)`", defaults)
            documented.update({(section, name): None for name in names})
            documented.update(zip([(section, name) for name in names], values, strict=False))
    real = {
        (name, field.name): field.default_factory()
        if field.default is msgspec.NODEFAULT
        else field.default
        for name, section in SECTIONS.items()
        for field in msgspec.structs.fields(section)
    }
    shown = {
        key: None if value is None else json.dumps(value, default=msgspec.structs.asdict)
        for key, value in real.items()
    }
    assert documented == shown
