"""What a checkpoint holds, in two formats: whole tensors, or each rank's shards.

`full`: rank 0 gathers everything and writes Hugging Face's layout (or peft's, with adapters) and
one file of optimizer state; anything can read it. `sharded`: every rank writes its own parts with
torch.distributed.checkpoint as safetensors, whose headers say which part of what they are. Both are
read by any number of ranks, each taking its parts. It knows models and optimizers. It leaves out
directories that must be whole (`checkpoint.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers.utils import logging as hf_logging

from rolltree.errors import TrainingError
from rolltree.models.layouts import Weights, open_file, open_weights
from rolltree.training.lora import is_adapted, peft_name
from rolltree.training.optim import Optimizer
from rolltree.training.ranks import Ranks
from rolltree.training.shard import own_part, reshard, whole

OPTIMIZER = "optimizer.safetensors"
SHARDS = "shards"
ADAPTER = "adapter_model.safetensors"


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint keeps of a model: its adapters if it has some, else all of it.

    All of it is the parameters (tied ones once) and the buffers that a state dict has.
    """
    reshard(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    if is_adapted(model):
        return {name: parameters[name] for name in parameters if ".lora_" in name}
    saved = set(model.state_dict(keep_vars=True))
    return parameters | {name: value for name, value in model.named_buffers() if name in saved}


def write_full(
    folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None, max_shard_size: str
) -> None:
    """Gather model and optimizer, tensor by tensor, and write them on rank 0."""
    writes = ranks is None or ranks.leads
    tensors = _gather(trained_tensors(model), writes)
    if writes:
        with quiet():
            model.save_pretrained(
                folder,
                state_dict=tensors,
                max_shard_size=max_shard_size,
                save_original_format=False,  # the names of the module, not those of its origin
            )
    del tensors
    state = _gather(optimizer.tensors(), writes)
    if writes:
        save_file(state, folder / OPTIMIZER)


def read_full(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Copy whole tensors into what this rank holds of them.

    Raises:
        TrainingError: they belong to another model.
        ConfigError: a file cannot be read.
    """
    own = trained_tensors(model)
    if is_adapted(model) != (folder / ADAPTER).is_file():
        raise TrainingError(
            f"the checkpoint {folder} was saved for another model: model.lora_rank is set for one "
            "of them and not for the other. Use the settings that the run was started with."
        )
    if is_adapted(model):
        _copy_in(open_file(folder / ADAPTER), own, folder, peft_name)
    else:
        _copy_in(open_weights(folder), own, folder)
    _copy_in(open_file(folder / OPTIMIZER), optimizer.tensors(), folder)


def write_sharded(
    folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None, max_shard_size: str
) -> None:
    """Write what this rank holds; a tensor that every rank has is written by one of them."""
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
    with quiet():
        dcp_save(
            _together(model, optimizer),
            storage_writer=writer,
            process_group=None if ranks is None else ranks.group,
            no_dist=ranks is None,
        )


def read_sharded(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Read the parts that this rank holds, whatever ranks wrote them.

    Raises:
        TrainingError: they belong to another model.
    """
    own = _together(model, optimizer)
    reader = HuggingFaceStorageReader(str(folder / SHARDS))
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


@dataclass(frozen=True, slots=True)
class Format:
    """How the contents of a checkpoint are written and read; every rank calls both."""

    write: Callable[[Path, Any, Optimizer, Ranks | None, str], None]
    read: Callable[[Path, Any, Optimizer, Ranks | None], None]


FORMATS: dict[str, Format] = {
    "full": Format(write_full, read_full),
    "sharded": Format(write_sharded, read_sharded),
}


def check_same(
    folder: Path, stored: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse tensors of other names or shapes.

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


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and torch's remarks away from whatever shows the run."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _together(model: Any, optimizer: Optimizer) -> dict[str, Tensor]:
    model_part = {f"model/{name}": tensor for name, tensor in trained_tensors(model).items()}
    return model_part | {f"optimizer/{name}": value for name, value in optimizer.tensors().items()}


def _gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    gathered = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            gathered[name] = full.cpu().contiguous()
    return gathered


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
        if part.numel():
            part.copy_(weights.read(key, spans))
