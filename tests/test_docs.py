"""Pages whose Python runs when it is pasted from top to bottom, in an empty folder."""

import ast
import subprocess
import sys

import pytest

import rolltree as rt
from docs_kit import ROOT, blocks, text_of

WHOLE = ("tutorial.md", "from-trl.md", "from-prime-rl.md")
"""Pages that say so, or that newcomers paste."""


@pytest.mark.parametrize("page", WHOLE)
def test_a_page_runs_from_top_to_bottom(page, tmp_path):
    code = "\n".join(blocks(page))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_python_block_is_python(page):
    for block in blocks(page):
        compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_site_has_every_page_and_the_reference_every_name():
    names = {"__name__": "site_hooks", "__file__": str(ROOT / "docs" / "site_hooks.py")}
    exec((ROOT / "docs" / "site_hooks.py").read_text(encoding="utf-8"), names)
    assert {*names["public_names"](), "__version__"} == set(rt.__all__)
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    for path in (ROOT / "docs").glob("*.md"):
        assert f"{path.name}\n" in nav, f"mkdocs.yml has no line for {path.name}"
        assert text_of(path.name).startswith("# ")
