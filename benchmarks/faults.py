"""What finds a fault: one is planted at a time, in functions drawn at random over all rooms.

    python benchmarks/faults.py --num 30 --seed 1            plant, and run what the gate would run
    python benchmarks/faults.py --num 30 --seed 1 --dry      only show the faults

A fault changes one expression or drops one statement of a function. Rooms are drawn evenly, then
functions. The tests that name the module run first, then `make test`, `make check`, and the suites
that `.ci/run` would run for the change, until one fails: it has found the fault. Some faults change
nothing that a caller can see, which only a person can tell. The script works in the checkout, which
must be clean, and puts each file back.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src/rolltree"
SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the faults that a node can have."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        changed = copy.deepcopy(node)
        changed.ops[0] = SWAPPED[type(node.ops[0])]()
        yield changed
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in SWAPPED:
        changed = copy.deepcopy(node)
        changed.op = SWAPPED[type(node.op)]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        yield ast.Pass()


def inner(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without signatures, annotations and messages."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, (ast.arguments, ast.JoinedStr, ast.Raise, ast.AnnAssign)):
            continue
        yield child
        yield from inner(child)


def draw(rng: random.Random) -> tuple[Path, str, str]:
    """Return a file, its text with a fault, and what the fault is."""
    rooms = sorted(
        path
        for path in SRC.iterdir()
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
    )
    while True:
        room = rng.choice(rooms)
        files = sorted(room.rglob("*.py")) if room.is_dir() else [room]
        functions = [
            (path, node)
            for path in files
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, FUNCTIONS)
        ]
        if not functions:
            continue
        path, function = rng.choice(functions)
        text = path.read_text()
        faults = [(node, fault) for node in inner(function) for fault in variants(node)]
        if not faults:
            continue
        node, fault = rng.choice(faults)
        old = ast.get_source_segment(text, node) or ""
        new = ast.unparse(fault)
        lines = text.encode().split(b"\n")
        begin = sum(len(line) + 1 for line in lines[: node.lineno - 1]) + node.col_offset
        end = sum(len(line) + 1 for line in lines[: node.end_lineno - 1]) + node.end_col_offset
        raw = text.encode()
        wrapped = f"({new})" if isinstance(fault, ast.expr) else new
        changed = (raw[:begin] + wrapped.encode() + raw[end:]).decode()
        what = f"{path.relative_to(SRC)}:{node.lineno} {function.name}: `{old}` -> `{new}`"
        return path, changed, re.sub(r"\s+", " ", what)


def passes(command: str) -> bool:
    """Whether a command ends well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    return done.returncode == 0


def near(path: Path) -> list[Path]:
    """Return the test files that name a module, and those of its name."""
    dotted = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    package, _, name = dotted.rpartition(".")
    from_package = rf"from rolltree\.?{re.escape(package)} import [^\n]*\b{name}\b"
    words = re.compile(rf"rolltree\.{re.escape(dotted)}\b|{from_package}")
    return [
        test
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if "house" not in test.parts
        and (words.search(test.read_text()) or (len(name) > 4 and name in test.stem))
    ]


def find(path: Path, name: str, gate: Any) -> str:
    """Return which suite finds what is planted now, or nothing."""
    python = f"{sys.executable} -m pytest -x -q -p no:cacheprovider -m 'not long'"
    room = ROOT / "tests" / path.relative_to(SRC).parts[0]
    files = near(path)
    files.sort(key=lambda file: (name not in file.read_text(), file.stat().st_size))
    stages = [files[:4], files[4:], [room] if room.is_dir() else []]
    for stage in filter(None, stages):
        words = " ".join(str(file.relative_to(ROOT)) for file in stage)
        if not passes(f"{python} {words}" + (" -n 3" if len(stage) > 4 else "")):
            return "test"
    suites = gate.read_suites((ROOT / ".ci/suites.toml").read_text())
    changed = str(path.relative_to(ROOT))
    inputs = [
        suite
        for suite in suites
        if suite.always or gate.inside(changed, (*suite.inputs, *suite.faces))
    ]
    order = sorted(inputs, key=lambda suite: (suite.name != "test", suite.nightly))
    for suite in order:
        command = f"{suite.command} ARGS=-x" if suite.name == "test" else suite.command
        if not passes(command):
            return f"{suite.name}{' (nightly only)' if suite.nightly else ''}"
    return ""


def main() -> int:
    """Plant faults one after the other, and print what finds each."""
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="begin after this many")
    parser.add_argument("--dry", action="store_true", help="only show the faults")
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("gate", ROOT / ".ci/gate.py")
    assert spec is not None
    assert spec.loader is not None
    gate = importlib.util.module_from_spec(spec)
    sys.modules["gate"] = gate
    spec.loader.exec_module(gate)
    if not args.dry and gate.changed_files():
        sys.exit("the checkout has changes: a fault is planted in it, so commit them first")
    rng = random.Random(args.seed)
    by: dict[str, int] = {}
    faults = {what: (path, changed) for path, changed, what in (draw(rng) for _ in range(99))}
    for number, (what, (path, changed)) in enumerate(list(faults.items())[: args.num]):
        if number < args.skip or args.dry:
            print(f"{number:3} {what}", flush=True)
            continue
        before, began = path.read_bytes(), time.monotonic()
        try:
            path.write_text(changed)
            found = find(path, what.split()[1].rstrip(":"), gate)
        finally:
            path.write_bytes(before)
        by[found or "nothing"] = by.get(found or "nothing", 0) + 1
        print(
            f"{number:3} {found or 'NOTHING':10} {time.monotonic() - began:4.0f} s  {what}",
            flush=True,
        )
    missed = by.get("nothing", 0)
    return conclude(args, [Bar.at_most("faults that nothing finds", missed, args.num / 5)], by)


if __name__ == "__main__":
    sys.exit(main())
