"""Reads a checkpoint back: checks that it is whole, and fills model, optimizer and generators."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from rolltree._helpers.files import odd_kind, read_regular
from rolltree.training.checkpoint import FORMAT, LATEST, STATE, own_checksum
from rolltree.training.checkpoint_formats import (
    NUM_THREADS,
    OPTIMIZER,
    file_checksum,
    quiet,
    trained_tensors,
)
from rolltree.training.models.plain_weights import ADAPTER_FILE, is_adapted
from rolltree.training.models.ranks import Ranks
from rolltree.training.models.shards import own_part
from rolltree.training.optim import Optimizer
from rolltree.training.sharded_checkpoint import SHARDS, together
from rolltree.values.errors import TrainingError

if TYPE_CHECKING:
    from rolltree.inference.models.layouts import Weights


def read_full(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Copy whole tensors into the parts that this rank holds.

    Raises:
        TrainingError: they belong to a different model.
        ConfigError: a file cannot be read.
    """
    from rolltree.inference.models.layouts import open_file

    read_weights(folder, model)
    _copy_in(open_file(folder / OPTIMIZER), optimizer.tensors(), folder)


def read_weights(folder: Path, model: Any) -> None:
    """Copy the trained weights of a whole checkpoint, without the optimizer.

    Raises:
        TrainingError: they belong to a different model.
        ConfigError: a file cannot be read.
    """
    from rolltree.inference.models.layouts import open_file, open_weights

    own = trained_tensors(model)
    if is_adapted(model) != (folder / ADAPTER_FILE).is_file():
        raise TrainingError(
            f"the checkpoint {folder} was saved for another model: model.lora_rank is set for one "
            "of them and not for the other. Use the settings that the run was started with."
        )
    if is_adapted(model):
        from rolltree.training.models.lora import peft_name

        _copy_in(open_file(folder / ADAPTER_FILE), own, folder, peft_name)
    else:
        _copy_in(open_weights(folder), own, folder)


