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
    """Return the module of each public name of rolltree, in the order of the source."""
    tree = ast.parse((ROOT / "src" / "rolltree" / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if alias.asname is not None and alias.asname == alias.name and node.module != "__future__"
    }


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the reference in, and unlink what the site does not have."""
    if page.file.src_uri == "api.md":
        names = sorted(public_names().items(), key=lambda item: item[0].lower())
        markdown += "\n\n".join(f"::: {module}.{name}" for name, module in names)
    # Examples, design pages and benchmarks are in the repository; a page names them.
    return _OUTSIDE.sub(r"\1", markdown)
