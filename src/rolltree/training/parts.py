"""Model, tokenizer, engine and client of a run, from its config; its trainer and checkpoints.

The embedded engine serves the tensors that the trainer changes, or, with several ranks or adapters,
a plain copy of the weights; vLLM and servers have copies that `publish` renews. What all ranks do
together, rank 0 sends to the others (`rank0.py`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rolltree import wings
from rolltree.inference.local import local_client
from rolltree.inference.models import load_model
from rolltree.store import Run
from rolltree.training.checkpoint import Checkpoints
from rolltree.training.checkpoint_formats import export_model
from rolltree.training.config import REMOVED, TrainConfig, as_started
from rolltree.training.models.plain_weights import copy_weights, is_adapted
from rolltree.training.publishing import WeightTarget, run_hooks
from rolltree.training.trainer import Trainer
from rolltree.values.errors import ConfigError
from rolltree.values.types import FloatArray, IntArray

if TYPE_CHECKING:
    from rolltree.training.models.ranks import Ranks


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
        await run_hooks(self.engine).aclose()
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
            from rolltree.training.models.lora import remove_adapters

            remove_adapters(served)
    adapt(model, config)
    # While the model is whole: the trainer will shard it.
    if config.model.lora_rank:
        from rolltree.training.models.lora import check_copy

        check_copy(model, served)
    kind = config.engine.kind
    make = _local if kind == "local" else wings.load_wing("engine", kind)
    client, engine = make(config, served, tokenizer)
    return TrainParts(model, tokenizer, engine, client, served)


def engine_options(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments that a config gives to an engine in this process."""
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
    client = local_client(model, tokenizer, batch_invariant=invariant, **engine_options(config))
    return client, client.engine


def settings_of_run(config: TrainConfig) -> Mapping[str, Any]:
    """Return the stored settings of the run that the config names; empty if there is none."""
    file = Path(config.run.dir) / "run.db"
    # A program that is killed as it makes a run leaves an empty file, which the next one fills.
    if not any(os.path.exists(each) and os.path.getsize(each) for each in (file, f"{file}-wal")):
        return {}
    with Run.open(config.run.dir, "r") as run:
        return run.config


def started_settings(config: TrainConfig) -> TrainConfig:
    """Return what `as_started` does for the run that the config names, if it exists."""
    return as_started(config, settings_of_run(config))


def open_run(config: TrainConfig) -> Run:
    """Create the run directory of a config, or open it to continue.

    Raises:
        ConfigError: it was started with other settings (`TrainConfig.may_change` may differ).
    """
    path, schedule = config.run.dir, config.optim.schedule
    started = started_settings(config)
    may_change = config.may_change()
    # Also if the caller has already asked for the settings that it was started with.
    default = replace(config, algorithm=replace(config.algorithm, aggregation=None))
    if started_settings(default) == started != default:
        may_change += ("algorithm.aggregation",)
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
        config=started.as_dict(),
        kind="train",
        may_change=may_change,
        defaults=TrainConfig().as_dict(),
        removed=REMOVED,
        advice=" ".join(advice),
    )


def load_trained(config: TrainConfig, ranks: Ranks | None) -> tuple[Any, Any]:
    """Return the float32 model and its tokenizer; ranks load it on the CPU and shard it later.

    Raises:
        UnknownName: there is no such model.
        ConfigError: it cannot be loaded.
    """
    # FSDP moves shards to the GPU, which need not hold the whole model (design/0007).
    device = config.model.device if ranks is None else "cpu"
    return load_model(config.model.name, "float32", device=device)


def adapt(model: Any, config: TrainConfig) -> None:
    """Add the adapters that the config asks for to a model.

    Raises:
        ConfigError: see `lora.add_adapter`.
    """
    if config.model.lora_rank and not is_adapted(model):  # a model may come with its own
        from rolltree.training.models.lora import add_adapter

        add_adapter(model, config.model, config.run.seed)


def make_trainer(model: Any, config: TrainConfig, ranks: Ranks | None) -> Trainer:
    """Return the trainer of this process, which leads the other ranks if there are any."""
    if ranks is None:
        return Trainer(model, config)
    from rolltree.training.rank0 import Rank0Trainer

    return Rank0Trainer(model, config, ranks)


def make_checkpoints(root: Path, config: TrainConfig, ranks: Ranks | None) -> Checkpoints:
    """Return the checkpoints below `root`; those of rank 0 lead the other ranks."""
    kind, section = Checkpoints, config.checkpoint
    if ranks is not None and ranks.leads:
        from rolltree.training.rank0 import Rank0Checkpoints

        kind = Rank0Checkpoints
    return kind(root, section.keep, content=section.format, ranks=ranks)


def renew_copy(model: Any, served: Any, ranks: Ranks | None) -> None:
    """Update the copy that the engine serves, with all ranks; `model` itself needs no update."""
    # The embedded engine reads the trained tensors themselves.
    if served is model:
        return
    if ranks is not None:
        ranks.send("copy")
    copy_weights(model, served)


def score_together(model: Any, prompts: IntArray, ranks: Ranks | None) -> FloatArray:
    """Do what `next_logprobs` does, with all ranks."""
    from rolltree.training.weight_probe import next_logprobs

    if ranks is not None:
        ranks.send("score", {"prompts": prompts})
    return next_logprobs(model, prompts)


def export_together(
    model: Any, tokenizer: Any, path: Path, config: TrainConfig, ranks: Ranks | None
) -> Path:
    """Do what `export_model` does, on all ranks."""
    if ranks is not None:
        ranks.send("export", {"path": str(path)})
    return export_model(model, tokenizer, path, ranks=ranks)
