"""How much of what goes wrong a run's story names, and how often it accuses a healthy run.

    python benchmarks/story.py                  the figures, and what was missed or accused
    python benchmarks/story.py --check          exit 1 when a bar is missed
    python benchmarks/story.py --json           one JSON object instead
    python benchmarks/story.py --seeds 5        each written run with five draws of its numbers
    python benchmarks/story.py --only written   without the runs that train, in seconds

The runs are those of `benchmarks/planted`: written stores, and runs that `rt.train` really trains
with the tiny model. A fault is found if a sentence of its kind alarms (error or warning); a healthy
run is accused if any sentence does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from planted import CLOCKED, kinds_of_alarms, trained, written
from verdict import Bar, conclude, make_parser

import rolltree as rt

LEAST_RECALL, MOST_FALSE_ALARMS = 0.9, 1


def told(path: Path) -> list[dict[str, Any]]:
    """Return the sentences of a run that alarm."""
    with rt.read_run(path) as data:
        return [each for each in data.story() if each["severity"] in ("error", "warning")]


def judged(name: str, how: str, kinds: tuple[str, ...], path: Path) -> dict[str, Any]:
    """Return whether the story of a run is right; without `kinds` the run is healthy."""
    alarms = told(path)
    found = kinds_of_alarms(alarms) - (CLOCKED if how == "trained" else set())
    return {
        "name": name,
        "how": how,
        "is_fault": bool(kinds),
        "is_right": bool(found & set(kinds)) if kinds else not found,
        "said": [each["text"] for each in alarms],
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="draws of each written run")
    parser.add_argument("--only", choices=("written", "trained"), help="one kind of run")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.only != "trained":
            for seed in range(options.seeds):
                for name, fault in written.FAULTS.items():
                    path = written.write(root / f"{name}-{seed}", fault.course, seed)
                    rows.append(judged(name, "written", fault.kinds, path))
                for name, course in written.HEALTHY.items():
                    path = written.write(root / f"{name}-{seed}", course, seed)
                    rows.append(judged(name, "written", (), path))
        if options.only != "written":
            for name, planted in trained.FAULTS.items():
                path = trained.train(root / name, planted.run)
                rows.append(judged(name, "trained", planted.kinds, path))
            for name, run in trained.HEALTHY.items():
                rows.append(judged(name, "trained", (), trained.train(root / name, run)))
    faults = [row for row in rows if row["is_fault"]]
    healthy = [row for row in rows if not row["is_fault"]]
    num_found = sum(row["is_right"] for row in faults)
    num_accused = sum(not row["is_right"] for row in healthy)

    def show() -> None:
        for how in ("written", "trained"):
            some = [row for row in faults if row["how"] == how]
            right = [row for row in healthy if row["how"] == how]
            print(
                f"{how}: {sum(r['is_right'] for r in some)} of {len(some)} faults found, "
                f"{sum(not r['is_right'] for r in right)} of {len(right)} healthy runs accused"
            )
        for row in rows:
            if not row["is_right"]:
                print(f"{'missed ' if row['is_fault'] else 'accused'} {row['name']}: {row['said']}")

    bars = [
        Bar.at_least("of the planted faults named", num_found / len(faults), LEAST_RECALL),
        # One in all, however often the written runs are drawn.
        Bar.at_most("healthy runs accused", num_accused / options.seeds, MOST_FALSE_ALARMS),
    ]
    return conclude(options, bars, rows, show)


if __name__ == "__main__":
    sys.exit(main())
