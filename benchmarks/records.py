"""The cost of reading stored runs of 100,000 rollouts: tidy tables, a page, a filter, a comparison.

    python benchmarks/records.py                the figures
    python benchmarks/records.py --check        exit 1 when a bar is missed
    python benchmarks/records.py --num 10000    smaller runs

The runs are those of `audit.py`, made of two real runs with other seeds; making them is not
measured. Seconds are CPU time, opening the run and reading every row into Python or Arrow included.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from audit import make_run
from verdict import Bar, conclude, make_parser

import rolltree as rt

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
MOST_S = {"two columns": 5.0, "all columns": 10.0, "page": 3.0, "where": 5.0, "compare": 75.0}
"""CPU seconds at 100,000 rollouts: 1.6 times or more of what a busy machine of two cores took.

Smaller runs have a part of it, a fifth at least, since some costs do not depend on the number.
"""


def two_columns(run: Path) -> int:
    """Read the reward and the step of every rollout."""
    with rt.read_run(run) as data:
        return int(data.rollouts().select(["train_step", "reward"]).to_arrow().num_rows)


def all_columns(run: Path) -> int:
    """Read every column of the table of rollouts, a batch at a time."""
    with rt.read_run(run) as data:
        return sum(batch.num_rows for batch in data.rollouts().to_reader())


def page(run: Path) -> int:
    """Read 50 rollouts in the order of their rewards, after 5,000 others."""
    with rt.read_run(run) as data:
        return len(list(data.rollouts(sort="-reward", limit=50, offset=5_000).rows()))


def where(run: Path) -> int:
    """Read three columns of the rollouts that a filter chooses."""
    with rt.read_run(run) as data:
        chosen = data.rollouts(where="reward < 0.5 and num_calls >= 2")
        return sum(1 for _ in chosen.select(["request_id", "reward", "num_calls"]).rows())


def measured(task: Callable[[], int], repeats: int) -> dict[str, Any]:
    """Return the median CPU time of a task and how many rows it read."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        num_rows = task()
        found.append(time.process_time() - began)
    return {"cpu_s": sorted(found)[repeats // 2], "rows": num_rows}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num", type=int, default=100_000, help="rollouts of a run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for name in ("demo", "demo-seed1"):
            source = Path(folder) / name
            with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
                archive.extractall(source, filter="data")
            runs.append(
                make_run(Path(folder) / f"run-{name}", source, options.num, for_audit=False)
            )

        def compared() -> int:
            (pair,) = rt.compare(*(f"{run}:train" for run in runs)).pairs
            return pair.reward.difference.num_examples

        rt.read_run(runs[0]).rollouts(limit=1).to_arrow()  # imports are not measured
        figures = {
            "two columns": measured(lambda: two_columns(runs[0]), 3),
            "all columns": measured(lambda: all_columns(runs[0]), 1),
            "page": measured(lambda: page(runs[0]), 3),
            "where": measured(lambda: where(runs[0]), 3),
            "compare": measured(compared, 1),
        }
    scale = max(0.2, options.num / 100_000)
    bars = [
        Bar.at_most(f"s of CPU time, {name}", found["cpu_s"], MOST_S[name] * scale)
        for name, found in figures.items()
    ]
    return conclude(options, bars, figures, lambda: print_figures(figures))


def print_figures(figures: dict[str, dict[str, Any]]) -> None:
    for name, found in figures.items():
        print(f"{name:12} {found['cpu_s']:7.3f} s  {found['rows']:8,} rows")


if __name__ == "__main__":
    sys.exit(main())
