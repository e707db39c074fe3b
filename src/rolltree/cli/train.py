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
        typer.Option(
            "--transcripts", help="Held-out examples to show from before and after.", min=0
        ),
    ] = 2,
) -> None:
    """Train a model by reinforcement learning; the same command again continues the run."""
    from rolltree.launch import train
    from rolltree.redact import remember, secrets_in_words
    from rolltree.reports import (
        SafeConsole,
        next_commands,
        save_reward_curve,
        say,
        training_report,
    )
    from rolltree.training import load_train_config
    from rolltree.training.ranks import is_rank0

    remember(*secrets_in_words(overrides or []))
    try:
        report = train(load_train_config(config, overrides or []))
    except KeyboardInterrupt:
        if is_rank0():
            say(SafeConsole(stderr=True), "stopped; the same command continues the run")
        raise
    if not is_rank0():
        return
    out = SafeConsole()
    with report.run as run:
        for part in training_report(run, num_transcripts=transcripts):
            out.print(part)
        curve = save_reward_curve(run)
        say(out, f"run    {run.path}")
        if curve is not None:
            say(out, f"curve  {curve}")
        say(out, "next")
        words = ["rolltree", "train", str(config), *(overrides or [])]
        for command in next_commands(run, words):
            say(out, f"  {command}")
