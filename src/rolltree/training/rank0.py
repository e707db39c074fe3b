"""Rank 0 leads, the others follow: commands for everything that all ranks do together.

    rank 0                      the others
    trainer.step(samples, 7) -> "step", with the samples   -> trainer.step(samples, 7)
    checkpoints.save(...)    -> "save"                     -> checkpoints.save(...)

Rollouts, store, engine, evaluation and metrics are rank 0's alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from rolltree.training.checkpoint import Checkpoints, TrainState
from rolltree.training.checkpoint_formats import export_model
from rolltree.training.config import TrainConfig
from rolltree.training.models.plain_weights import copy_weights
from rolltree.training.models.ranks import STOP, Ranks, samples_from_data, samples_to_data
from rolltree.training.optim import Optimizer
from rolltree.training.parts import adapt, load_trained, make_checkpoints
from rolltree.training.trainer import Exclusive, OnBatch, Trainer
from rolltree.training.weight_probe import next_logprobs
from rolltree.values.errors import NonFiniteStep
from rolltree.values.types import Sample


class Rank0Trainer(Trainer):
    """The trainer of rank 0: each of its steps is a step of every rank."""

    def step(
        self,
        samples: Sequence[Sample],
        step: int,
        *,
        exclusive: Exclusive = nullcontext,
        on_batch: OnBatch | None = None,
    ) -> dict[str, float]:
        """Do what `Trainer.step` does, on all ranks."""
        assert self.ranks is not None
        # Before the step, whose sums over ranks wait for all of them.
        self.ranks.send("step", {"step": step, "samples": samples_to_data(samples)})
        return super().step(samples, step, exclusive=exclusive, on_batch=on_batch)


class Rank0Checkpoints(Checkpoints):
    """The checkpoints of rank 0, which every rank saves and loads together with it."""

    def save(self, model: Any, optimizer: Optimizer, state: TrainState) -> Path:
        """Do what `Checkpoints.save` does, on all ranks."""
        assert self.ranks is not None
        self.ranks.send("save", {"root": str(self.root), "state": asdict(state)})
        return super().save(model, optimizer, state)

    def load(self, path: Path, model: Any, optimizer: Optimizer) -> TrainState:
        """Do what `Checkpoints.load` does, on all ranks."""
        assert self.ranks is not None
        self.ranks.send("load", {"path": str(path)})
        return super().load(path, model, optimizer)


@dataclass(frozen=True, slots=True)
class _Follower:
    config: TrainConfig
    ranks: Ranks
    trainer: Trainer

    def step(self, data: Mapping[str, Any]) -> None:
        # Without `exclusive` and `on_batch`: only rank 0 has the engine and the store.
        # All ranks decide alike, and rank 0 whether the run goes on.
        with suppress(NonFiniteStep):
            self.trainer.step(samples_from_data(data["samples"]), data["step"])

    def save(self, data: Mapping[str, Any]) -> None:
        state = msgspec.convert(data["state"], TrainState)
        store = make_checkpoints(Path(data["root"]), self.config, self.ranks)
        store.save(self.trainer.model, self.trainer.optimizer, state)

    def load(self, data: Mapping[str, Any]) -> None:
        path = Path(data["path"])
        store = make_checkpoints(path.parent, self.config, self.ranks)
        store.load(path, self.trainer.model, self.trainer.optimizer)

    def copy(self, data: Mapping[str, Any]) -> None:
        # Takes part in gathering the weights, but keeps none of them.
        copy_weights(self.trainer.model, None)

    def score(self, data: Mapping[str, Any]) -> None:
        # All ranks run the pass; only rank 0 uses the result.
        next_logprobs(self.trainer.model, data["prompts"])

    def export(self, data: Mapping[str, Any]) -> None:
        export_model(self.trainer.model, None, Path(data["path"]), ranks=self.ranks)


COMMANDS: dict[str, Callable[[_Follower, Mapping[str, Any]], None]] = {
    "step": _Follower.step,
    "save": _Follower.save,
    "load": _Follower.load,
    "copy": _Follower.copy,
    "score": _Follower.score,
    "export": _Follower.export,
}


def follow(config: TrainConfig, ranks: Ranks, model: Any = None) -> None:
    """Run the commands of rank 0 until it sends `STOP`.

    SIGTERM and Ctrl-C are left to rank 0, which makes every rank save. `model`, if given, is
    trained instead of the one that the config names.

    Raises:
        TrainingError: rank 0 has ended, or a command failed on every rank.
    """
    # torchrun passes signals on to every rank, and a rank that ended would make the others' save
    # fail.
    with _signals_ignored():
        if config.train.num_threads is not None:
            torch.set_num_threads(config.train.num_threads)
        if model is None:
            model, _ = load_trained(config, ranks)
        adapt(model, config)
        follower = _Follower(config, ranks, Trainer(model, config, ranks))
        while (command := ranks.receive()).name != STOP:
            COMMANDS[command.name](follower, command.data)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, signal.SIG_IGN) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
