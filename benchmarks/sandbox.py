"""Escapes and resource attacks on the local sandbox, at each level, as root and as a user.

    python benchmarks/sandbox.py            the table, figures on the last line
    python benchmarks/sandbox.py --check    exit 1 when one passes that `missing` does not name
    python benchmarks/sandbox.py --json     one JSON object instead of the table

The programs are those of the tests: `tests/sandbox/attempts.py` gets at files, sockets and
processes of the host, `tests/sandbox/attacks.py` at its disk, processes, memory and time, and
`tests/sandbox/hostile.py` at the sandbox itself, which must go on answering. Started
by root, everything runs as root (with Python where it is and, if other users cannot reach that,
with a copy) and as an unprivileged user. A level that this machine lacks is a row without figures.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
LEVELS = ("bubblewrap", "landlock")
NUM_AT_ONCE = 2
NUM_STARTS = 10


async def measure(level: str, python: str | None) -> dict[str, Any]:
    """Run every attempt and every attack at one level, as the user of this process."""
    from rolltree.sandbox import LocalBackend
    from rolltree.sandbox.machine import PROTECTIONS
    from rolltree.values.errors import SandboxUnavailable

    backend = LocalBackend(level, python=python, allow_weaker=PROTECTIONS)
    try:
        sandbox = await backend.create()
    except SandboxUnavailable as error:
        return {"level": level, "unavailable": str(error)}
    await sandbox.close()
    missing = sandbox.level.missing
    return {
        "level": level,
        "missing": list(missing),
        "escapes": await escapes(backend, missing),
        "attacks": await attacks(backend, missing),
        "acts": await acts(backend),
        **await starts(backend),
    }


async def escapes(backend: Any, missing: tuple[str, ...]) -> dict[str, str]:
    """Return what became of each attempt: "blocked", "named", or what it said."""
    import attempts
    from bait_kit import FILES, SECRET, a_victim, heard, laid_out, tried

    from rolltree.sandbox import Limits

    source = inspect.getsource(attempts)
    found = {}
    sandbox = await backend.create(limits=Limits(wall_s=60.0, cpu_s=60.0))
    with a_victim() as victim, laid_out(victim, "benchmark") as bait:
        session = sandbox.python_session()
        for name in attempts.ATTEMPTS:
            said = (await tried(session, bait, source, name)).text().strip()
            is_safe = said.startswith("blocked")
            is_named = attempts.NEEDS.get(name) in missing
            found[name] = "blocked" if is_safe else "named" if is_named else said[-300:]
        found["signals that arrived"] = heard(victim) or "blocked"
        files = [Path(bait[name]) for name in FILES]
        kept = all(p.read_text() == SECRET and p.stat().st_mode & 0o777 == 0o666 for p in files)
        found["changes of the bait"] = "blocked" if kept else "a file changed"
    await sandbox.close()
    return found


async def attacks(backend: Any, missing: tuple[str, ...]) -> dict[str, str]:
    """Return what became of each attack: "stopped", "named", or what it held."""
    from attacks import ATTACKS

    turn = asyncio.Semaphore(NUM_AT_ONCE)

    async def attacked(name: str) -> str:
        async with turn:
            sandbox = await backend.create(limits=ATTACKS[name].limits)
            try:
                result = await sandbox.run_python(ATTACKS[name].program)
            finally:
                await sandbox.close()
            return str(ATTACKS[name].verdict(result, missing))

    return dict(zip(ATTACKS, await asyncio.gather(*map(attacked, ATTACKS)), strict=True))


async def acts(backend: Any) -> dict[str, str]:
    """Return what became of a sandbox after each act of code in it: "answered", or what failed."""
    from hostile import ACTS, LIMITS, RACES, verdict

    found = {}
    for name in (*ACTS, *RACES):
        sandbox = await backend.create(limits=LIMITS)
        found[name] = str(await verdict(sandbox, name))
        await sandbox.close()
    return found


async def starts(backend: Any) -> dict[str, float]:
    """Return the median milliseconds of making a sandbox and of a run that does nothing."""
    made, ran = [], []
    for _ in range(NUM_STARTS):
        began = time.perf_counter()
        sandbox = await backend.create()
        made.append(time.perf_counter() - began)
        began = time.perf_counter()
        await sandbox.run(["true"])
        ran.append(time.perf_counter() - began)
        await sandbox.close()
    return {
        "create_ms": 1e3 * sorted(made)[NUM_STARTS // 2],
        "run_ms": 1e3 * sorted(ran)[NUM_STARTS // 2],
    }


@contextmanager
def reachable() -> Iterator[tuple[str, list[str]]]:
    """Give a Python, and a path for it, that every user can reach: this one, or a copy."""
    from rolltree.sandbox.machine import PythonRuntime, is_world_reachable

    own = PythonRuntime.of().executable
    places = [str(ROOT / "src"), str(ROOT / "tests" / "sandbox"), str(ROOT / "benchmarks")]
    places += [place for place in sys.path if place.endswith("site-packages")]
    if all(map(is_world_reachable, [own, *places])):
        yield own, places
        return
    with tempfile.TemporaryDirectory(prefix="rolltree-reachable-") as folder:
        os.chmod(folder, 0o755)
        yield copy_python(own, Path(folder)), copy_modules(places, Path(folder))


def copy_python(python: str, folder: Path) -> str:
    """Copy an interpreter with its standard library; return the copy."""
    prefix, name = Path(python).parents[1], f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "bin").mkdir()
    shutil.copy(python, folder / "bin" / "python3")
    leave_out = ("site-packages", "test", "idlelib", "__pycache__", "config-*")
    ignored = shutil.ignore_patterns(*leave_out)
    shutil.copytree(prefix / "lib" / name, folder / "lib" / name, ignore=ignored)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy(library, folder / "lib")
    return str(folder / "bin" / "python3")


def copy_modules(places: list[str], folder: Path) -> list[str]:
    """Copy rolltree, the tests' programs and every package that is imported by now."""
    copies = []
    for at, place in enumerate(places):
        copies.append(str(folder / f"path-{at}"))
        if not place.endswith("site-packages"):
            shutil.copytree(place, copies[-1], ignore=shutil.ignore_patterns("__pycache__"))
            continue
        Path(copies[-1]).mkdir()
        for name in {module.partition(".")[0] for module in sys.modules}:
            for found in [Path(place, name), *Path(place).glob(f"{name}.*")]:
                copy = shutil.copytree if found.is_dir() else shutil.copy
                if found.exists() and found.suffix != ".dist-info":
                    copy(found, Path(copies[-1], found.name))
    return copies


