"""Model, engine and client of a run on one machine, from its config.

The embedded engine serves the very tensors that the trainer changes; vLLM in this process serves a
copy of them that `publish` renews. It knows the names in the config. It leaves out the environment,
which the caller builds, and servers on other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rolltree.inference.local import LocalClient, local_client
from rolltree.inference.vllm import vllm_client
from rolltree.models import load_model, resolve_model
from rolltree.store import Run
from rolltree.training.config import MAY_CHANGE, TrainConfig
from rolltree.training.train import WeightTarget


@dataclass(frozen=True, slots=True)
class LocalParts:
    """What `train` needs and a config can make. Close it with `await parts.client.aclose()`."""

    model: Any
    tokenizer: Any
    engine: WeightTarget
    client: LocalClient


def build_local(config: TrainConfig) -> LocalParts:
    """Load the model in float32 and start the engine that `engine.kind` names.

    Raises:
        UnknownName: there is no such model.
        ConfigError: the model or the engine's settings cannot be used, or vLLM is not installed.
    """
    model, tokenizer = load_model(config.model.name, "float32", device=config.model.device)
    section = config.engine
    client = _CLIENTS[section.kind](
        config,
        model,
        tokenizer,
        name=config.model.name,
        max_batch=section.max_batch,
        max_context=section.max_context,
        kv_budget_bytes=section.kv_budget_bytes,
        prefill_chunk=section.prefill_chunk,
        seed=config.run.seed,
    )
    return LocalParts(model, tokenizer, client.engine, client)


def _local(config: TrainConfig, model: Any, tokenizer: Any, **options: Any) -> LocalClient:
    return local_client(model, tokenizer, **options)


def _vllm(config: TrainConfig, model: Any, tokenizer: Any, **options: Any) -> LocalClient:
    return vllm_client(resolve_model(config.model.name), model, tokenizer, **options)


_CLIENTS: dict[str, Callable[..., LocalClient]] = {"local": _local, "vllm": _vllm}


def open_run(config: TrainConfig) -> Run:
    """Make the run directory of a config, or continue it.

    Raises:
        ConfigError: it was started with other settings (`MAY_CHANGE` may differ).
    """
    return Run.open_or_create(
        config.run.dir, config=config.as_dict(), kind="train", may_change=MAY_CHANGE
    )
