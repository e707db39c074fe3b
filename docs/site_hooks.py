"""Hooks of the site: the reference's names, and links to files that are not pages.

Names are read from the source without importing it, so that the site builds without torch.
"""

import ast
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def public_names() -> dict[str, str]:
    """Return the room of each public name of rolltree, as `rolltree/__init__.py` lists them."""
    package = ROOT / "src" / "rolltree"
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.target) == "_ROOMS"
        and isinstance(node.value, ast.Dict)
    )
    pairs = zip(table.keys, table.values, strict=True)
    rooms = {ast.literal_eval(key): ast.literal_eval(names) for key, names in pairs if key}
    # The names of wings stand in their own table.
    wings = runpy.run_path(str(package / "wings.py"))["rows"]
    rooms |= {wing.where: wing.names for wing in wings("rolltree")}
    return {name: f"rolltree.{room}" for room, names in rooms.items() for name in names.split()}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the reference in, and unlink what the site does not have."""
    if page.file.src_uri == "api.md":
        names = sorted(public_names().items(), key=lambda item: item[0].lower())
        markdown += "\n\n".join(f"::: {module}.{name}" for name, module in names)
    # Examples, design pages and benchmarks are in the repository; a page names them.
    return _OUTSIDE.sub(r"\1", markdown)
