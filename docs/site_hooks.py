"""Hooks of the site: the reference's names, and links to files that are not pages.

Names are read from the source without importing it, so that the site builds without torch.
"""

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def public_names() -> dict[str, str]:
    """Return the room of each public name of rolltree, as `rolltree/__init__.py` lists them."""
    tree = ast.parse((ROOT / "src" / "rolltree" / "__init__.py").read_text(encoding="utf-8"))
    rooms = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_ROOMS" and node.value
    )
    return {name: f"rolltree.{room}" for room, names in rooms.items() for name in names.split()}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the reference in, and unlink what the site does not have."""
    if page.file.src_uri == "api.md":
        names = sorted(public_names().items(), key=lambda item: item[0].lower())
        markdown += "\n\n".join(f"::: {module}.{name}" for name, module in names)
    # Examples, design pages and benchmarks are in the repository; a page names them.
    return _OUTSIDE.sub(r"\1", markdown)
