"""Bars that CI holds on any machine, in a minute: what took long to make fast stays fast.

    python benchmarks/quick.py              the figures
    python benchmarks/quick.py --check      exit 1 when a bar is missed

Every bar is a ratio of CPU times that are measured in turns, the best of several: of a command and
of a start of Python that imports what every command needs; of work and of a fixed piece of Python;
of much and of little. A busy machine stretches both sides. The absolute bars are in the other
scripts.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import engine
from verdict import Bar, conclude, make_parser

import samples
from rolltree.evaluation import stored_report
from rolltree.evaluation.report import keep_report
from rolltree.store import Run, StoredRollout

NUM_STORED = 40_000
START = "import click, rich.console, rich.panel, rich.table, sqlite3, json, msgspec"


def child_cpu_s(*words: str) -> float:
    """Return the CPU time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_turns(times: int, **works: Callable[[], float]) -> dict[str, float]:
    """Return the least of `times` measurements of each, taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(times):
        for name, work in works.items():
            found[name].append(work())
    return {name: min(values) for name, values in found.items()}


def unit() -> None:
    """A fixed piece of work: 1,000 texts of 4 kB through JSON and zlib."""
    for number in range(1000):
        text = json.dumps({"number": number, "text": "some words " * 360})
        zlib.compress(json.dumps(json.loads(text)).encode(), 1)


def long_run(folder: Path) -> list[StoredRollout]:
    """Make a run of `NUM_STORED` rollouts and its report, and return some of its rows."""
    few = folder / "few"
    env = engine.make_environment(64, turns=2, told=60)
    model = engine.LatentModel(0.0, 0.0, told=60, sampled=40)
    asyncio.run(engine.evaluate(few, model, env, 64, 64))
    with Run.open(few, "r") as run:
        rows = list(run.rollouts())
    with Run.create(folder / "long", config={"bench": "quick"}, kind="eval") as run:
        for begin in range(0, NUM_STORED, 2000):
            run.add_rollouts(
                replace(rows[number % 64], request_id=f"r{number}", example_id=number)
                for number in range(begin, begin + 2000)
            )
        keep_report(run, stored_report(run, "eval"))
    return rows


def commands(folder: Path) -> dict[str, float]:
    show = ("-m", "rolltree", "show", str(folder / "long"))
    return in_turns(
        5,
        start=lambda: child_cpu_s("-c", START),
        show=lambda: child_cpu_s(*show),
        show_phase=lambda: child_cpu_s(*show, "--phase", "eval"),
        import_rolltree=lambda: child_cpu_s("-c", "import rolltree"),
    )


def storing(folder: Path, rows: list[StoredRollout]) -> dict[str, float]:
    """1,000 rollouts stored, relative to the unit."""
    count = iter(range(100))

    def store() -> float:
        made = [replace(rows[n % 64], request_id=str(n)) for n in range(1000)]
        with Run.create(folder / f"stored-{next(count)}") as run:
            return cpu_s(lambda: run.add_rollouts(made))

    return in_turns(4, unit=lambda: cpu_s(unit), store=store)


def turns(folder: Path) -> dict[str, float]:
    """250 rollouts of four turns with a run, relative to the unit."""
    count = iter(range(100))

    def play() -> float:
        env = engine.make_environment(250, turns=4, told=100)
        model = engine.LatentModel(0.0, 0.0, told=100, sampled=100)
        run = folder / f"played-{next(count)}"
        return asyncio.run(engine.evaluate(run, model, env, 250, 250))["cpu_s"]

    return in_turns(3, unit=lambda: cpu_s(unit), play=play)


def main() -> int:
    options = make_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="rolltree-quick-") as name:
        folder = Path(name)
        rows = long_run(folder)
        results = {
            "commands": commands(folder),
            "storing": storing(folder, rows),
            "turns": turns(folder),
            "samples": {"growth": samples.growth()},
        }
    ran, stored, played = results["commands"], results["storing"], results["turns"]
    bars = [
        Bar.at_most("starts of Python for show", ran["show"] / ran["start"], 4.5),
        Bar.at_most("starts of Python for show --phase", ran["show_phase"] / ran["start"], 4),
        Bar.at_most(
            "starts of Python for import rolltree", ran["import_rolltree"] / ran["start"], 1
        ),
        Bar.at_most("units for 1,000 stored rollouts", stored["store"] / stored["unit"], 8),
        Bar.at_most("units for 1,000 turns", played["play"] / played["unit"], 35),
        Bar.at_most(
            "times the cost of four short rollouts for a long one", results["samples"]["growth"], 2
        ),
    ]

    def show() -> None:
        for name, figures in results.items():
            print(name, "  ".join(f"{key} {value:.3g}" for key, value in figures.items()))

    return conclude(options, bars, results, show)


if __name__ == "__main__":
    sys.exit(main())
