"""Whether this code is slower than other code of rolltree: other benchmarks, in turns on both.

    python benchmarks/paired.py OLD                    OLD: a checkout, or its `src`
    python benchmarks/paired.py OLD --only http samples
    python benchmarks/paired.py OLD --check            exit 1 when one is slower by more than 3 %

Both sides run the scripts that lie here, in this environment, and differ in `PYTHONPATH`; after a
move of modules the old side needs a copy with the former names (`--old-scripts`). Figures
are CPU time of one thread, and the page's are what the browser took to draw a view.
Which side goes first changes from pair to pair. What counts is the
ratio of the least of each side, since what else the machine does only adds; beside it stands the
95 % interval of the median ratio of a pair. A ratio beyond the tolerance whose interval does not
say so too is undecided.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

HERE = Path(__file__).parent
NEW = HERE.parent / "src"
TOLERANCE = 0.03
RUNS = "RUNS"
"""A word that stands for a folder of the side's own, which keeps what its first run stored."""


@dataclass(frozen=True, slots=True)
class Row:
    """A benchmark: the script's words, and its figures in what it prints last."""

    words: tuple[str, ...]
    figures: Callable[[Any], dict[str, float]]


def _of_samples(found: Any) -> dict[str, float]:
    whole = [row for row in found["results"]["rows"] if row["turns"] == 128]
    return {
        f"{part} of 128 turns": sum(row[f"{part}_s"] for row in whole)
        for part in ("insert", "token_in", "build")
    }


ROWS = {
    "rollouts": Row(
        ("rollouts.py", "--side", "rolltree"), lambda found: {"a rollout": found["cpu_s"]}
    ),
    "http": Row(
        ("http.py", "--json", "--sides", "rolltree", "--connections", "64"),
        lambda found: {"a call": found["results"]["rolltree"]["64"]["cpu_ms"]},
    ),
    "samples": Row(("samples.py", "--json"), _of_samples),
    "tree_training": Row(
        (
            "tree_training.py",
            "--json",
            "--models",
            "full",
            "--scenes",
            "reasoning stripped, 8 turns",
        ),
        lambda found: {
            f"a gradient, {name}": row["cpu_s"] for name, row in found["results"][0]["rows"].items()
        },
    ),
    "engine": Row(
        ("engine.py", "--json", "--cases", "fast", "long", "--in-flight", "2000"),
        lambda found: {
            "rollouts in flight": found["results"]["fast"]["cpu_s"],
            "long rollouts": found["results"]["long"]["cpu_s"],
        },
    ),
    "gateway": Row(
        ("gateway.py", "--json"),
        lambda found: {
            f"a call, {name} turns": row["gateway"]["cpu_ms"]
            for name, row in found["results"].items()
        },
    ),
    "viewer": Row(
        (
            *("viewer.py", "--json", "--num", "10000", "--tokens", "20000", "--runs", RUNS),
            *("--only", "run", "rollouts", "long rollout", "long tokens"),
        ),
        lambda found: {
            f"to open {name}": row["first_ms"] for name, row in found["results"]["opened"].items()
        },
    ),
}


def figures_of(row: Row, source: Path, scripts: Path, runs: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    words = [str(runs) if word is RUNS else word for word in row.words[1:]]
    command = [sys.executable, str(scripts / row.words[0]), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(row.words)} failed with {source}:\n{done.stderr[-3000:]}")
    return row.figures(json.loads(done.stdout.splitlines()[-1]))


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return a 95 % interval of the median, from order statistics; the extremes if too few."""
    number, ordered, left_out, tail = len(values), sorted(values), 0, 0.0
    while left_out < number // 2:
        tail += comb(number, left_out) / 2**number
        if tail > 0.025:
            break
        left_out += 1
    cut = max(left_out - 1, 0)
    return ordered[cut], ordered[number - 1 - cut]


def compare(row: Row, old: Path, scripts: Path, pairs: int) -> dict[str, dict[str, Any]]:
    sides = {
        "old": ((old, scripts), list[dict[str, float]]()),
        "new": ((NEW, HERE), list[dict[str, float]]()),
    }
    with tempfile.TemporaryDirectory() as runs:
        for number in range(pairs):
            for side in ("old", "new") if number % 2 else ("new", "old"):
                code, found = sides[side]
                found.append(figures_of(row, *code, Path(runs) / side))
    results = {}
    for name in sides["new"][1][0]:
        before, after = ([one[name] for one in found] for _, found in sides.values())
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        low, high = median_interval(ratios)
        ratio = min(after) / min(before)
        if ratio <= 1 + TOLERANCE:
            verdict = "as fast" if ratio >= 1 - TOLERANCE else "faster"
        else:
            verdict = "slower" if low > 1 + TOLERANCE else "undecided"
        results[name] = {
            **{"old": min(before), "new": min(after), "ratio": ratio},
            **{"median": statistics.median(ratios), "low": low, "high": high, "verdict": verdict},
        }
    return results


def show_figure(benchmark: str, name: str, of: dict[str, Any]) -> None:
    print(
        f"{benchmark:14} {name:32} {of['ratio']:6.3f} of minima, {of['median']:6.3f} of a pair "
        f"({of['low']:.3f} to {of['high']:.3f}): {of['verdict']}",
        flush=True,
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("old", type=Path, help="a checkout of rolltree, or its src")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="benchmarks")
    parser.add_argument("--pairs", type=int, default=14, help="runs of each side")
    text = "a copy of this folder for the old side, if modules that scripts import have moved"
    parser.add_argument("--old-scripts", type=Path, default=HERE, help=text)
    options = parser.parse_args()
    old = options.old if (options.old / "rolltree").is_dir() else options.old / "src"
    if not (old / "rolltree").is_dir():
        parser.error(f"{options.old} has no rolltree")
    results = {}
    for name in options.only:
        results[name] = compare(ROWS[name], old.resolve(), options.old_scripts, options.pairs)
        if not options.json:
            for figure, of in results[name].items():
                show_figure(name, figure, of)
    bars = [
        Bar(f"times the CPU of before, {name}: {figure}", of["ratio"], "not slower", met)
        for name, found in results.items()
        for figure, of in found.items()
        for met in [of["verdict"] != "slower"]
    ]
    return conclude(options, bars, results)


if __name__ == "__main__":
    sys.exit(main())
