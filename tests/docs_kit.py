"""The Python blocks of README.md and docs/: `blocks("samples.md")` reads them, `run` runs them."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def text_of(page):
    """Return the text of a page: README.md, or the name of a file in docs/."""
    folder = ROOT if page == "README.md" else ROOT / "docs"
    return (folder / page).read_text(encoding="utf-8")


def blocks(page, language="python", below=""):
    """Return the code blocks of a page, top to bottom; only those below a heading, if given."""
    pattern = rf"^ *```{language}\n(.*?)^ *```$"
    text = text_of(page)
    text = text[text.index(below) :]
    found = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


def run(page, names=None, only=slice(None), below=""):
    """Run the Python blocks of a page in one namespace, and return the namespace."""
    names = {"__name__": "docs"} if names is None else names
    for block in blocks(page, below=below)[only]:
        exec(compile(block, page, "exec"), names)
    return names
