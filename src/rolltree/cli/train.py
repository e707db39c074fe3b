"""`rolltree train`, `demo` and `fork` train a model on an environment; `rolltree models`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rolltree.cli.arguments import echo

if TYPE_CHECKING:
    from rolltree.training import TrainConfig

transcripts_option = click.option(
    "--transcripts",
    type=click.IntRange(min=0),
    default=2,
    help="Held-out examples to show from before and after.",
)


DEMO = "arithmetic"
"""The environment of the demo, which has its own `train.toml`."""


@click.command("train")
@click.argument("config", help="TOML file with the settings of the run, or an environment.")
@click.argument(
    "overrides", nargs=-1, help="Settings that replace the file's: optim.lr=1e-5 run.seed=1 ..."
)
@transcripts_option
def train_model(config: str, overrides: tuple[str, ...], transcripts: int) -> None:
    """Train a model by reinforcement learning; the same command again continues the run."""
    from rolltree._helpers.redact import remember, secrets_in_words
    from rolltree.training import load_train_config
    from rolltree.training.launch import environment_config

    # Before the settings are read: errors quote them.
    remember(*secrets_in_words(overrides))
    source = environment_config(config) if _is_environment(config) else config
    checked = load_train_config(source, overrides)
    _train(checked, ["rolltree", "train", config, *overrides], transcripts)


def _is_environment(config: str) -> bool:
    """Whether the first argument of `train` is an environment, not a config or a setting."""
    is_config = config.endswith(".toml") or (Path(config).is_file() and config[-3:] != ".py")
    return not is_config and "=" not in config


@click.command("demo")
@click.argument("overrides", nargs=-1, help="Settings that replace the demo's: run.seed=1 ...")
@transcripts_option
def run_demo(overrides: tuple[str, ...], transcripts: int) -> None:
    """Train SmolLM2-135M to add, on two CPU cores, in minutes; run it again to continue."""
    from rolltree._helpers.redact import remember, secrets_in_words
    from rolltree.environments import train_config_file
    from rolltree.training import load_train_config

    remember(*secrets_in_words(overrides))
    checked = load_train_config(train_config_file(DEMO), overrides)
    _train(checked, ["rolltree", "demo", *overrides], transcripts)


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
    from rolltree._helpers.redact import remember, secrets_in_words
    from rolltree.training import fork_run as fork

    remember(*secrets_in_words(settings))
    checked = fork(run, settings, step=step, run_dir=target)
    # With the directory that was chosen, so that the stored command continues this run.
    words = ["rolltree", "fork", str(run), *(f"--set={each}" for each in settings)]
    words += [] if step is None else ["--step", str(step)]
    _train(checked, [*words, "--run", checked.run.dir], transcripts)


@click.command("models")
@click.argument("prepare", required=False, help="Prepare this model and print its folder.")
def list_models(prepare: str | None) -> None:
    """List the built-in models, or prepare one."""
    from rolltree.inference.models import resolve_model
    from rolltree.inference.models.load import MADE_MODELS

    if prepare is not None:
        echo(resolve_model(prepare))
        return
    for name in sorted(MADE_MODELS):
        echo(name)


def _train(config: TrainConfig, words: Sequence[str], transcripts: int) -> None:
    """Train, and print the report; `words` are those of the command."""
    if config.cluster is not None:
        from rolltree.wings import load_wing

        load_wing("section", "cluster")(config, num_transcripts=transcripts, command=words)
        return
    if os.environ.get("RANK", "0") == "0":
        # Loading torch and the model takes a while, and nothing else is printed meanwhile.
        echo(f"loading {config.model.name}", error=True)
    from rolltree.training.launch import train

    train(config, num_transcripts=transcripts, command=words)
