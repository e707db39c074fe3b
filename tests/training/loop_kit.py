"""A whole tiny run for the tests of the loop: model folder, config, parts, one call to start it.

And the same run killed at random: `attempt` for a script that `run_script` runs.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

from training_kit import LetterSource

from rolltree.models import TinyConfig, make_tiny
from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training

METRICS = ("train/loss", "reward/mean", "train/grad_norm", "train/entropy", "train/num_records")


def make_model(folder: Path) -> Path:
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_tiny(
            folder,
            TinyConfig(hidden_size=32, num_layers=2, intermediate_size=64, max_context=256),
        )
    return folder


def make_config(model: Path, run: Path, **sections: dict[str, Any]) -> Any:
    data: dict[str, dict[str, Any]] = {
        "run": {"dir": str(run)},
        "model": {"name": str(model)},
        "engine": {"max_batch": 8, "max_context": 128},
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 3, "groups_per_step": 2},
        "optim": {"lr": 5e-3},
        "train": {"num_steps": 4, "num_threads": 1},
        "eval": {"before": False, "after": False},
        "checkpoint": {"every": 2, "export": False},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return load_train_config(data)


def start(config: Any, source: Any = None, *, parts: Any = None, **options: Any) -> Any:
    """Run the loop once, as a command would: open the run, build the parts, train, close."""

    async def main() -> Any:
        own = parts or build_parts(config, options.get("ranks"))
        with open_run(config) as run:
            try:
                return await run_training(
                    config, own, source=source or LetterSource(), run=run, **options
                )
            finally:
                await own.aclose()

    return asyncio.run(main())


def curve(report: Any) -> list[tuple[float, ...]]:
    return [tuple(step[name] for name in METRICS) for step in report.metrics]


class Killer(Silent):
    """Kills its process some seconds after the n-th thing that it hears of; never where n is 0."""

    def __init__(self, num_events: int, delay_s: float) -> None:
        self.num_events, self.delay_s = num_events, delay_s

    def tick(self, *args: Any) -> None:
        self.num_events -= 1
        if self.num_events == 0:
            threading.Timer(self.delay_s, os.kill, (os.getpid(), 9)).start()

    on_start = on_rollouts = on_step = on_eval = on_end = tick


def attempt(config: Any, num_events: int = 0, delay_s: float = 0.0, **options: Any) -> int:
    """Run the loop in a child that is killed (see `Killer`); print and return its exit code."""
    child = os.fork()
    if child == 0:
        start(config, reporter=Killer(num_events, delay_s), **options)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    return code


HEAD = """
import random, sys, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, {kit!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from loop_kit import attempt, make_config
model, root = Path({model!r}), Path({root!r})
"""


def run_script(script: str, model: Path, root: Path) -> tuple[list[int], str]:
    """Run a script in a process without threads, which may fork; return the codes it printed.

    It finds `attempt`, `make_config`, `random`, `model` and `root`. Also returns its stderr.
    """
    head = HEAD.format(kit=str(Path(__file__).parent), model=str(model), root=str(root))
    done = subprocess.run(
        [sys.executable, "-c", head + dedent(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [int(line) for line in done.stdout.split()], done.stderr
