"""A whole tiny run for the tests of the loop: model folder, config, parts, one call to start it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from training_kit import LetterSource

from rolltree.inference.models import TinyConfig, make_tiny
from rolltree.training import build_parts, load_train_config, open_run, run_training

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
