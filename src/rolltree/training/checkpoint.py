"""Checkpoints that are whole or not there: model, optimizer and position of a training run.

    checkpoints/step-000020/  model.safetensors  optimizer.safetensors  state.json
    checkpoints/latest        the name of the newest complete one

A checkpoint is written into a temporary directory, synced, renamed, and only then is `latest`
moved to it, so a kill at any moment leaves the previous one in force. It knows named tensors and
plain data. It leaves out pickle, sharded models, and rollouts, which are in the run store.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as hf_logging

from rolltree.errors import TrainingError
from rolltree.training.optim import Optimizer

FORMAT = 1
_MODEL, _OPTIMIZER, _STATE, _LATEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "latest",
)


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands: `step` steps are done and the weights are policy `version`.

    Example: `TrainState(step=20, version=20)`. Task order, seeds and learning rate follow from the
    step, so nothing else has a position. `averages`: what each role has usually earned, where the
    credit has moving averages.
    """

    step: int
    version: int
    averages: Mapping[str, float] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, below one directory. One writer at a time.

    Args:
        root: made when the first checkpoint is saved.
        keep: how many complete checkpoints stay.
    """

    def __init__(self, root: str | Path, keep: int = 2) -> None:
        self.root, self.keep = Path(root), keep

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or None when there is none.

        Raises:
            TrainingError: the pointer names a directory that is torn or gone.
        """
        pointer = self.root / _LATEST
        if not pointer.is_file():
            return None
        path = self.root / pointer.read_text(encoding="utf-8").strip()
        check_complete(path)
        return path

    def save(self, model: torch.nn.Module, optimizer: Optimizer, state: TrainState) -> Path:
        """Write a checkpoint, point `latest` at it, and remove those beyond `keep`."""
        self.root.mkdir(parents=True, exist_ok=True)
        final = self.root / f"step-{state.step:06d}"
        working = self.root / f".{final.name}.tmp"
        _remove(working)
        working.mkdir()
        save_file(_contiguous(dict(_model_tensors(model))), working / _MODEL)
        save_file(_contiguous(dict(optimizer.tensors())), working / _OPTIMIZER)
        sizes = {name: (working / name).stat().st_size for name in (_MODEL, _OPTIMIZER)}
        data = {
            "format": FORMAT,
            "step": state.step,
            "version": state.version,
            "averages": dict(state.averages),
            "files": sizes,
        }
        (working / _STATE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        for name in (_MODEL, _OPTIMIZER, _STATE):
            _sync(working / name)
        _sync(working)
        _remove(final)  # left by a kill between the rename and the pointer
        working.rename(final)
        _sync(self.root)
        self._point_to(final)
        self._retain(final)
        return final

    def load(self, path: Path, model: torch.nn.Module, optimizer: Optimizer) -> TrainState:
        """Copy a checkpoint into the module's own tensors and the optimizer.

        Raises:
            TrainingError: the directory is torn, or it belongs to another model.
        """
        data = check_complete(path)
        _load_model(path, model)
        try:
            optimizer.load_tensors(load_file(path / _OPTIMIZER))
        except SafetensorError as error:
            raise _torn(path, f"{_OPTIMIZER} cannot be read ({error})") from error
        averages = {role: float(value) for role, value in data.get("averages", {}).items()}
        return TrainState(int(data["step"]), int(data["version"]), averages)

    def _point_to(self, final: Path) -> None:
        temporary = self.root / f".{_LATEST}.tmp"
        temporary.write_text(final.name + "\n", encoding="utf-8")
        _sync(temporary)
        temporary.replace(self.root / _LATEST)
        _sync(self.root)

    def _retain(self, newest: Path) -> None:
        """Remove checkpoints beyond `keep`, those of an abandoned future, and killed writers'."""
        others = sorted(self.root.glob("step-*"), reverse=True)
        older = [path for path in others if path.name < newest.name]
        future = [path for path in others if path.name > newest.name]
        for old in (*future, *older[self.keep - 1 :]):
            hidden = old.with_name(f".{old.name}.old")
            _remove(hidden)
            old.rename(hidden)
        for left in (*self.root.glob(".step-*.old"), *self.root.glob(".step-*.tmp")):
            _remove(left)


def check_complete(path: Path) -> dict[str, Any]:
    """Return `state.json` of a checkpoint after comparing every file with it.

    Raises:
        TrainingError: something is missing, short or of another format; the directory is named.
    """
    try:
        data = json.loads((path / _STATE).read_text(encoding="utf-8"))
        sizes: Mapping[str, int] = data["files"]
        found = data["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _torn(path, f"{_STATE} cannot be read ({type(error).__name__})") from error
    if found != FORMAT:
        raise TrainingError(
            f"the checkpoint {path} has format {found}; this rolltree reads format {FORMAT}. "
            "Continue the run with the version that wrote it."
        )
    for name, size in sizes.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            has = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise _torn(path, f"{name} {has}")
    return dict(data)


def export_model(model: Any, tokenizer: Any, path: Path) -> Path:
    """Write model and tokenizer as a folder that transformers and `load_model` read.

    The folder appears whole or not at all; an older export is replaced.
    """
    working = path.with_name(f".{path.name}.tmp")
    _remove(working)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _no_progress_bar():
        model.save_pretrained(working)
    if tokenizer is not None:
        tokenizer.save_pretrained(working)
    for file in working.iterdir():
        _sync(file)
    _sync(working)
    _remove(path)
    working.rename(path)
    _sync(path.parent)
    return path


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing over whatever shows the run."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters (tied ones once) and the buffers that a state dict keeps."""
    saved = set(model.state_dict(keep_vars=True))
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    return tensors | {name: value for name, value in model.named_buffers() if name in saved}


def _load_model(path: Path, model: torch.nn.Module) -> None:
    own = _model_tensors(model)
    try:
        stored = load_file(path / _MODEL)
    except SafetensorError as error:
        raise _torn(path, f"{_MODEL} cannot be read ({error})") from error
    if stored.keys() != own.keys() or any(stored[k].shape != own[k].shape for k in own):
        different = sorted(
            stored.keys() ^ own.keys() or {k for k in own if stored[k].shape != own[k].shape}
        )
        raise TrainingError(
            f"the checkpoint {path} was saved for another model: {different[0]} and "
            f"{len(different) - 1} more differ. Use the model.name that the run was started with."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _torn(path: Path, what: str) -> TrainingError:
    return TrainingError(
        f"the checkpoint {path} is torn: {what}. Training from it would continue from weights that "
        f"never existed. Remove the directory and write the name of an older one into "
        f"{path.parent / _LATEST}, or remove that file to start from the beginning (stored "
        "rollouts are used again)."
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
