"""The page's code stays small: readable lines, no export and no style that nothing uses."""

import re

from rolltree.insight.page.bundle import STATIC

MAX_LINES = 3200
MAX_CHARACTERS = 120
FILES = {path.name: path.read_text("utf-8") for path in sorted(STATIC.iterdir())}
MODULES = {name: text for name, text in FILES.items() if name.endswith(".js")}
EXPORT = re.compile(r"^export (?:async )?(?:function|const) (\w+)", re.MULTILINE)
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";', re.MULTILINE)
VIEWS = re.compile(r'^import \* as \w+ from "\./([\w.]+)";', re.MULTILINE)


def test_the_page_is_small():
    """Lines that are read: empty ones between functions are not counted."""
    lines = [line for text in FILES.values() for line in text.splitlines() if line.strip()]
    assert len(lines) < MAX_LINES


def test_every_line_is_readable():
    lines = [(name, line) for name, text in FILES.items() for line in text.splitlines()]
    assert [(name, line) for name, line in lines if len(line) > MAX_CHARACTERS] == []


def test_every_export_is_imported():
    exported = {(name, found) for name, text in MODULES.items() for found in EXPORT.findall(text)}
    imported = set()
    for text in MODULES.values():
        imported |= {(name, "render") for name in VIEWS.findall(text)}
        for names, module in IMPORT.findall(text):
            imported |= {(module, each.split(" as ")[0].strip()) for each in names.split(",")}
    assert exported - imported == set()


def test_every_import_is_used():
    for name, text in MODULES.items():
        for names, _ in IMPORT.findall(text):
            for each in names.split(","):
                word = each.split(" as ")[-1].strip()
                uses = re.findall(rf"\b{word}\b", IMPORT.sub("", text)) if word else ["none"]
                assert uses, f"{name} imports {word} and does not use it"


def test_every_styled_class_is_set_somewhere():
    """As far as the text tells: a class is a word in some string, or its number follows one."""
    rules = re.sub(r"/\*.*?\*/|\{[^{}]*\}", " ", FILES["style.css"], flags=re.DOTALL)
    styled = set(re.findall(r"\.([a-z][\w-]*)", rules))
    strings = " ".join(
        found
        for name, text in FILES.items()
        if name != "style.css"
        for found in re.findall(r'"[^"\n]*"|`[^`]*`', text)
    )
    words = set(re.findall(r"[\w-]+", strings))
    numbered = set(re.findall(r"\b([a-z]+)\$\{", strings))
    values = {"assistant", "system", "warning", "model", "running"}  # a record's own words
    unset = {each for each in styled - words - values if each.rstrip("0123456789") not in numbered}
    assert unset == set()
