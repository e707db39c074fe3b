"""A model passed as an object: its weights when the run began are restored when it continues.

The caller owns it, so it survives the call that trained it. A later call with the same object would
take trained weights for those that the run began with: as the reference of the KL, below adapters,
or, if an error came before the first checkpoint, to train on. So the run stores a fingerprint of
the first weights and, if they are trained in place, the weights themselves (`start.safetensors`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file

from rolltree._helpers.files import odd_kind, whole_file
from rolltree.inference.models.layouts import open_file
from rolltree.store import Run
from rolltree.training.checkpoint_formats import trained_tensors, written
from rolltree.training.config import TrainConfig, load_train_config
from rolltree.training.models.lora import accept_adapter, take_off
from rolltree.training.models.plain_weights import is_adapted
from rolltree.values.errors import ConfigError

START, START_FILE = "start_weights", "start.safetensors"

# Weak, so that a run does not keep a model alive that its caller has dropped.
_trained_by: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()


def accept_given(model: Any, config: TrainConfig) -> TrainConfig:
    """Check an object before it is used, and return the config, with the object's own adapter.

    Adapters that an earlier call added are removed; those that came with the object are trained.

    Raises:
        ConfigError: it is split over ranks, or its adapter cannot be trained.
    """
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise ConfigError(
            "the model that was given is split over ranks, by an earlier call or by your own "
            "code, and cannot be put together here. Load it again and pass that."
        )
    if not take_off(model) and is_adapted(model):
        rank, alpha = accept_adapter(model)
        if config.model.lora_rank not in (0, rank):
            raise ConfigError(
                f"model.lora_rank is {config.model.lora_rank}, and the model that was given has "
                f"an adapter of rank {rank}, which is trained. Leave model.lora_rank out."
            )
        return load_train_config(config, lora_rank=rank, lora_alpha=alpha)
    return config


@torch.no_grad()
def begin(
    model: Any, config: TrainConfig, run: Run, notify: Callable[[str], None], *, is_alone: bool
) -> None:
    """Restore an object's weights from when `run` began, or store them if `run` begins now.

    `is_alone`: there are no other ranks, whose objects would not be restored.

    Raises:
        ConfigError: its weights are not those that the run began with.
    """
    weights, known = fingerprint(model), run.meta.get(START)
    file = run.path / START_FILE
    earlier = _trained_by.get(model)
    if known is None and not run.steps():
        if earlier is not None and earlier != run.path:
            notify(
                f"the model object was trained in place by {earlier}: this run begins with the "
                "weights that it has now (adapters are taken off). Load the model again to begin "
                "with others."
            )
        # Weights below adapters that this run adds are never written, so there is nothing to
        # restore.
        if not config.model.lora_rank or is_adapted(model):
            what = "the weights that the run begins with"
            with written(file.with_suffix(".tmp"), what), whole_file(file, follow=False) as part:
                # safetensors refuses tensors that share memory, as tied weights do.
                unique = {t.data_ptr(): (name, t) for name, t in trained_tensors(model).items()}
                save_file({name: t.cpu().contiguous() for name, t in unique.values()}, part)
        run.set_meta(START, weights)
    elif known is not None and weights != known:
        # Only if an earlier call trained the object; otherwise its weights may be intended.
        if earlier is not None and is_alone and file.is_file() and odd_kind(file) is None:
            stored, own = open_file(file), trained_tensors(model)
            for name in stored.names & own.keys():
                if stored.shape(name) == tuple(own[name].shape):
                    own[name].copy_(stored.read(name))
        # Computed again, whether something was copied back or not.
        if fingerprint(model) != known:
            raise ConfigError(
                f"the model that was given has other weights than the run {run.path} began with, "
                "so the run would continue another model. Load the one that it began with, or "
                "choose another run directory."
            )
    _trained_by[model] = run.path


def fingerprint(model: Any) -> int:
    """Return a CRC-32 of the names and bytes of the tensors that would be trained."""
    crc = 0
    for name, tensor in sorted(trained_tensors(model).items()):
        data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(data, zlib.crc32(name.encode(), crc))
    return crc
