"""Models on disk: the contents of a checkpoint in two formats, and the exported model.

`full`: rank 0 gathers everything and writes Hugging Face's layout (or peft's, with adapters) and
one file of optimizer state. `sharded`: every rank writes its own part with
torch.distributed.checkpoint as safetensors. Any number of ranks can read either.

    model/    the exported model in Hugging Face's layout, adapters merged in, with the tokenizer
    adapter/  the adapters in peft's layout, if it reads them back as they were trained
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from transformers.utils import logging as hf_logging

from rolltree._helpers.files import open_regular, remove, sync
from rolltree.training.models.plain_weights import (
    ADAPTER,
    ADAPTER_FILE,
    is_adapted,
    own_tensors,
    plain_tensors,
)
from rolltree.training.models.ranks import Ranks, own_part, reshard, whole
from rolltree.training.optim import Optimizer
from rolltree.values.errors import TrainingError

if TYPE_CHECKING:
    from rolltree.inference.models.layouts import Weights

OPTIMIZER = "optimizer.safetensors"
MAX_SHARD_SIZE = "5GB"
"""Weights above it become several files; the size that published models have on the hub."""
SHARDS = "shards"
_NUM_THREADS = 4  # zlib.crc32 runs without the interpreter's lock


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint keeps: the adapters if there are any, else all.

    All means the parameters (tied ones once) and the buffers that a state dict has.
    """
    # A forward pass without a backward pass leaves the root's parameters whole, and each rank would
    # save them whole.
    reshard(model)
    only_adapters = is_adapted(model)
    return {
        name: tensor.detach()
        for name, tensor in own_tensors(model).items()
        if ".lora_" in name or not only_adapters
    }


