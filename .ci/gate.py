"""The gate: a suite runs again when what it reads differs from what it last passed on.

    bash .ci/run               what CI runs: `check` and `test`, and each suite that is not green
    bash .ci/run --nightly     every suite, whatever `.ci/green` says (`make nightly`)
    bash .ci/run vllm compat   these suites
    bash .ci/run --list        what would run now, why, and how long it took last
    bash .ci/run --history 40  what the gate would have run for each of the last 40 commits

`.ci/suites.toml` has a row a suite. Its key is a hash over path, mode and blob of its inputs and
over the row itself, so it needs no history: merges, renames and shallow clones only change keys.
`.ci/green` has the key that each suite last passed on. A suite that passes on a clean tree writes
its line, one that fails loses it; a line that was edited by hand does not match its seal, and
counts for nothing. design/0031 has the figures.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GREEN = ".ci/green"
CORE = {
    *("values", "_helpers", "tokens", "store", "samples", "inference", "environments", "rollouts"),
    *("training", "evaluation"),
}
"""Rooms that every run needs, for `--history`."""


@dataclass(frozen=True)
class Suite:
    """A row of `.ci/suites.toml`."""

    name: str
    command: str
    inputs: tuple[str, ...]
    """Files and folders whose content decides what the suite says."""
    faces: tuple[str, ...] = ()
    """Folders of Python of which only names, signatures and docstrings count."""
    installs: tuple[str, ...] = ()
    """Commands that make what the suite needs; their time is printed apart."""
    always: bool = False
    nightly: bool = False
    """The gate leaves it to `make nightly`."""


@dataclass(frozen=True)
class Entry:
    """A file of a tree, as git knows it."""

    path: str
    mode: str
    blob: str


@dataclass(frozen=True)
class Line:
    """A line of `.ci/green`: this suite passed on these inputs."""

    suite: str
    key: str
    commit: str
    date: str
    seconds: int

    def __str__(self) -> str:
        text = f"{self.suite} {self.key} {self.commit} {self.date} {self.seconds}"
        return f"{text} {_digest(text)[:8]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True)
    return done.stdout.decode(errors="surrogateescape")


def read_suites(text: str) -> list[Suite]:
    """Return the rows of `.ci/suites.toml`. `@name` among inputs stands for a list of `[lists]`."""
    table = tomllib.loads(text)
    lists = table["lists"]

    def spelled(inputs: Iterable[str]) -> list[str]:
        return [
            path
            for item in inputs
            for path in (spelled(lists[item[1:]]) if item.startswith("@") else [item])
        ]

    suites = []
    for name, row in table["suite"].items():
        inputs = tuple(sorted({*spelled(["@every"]), *spelled(row.pop("inputs", []))}))
        lines = {key: tuple(row.pop(key, ())) for key in ("faces", "installs")}
        suites.append(Suite(name, row.pop("command"), inputs, **lines, **row))
    return suites


@functools.cache
def tree_of(commit: str | None = None) -> tuple[Entry, ...]:
    """Return the files of a commit, or else of the index."""
    words = ("ls-files", "-s") if commit is None else ("ls-tree", "-r", "--full-tree", commit)
    entries = []
    for row in filter(None, _git(*words, "-z").split("\0")):
        (mode, *rest), path = row.partition("\t")[0].split(" "), row.partition("\t")[2]
        entries.append(Entry(path, mode, rest[0] if commit is None else rest[1]))
    return tuple(entries)


def inside(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of these files, or lies in one of these folders."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _shown(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield what a reader of the reference sees of a module or a class."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            heads = [*node.decorator_list, node.args, node.returns]
            shown = [ast.dump(head) for head in heads if head is not None]
            yield repr([node.name, shown, ast.get_docstring(node)])
        elif isinstance(node, ast.ClassDef):
            yield repr([node.name, *map(ast.dump, [*node.decorator_list, *node.bases])])
            yield from _shown(node.body)
        else:
            yield ast.dump(node)


@functools.cache
def _face(blob: str) -> str:
    try:
        return _digest("\n".join(_shown(ast.parse(_git("cat-file", "blob", blob)).body)))
    except SyntaxError:
        return blob


def key_of(suite: Suite, tree: Sequence[Entry]) -> str:
    """Return the hash of what decides whether a suite passes."""
    row = json.dumps([suite.command, suite.inputs, suite.faces])
    lines = [f"{e.mode} {e.blob} {e.path}" for e in tree if inside(e.path, suite.inputs)]
    lines += [
        f"{e.mode} {_face(e.blob) if e.path.endswith('.py') else e.blob} {e.path}"
        for e in tree
        if inside(e.path, suite.faces) and not inside(e.path, suite.inputs)
    ]
    return _digest("\n".join([row, *sorted(lines)]))[:24]


def changed_files() -> list[str]:
    """Return what differs from the commit, untracked files among it; `.ci/green` does not count."""
    fields = iter(_git("status", "--porcelain", "-z", "--untracked-files=all").split("\0"))
    paths = []
    for field in filter(None, fields):
        paths.append(field[3:])
        if field[0] in "RC":  # the next field is the name it had
            paths.append(next(fields))
    return [path for path in paths if path != GREEN]


def read_green() -> list[Line]:
    """Return the lines whose seal holds: what a conflict or an editor left is none."""
    path = ROOT / GREEN
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        fields = text.split(" ")
        if len(fields) == 6 and fields[4].isdecimal():
            line = Line(*fields[:4], int(fields[4]))
            lines += [line] if str(line) == text else []
    return lines


def write_green(suite: str, line: Line | None) -> None:
    """Replace what `.ci/green` says of a suite."""
    lines = [old for old in read_green() if old.suite != suite] + ([line] if line else [])
    part = ROOT / f"{GREEN}.part"
    part.write_text("".join(sorted(f"{each}\n" for each in lines)))
    part.replace(ROOT / GREEN)


def why_run(suite: Suite, tree: Sequence[Entry], changed: Sequence[str]) -> str:
    """Return why the gate runs a suite, or nothing if it passed on just these inputs."""
    if suite.always:
        return "always"
    if suite.nightly:
        return ""
    touched = [path for path in changed if inside(path, (*suite.inputs, *suite.faces))]
    if touched:
        return f"{touched[0]} is not committed"
    keys = {line.key for line in read_green() if line.suite == suite.name}
    if not keys:
        return "it has no line"
    return "" if key_of(suite, tree) in keys else "its inputs changed"


class Installer(threading.Thread):
    """Runs commands that install, one after the other, beside the first suites."""

    def __init__(self, commands: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self.commands = list(dict.fromkeys(commands))
        self.ends = {command: threading.Event() for command in self.commands}
        self.seconds = 0.0

    def run(self) -> None:
        """Run them."""
        for command in self.commands:
            try:
                self._install(command)
            finally:
                self.ends[command].set()

    def _install(self, command: str) -> None:
        began = time.monotonic()
        done = subprocess.run(
            ["nice", "-n", "10", *shlex.split(command)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        took = time.monotonic() - began
        self.seconds += took
        print(f"== installing: {command} took {took:.0f} s", flush=True)
        if done.returncode:  # the suite's own command tries again
            print(done.stdout.decode(errors="replace")[-4000:], flush=True)


def run(suites: Sequence[Suite]) -> int:
    """Run suites, also after one that fails, and keep `.ci/green`. Return the exit status."""
    installer = Installer(command for suite in suites for command in suite.installs)
    installer.start()
    results: list[tuple[str, bool, float]] = []
    for suite in suites:
        for command in suite.installs:
            installer.ends[command].wait()
        before = key_of(suite, tree_of())
        clean = not changed_files()
        print(f"== {suite.name}: {suite.command}", flush=True)
        began = time.monotonic()
        done = subprocess.run(["bash", "-c", suite.command], cwd=ROOT, stdin=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        passed = done.returncode == 0
        print(f"== {suite.name} took {seconds:.0f} s", flush=True)
        results.append((suite.name, passed, seconds))
        tree_of.cache_clear()
        clean = clean and not changed_files() and before == key_of(suite, tree_of())
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = Line(suite.name, before, _git("rev-parse", "HEAD").strip()[:12], now, round(seconds))
        if clean or not passed:
            write_green(suite.name, line if passed else None)
    installer.join()
    print("\n== the gate")
    for name, passed, seconds in results:
        print(f"{'green' if passed else 'RED':6} {seconds:6.0f} s  {name}")
    total = sum(seconds for _, _, seconds in results)
    print(f"testing {total:.0f} s, installing {installer.seconds:.0f} s (beside the first suites)")
    if changed := changed_files():
        print(f"nothing is noted in {GREEN}: {changed[0]} is not committed")
    return int(not all(passed for _, passed, _ in results))


def history(suites: Sequence[Suite], number: int) -> None:
    """Print what the gate would have run for each of the last commits, and its minutes."""
    seconds = {line.suite: line.seconds for line in read_green()}
    minutes: dict[str, list[float]] = {}
    for commit in _git("rev-list", f"--max-count={number}", "HEAD").split():
        trees = [tree_of(f"{commit}^"), tree_of(commit)]
        touched = {e.path for e in set(trees[0]) ^ set(trees[1])}
        rooms = {path.split("/")[2] for path in touched if path.startswith("src/rolltree/")}
        kind = "core" if rooms & CORE or len(rooms) > 1 else "one room" if rooms else "no code"
        ran = [
            suite.name
            for suite in suites
            if suite.always
            or (not suite.nightly and key_of(suite, trees[0]) != key_of(suite, trees[1]))
        ]
        minutes.setdefault(kind, []).append(sum(seconds.get(name, 0) for name in ran) / 60)
        print(f"{commit[:9]} {minutes[kind][-1]:5.1f} min  {kind:8}  {' '.join(ran)}")
    for kind, values in {**minutes, "all": [*itertools.chain(*minutes.values())]}.items():
        tenths = statistics.quantiles(values, n=10, method="inclusive") if values[1:] else values
        print(
            f"{kind:8} {len(values):3} commits: median {statistics.median(values):.1f} min, "
            f"90 % {tenths[-1]:.1f}, most {max(values):.1f}"
        )
    if missing := [suite.name for suite in suites if suite.name not in seconds]:
        print(f"counted as nothing, since they have no line: {' '.join(missing)}")


def main(words: Sequence[str] | None = None) -> int:
    """Run the gate. Return the status of the process."""
    parser = argparse.ArgumentParser(prog=".ci/run", description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", help="run these, whatever .ci/green says")
    parser.add_argument("--nightly", action="store_true", help="run every suite")
    parser.add_argument("--list", action="store_true", help="say what would run, and why")
    parser.add_argument("--history", type=int, metavar="N", help="the last N commits")
    args = parser.parse_args(words)
    suites = read_suites((ROOT / ".ci/suites.toml").read_text())
    tree, changed = tree_of(), changed_files()
    for path in {path for suite in suites for path in (*suite.inputs, *suite.faces)}:
        if not any(inside(entry.path, [path]) for entry in tree):
            parser.error(f".ci/suites.toml names {path}, which git does not have: correct the row")
    if args.history:
        history(suites, args.history)
        return 0
    names = {suite.name for suite in suites}
    if unknown := [name for name in args.suites if name not in names]:
        parser.error(f"no suite is called {unknown[0]}; there are {', '.join(sorted(names))}")
    if args.nightly:
        (ROOT / GREEN).unlink(missing_ok=True)
        reasons = dict.fromkeys(names, "nightly")
    elif args.suites:
        reasons = {name: "asked for" if name in args.suites else "" for name in names}
    else:
        reasons = {suite.name: why_run(suite, tree, changed) for suite in suites}
    last = {line.suite: f"{line.seconds} s" for line in read_green()}
    for suite in suites:
        other = "not asked for" if args.suites else "nightly only" if suite.nightly else "green"
        reason = reasons[suite.name] or other
        print(f"{suite.name:16} {reason:30} {last.get(suite.name, '')}", flush=True)
    if args.list:
        return 0
    os.environ.setdefault("GIT_OPTIONAL_LOCKS", "0")
    return run([suite for suite in suites if reasons[suite.name]])


if __name__ == "__main__":
    sys.exit(main())
