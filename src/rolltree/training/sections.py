"""The sections of the training config: frozen structs whose fields are documented and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rolltree.samples import DEFAULT_SCOPE
from rolltree.values.errors import ConfigError
from rolltree.values.types import Scope

# msgspec checks these ranges, and its errors name the key.
AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
# Below 1: an average with 1 would never move.
Decay = Annotated[float, Meta(ge=0, lt=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the config's sections."""


class RunSection(Section, frozen=True):
    """Where the run is stored, and its seed.

    `dir`: the run directory; the same directory continues the run. `seed`: task order, environments
    and sampling are derived from it.
    """

    dir: Text = "runs/train"
    seed: int = 0


class ModelSection(Section, frozen=True):
    """The model that is trained and served.

    `name`: a model's name or folder, as `load_model` takes it. `compute_dtype`: autocast of the
    training pass; the weights themselves are always float32. `backward_dtype`: dtype of the matrix
    products in the backward pass on a CPU; logprobs stay exact. `device`: as torch names it.

    `lora_rank`: train adapters of this rank instead of the weights (0: train the weights), scaled
    by `lora_alpha` / rank (None: twice the rank), on the linear layers and experts' weights named
    in `lora_targets` (empty: all but the output head).
    """

    name: str = "smollm2-135m"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    backward_dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    lora_rank: AtLeast0 = 0
    lora_alpha: Positive | None = None
    lora_targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.lora_rank and (self.lora_alpha is not None or self.lora_targets):
            raise ConfigError(
                "model.lora_alpha or model.lora_targets is set, but model.lora_rank is 0, so no "
                "adapter would read it. Set model.lora_rank, or leave them out."
            )
        if self.backward_dtype != "float32" and self.device != "cpu":
            raise ConfigError(
                f"model.backward_dtype is {self.backward_dtype!r}, which has an effect only on a "
                f"CPU, and the device is {self.device!r}. Use model.compute_dtype = 'bfloat16' "
                "there."
            )


_ONCE_DEFAULTS = {("publish", "disk"), ("transfer_address", "127.0.0.1")}


