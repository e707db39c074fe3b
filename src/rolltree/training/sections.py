"""Sections of the training config that surround learning: where, which model, which task.

Frozen structs whose fields are documented and checked. They know nothing about what uses them. The
sections that decide what is learned are in `config.py`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from rolltree.errors import ConfigError


def need(ok: bool, key: str, value: object, rule: str) -> None:
    """Refuse a value of a setting that breaks its rule.

    Raises:
        ConfigError: with the dotted key.
    """
    if not ok:
        raise ConfigError(f"{key} is {value!r}; it must be {rule}. Change it in the config.")


class RunSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the run lives and what makes it repeatable.

    `dir`: the run directory; the same directory continues the run. `seed`: everything random (task
    order, worlds, sampling) comes from it.
    """

    dir: str = "runs/train"
    seed: int = 0

    def __post_init__(self) -> None:
        need(bool(self.dir), "run.dir", self.dir, "a path")


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model that is trained and served.

    `name`: what `rolltree.models.load_model` takes. `compute_dtype`: autocast of the training pass;
    the weights themselves are always float32. `backward_dtype`: of the matrix products in the
    backward pass on a CPU; logprobs stay exact. `device`: as torch names it.

    `lora_rank`: train adapters of this rank instead of the weights (0: train the weights), scaled
    by `lora_alpha` / rank (None: twice the rank), on the linear layers named in `lora_targets`
    (empty: all but the output head).
    """

    name: str = "smollm2-135m"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    backward_dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need(self.lora_rank >= 0, "model.lora_rank", self.lora_rank, "0 or more")
        alpha = self.lora_alpha
        need(alpha is None or alpha > 0, "model.lora_alpha", alpha, "above 0")
        if not self.lora_rank and (alpha is not None or self.lora_targets):
            raise ConfigError(
                "model.lora_alpha or model.lora_targets is set, but model.lora_rank is 0, so there "
                "are no adapters that would read it. Set model.lora_rank, or leave them out."
            )
        if self.backward_dtype != "float32" and self.device != "cpu":
            raise ConfigError(
                f"model.backward_dtype is {self.backward_dtype!r}, which only a CPU reads, and the "
                f"device is {self.device!r}. Use model.compute_dtype = 'bfloat16' there."
            )


class EngineSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What samples, and how many episodes it gets at once.

    `kind`: `local` is the embedded engine, which reads the trainer's own tensors; `vllm` is vLLM in
    this process, which gets a copy of them after every step and needs the package; `servers` are
    those at `urls`. `publish`: servers reload the weights from `weights/` in the run directory,
    under the same path for them (`disk`), or are sent them (`transfer`): by nccl if `model.device`
    is a GPU, else by gloo, from `transfer_address`, one of this machine's that they reach.
    `served_model`: the name that servers know the model by (None: `model.name`).
    `api_key_env`: the environment variable that holds their token. `reload_method`: the worker's
    method (see `publish_weights`). `probe_tolerance`: after every publish a short probe is sampled;
    its logprobs may differ from the trainer's by this much (servers in 16 bits need about 0.5).
    `max_batch`: requests that
    decode together. `max_context`: prompt and completion of one request in tokens, None for the
    engine's default. `kv_budget_bytes`: memory for keys and values, None for `max_batch` full slots
    (`vllm`: 1 GiB). `prefill_chunk`: most prompt tokens in one forward pass. `max_concurrent`:
    episodes in flight. `time_limit_s`: seconds an episode may spend. `retries`: how often an
    episode whose model call failed is run again.
    """

    kind: Literal["local", "vllm", "servers"] = "local"
    urls: tuple[str, ...] = ()
    publish: Literal["disk", "transfer"] = "disk"
    transfer_address: str = "127.0.0.1"
    served_model: str | None = None
    api_key_env: str | None = None
    reload_method: str = "reload_weights"
    probe_tolerance: float = 0.01
    max_batch: int = 64
    max_context: int | None = None
    kv_budget_bytes: int | None = None
    prefill_chunk: int = 2048
    max_concurrent: int = 64
    time_limit_s: float | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        need(self.max_batch >= 1, "engine.max_batch", self.max_batch, "at least 1")
        need(self.max_concurrent >= 1, "engine.max_concurrent", self.max_concurrent, "at least 1")
        need(self.prefill_chunk >= 1, "engine.prefill_chunk", self.prefill_chunk, "at least 1")
        need(self.retries >= 0, "engine.retries", self.retries, "0 or more")
        bound = self.probe_tolerance
        need(bound > 0, "engine.probe_tolerance", bound, "above 0")
        if (self.kind == "servers") != bool(self.urls):
            raise ConfigError(
                f"engine.kind is {self.kind!r} and engine.urls is {list(self.urls)}: servers have "
                "URLs, and engines in this process have none. Set both, or neither."
            )
        ignored = ("max_batch", "max_context", "kv_budget_bytes", "prefill_chunk")
        others = ("served_model", "api_key_env", "reload_method", "publish", "transfer_address")
        other_way = "reload_method" if self.publish == "transfer" else "transfer_address"
        defaults = {f.name: f.default for f in msgspec.structs.fields(type(self))}
        for name in (*ignored, other_way) if self.kind == "servers" else others:
            if getattr(self, name) != defaults[name]:
                chosen = "publish" if name == other_way and self.kind == "servers" else "kind"
                raise ConfigError(
                    f"engine.{name} is set, and engine.{chosen} = {getattr(self, chosen)!r} does "
                    "not read it, so it would do nothing. Leave it out (servers are set up where "
                    "they are started)."
                )


class EnvSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The environment: `id` and `args` are what `load_environment` takes."""

    id: str = ""
    args: dict[str, Any] = {}


class SamplingSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How training rollouts are sampled; None leaves a field to the environment.

    `temperature` (above 0), `max_tokens` per model call, `stop` strings.

    There is no top_p and no top_k: the trainer computes logprobs of the full distribution, and the
    importance ratio against a truncated one would be wrong.
    """

    temperature: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        at = self.temperature
        need(at is None or at > 0, "sampling.temperature", at, "above 0 to learn from samples")
        limit = self.max_tokens
        need(limit is None or limit >= 1, "sampling.max_tokens", limit, "at least 1")

    def as_args(self) -> dict[str, Any]:
        """Return the fields that are set, as OpenAI request fields."""
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        args = {key: value for key, value in given.items() if value is not None}
        return {**args, "stop": list(self.stop)} if self.stop is not None else args


class EvalSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Held-out evaluation: `before` training, `after` it, and `every` so many steps (0: never).

    `num_examples` (-1: all), `rollouts_per_example`, `temperature` and `max_tokens` (None: as in
    training) say how the evaluation is run.
    """

    before: bool = True
    after: bool = True
    every: int = 0
    num_examples: int = -1
    rollouts_per_example: int = 1
    temperature: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        need(self.every >= 0, "eval.every", self.every, "0 or more")
        number = self.num_examples
        need(number == -1 or number >= 1, "eval.num_examples", number, "-1 or at least 1")
        repeats = self.rollouts_per_example
        need(repeats >= 1, "eval.rollouts_per_example", repeats, "at least 1")
        at = self.temperature
        need(at is None or at >= 0, "eval.temperature", at, "0 or more")


class CheckpointSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When state is saved and what is left at the end.

    `every`: steps between checkpoints (the last step always gets one). `keep`: how many stay.
    `format`: `full` gathers the weights and writes Hugging Face's layout, `sharded` lets every rank
    write its part; both are read by any number of ranks. `max_shard_size`: weights of a larger
    model become several files, as `"5GB"`. `export`: write the trained model in Hugging Face's
    layout at the end.
    """

    every: int = 10
    keep: int = 2
    format: Literal["full", "sharded"] = "full"
    max_shard_size: str = "5GB"
    export: bool = True

    def __post_init__(self) -> None:
        need(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        need(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        size = self.max_shard_size
        good = re.fullmatch(r"[1-9]\d*[KMGT]?B", size) is not None
        need(good, "checkpoint.max_shard_size", size, "a size such as '5GB' or '200MB'")


class TrackSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where metrics go besides the run store, which always has them.

    `to`: rows of `trackers.TRACKERS`: `"tensorboard"`, `"wandb"`, `"trackio"`, `"mlflow"`; each
    needs its package (`pip install 'rolltree[track]'`). `project`: the project or experiment there.
    `name`: the run's name there, None for that of the run directory.
    """

    to: tuple[str, ...] = ()
    project: str = "rolltree"
    name: str | None = None

    def __post_init__(self) -> None:
        need(bool(self.project), "track.project", self.project, "a name")
        if len(set(self.to)) < len(self.to):
            raise ConfigError(f"track.to is {list(self.to)}; name each tracker once.")
