"""A new run from a checkpoint of another run, with different settings.

The new run begins with the weights, the optimizer and the step of the checkpoint, and with the
metrics of the steps before it. Rollouts and evaluations stay with the run that made them.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolltree._helpers.files import remove, write_whole
from rolltree._helpers.redact import REDACTED
from rolltree.store import Run, to_plain
from rolltree.store.settings import config_differences, with_defaults, without
from rolltree.training.checkpoint import Checkpoints
from rolltree.training.checkpoint_formats import put_in_place, sync_files
from rolltree.training.checkpoint_reading import check_complete
from rolltree.training.config import (
    REMOVED,
    TrainConfig,
    as_started,
    ignored_settings,
    load_train_config,
)
from rolltree.training.given import START, START_FILE
from rolltree.training.models.ranks import is_rank0
from rolltree.training.plan import FORKED
from rolltree.values.errors import ConfigError, StoreError, TrainingError


def fork_run(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    run_dir: str | Path | None = None,
    **settings: Any,
) -> TrainConfig:
    """Make a run from a checkpoint of `source` and return its config, for `rolltree.train`.

        rt.train(fork_run("runs/demo", lr=5e-6, num_steps=60))

    Calling it again returns the config of the run that it made, which is then continued. Under
    torchrun every rank calls it, and rank 0 makes the run.

    Args:
        source: the directory of a training run. It may be in use, and is not changed.
        overrides: settings that replace the source's, as `load_train_config` takes them.
        step: the step of a checkpoint that was kept; None for the latest.
        run_dir: the new run; None for `<source>-fork`, `<source>-fork-2`, ...
        settings: the same as keywords, for Python.

    Raises:
        ConfigError: wrong settings, a setting that was stored redacted, nothing left to train, or
            `run_dir` holds something else.
        TrainingError: there is no such checkpoint, or it is torn.
    """
    source = Path(source)
    with Run.open(source, "r") as parent:
        if parent.meta["kind"] != "train":
            raise ConfigError(
                f"{source} holds a run of kind {parent.meta['kind']!r}; only training runs have "
                "checkpoints to fork."
            )
        config = load_train_config(without(parent.config, REMOVED), overrides, **settings)
        config = as_started(config, parent.config)
        _check_redacted(source, config.as_dict())
        for target in [Path(run_dir)] if run_dir is not None else _free_names(source):
            # The target is one of the settings that are compared below.
            made = load_train_config(config, run_dir=str(target))
            known = _fork_at(target)
            if known is None and is_rank0():
                _make(parent, made, target, _checkpoint(source, step))
                return made
            while known is None:  # rank 0 makes it
                time.sleep(0.1)
                known = _fork_at(target)
            origin, stored = known
            # Without `step` any checkpoint of this source will do, since "latest" moves on.
            same = origin == (str(source.resolve()), origin[1] if step is None else step)
            plain = to_plain(made.as_dict())
            stored = with_defaults(without(stored, REMOVED), TrainConfig().as_dict())
            if same and not config_differences(stored, plain, made.may_change()):
                return made
        raise ConfigError(
            f"{run_dir} holds another run, or a fork with other settings or from another step. "
            "Choose another run directory."
        )


def _free_names(source: Path) -> Iterator[Path]:
    for number in itertools.count(1):
        yield source.with_name(f"{source.name}-fork{f'-{number}' if number > 1 else ''}")


def _fork_at(path: Path) -> tuple[tuple[str, int], Mapping[str, Any]] | None:
    """Return origin, step and settings of the fork at `path`; None if there is no run."""
    if not path.exists():
        return None
    try:
        with Run.open(path, "r") as run:
            origin = run.meta.get(FORKED, {})
            return (origin.get("run", ""), origin.get("step", 0)), run.config
    except StoreError:
        # Something else is there, which does not equal any fork.
        return ("", 0), {}


def _checkpoint(source: Path, step: int | None) -> Path:
    kept = sorted(path.name for path in (source / "checkpoints").glob("step-*"))
    # This also verifies that the source has a whole checkpoint.
    path = Checkpoints(source / "checkpoints").latest()
    if step is not None:
        path = source / "checkpoints" / f"step-{step:06d}"
    if path is None or path.name not in kept:
        available = f"It has {', '.join(kept)}" if kept else "It has none yet"
        raise TrainingError(
            f"{source} has no checkpoint {'to fork' if path is None else path.name}. {available}; "
            "checkpoint.every and checkpoint.keep say which are written and kept."
        )
    return path


def _make(parent: Run, config: TrainConfig, target: Path, checkpoint: Path) -> None:
    """Write the run to a temporary directory, sync it, and rename it when it is complete."""
    step = int(check_complete(checkpoint)["state"]["step"])
    if step >= config.train.num_steps:
        raise ConfigError(
            f"the checkpoint {checkpoint} is at step {step} and train.num_steps is "
            f"{config.train.num_steps}, so nothing would be trained. Add "
            f"train.num_steps={2 * step}, or choose an earlier checkpoint."
        )
    working = target.with_name(f".{target.name}.tmp")
    remove(working)
    copy = working / "checkpoints" / checkpoint.name
    try:
        shutil.copytree(checkpoint, copy)
        check_complete(copy)  # the source may be in use, and have removed it meanwhile
    except (OSError, shutil.Error) as error:
        remove(working)
        raise TrainingError(
            f"the checkpoint {checkpoint} cannot be copied to {target}: {error}. Nothing was left "
            "there; the same command tries again."
        ) from error
    write_whole(copy.parent / "latest", copy.name + "\n", follow=False)
    if (parent.path / START_FILE).is_file():
        shutil.copy2(parent.path / START_FILE, working)
    origin = {"run": str(parent.path.resolve()), "step": step}
    with Run.create(working, config=config.as_dict(), kind="train") as run:
        run.set_meta(FORKED, origin)
        if START in parent.meta:
            run.set_meta(START, parent.meta[START])
        for row in parent.steps():
            if row.step <= step:
                run.add_step(row.step, row.metrics)
        run.add_event("forked", origin, step=step)
        for message in ignored_settings(parent.config):
            run.add_event("notice", {"message": message})
    # Before the rename: a run that appears under its name is on the disk.
    sync_files(working)
    put_in_place(working, target)


def _check_redacted(source: Path, config: Mapping[str, Any]) -> None:
    for section, values in config.items():
        for key, value in (values or {}).items():
            # Secrets may be anywhere inside, as in the arguments of an environment.
            if REDACTED in json.dumps(value):
                inner = [name for name in value if value[name] == REDACTED] if key == "args" else []
                name = ".".join((section, key, *inner[:1]))
                raise ConfigError(
                    f"{name} is a secret, so {source} does not hold it. Set it again: "
                    f"--set {name}=..."
                )