class EngineSection(Section, frozen=True):
    """The inference engine that samples rollouts.

    - `kind`: `local` is the embedded engine, which reads the trainer's own tensors; `vllm` runs
      vLLM in this process and copies the weights to it after every step; `servers` are vLLM servers
      at `urls`.
    - `publish`: how servers get new weights. `shared`: they map memory of this machine. `transfer`:
      the weights are sent, by nccl if `model.device` is a GPU, else by gloo, from
      `transfer_address` of this machine (None: found automatically). `disk`: they reload `weights/`
      in the run directory, which they see under the same path. `auto`: each server takes the first
      of these that works, and a notice says which.
    - `served_model`: the model's name on the servers (None: `model.name`). `api_key_env`: the
      environment variable with their API key; `admin_key_env`: with the key that publishes weights,
      if that is different.
    - `probe_tolerance`: after every publish engines that hold a copy of the weights are probed. The
      bound follows from the step and from the engine's first difference; it is never more
      than this (16-bit servers need about 0.5).
    - `max_batch`: sequences decoded together. `max_context`: tokens of prompt and completion (None:
      the engine's default). `kv_budget_bytes`: memory of the KV cache (None: `max_batch` full
      sequences; `vllm`: 1 GiB). `prefill_chunk`: maximum prompt tokens in one forward pass.
    - `batch_invariant`: the embedded engine gives a request the same bits in any batch, so a run
      that was killed and continued equals one that was not, bit for bit.
    - `record_experts`: the engine in this process keeps which experts of a mixture every token went
      to, for `train.replay_experts`. (Servers do if they were started with that option.)
    - `max_concurrent`: rollouts in flight. `time_limit_s`: time limit of a rollout, without waiting
      for the server; `deadline_s`: in all. `retries`: how often a rollout is repeated after a
      server or a sandbox failed.
    """

    kind: Literal["local", "vllm", "servers"] = "local"
    urls: tuple[str, ...] = ()
    publish: Literal["auto", "shared", "transfer", "disk"] = "auto"
    transfer_address: str | None = None
    served_model: str | None = None
    api_key_env: str | None = None
    admin_key_env: str | None = None
    probe_tolerance: Positive = 0.01
    max_batch: AtLeast1 = 64
    max_context: AtLeast1 | None = None
    kv_budget_bytes: AtLeast1 | None = None
    prefill_chunk: AtLeast1 = 2048
    batch_invariant: bool = False
    record_experts: bool = False
    max_concurrent: AtLeast1 = 64
    time_limit_s: Positive | None = None
    deadline_s: Positive | None = None
    retries: AtLeast0 = 0

    def __post_init__(self) -> None:
        if (self.kind == "servers") != bool(self.urls):
            raise ConfigError(
                f"engine.kind is {self.kind!r} and engine.urls is {list(self.urls)}. Servers "
                "need URLs, and an engine in this process takes none. Set engine.kind = 'servers' "
                "and engine.urls, or neither."
            )
        if self.batch_invariant and self.kind != "local":
            raise ConfigError(
                f"engine.batch_invariant is set, and engine.kind = {self.kind!r} ignores it. "
                "Use engine.kind = 'local', or servers that were started with it "
                "(`rolltree serve --batch-invariant`), and leave it out here."
            )
        # A user who sets one of these expects an effect, so setting it in vain is an error.
        ignored = ("max_batch", "max_context", "kv_budget_bytes", "prefill_chunk")
        if self.kind == "servers" and self.record_experts:
            raise ConfigError(
                "engine.record_experts is set, but servers record routed experts only if they were "
                "started with that option. Start them with it (`vllm serve "
                "--enable-return-routed-experts`, `rolltree serve --record-experts`), and leave it "
                "out here."
            )
        others = ("served_model", "api_key_env", "admin_key_env", "publish", "transfer_address")
        other_way = ("transfer_address",) if self.publish in ("shared", "disk") else ()
        # A struct does not know which fields were given, so a default that is written out passes.
        defaults = {f.name: f.default for f in msgspec.structs.fields(type(self))}
        for name in (*ignored, *other_way) if self.kind == "servers" else others:
            # Runs from before there was a choice have stored the only way of that time.
            is_old = (name, getattr(self, name)) in _ONCE_DEFAULTS
            if getattr(self, name) != defaults[name] and not is_old:
                chosen = "publish" if name in other_way and self.kind == "servers" else "kind"
                raise ConfigError(
                    f"engine.{name} is set, and engine.{chosen} = {getattr(self, chosen)!r} does "
                    "not use it, so it would have no effect. Leave it out (servers are configured "
                    "when they are started)."
                )


class EnvSection(Section, frozen=True):
    """The environment: `id`, `args` and `compat` are what `load_environment` takes.

    `train(config, environment=...)` needs none of them.
    """

    id: str = ""
    # msgspec copies an empty default for each instance.
    args: dict[str, Any] = {}
    compat: bool = False


class SamplingSection(Section, frozen=True):
    """How training rollouts are sampled; None leaves a field to the environment.

    `temperature` (above 0), `max_tokens` per model call, `stop` strings. There is no top_p and no
    top_k: importance ratios are computed from the full distribution.
    """

    # Above 0: a greedy token has no probability to take ratios of.
    temperature: Positive | None = None
    max_tokens: AtLeast1 | None = None
    # An empty tuple takes the environment's stop strings away; None keeps them.
    stop: tuple[str, ...] | None = None

    def as_args(self) -> dict[str, Any]:
        """Return the fields that are set, as OpenAI request fields."""
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        args = {key: value for key, value in given.items() if value is not None}
        return {**args, "stop": list(self.stop)} if self.stop is not None else args


class EvalSection(Section, frozen=True):
    """Held-out evaluation: `before` training, `after` it, and every `every` steps (0: never).

    `num_examples` (-1: all), `rollouts_per_example`, `temperature` and `max_tokens` (None: as in
    training).
    """

    before: bool = True
    after: bool = True
    every: AtLeast0 = 0
    num_examples: int = -1
    rollouts_per_example: AtLeast1 = 1
    temperature: NonNegative | None = None
    max_tokens: AtLeast1 | None = None

    def __post_init__(self) -> None:
        # Two ranges, which no `Meta` expresses.
        if self.num_examples != -1 and self.num_examples < 1:
            raise ConfigError(
                f"eval.num_examples is {self.num_examples}. Use -1 for all, or at least 1."
            )

    def sampling_args(self, training: SamplingSection) -> dict[str, Any]:
        """Return the sampling of an evaluation as request fields: its own over training's."""
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return training.as_args() | {key: value for key, value in own.items() if value is not None}


