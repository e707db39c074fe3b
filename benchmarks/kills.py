"""Kills: runs of three kinds killed at random by three signals, continued, and compared.

    python benchmarks/kills.py            the table, figures on the last line
    python benchmarks/kills.py --check    exit 1 when a bar is missed
    python benchmarks/kills.py --json     one JSON object instead of the table

Evaluation, synchronous and asynchronous training (`tests/training/kills_kit.py`: 17,504 parameters,
the embedded engine with `batch_invariant`, held-out evaluations before, during and after training)
get SIGKILL, SIGTERM and SIGINT `--kills` times each, at random moments, and the same call continues
them. What they hold at the end is compared bit for bit with a run that nobody killed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from kills_kit import KINDS, SIGNALS, kill_all
from verdict import Bar, conclude, make_parser


def bars(results: dict[str, Any], num_kills: int = 50) -> list[Bar]:
    found = [results[f"{kind} {name}"] for kind in KINDS for name in SIGNALS]
    return [
        Bar.at_least(
            "kills of each kind by each signal", min(f["kills"] for f in found), num_kills
        ),
        Bar.at_most("values that differ in a bit", sum(len(f["differ"]) for f in found), 0),
        Bar.at_most("runs that ended otherwise", sum(len(f["wrong"]) for f in found), 0),
    ]


def show(results: dict[str, Any]) -> None:
    print("kind and signal            kills   runs   values compared   different   otherwise")
    for name, found in results.items():
        print(
            f"{name:25s} {found['kills']:6d} {found['lives']:6d} {found['compared']:17,d} "
            f"{len(found['differ']):11d} {len(found['wrong']):11d}"
        )
        for text in (*found["differ"][:5], *found["wrong"][:5]):
            print(f"    {text}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="kills of each kind by each signal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = kill_all(Path(folder), options.kills)
    num_compared = sum(found["compared"] for found in results.values())
    return conclude(
        options,
        bars(results, options.kills),
        results,
        lambda: show(results),
        also=[f"{num_compared:,} values compared"],
    )


if __name__ == "__main__":
    sys.exit(main())
