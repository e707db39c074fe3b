"""How much code there is: lines without blanks, comments and docstrings.

python tests/house/weigh.py            a line per room, heaviest first, and the sum
python tests/house/weigh.py PATHS      a line per file or folder named
"""

import ast
import sys
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src" / "rolltree"
EMPTY = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}


@cache
def code_lines(path):
    """Return the number of lines of a Python file that hold code."""
    source = path.read_text(encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        tokens = [one for one in tokenize.generate_tokens(file.readline) if one.type not in EMPTY]
    held = {line for one in tokens for line in range(one.start[0], one.end[0] + 1)}
    blank = {at for at, line in enumerate(source.splitlines(), 1) if not line.strip()}
    for owner in ast.walk(ast.parse(source)):
        if isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = owner.body[0] if owner.body else None
            if ast.get_docstring(owner, clean=False) is not None:
                held -= set(range(first.lineno, first.end_lineno + 1))
    return len(held - blank)


def weigh(*paths):
    """Return the lines of code and the number of files below paths."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return sum(code_lines(file) for file in files), len(files)


def rooms():
    """Return each room with its lines of code; the modules beside the rooms are one."""
    lines = Counter()
    for file in SRC.rglob("*.py"):
        room, *rest = file.relative_to(SRC).parts
        lines[room if rest else "(modules)"] += code_lines(file)
    return lines


def main():
    named = {name: weigh(Path(name))[0] for name in sys.argv[1:]}
    for name, lines in Counter(named or rooms()).most_common():
        print(f"{lines:8,} {name}")
    if not named:
        print("{:8,} in {} files".format(*weigh(SRC)))


if __name__ == "__main__":
    main()
