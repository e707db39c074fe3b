"""`rolltree train` and `rolltree fork`: train a model on an environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rolltree.training import TrainConfig

transcripts_option = click.option(
    "--transcripts",
    type=click.IntRange(min=0),
    default=2,
    help="Held-out examples to show from before and after.",
)


@click.command("train")
@click.argument(
    "config", type=click.Path(path_type=Path), help="TOML file with the settings of the run."
)
@click.argument(
    "overrides", nargs=-1, help="Settings that replace the file's: optim.lr=1e-5 run.seed=1 ..."
)
@transcripts_option
def train_model(config: Path, overrides: tuple[str, ...], transcripts: int) -> None:
    """Train a model by reinforcement learning; the same command again continues the run."""
    from rolltree.redact import remember, secrets_in_words
    from rolltree.training import load_train_config

    # Before the settings are read, whose errors quote them.
    remember(*secrets_in_words(overrides))
    checked = load_train_config(config, overrides)
    _train(checked, ["rolltree", "train", str(config), *overrides], transcripts)


@click.command("fork")
@click.argument("run", type=click.Path(path_type=Path), help="Directory of a training run.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    help="Setting that replaces the run's: optim.lr=1e-5. Repeatable.",
)
@click.option("--step", type=int, help="Checkpoint to start from (default: the latest).")
@click.option(
    "--run",
    "target",
    type=click.Path(path_type=Path),
    help="Directory of the new run (default: RUN-fork).",
)
@transcripts_option
def fork_stored_run(
    run: Path, settings: tuple[str, ...], step: int | None, target: Path | None, transcripts: int
) -> None:
    """Start a new run from a checkpoint of another, with other settings."""
    from rolltree.redact import remember, secrets_in_words
    from rolltree.training import fork_run as fork

    remember(*secrets_in_words(settings))
    checked = fork(run, settings, step=step, run_dir=target)
    # With the directory that was chosen, so the stored command continues this run.
    words = ["rolltree", "fork", str(run), *(f"--set={each}" for each in settings)]
    words += [] if step is None else ["--step", str(step)]
    _train(checked, [*words, "--run", checked.run.dir], transcripts)


def _train(config: TrainConfig, words: Sequence[str], transcripts: int) -> None:
    """Train, and print the report; `words` are the command."""
    if config.cluster is not None:
        from rolltree.cluster.driver import train_on_cluster

        train_on_cluster(config, num_transcripts=transcripts, command=words)
        return
    from rolltree.launch import train

    train(config, num_transcripts=transcripts, command=words)