def cells() -> Iterator[dict[str, Any]]:
    """Measure all levels as every user that this process can be."""
    is_root = os.geteuid() == 0
    with reachable() as (python, places):
        yield from spawn("root" if is_root else "user", sys.executable, None, sys.path[1:], None)
        if is_root:
            if python.startswith(tempfile.gettempdir()):
                who = "root, reachable Python"
                yield from spawn(who, sys.executable, python, sys.path[1:], None)
            yield from spawn("user", python, None, places, NOBODY)


def spawn(
    who: str, python: str, inside: str | None, places: list[str], uid: int | None
) -> Iterator[dict[str, Any]]:
    """Measure in its own process, level by level."""
    script = __file__ if uid is None else copy_of_script(places)
    found = os.pathsep.join(places)
    for level in LEVELS:
        done = subprocess.run(
            [python, script, "--here", level, inside or ""],
            env={"PATH": "/usr/bin:/bin", "HOME": "/var/tmp", "PYTHONPATH": found},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
            cwd="/",
        )
        yield {"who": who, **json.loads(done.stdout)}


def copy_of_script(places: list[str]) -> str:
    """Return this script where every user reaches it."""
    return next(f"{place}/sandbox.py" for place in places if Path(place, "sandbox.py").exists())


def wrong(cell: dict[str, Any], kind: str, good: str) -> list[str]:
    """Return what passed although the level does not name it as missing."""
    return [f"{name}: {was}" for name, was in cell[kind].items() if was not in (good, "named")]


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    """Nothing passes, of enough attempts."""
    measured = [row for row in rows if "missing" in row]
    passed = sum(len(wrong(row, "escapes", "blocked")) for row in measured)
    held = sum(len(wrong(row, "attacks", "stopped")) for row in measured)
    failed = sum(len(wrong(row, "acts", "answered")) for row in measured)
    return [
        Bar.at_least("escape attempts a level", min(len(row["escapes"]) for row in measured), 120),
        Bar.at_least("resource attacks a level", min(len(row["attacks"]) for row in measured), 40),
        Bar.at_most("escapes that passed and that `missing` does not name", passed, 0),
        Bar.at_most("attacks that passed and that `missing` does not name", held, 0),
        Bar.at_most("acts of code that made its sandbox fail", failed, 0),
    ]


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'as':24} {'level':11} {'escapes':>8} {'passed':>6} {'attacks':>8} {'named':>6} "
        f"{'passed':>6} {'acts':>5} {'failed':>6} {'create ms':>10} {'run ms':>7}  missing"
    )
    for row in rows:
        if "missing" not in row:
            print(f"{row['who']:24} {row['level']:11} not here: {row['unavailable'][:200]}")
            continue
        named = sum(was == "named" for was in row["attacks"].values())
        print(
            f"{row['who']:24} {row['level']:11} {len(row['escapes']):8} "
            f"{len(wrong(row, 'escapes', 'blocked')):6} {len(row['attacks']):8} {named:6} "
            f"{len(wrong(row, 'attacks', 'stopped')):6} {len(row['acts']):5} "
            f"{len(wrong(row, 'acts', 'answered')):6} {row['create_ms']:10.1f} "
            f"{row['run_ms']:7.1f}  {', '.join(row['missing']) or '-'}"
        )
        for kind, good in {"escapes": "blocked", "attacks": "stopped", "acts": "answered"}.items():
            for line in wrong(row, kind, good):
                print(f"    {line}")


def main() -> int:
    if sys.argv[1:2] == ["--here"]:
        level, python = sys.argv[2:4]
        print(json.dumps(asyncio.run(measure(level, python or None))))
        return 0
    options = make_parser(__doc__).parse_args()
    sys.path += [str(ROOT / "tests" / "sandbox"), str(ROOT / "benchmarks")]
    import rolltree.sandbox  # noqa: F401  its packages are those that a copy needs

    rows = list(cells())
    return conclude(options, bars(rows), rows, lambda: show(rows))


if __name__ == "__main__":
    sys.exit(main())
