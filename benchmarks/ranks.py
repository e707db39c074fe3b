"""Several ranks against one: gradients, checkpoints resumed at other world sizes, kills.

    python benchmarks/ranks.py            the tables, figures on the last line
    python benchmarks/ranks.py --check    exit 1 when a bar is missed
    python benchmarks/ranks.py --json     one JSON object instead of the tables

Real processes on gloo, CPU, float32, the cases of `tests/training/gradient_cases.py` (a model of
17,504 parameters) and `checkpoint_cases.py` (9,744). Errors of gradients are norms of differences
over norms; of weights and momentum, largest absolute differences after three further steps of AdamW
at a rate of 1e-3. A kill is whole when what is resumed is bit for bit one of the two saves.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from ranks_kit import run_worlds
from verdict import Bar, conclude, make_parser

GRADIENT_BAR, RESUME_BAR = 5e-5, 5e-5  # float32: how much it rounds depends on the CPU


def gradients(results: dict[str, Any]) -> list[tuple[int, str, float]]:
    """Return ranks, case and error of each gradient."""
    return [
        (size, name, case["gradient"])
        for size in (2, 3)
        for name, case in results[f"gradients/{size}"].items()
    ]


def resumes(results: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    """Return ranks, case and the differences after loading and three steps later."""
    return [
        (size, name, loaded, later)
        for size in (1, 2, 3, 4)
        for name, (_, loaded, later) in results[f"resumed/{size}"].items()
    ]


def kills(results: dict[str, Any]) -> Iterator[tuple[str, list[int], int]]:
    """Yield of each case its name, the step that each kill was resumed from, and how many broke."""
    for name, outcomes in results.items():
        if name.startswith("kills"):
            *killed, _ = outcomes
            steps = [step for _, step, _, _ in killed]
            num_broken = sum(distance != 0 for _, _, distance, _ in killed)
            yield name.partition("/")[0], steps, num_broken


def bars(results: dict[str, Any]) -> list[Bar]:
    resumed = resumes(results)
    broken = sum(num for _, _, num in kills(results))
    return [
        Bar.below(
            "worst relative error of a gradient",
            max(error for *_, error in gradients(results)),
            GRADIENT_BAR,
        ),
        Bar.at_most("largest difference after loading", max(row[2] for row in resumed), 0),
        Bar.below("largest difference three steps later", max(r[3] for r in resumed), RESUME_BAR),
        Bar.at_most("kills that left something broken", broken, 0),
    ]


def show(results: dict[str, Any]) -> None:
    print("gradient of n ranks against one (relative error)")
    for size, name, error in gradients(results):
        print(f"  {size} ranks  {error:.1e}  {name}")
    half = results["bfloat16/2"]
    print(
        f"  bfloat16 against float32: one rank {half['alone']:.1e}, two {half['together']:.1e}; "
        f"weights stay {half['master'][0]}"
    )
    print("saved by 2 ranks, read by n (largest difference after loading, and three steps later)")
    for size, name, loaded, later in resumes(results):
        print(f"  {size} ranks  {loaded:.1e}  {later:.1e}  {name}")
    print("kill -9 of one rank at its n-th call to the file system during a save")
    for name, steps, _ in kills(results):
        _, size, victim, content = name.split("_")
        print(
            f"  {size} ranks, rank {victim}, {content}: {len(steps)} kills, resumed from the "
            f"save before {steps.count(1)} times, from the new one {steps.count(2)} times"
        )


def main() -> int:
    options = make_parser(__doc__).parse_args()
    results: dict[str, Any] = {}
    for cases in ("gradient_cases", "checkpoint_cases"):
        with tempfile.TemporaryDirectory() as folder:
            results |= run_worlds(cases, Path(folder))
    num_kills = sum(len(steps) for _, steps, _ in kills(results))
    return conclude(
        options, bars(results), results, lambda: show(results), also=[f"{num_kills} kills"]
    )


if __name__ == "__main__":
    sys.exit(main())