class CheckpointSection(Section, frozen=True):
    """Checkpoints during training, and the exported model at its end.

    `every`: steps between checkpoints (the last step always gets one). `keep`: how many to keep.
    `format`: `full` gathers the weights and writes Hugging Face's layout, `sharded` lets every rank
    write its part; any number of ranks reads both. `export`: write the trained model in Hugging
    Face's layout at the end.
    """

    every: AtLeast1 = 10
    keep: AtLeast1 = 2
    format: Literal["full", "sharded"] = "full"
    export: bool = True


class TrackSection(Section, frozen=True):
    """Experiment trackers that get metrics and transcripts, in addition to the run store.

    `to`: any of `"tensorboard"`, `"wandb"`, `"trackio"`, `"mlflow"`; each needs its package
    (`pip install 'rolltree[track]'`). `project`: the project or experiment. `name`: the run's name
    there (None: that of the run directory). `transcripts`: rollouts to send of each evaluation, of
    the first step, and of every tenth step after it.
    """

    to: tuple[str, ...] = ()
    project: Text = "rolltree"
    name: str | None = None
    transcripts: AtLeast0 = 4

    def __post_init__(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ConfigError(f"track.to is {list(self.to)}. Name each tracker once.")


class OptimSection(Section, frozen=True):
    """AdamW and its schedule.

    `lr`, `beta1`, `beta2`, `eps`: AdamW's. `weight_decay` applies to matrices only. The gradient is
    scaled down to `max_grad_norm` (inf: no clipping). `schedule`: a row of `SCHEDULES`, after
    `warmup_steps` of linear warm-up.
    """

    lr: Positive = 1e-5
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: AtLeast0 = 0

    def __post_init__(self) -> None:
        # `gt=0` lets infinity through, which `max_grad_norm` may be.
        if not math.isfinite(self.lr):
            raise ConfigError(f"optim.lr is {self.lr}. Use a finite learning rate.")


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
"""Share of the run that is done -> share of the rate; one that falls ends at 0."""


def learning_rate(config: OptimSection, update: int, num_updates: int) -> float:
    """Return the rate of update `update` (0 is the first) of `num_updates`."""
    if update < config.warmup_steps:
        # The first update is above 0, and the first one after the warm-up has the full rate.
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    span = max(1, num_updates - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    return config.lr * SCHEDULES[config.schedule](done)


class TrainSection(Section, frozen=True):
    """Steps, samples and memory.

    - `num_steps`: steps of the whole run.
    - `scope`: how trajectories become samples, see `build_samples`.
    - `share_prefix_across`: in the `tree` scope, which rollouts share one tree, so that a common
      prefix is computed once: those of a `group`, all of a `step`, or none (`rollout`).
    - `max_seq_len`: cut every path to this many tokens.
    - `max_tokens`: maximum tokens in one forward pass; gradients of several passes are summed.
    - `forward`: `tree` computes unique tokens once, `rows` is the model's own attention, `auto`
      picks.
    - `tree_attention`: `segments` computes attention over trees block by block, on any device;
      `flex` with one FlexAttention kernel, on a GPU.
    - `updates_per_step`: optimizer updates on the rollouts of a step; ratios, corrections and the
      KL in the reward stay those before the first.
    - `minibatches`: parts of whole rollouts that a step is cut into; each update takes the next
      part, so `updates_per_step` is a multiple of it.
    - `skip_zero_advantage`: do not compute rollouts whose advantages are all zero. They count in
      the normalizers, so the gradient is the same; entropy and ratios are measured on the others.
    - `gradient_checkpointing`: recompute activations in the backward pass.
    - `replay_experts`: mixture layers take the experts that the engine recorded instead of their
      own choice (None: if they are recorded; false: never).
    - `async_steps`: how many policy versions sampling may run ahead of training; 0 is the
      synchronous loop, in which they take turns.
    - `max_lag`: tokens that are more versions old than this get no weight (None: `async_steps`).
    - `max_failed_share`: a step with a larger share of failed rollouts is not trained, because
      dropping them biases training toward easy rollouts: those whose model calls failed are
      sampled again until they succeed, and the run ends if other failures exceed this share.
    - `max_mismatch`: stop if trainer and engine logprobs differ by more on average over the tokens
      that the current weights sampled. After a step without any, as happens in asynchronous runs,
      the engine answers a probe instead (`engine.probe_tolerance`).
    - `changed_sampling`: what becomes of a call that was not sampled from the model's own
      distribution (top-k, a penalty, forced tools, a response format). `mask` leaves it out of the
      loss and counts it, `refuse` ends the run.
    - `record_tokens`: store what each step computed for every trained token (advantage, loss
      weight, the trainer's logprob, entropy), which `Run.trained` returns.
    - `num_threads`: torch's number of threads (None: torch's default).
    """

    num_steps: AtLeast1 = 100
    scope: Scope = DEFAULT_SCOPE
    share_prefix_across: Literal["group", "step", "rollout"] = "group"
    # The first token of a path is only context, so one alone trains nothing.
    max_seq_len: Annotated[int, Meta(ge=2)] | None = None
    max_tokens: AtLeast1 = 8192
    forward: Literal["auto", "tree", "rows"] = "auto"
    tree_attention: Literal["segments", "flex"] = "segments"
    updates_per_step: AtLeast1 = 1
    minibatches: AtLeast1 = 1
    skip_zero_advantage: bool = True
    gradient_checkpointing: bool = False
    replay_experts: bool | None = None
    async_steps: AtLeast0 = 0
    max_lag: AtLeast0 | None = None
    max_failed_share: Share = 0.5
    max_mismatch: Positive = 0.1
    changed_sampling: Literal["mask", "refuse"] = "mask"
    record_tokens: bool = True
    num_threads: AtLeast1 | None = None

    def __post_init__(self) -> None:
        if self.updates_per_step % self.minibatches:
            raise ConfigError(
                f"train.minibatches is {self.minibatches} and train.updates_per_step "
                f"{self.updates_per_step}: some rollouts would train more often than others. Set "
                f"train.updates_per_step to a multiple of {self.minibatches}."
            )
        if self.max_lag is not None and not self.async_steps:
            raise ConfigError(
                f"train.max_lag is {self.max_lag}, but in the synchronous loop no token is older "
                "than the weights, so it would have no effect. Set train.async_steps, or leave it "
                "out."
            )
        if self.share_prefix_across != "group" and self.scope != "tree":
            raise ConfigError(
                f"train.share_prefix_across is {self.share_prefix_across!r}, but the scope "
                f"{self.scope!r} shares nothing between rollouts. Use train.scope = 'tree', or "
                "leave train.share_prefix_across out."
            )


class ClusterEngines(Section, frozen=True):
    """Engines of a run on several processes: how many, GPUs of each, and what serves the model.

    `serve` is `rolltree serve`, with the settings of the `engine` section; `vllm` is vLLM.
    """

    count: AtLeast1 = 1
    gpus: NonNegative = 0
    kind: Literal["serve", "vllm"] = "serve"


class ClusterTrainer(Section, frozen=True):
    """The processes that train together, and GPUs of each."""

    ranks: AtLeast1 = 1
    gpus: NonNegative = 0


class ClusterSection(Section, frozen=True):
    """A run on several processes or machines; without this section it is one process.

    - `launcher`: `local` starts processes on this machine; `ray` places them on the machines of a
      Ray cluster, which `address` names (`auto`: the existing one; empty: a new local one).
    - `rollout_workers`: processes that play rollouts, each at most `slots_per_worker` at a time.
    - `engines` (`count`, `gpus`, `kind`) sample; `trainer` (`ranks`, `gpus`) trains.
    """

    launcher: Literal["local", "ray"] = "local"
    address: str = ""
    rollout_workers: AtLeast1 = 2
    engines: ClusterEngines = ClusterEngines()
    trainer: ClusterTrainer = ClusterTrainer()
    slots_per_worker: AtLeast1 = 64

    def __post_init__(self) -> None:
        if self.address and self.launcher != "ray":
            raise ConfigError(
                f"cluster.address is {self.address!r}, and cluster.launcher = {self.launcher!r} "
                "starts processes on this machine, so it would have no effect. Set "
                "cluster.launcher = 'ray', or leave the address out."
            )
