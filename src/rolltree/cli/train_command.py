"""`rolltree train CONFIG.toml key.sub=value ...`: train a model on an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train_model(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: optim.lr=1e-5 run.seed=1 ..."),
    ] = None,
    transcripts: Annotated[
        int,
        typer.Option("--transcripts", help="Held-out examples shown before and after.", min=0),
    ] = 2,
) -> None:
    """Train a model by reinforcement learning; the same command again continues the run."""
    from rolltree.cli.overrides import read_config
    from rolltree.cli.train_run import run_training

    words = ["rolltree", "train", str(config), *(overrides or [])]
    run_training(read_config(config, overrides or []), words, num_transcripts=transcripts)
