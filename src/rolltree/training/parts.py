"""Model, tokenizer, engine and client of a run, from its config.

The embedded engine serves the tensors that the trainer changes, or, with several ranks or adapters,
a plain copy of the weights; vLLM and servers have copies that `publish` renews.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.errors import ConfigError
from rolltree.inference import ChatRenderer, EndpointPool
from rolltree.inference.local import local_client
from rolltree.inference.vllm import vllm_client
from rolltree.models import resolve_model
from rolltree.store import Run
from rolltree.training.config import TrainConfig
from rolltree.training.lora import check_copy, is_adapted, remove_adapters
from rolltree.training.publishing import WeightTarget
from rolltree.training.rank0 import adapt, load_trained
from rolltree.training.ranks import Ranks
from rolltree.training.server_client import TrainedServer, server_client
from rolltree.training.servers import (
    Servers,
    check_served_names,
    weight_way,
)


@dataclass(frozen=True, slots=True)
class TrainParts:
    """Model, tokenizer, engine and client of a run. Close them with `await parts.aclose()`.

    `served` is the module that the engine reads: `model`, or a plain copy of it.
    """

    model: Any
    tokenizer: Any
    engine: WeightTarget
    client: Any
    served: Any

    async def aclose(self) -> None:
        """Close the client, with an engine in this process, and connections to servers."""
        if isinstance(self.engine, Servers):
            await self.engine.aclose()
        await self.client.aclose()


def build_parts(
    config: TrainConfig, ranks: Ranks | None = None, *, model: Any = None, tokenizer: Any = None
) -> TrainParts:
    """Load the model in float32 and start, or connect to, the engine that `engine.kind` names.

    With several ranks only rank 0 calls it. If a `model` and its tokenizer are given, the model is
    trained in place instead of the one that `model.name` names.

    Raises:
        UnknownName: there is no such model.
        ConfigError: the model, its adapters or the engine's settings cannot be used, or vLLM is not
            installed.
    """
    recorded = config.engine.record_experts or config.engine.kind == "servers"
    if config.train.replay_experts and not recorded:
        raise ConfigError(
            "train.replay_experts is true, but engine.record_experts is not, so there would be "
            "nothing to replay. Set engine.record_experts = true too."
        )
    if model is None:
        model, tokenizer = load_trained(config, ranks)
    served = model
    # Shards cannot be read in place, and the engine's own forward pass knows plain layers only
    # (design/0007).
    if ranks is not None or config.model.lora_rank:
        device = config.model.device if ranks is None else ranks.device
        # Before `adapt`, so the only adapters it can have are those of a given model.
        served = copy.deepcopy(model).to(device)
        if is_adapted(served):
            remove_adapters(served)
    adapt(model, config)
    # While the model is whole: the trainer will shard it.
    if config.model.lora_rank:
        check_copy(model, served)
    client, engine = _ENGINES[config.engine.kind](config, served, tokenizer)
    return TrainParts(model, tokenizer, engine, client, served)


def _options(config: TrainConfig) -> dict[str, Any]:
    section = config.engine
    return {
        "name": config.model.name,
        "max_batch": section.max_batch,
        "max_context": section.max_context,
        "kv_budget_bytes": section.kv_budget_bytes,
        "prefill_chunk": section.prefill_chunk,
        "seed": config.run.seed,
        "record_experts": section.record_experts,
    }


def _local(config: TrainConfig, model: Any, tokenizer: Any) -> tuple[Any, WeightTarget]:
    invariant = config.engine.batch_invariant
    client = local_client(model, tokenizer, batch_invariant=invariant, **_options(config))
    return client, client.engine


def _vllm(config: TrainConfig, model: Any, tokenizer: Any) -> tuple[Any, WeightTarget]:
    check_served_names(model, "engine.kind = 'servers' with engine.publish = 'disk'")
    folder = resolve_model(config.model.name)
    client = vllm_client(folder, model, tokenizer, **_options(config))
    return client, client.engine


def _servers(config: TrainConfig, model: Any, tokenizer: Any) -> tuple[Any, WeightTarget]:
    section = config.engine
    configured = getattr(model.generation_config, "eos_token_id", None)
    known = configured if isinstance(configured, list) else [configured]
    # A model may end its turns with more ids than the tokenizer's single one.
    renderer = ChatRenderer(tokenizer, end_ids=[int(i) for i in known if i is not None])
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    clients = [
        server_client(TrainedServer, config, url, renderer, vocab_size) for url in section.urls
    ]
    limit_s = section.away_limit_s
    # A call may wait as long as the run does, and then needs its own time in addition.
    pool = EndpointPool(clients, deadline_s=limit_s + max(c.server.deadline_s for c in clients))
    way = weight_way(
        model,
        # Absolute, because servers have different working directories.
        Path(config.run.dir).absolute() / "weights",
        publish=section.publish,
        method=section.reload_method,
        address=section.transfer_address,
    )
    return pool, Servers(clients, way, away_limit_s=limit_s, pool=pool)


_ENGINES: dict[str, Callable[[TrainConfig, Any, Any], tuple[Any, WeightTarget]]] = {
    "local": _local,
    "vllm": _vllm,
    "servers": _servers,
}


def open_run(config: TrainConfig) -> Run:
    """Create the run directory of a config, or open it to continue.

    Raises:
        ConfigError: it was started with other settings (`TrainConfig.may_change` may differ).
    """
    path, schedule = config.run.dir, config.optim.schedule
    advice = [
        f"`rolltree fork {path} --set section.key=value` goes on from its last checkpoint with "
        "other settings, in its own run."
    ]
    if schedule != "constant":
        advice.append(
            f"(optim.schedule = {schedule!r} falls until train.num_steps, so that is one of them.)"
        )
    return Run.open_or_create(
        path,
        config=config.as_dict(),
        kind="train",
        may_change=config.may_change(),
        defaults=TrainConfig().as_dict(),
        advice=" ".join(advice),
    )