def read_sharded(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Read the parts that this rank holds, from any number of ranks that wrote them.

    Raises:
        TrainingError: they belong to a different model.
    """
    own = together(model, optimizer)
    reader = HuggingFaceStorageReader(str(folder / SHARDS))
    # The reader takes the largest offset as a tensor's size and ignores names that it does not
    # expect, so both are compared here (design/0007).
    metadata: Any = reader.read_metadata().state_dict_metadata
    stored = {name: tuple(entry.size) for name, entry in metadata.items()}
    check_same(folder, stored, {name: tuple(tensor.shape) for name, tensor in own.items()})
    with quiet():
        dcp_load(
            own,
            storage_reader=reader,
            process_group=None if ranks is None else ranks.group,
            no_dist=ranks is None,
        )


def check_same(
    folder: Path, stored: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse tensors with different names or shapes.

    Raises:
        TrainingError: naming the first one.
    """
    different = sorted(stored.keys() ^ own.keys()) or sorted(
        name for name in own if stored[name] != own[name]
    )
    if different:
        raise TrainingError(
            f"the checkpoint {folder} was saved for another model: {different[0]} and "
            f"{len(different) - 1} more differ. Use the model settings (model.name, model.lora_*) "
            "that the run was started with."
        )


def _copy_in(
    weights: Weights,
    own: Mapping[str, Tensor],
    folder: Path,
    file_name: Callable[[str], str] = lambda name: name,
) -> None:
    names = {file_name(name): name for name in own}
    stored = {name: weights.shape(name) for name in weights.names}
    check_same(folder, stored, {key: tuple(own[name].shape) for key, name in names.items()})
    for key, name in names.items():
        part, spans = own_part(own[name])
        # A rank holds no part of a vector that is shorter than the number of ranks.
        if part.numel():
            part.copy_(weights.read(key, spans))


def changed_files(folder: Path, sums: Mapping[str, int]) -> list[str]:
    """Return the names of the files whose content differs from these CRC-32s, or is unreadable."""

    def differs(name: str) -> bool:
        try:
            return file_checksum(folder / name) != sums[name]
        except OSError:
            return True

    names = sorted(sums)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [name for name, bad in zip(names, pool.map(differs, names), strict=True) if bad]


def check_complete(path: Path) -> dict[str, Any]:
    """Return `state.json` of a checkpoint after checking the size of every file.

    Raises:
        TrainingError: something is missing, short or of another format; the directory is named.
    """
    try:
        if path.is_symlink():
            raise torn(path, "it is a link")
        for file in path.rglob("*"):  # loading would block on a pipe, and follow a link
            if (file.is_symlink() or not file.is_dir()) and (kind := odd_kind(file)):
                raise torn(path, f"{file.name} is {kind}")
        data = json.loads(read_regular(path / STATE))
        version = data["format"]
        files = {str(name): (int(size), int(own)) for name, (size, own) in data["files"].items()}
    # A changed file may hold any JSON, even one that nests too deep.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise torn(path, f"{STATE} cannot be read ({type(error).__name__})") from error
    if version != FORMAT:
        raise TrainingError(
            f"the checkpoint {path} has format {version}; this rolltree reads format {FORMAT}. "
            "Continue the run with the version that wrote it."
        )
    if data.get("checksum") != own_checksum(data):
        raise torn(path, f"{STATE} differs from its checksum")
    for name, (size, _) in files.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            has = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise torn(path, f"{name} {has}")
    return dict(data)


def check_content(path: Path) -> None:
    """Compare every file of a complete checkpoint with its checksum.

    Raises:
        TrainingError: a file has changed since it was written; it is named.
    """
    files = json.loads(read_regular(path / STATE))["files"]
    changed = changed_files(path, {name: own for name, (_, own) in files.items()})
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise torn(path, f"{changed[0]} differs from its checksum{more}")


def torn(path: Path, what: str) -> TrainingError:
    """Return the error for a checkpoint that cannot be trusted."""
    return TrainingError(
        f"the checkpoint {path} is torn or damaged: {what}. Training would continue from "
        f"weights that never existed. Restore it from a copy, or remove {path.parent / LATEST} to "
        "start from the beginning (stored rollouts are used again)."
    )


def restore_rng(tensors: dict[str, Tensor]) -> None:
    """Set the generators to what `rng_tensors` returned; states of missing GPUs are ignored."""
    gauss = tensors["python/gauss"].tolist()
    words = tuple(tensors["python/words"].tolist())
    random.setstate((3, words, gauss[0] if gauss else None))
    position, has_gauss = tensors["numpy/position"].tolist()
    # Stored as int64, because torch does little with uint32.
    keys = tensors["numpy/keys"].numpy().astype(np.uint32)
    cached = float(tensors["numpy/gauss"])
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(tensors["torch/cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        state = tensors.get(f"torch/cuda{index}")
        if state is not None:
            torch.cuda.set_rng_state(state, index)


def newest_whole(pointer: Path, notify: Callable[[str], None]) -> Path:
    """Return the newest whole checkpoint beside the file that names the newest one.

    Raises:
        TrainingError: no checkpoint is whole.
    """
    root = pointer.parent
    try:
        name = read_regular(pointer, 1024).decode("utf-8", "replace").strip()
    except OSError as error:
        raise torn(pointer, str(error.strerror)) from error
    newest = root / Path(name).name  # never outside
    exists = newest.name.startswith("step-") and newest.is_dir()
    # A pointer to a checkpoint that is gone does not say which ones came before it, so all are
    # tried.
    older = [p for p in root.glob("step-*") if p.name < newest.name or not exists]
    refused: TrainingError | None = None
    for path in (newest, *sorted(older, reverse=True)):
        # Names and sizes first, which cost nothing; then every byte.
        try:
            check_complete(path)
            check_content(path)
        except TrainingError as error:
            refused = refused or error
            continue
        if refused is not None:
            problem = str(refused).partition(". ")[0]
            notify(
                f"{problem}. Training continues from {path.name}, the one before it; later "
                "steps are trained again from their stored rollouts."
            )
        return path
    assert refused is not None
    raise refused


READS: dict[str, Callable[[Path, Any, Optimizer, Ranks | None], None]] = {
    "full": read_full,
    "sharded": read_sharded,
}
