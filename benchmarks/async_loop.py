"""Seconds per training step: the synchronous loop against generation during the optimizer step.

    python benchmarks/async_loop.py            the table, figures on the last line
    python benchmarks/async_loop.py --check    exit 1 when a bar is missed
    python benchmarks/async_loop.py --json     one JSON object instead of the table

Scenes: `compute` is the demo's task on SmolLM2 (135M): both sides are limited by the cores they
share. `waiting` is the tiny model in an environment whose turns take time elsewhere (a tool, a
judge), here a sleep. The loops train the same number of rollouts; a step's wall time is that of all
steps but the first, over their number, and `engine paused` is how long per step the optimizer kept
the engine waiting.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training

WAIT_S = 0.5
SCENES = {
    "compute": {"model": "smollm2-135m", "steps": 7, "groups": 4, "size": 8, "max_tokens": 4},
    "waiting": {"model": "tiny", "steps": 13, "groups": 4, "size": 4, "max_tokens": 8},
}
AHEAD = (0, 1, 2)


class Waiting(rt.MultiTurnEnv):
    """Two turns, with a wait between them."""

    async def env_response(self, messages: Any, state: Any) -> Any:
        await asyncio.sleep(WAIT_S)
        return [{"role": "user", "content": "again"}]


def environment(scene: str) -> Any:
    if scene == "compute":
        return rt.load_environment("arithmetic")
    rows = [{"question": f"say {n}", "answer": ""} for n in range(50)]

    @rt.run_inline
    def low_bytes(completion: Any) -> float:
        text = "".join(message["content"] or "" for message in completion)
        return sum(character < "m" for character in text) / max(1, len(text))

    return Waiting(dataset=rows, rubric=rt.Rubric([low_bytes]), max_turns=2)


def run(scene: str, ahead: int) -> dict[str, float]:
    shape = SCENES[scene]
    times: list[float] = []

    class Note(Silent):
        def on_step(self, step: int, metrics: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        config = load_train_config(
            {
                "run": {"dir": str(Path(folder) / "run")},
                "model": {"name": shape["model"]},
                "engine": {"max_context": 512},
                "sampling": {"max_tokens": shape["max_tokens"]},
                "algorithm": {"groups_per_step": shape["groups"], "group_size": shape["size"]},
                "train": {"num_steps": shape["steps"], "num_threads": 2, "async_steps": ahead},
                "eval": {"before": False, "after": False},
                "checkpoint": {"every": 1000, "export": False},
            }
        )
        parts = build_parts(config)
        cpu = time.process_time()
        with open_run(config) as store:
            work = run_training(
                config, parts, source=environment(scene), run=store, reporter=Note()
            )
            report = asyncio.run(work)
        cpu = time.process_time() - cpu
        asyncio.run(parts.client.aclose())
    later = report.metrics[1:]
    return {
        "step_s": (times[-2] - times[0]) / (len(times) - 2),  # the last one saves a checkpoint
        "cpu_s": cpu / len(times),
        "wait_for_rollouts_s": fmean(step["time/wait_for_batch"] for step in later),
        "train_s": fmean(step["time/train_s"] for step in later),
        "paused_s": fmean(step.get("time/paused_s", step["time/train_s"]) for step in later),
        "lag_mean": fmean(step["train/lag_mean"] for step in later),
        "stale_share": fmean(step.get("async/stale_share", 0.0) for step in later),
    }


def bars(results: dict[str, dict[int, dict[str, float]]]) -> list[Bar]:
    waiting, compute = results["waiting"], results["compute"]
    gain = waiting[0]["step_s"] / waiting[1]["step_s"]
    same = compute[0]["step_s"] / compute[1]["step_s"]
    share = compute[1]["paused_s"] / compute[1]["train_s"]
    return [
        Bar.at_least("times as fast with one version ahead, waiting environment", gain, 1.1),
        Bar.at_least("times as fast with one version ahead, two busy cores", same, 0.8),
        Bar.at_most("of a training step the engine is paused", share, 0.5),
    ]


def show(results: dict[str, dict[int, dict[str, float]]]) -> None:
    print(
        f"{'scene':8} {'ahead':>5} {'step s':>7} {'CPU s':>6} {'wait for rollouts s':>19} "
        f"{'train s':>8} {'engine paused s':>15} {'lag':>5} {'stale':>6}"
    )
    for scene, rows in results.items():
        for ahead, row in rows.items():
            print(
                f"{scene:8} {ahead:5} {row['step_s']:7.2f} {row['cpu_s']:6.2f} "
                f"{row['wait_for_rollouts_s']:19.2f} {row['train_s']:8.2f} "
                f"{row['paused_s']:15.3f} {row['lag_mean']:5.2f} {row['stale_share']:6.1%}"
            )


def main() -> int:
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(2)
    results: dict[str, dict[int, dict[str, float]]] = {}
    for scene in SCENES:
        results[scene] = {ahead: run(scene, ahead) for ahead in AHEAD}
    return conclude(options, bars(results), results, lambda: show(results))


if __name__ == "__main__":
    sys.exit(main())
