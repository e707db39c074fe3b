"""`rolltree docs`: print the documentation pages of this version, to which messages refer."""

from __future__ import annotations

import re
from pathlib import Path

import click

from rolltree.cli.arguments import echo
from rolltree.values.errors import UnknownName

PAGES = Path(__file__).parents[1] / "_docs"
_HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)


@click.command("docs")
@click.argument("page", required=False)
def show_page(page: str | None) -> None:
    """Print a page of the documentation (NAME, or NAME#SECTION), or list the pages."""
    found = {path.stem: path for path in PAGES.glob("*.md") if path.stem != "README"}
    pages = {name: found[name] for name in sorted(found)}
    if page is None:
        for name, path in pages.items():
            heading = _HEADING.search(path.read_text(encoding="utf-8"))
            echo(f"{name:<16} {heading[2] if heading else ''}".rstrip())
        return
    name, _, section = page.partition("#")
    name = name.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise UnknownName(f"there is no page {name!r}. Write one of: {', '.join(pages)}.")
    text = pages[name].read_text(encoding="utf-8")
    echo((_section(text, section) if section else text).rstrip())


def _section(text: str, anchor: str) -> str:
    """Return the section whose heading has this anchor, with its subsections."""
    headings = list(_HEADING.finditer(text))
    for heading in headings:
        if _anchor(heading[2]) == anchor:
            rest = (each for each in headings if each.start() > heading.start())
            end = next(
                (each.start() for each in rest if len(each[1]) <= len(heading[1])), len(text)
            )
            return text[heading.start() : end]
    raise UnknownName(
        f"the page has no section {anchor!r}. Write one of: "
        f"{', '.join(_anchor(each[2]) for each in headings)}."
    )


def _anchor(heading: str) -> str:
    """Return the link anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