def write_full(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Gather model and optimizer, tensor by tensor, and write them on rank 0."""
    writes = ranks is None or ranks.leads
    # Weights, then optimizer: only one of them is gathered in memory at a time.
    tensors = _gather(trained_tensors(model), writes)
    if writes and is_adapted(model):
        from rolltree.training.models.lora import write_adapter

        write_adapter(folder, model, tensors)
    elif writes:
        with quiet():
            model.save_pretrained(
                folder,
                state_dict=tensors,
                max_shard_size=MAX_SHARD_SIZE,
                save_original_format=False,  # the module's own names
            )
    del tensors
    state = _gather(optimizer.tensors(), writes)
    if writes:
        save_file(state, folder / OPTIMIZER)


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


def write_sharded(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Write what this rank holds; a tensor that every rank has is written by one of them."""
    # In a separate folder: DCP's reader takes every safetensors file there (design/0007).
    writer = _ShardWriter(str(folder / SHARDS), save_distributed=True)
    with quiet():
        dcp_save(
            _together(model, optimizer),
            storage_writer=writer,
            process_group=None if ranks is None else ranks.group,
            no_dist=ranks is None,
        )


class _ShardWriter(HuggingFaceStorageWriter):
    """DCP's writer of safetensors, without its copy of the whole file in memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file with this rank's parts, and sync it."""
        tensors: dict[str, Tensor] = {}
        parts: dict[str, Any] = {}
        results = []
        for item in plan.items:
            assert item.tensor_data is not None
            name, data = item.index.fqn, planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[name] = data.detach().cpu().contiguous()
            parts[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensors[name].nbytes, None))
        # If a model has few or short tensors, a rank may hold nothing.
        if tensors:
            index = plan.storage_data["shard_index"]
            # DCP's own names and header, since DCP's reader reads the file.
            path = Path(self.path) / f"shard-{index:05d}-model-00001-of-00001.safetensors"
            header = {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(tensors, path, metadata=header)
            sync(path)  # by the machine that wrote it
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def read_sharded(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Read the parts that this rank holds, from any number of ranks that wrote them.

    Raises:
        TrainingError: they belong to a different model.
    """
    own = _together(model, optimizer)
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


@dataclass(frozen=True, slots=True)
class Format:
    """How the contents of a checkpoint are written and read; every rank calls both."""

    write: Callable[[Path, Any, Optimizer, Ranks | None], None]
    read: Callable[[Path, Any, Optimizer, Ranks | None], None]


FORMATS: dict[str, Format] = {
    "full": Format(write_full, read_full),
    "sharded": Format(write_sharded, read_sharded),
}


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


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and torch's warnings, which would disturb the display."""
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
    # Every rank goes through all tensors in the same order, because `whole` is collective.
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
        # A rank holds no part of a vector that is shorter than the number of ranks.
        if part.numel():
            part.copy_(weights.read(key, spans))


def sync_files(folder: Path) -> dict[str, list[int]]:
    """Sync every file below a folder, and the folders.

    Returns each file's size in bytes and CRC-32, by relative name. Checksums are computed while the
    disk is busy with the sync.
    """
    files = _files(folder)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        # Threads read while the disk writes: `zlib.crc32` and `fsync` both release the
        # interpreter's lock.
        sums = [pool.submit(file_checksum, path) for path in files]
        for path in (*files, *(path for path in folder.rglob("*") if path.is_dir()), folder):
            sync(path)
        return {
            str(path.relative_to(folder)): [path.stat().st_size, crc.result()]
            for path, crc in zip(files, sums, strict=True)
        }


def changed_files(folder: Path, sums: Mapping[str, int]) -> list[str]:
    """Return the names of the files whose content differs from these CRC-32s, or is unreadable."""

    def differs(name: str) -> bool:
        try:
            return file_checksum(folder / name) != sums[name]
        except OSError:
            return True

    names = sorted(sums)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return [name for name, bad in zip(names, pool.map(differs, names), strict=True) if bad]


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file: 3.7 GB/s per thread, 1.4 with SHA-256."""
    with open(open_regular(path), "rb") as file:
        # An empty file cannot be mapped.
        if not os.fstat(file.fileno()).st_size:
            return 0
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return zlib.crc32(data)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def written(working: Path, what: str) -> Iterator[None]:
    """Raise a failed write as a `TrainingError` with advice, and remove the partial folder.

    Raises:
        TrainingError: it could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        # On a full or failing disk removing may fail, too; the first error is the one to report.
        with suppress(OSError):
            remove(working)
        raise TrainingError(
            f"{what} could not be written into {working.parent} ({_reason(error)}); what "
            "was saved before is kept. Make room or check the disk, then start the same command "
            "again: it continues from the last checkpoint, if there is one."
        ) from error


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        # DCP wraps the error of each rank.
        failures = [failure[0] for failure in error.failures.values()]
        return _reason(failures[0]) if failures else str(error).splitlines()[0]
    strerror = getattr(error, "strerror", None)
    return str(strerror or error).splitlines()[0] if str(error) else type(error).__name__


def put_in_place(working: Path, final: Path) -> None:
    """Rename a synced folder to its final name, replacing what is there.

    If that fails, what was there is still there; after a kill, it may be `.{name}.old` beside it.
    """
    old = final.with_name(f".{final.name}.old")
    # A folder cannot be renamed onto one with files in it.
    if os.path.lexists(final):
        remove(old)
        final.rename(old)
    try:
        working.rename(final)
    except OSError:
        # A killed call may have left it, too.
        if os.path.lexists(old):
            old.rename(final)
        raise
    sync(final.parent)
    # The new one is in place, so this is not a failure; the next call tries again.
    with suppress(OSError):
        remove(old)


def export_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    ranks: Ranks | None = None,
) -> Path:
    """Write model and tokenizer as a folder that transformers and `load_model` read.

    The folder appears whole or not at all; an older one is replaced. Adapters are merged, and also
    written beside it, as `adapter`, if peft reads them back as they were trained. Every rank calls
    it, rank 0 writes.
    """
    writes = ranks is None or ranks.leads
    # Each rank goes through the generator, which gathers; only rank 0 keeps the tensors.
    tensors = {name: value.cpu().contiguous() for name, value in plain_tensors(model) if writes}
    adapter = {}
    if is_adapted(model):
        adapter = {  # layers that share one get a copy each, as in peft
            name: whole(value).cpu().clone()
            for name, value in model.named_parameters(remove_duplicate=False)
            if ".lora_" in name
        }
    if not writes:
        return path

    def write_model(folder: Path) -> None:
        # A model with adapters would save only these.
        plain = _skeleton(model) if adapter else model
        plain.save_pretrained(folder, state_dict=tensors, max_shard_size=MAX_SHARD_SIZE)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    _write(path, write_model)

    def fill(folder: Path) -> bool:
        from rolltree.training.models.lora import write_adapter

        write_adapter(folder, model, adapter)
        return _peft_reads(model, adapter, folder)

    if adapter:
        _write(path.with_name("adapter"), fill)
    return path


def _write(path: Path, fill: Callable[[Path], bool | None]) -> None:
    """Let `fill` write a folder, which appears only when it is whole; not if `fill` gives False."""
    working = path.with_name(f".{path.name}.tmp")
    with written(working, "the model"):
        remove(working)
        working.mkdir(parents=True)
        with quiet():
            wanted = fill(working)
        if wanted is False:
            remove(working)
            return
        for file in (*_files(working), working):
            sync(file)
        put_in_place(working, path)


def _skeleton(model: Any) -> Any:
    """Return the model without adapters and without weights, for its configuration."""
    with torch.device("meta"):  # its own class: transformers finds none for some configurations
        plain = type(model)._from_config(model.config)
    plain.generation_config = model.generation_config
    if hasattr(model, "_weight_conversions"):  # checkpoint names of fused weights
        plain._weight_conversions = model._weight_conversions
    return plain


def _peft_reads(model: Any, adapter: Mapping[str, Tensor], folder: Path) -> bool:
    """Return whether peft reads the same adapters back from a folder.

    In mixture-of-experts models whose layers peft renames (those of transformers 4) it leaves out
    shared experts and dense layers, and it refuses output projections of Mamba.
    """
    from peft import LoraConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):  # all but the adapters
                read = PeftModel(_skeleton(model), LoraConfig.from_pretrained(str(folder)))
            for name, module in read.named_modules():
                if name.endswith(f".{ADAPTER}") and ".lora_" in name:
                    for parameter in module.to_empty(device="cpu").parameters():
                        # What peft leaves out stays NaN, which equals nothing.
                        parameter.data.fill_(math.nan)
            set_peft_model_state_dict(read, load_peft_weights(str(folder), device="cpu"))
        except Exception:  # noqa: BLE001  (whatever it is, it would fail elsewhere too)
            return False
    made = dict(read.get_base_model().named_parameters())
    return all(name in made and torch.equal(made[name], value) for name, value in adapter.items())
