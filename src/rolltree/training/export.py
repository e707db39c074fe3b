"""The trained model as folders that other programs read.

    model/    Hugging Face's layout, adapters merged in, with the tokenizer
    adapter/  peft's layout, when the model has adapters

It knows modules and folders. It leaves out checkpoints, which continue a run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rolltree.training.contents import quiet, trained_tensors
from rolltree.training.durable import put_in_place, remove, sync_files
from rolltree.training.lora import is_adapted, plain_tensors
from rolltree.training.ranks import Ranks
from rolltree.training.shard import whole


def export_model(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    max_shard_size: str = "5GB",
    ranks: Ranks | None = None,
) -> Path:
    """Write model and tokenizer as a folder that transformers and `load_model` read.

    The folder appears whole or not at all; an older one is replaced. Adapters are merged, and also
    written beside it, as `adapter`. Every rank calls it, rank 0 writes.
    """
    writes = ranks is None or ranks.leads
    tensors = {name: value.cpu().contiguous() for name, value in plain_tensors(model) if writes}
    adapter = {}
    if is_adapted(model):
        adapter = {name: whole(value).cpu() for name, value in trained_tensors(model).items()}
    if not writes:
        return path

    def write_model(folder: Path) -> None:
        plain = _skeleton(model) if adapter else model
        plain.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    _write(path, write_model)
    if adapter:
        _write(
            path.with_name("adapter"),
            lambda folder: model.save_pretrained(folder, state_dict=adapter),
        )
    return path


def _write(path: Path, fill: Callable[[Path], Any]) -> None:
    working = path.with_name(f".{path.name}.tmp")
    remove(working)
    working.mkdir(parents=True)
    with quiet():
        fill(working)
    sync_files(working)
    put_in_place(working, path)


def _skeleton(model: Any) -> Any:
    """Return the model without adapters and without weights, for its configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config)
    plain.generation_config = model.generation_config
    return plain
