"""Several ranks against one: gradients, checkpoints read by other numbers of ranks, kills.

    python benchmarks/ranks.py            the tables
    python benchmarks/ranks.py --check    exit 1 when a bar is missed

Real processes on gloo, CPU, float32, the cases of `tests/training/gradient_cases.py` (a model of
17,504 parameters) and `checkpoint_cases.py` (9,744). Errors of gradients are norms of differences
over norms; of weights and momentum, largest absolute differences after three further steps of AdamW
at a rate of 1e-3.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from ranks_kit import run_worlds

GRADIENT_BAR, RESUME_BAR = 1e-6, 1e-6


def gradients(results: dict[str, Any]) -> bool:
    """Print the gradient errors and return whether they are within the bar."""
    print("gradient of n ranks against one (relative error)")
    worst = 0.0
    for size in (2, 3):
        for name, case in results[f"gradients/{size}"].items():
            worst = max(worst, case["gradient"])
            print(f"  {size} ranks  {case['gradient']:.1e}  {name}")
    half = results["bfloat16/2"]
    print(
        f"  bfloat16 against float32: one rank {half['alone']:.1e}, two {half['together']:.1e}; "
        f"weights stay {half['master'][0]}"
    )
    return worst < GRADIENT_BAR


def checkpoints(results: dict[str, Any]) -> bool:
    """Print the resume errors and return whether they are within the bar."""
    print("saved by 2 ranks, read by n (largest difference after loading, and three steps later)")
    worst, exact = 0.0, True
    for size in (1, 2, 3, 4):
        for name, (_, loaded, later) in results[f"resumed/{size}"].items():
            exact, worst = exact and loaded == 0, max(worst, later)
            print(f"  {size} ranks  {loaded:.1e}  {later:.1e}  {name}")
    return exact and worst < RESUME_BAR


def kills(results: dict[str, Any]) -> bool:
    """Print what was left by a kill at each call, and return whether it was always whole."""
    print("kill -9 of one rank at its n-th call to the file system during a save")
    whole = True
    for name, outcomes in results.items():
        if name.startswith("kills"):
            *killed, _ = outcomes
            steps = [step for _, step, _, _ in killed]
            whole = whole and all(distance == 0 for _, _, distance, _ in killed)
            _, size, victim, content = name.partition("/")[0].split("_")
            print(
                f"  {size} ranks, rank {victim}, {content}: {len(killed)} kills, resumed from the "
                f"save before {steps.count(1)} times, from the new one {steps.count(2)} times"
            )
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args()
    met = []
    with tempfile.TemporaryDirectory() as folder:
        met.append(gradients(run_worlds("gradient_cases", Path(folder))))
    with tempfile.TemporaryDirectory() as folder:
        results = run_worlds("checkpoint_cases", Path(folder))
        met += [checkpoints(results), kills(results)]
    names = (f"gradients < {GRADIENT_BAR:g}", f"resumes < {RESUME_BAR:g}", "kills")
    print(
        "; ".join(
            f"{name}: {'ok' if ok else 'MISSED'}" for name, ok in zip(names, met, strict=True)
        )
    )
    return 1 if options.check and not all(met) else 0


if __name__ == "__main__":
    raise SystemExit(main())
