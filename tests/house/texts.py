"""The texts of the project: pages, docstrings, comments and messages."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "rolltree"
CODE_FOLDERS = ("src", "benchmarks", "environments", "examples")


def code_files():
    """Return every Python file that ships or is read as an example, tests left out."""
    return [path for folder in CODE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def pages():
    """Return the Markdown pages by their path from the root."""
    folders = (".", "docs", "design", "benchmarks")
    found = [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]
    found += sorted((ROOT / "environments").glob("*/README.md"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in found}


def without_code(text):
    """Return Markdown with fenced blocks and `inline code` blanked, line for line."""
    blank = re.compile(r"[^\n]")
    text = re.sub(r"^ *```.*?^ *```", lambda m: blank.sub(" ", m[0]), text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", lambda m: "`" + " " * (len(m[0]) - 2) + "`", text)


@cache
def docstrings(path):
    """Return the docstrings of a file as (line, text)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [
        (owner.body[0].lineno, text)
        for owner in owners
        if (text := ast.get_docstring(owner, clean=False)) is not None
    ]


@cache
def sentences(path):
    """Return the comments and strings of a Python file as (line, text)."""
    source = path.read_text(encoding="utf-8")
    wanted = (
        (tokenize.COMMENT, tokenize.STRING, tokenize.FSTRING_MIDDLE)
        if hasattr(tokenize, "FSTRING_MIDDLE")
        else (tokenize.COMMENT, tokenize.STRING)
    )
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type in wanted]
