"""`rolltree train` and `rolltree fork`: train a model on an environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rolltree.training import TrainConfig

TranscriptsOption = Annotated[
    int,
    typer.Option("--transcripts", help="Held-out examples to show from before and after.", min=0),
]


def train_model(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings that replace the file's: optim.lr=1e-5 run.seed=1 ..."),
    ] = None,
    transcripts: TranscriptsOption = 2,
) -> None:
    """Train a model by reinforcement learning; the same command again continues the run."""
    from rolltree.redact import remember, secrets_in_words
    from rolltree.training import load_train_config

    remember(*secrets_in_words(overrides or []))
    checked = load_train_config(config, overrides or [])
    _train(checked, ["rolltree", "train", str(config), *(overrides or [])], transcripts)


def fork_run(
    run: Annotated[Path, typer.Argument(help="Directory of a training run.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting that replaces the run's: optim.lr=1e-5. Repeatable."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to start from (default: the latest).")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--run", help="Directory of the new run (default: RUN-fork).")
    ] = None,
    transcripts: TranscriptsOption = 2,
) -> None:
    """Start a new run from a checkpoint of another, with other settings."""
    from rolltree.redact import remember, secrets_in_words
    from rolltree.training import fork_run as fork

    remember(*secrets_in_words(settings or []))
    checked = fork(run, settings or [], step=step, run_dir=target)
    words = ["rolltree", "fork", str(run), *(f"--set={each}" for each in settings or [])]
    words += [] if step is None else ["--step", str(step)]
    _train(checked, [*words, "--run", checked.run.dir], transcripts)


def _train(config: TrainConfig, words: Sequence[str], transcripts: int) -> None:
    """Train, and print the report; `words` are the command."""
    from rolltree.launch import train
    from rolltree.reports import (
        SafeConsole,
        next_commands,
        save_reward_curve,
        say,
        training_report,
    )
    from rolltree.training.ranks import is_rank0

    try:
        report = train(config)
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
        for command in next_commands(run, words):
            say(out, f"  {command}")
