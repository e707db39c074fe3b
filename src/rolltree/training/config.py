"""The settings of a training run: one frozen struct per section, every field checked.

`load_train_config` turns plain data (parsed TOML with overrides) into a `TrainConfig`; unknown keys
and values out of range are errors that name the key. It knows nothing about files and flags, which
are the command line's. It leaves out settings of environments: `env.args` goes to them as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rolltree.errors import ConfigError, did_you_mean
from rolltree.samples import DEFAULT_SCOPE, TruncationPolicy
from rolltree.training.advantages import (
    BaselineName,
    CreditPolicy,
    OnError,
    SoftOverlong,
    check_baseline,
)
from rolltree.training.algorithms import Algorithm, resolve_algorithm
from rolltree.training.credit import COMPARING, resolve_flow
from rolltree.training.sections import (
    CheckpointSection,
    EngineSection,
    EnvSection,
    EvalSection,
    ModelSection,
    RunSection,
    SamplingSection,
    TrackSection,
    need,
)
from rolltree.types import Scope

MAY_CHANGE: tuple[str, ...] = (
    "run.dir",
    "engine",
    "eval.every",
    "eval.after",
    "checkpoint",
    "track",
    "train.num_steps",
    "train.max_tokens",
    "train.num_threads",
    "train.tree_attention",
    "train.chunk_rows",
    "train.gradient_checkpointing",
)
"""Settings in which a continued run may differ from its first start: they do not change what is
learned from one step, or only say how long to go on."""


class AlgorithmSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is learned from the rewards.

    - `name`: a row of `algorithms.ALGORITHMS`; `credit`, `loss`, `aggregation`, `kl` and `kl_coef`
      replace parts of it.
    - `clip_low`, `clip_high`, `dual_clip`, `ratio_cap`: parameters of the loss, None for its own.
    - `fixed_length`: the constant of the aggregation of that name.
    - `correction`: a row of `corrections.CORRECTIONS`; `correction_low`, `correction_high` are its
      bounds, None for its own.
    - `kl_coef`: weight of the KL to the reference, of the kind `kl` (a row of `kl.KLS`).
    - `reference`: a model with the same vocabulary, as `model.name`; None is the model as it was
      before training. It is kept beside the trained one, in float32.
    - `entropy_coef`: weight of the entropy that is added to the objective.
    - `overlong_tokens`, `overlong_buffer`: a penalty for length, see `advantages.SoftOverlong`.
    - `group_size`: rollouts per task; `groups_per_step`: tasks per step.
    - `replace_flat`: groups whose rewards teach nothing (no spread) are replaced by new ones, at
      most this many per step (0: never).
    - `on_error`, `discount`, `baseline` and `baseline_decay` (None: 0.9): see
      `advantages.CreditPolicy`.
    - `flow` and `edge_discount`: how credit moves between parents and children, see `credit.FLOWS`.
    - `truncation` and `truncation_penalty`: see `rolltree.samples.TruncationPolicy`.
    """

    name: str = "grpo"
    credit: str | None = None
    loss: str | None = None
    aggregation: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    group_size: int = 8
    groups_per_step: int = 8
    replace_flat: int = 0
    fixed_length: int | None = None
    correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    kl_coef: float | None = None
    kl: str | None = None
    reference: str | None = None
    entropy_coef: float = 0.0
    overlong_tokens: int | None = None
    overlong_buffer: int | None = None
    on_error: OnError = "exclude"
    truncation: Literal["keep", "drop", "mask", "penalise"] = "keep"
    truncation_penalty: float = 0.0
    discount: float = 1.0
    flow: Literal["own", "shared", "discounted", "team"] = "shared"
    edge_discount: float | None = None
    baseline: BaselineName = "none"
    baseline_decay: float | None = None

    def __post_init__(self) -> None:
        need(self.group_size >= 1, "algorithm.group_size", self.group_size, "at least 1")
        groups = self.groups_per_step
        need(groups >= 1, "algorithm.groups_per_step", groups, "at least 1")
        need(self.replace_flat >= 0, "algorithm.replace_flat", self.replace_flat, "0 or more")
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            need(value is None or 0 <= value < math.inf, f"algorithm.{name}", value, "0 or more")
        need(0 <= self.discount <= 1, "algorithm.discount", self.discount, "from 0 to 1")
        self.truncation_policy()
        algorithm = self.resolve()
        if self.reference is not None and algorithm.kl_coef == 0:
            raise ConfigError(
                f"algorithm.reference is {self.reference!r} and algorithm.kl_coef is 0, so that "
                "model would do nothing. Set algorithm.kl_coef, or leave the reference out."
            )
        if self.overlong() is not None and algorithm.credit in ("zero", "constant"):
            raise ConfigError(
                f"algorithm.overlong_tokens is {self.overlong_tokens}, but the credit "
                f"{algorithm.credit!r} does not read the episode's reward, which the penalty is "
                "taken off. Choose another credit, or leave overlong_tokens out."
            )
        if self.discount != 1 and algorithm.credit != "monte_carlo":
            raise ConfigError(
                f"algorithm.discount is {self.discount}, but the credit {algorithm.credit!r} gives "
                "every call of an episode the same advantage, so it would do nothing. Use "
                "algorithm.credit = 'monte_carlo', or leave the discount out."
            )
        resolve_flow(self.flow, self.edge_discount)
        check_baseline(algorithm.credit, self.baseline)
        decay = self.baseline_decay
        need(decay is None or 0 <= decay < 1, "algorithm.baseline_decay", decay, "in [0, 1)")
        if decay is not None and self.baseline == "none":
            raise ConfigError(
                f"algorithm.baseline_decay is {decay}, but there is no moving average. Use "
                "algorithm.baseline = 'ema', or leave the decay out."
            )
        if self.replace_flat and algorithm.credit == "zero":
            raise ConfigError(
                "algorithm.replace_flat is set, and with the credit 'zero' no group ever has a "
                "spread, so every step would be sampled in vain up to the limit. Leave it out."
            )
        if self.group_size == 1 and algorithm.credit in COMPARING:
            raise ConfigError(
                f"algorithm.group_size is 1, and the credit {algorithm.credit!r} compares the "
                "members of a group, so every advantage would be 0. Use at least 2, or "
                "algorithm.credit = 'reinforce'."
            )

    def resolve(self) -> Algorithm:
        """Return the algorithm with every part and parameter filled in.

        Raises:
            UnknownName: a part does not exist.
            ConfigError: a setting that no chosen part reads, or parts that do not fit.
        """
        return resolve_algorithm(
            self.name,
            credit=self.credit,
            loss=self.loss,
            aggregation=self.aggregation,
            parameters={
                "clip_low": self.clip_low,
                "clip_high": self.clip_high,
                "dual_clip": self.dual_clip,
                "ratio_cap": self.ratio_cap,
                "correction_low": self.correction_low,
                "correction_high": self.correction_high,
            },
            fixed_length=self.fixed_length,
            correction=self.correction,
            kl=self.kl,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
        )

    def truncation_policy(self) -> TruncationPolicy:
        """Return what becomes of truncated episodes.

        Raises:
            ConfigError: a penalty without `penalise`, or the other way round.
        """
        return TruncationPolicy(self.truncation, penalty=self.truncation_penalty)

    def overlong(self) -> SoftOverlong | None:
        """Return the penalty for length, None without one.

        Raises:
            ConfigError: one of its two settings without the other, or an impossible buffer.
        """
        if self.overlong_tokens is None and self.overlong_buffer is None:
            return None
        if self.overlong_tokens is None or self.overlong_buffer is None:
            raise ConfigError(
                "algorithm.overlong_tokens and algorithm.overlong_buffer go together: the penalty "
                "grows over the last overlong_buffer tokens before overlong_tokens. Set both."
            )
        return SoftOverlong(self.overlong_tokens, self.overlong_buffer)

    def policy(self, max_seq_len: int | None) -> CreditPolicy:
        """Return what credit does with failed and truncated episodes."""
        return CreditPolicy(
            self.on_error,
            self.truncation_policy(),
            max_seq_len,
            self.discount,
            resolve_flow(self.flow, self.edge_discount),
            self.baseline,
            0.9 if self.baseline_decay is None else self.baseline_decay,
            self.overlong(),
        )


class OptimSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW and its schedule.

    `lr`, `beta1`, `beta2`, `eps`: AdamW's. `weight_decay` applies to matrices only. The gradient is
    scaled down to `max_grad_norm`. `schedule`: a row of `optim.SCHEDULES`, after `warmup_steps` of
    linear warm-up; `final_lr_share` is where a falling schedule ends, relative to `lr`.
    """

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_lr_share: float = 0.0

    def __post_init__(self) -> None:
        need(self.lr > 0 and math.isfinite(self.lr), "optim.lr", self.lr, "above 0")
        need(0 <= self.beta1 < 1, "optim.beta1", self.beta1, "in [0, 1)")
        need(0 <= self.beta2 < 1, "optim.beta2", self.beta2, "in [0, 1)")
        need(self.eps > 0, "optim.eps", self.eps, "above 0")
        need(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        norm = self.max_grad_norm
        need(norm > 0, "optim.max_grad_norm", norm, "above 0 (inf: no clipping)")
        need(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "0 or more")
        share = self.final_lr_share
        need(0 <= share <= 1, "optim.final_lr_share", share, "from 0 to 1")
        if share and self.schedule == "constant":
            raise ConfigError(
                "optim.final_lr_share is set, but the constant schedule never falls. Use "
                "optim.schedule = 'linear' or 'cosine', or leave the share out."
            )


class TrainSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Steps, samples and memory.

    - `num_steps`: steps of the whole run.
    - `scope`: how trajectories become samples.
    - `share`: in the `tree` scope, which rollouts share one tree: those of a `group`, all of a
      `step`, or none (`rollout`).
    - `max_seq_len`: cut every path to this many tokens.
    - `max_tokens`: most tokens in one forward pass; gradients of several passes are summed.
    - `forward`: `tree` computes unique tokens once, `rows` is the model's own attention, `auto`
      picks.
    - `tree_attention`: `segments` computes attention over trees block by block, on any device;
      `flex` with one FlexAttention kernel, on a GPU.
    - `chunk_rows`: positions whose logits exist at once.
    - `updates_per_step`: optimizer updates on the rollouts of a step; ratios, corrections and the
      KL in the reward stay those before the first.
    - `minibatches`: parts of whole rollouts that a step's rollouts are cut into; each update takes
      the next part, so `updates_per_step` is a multiple of it.
    - `skip_flat`: do not compute rollouts whose advantages are all zero. They count in the
      normalizers, so the gradient is the same; entropy and ratios are measured on the others.
    - `gradient_checkpointing`: recompute activations in the backward pass.
    - `async_steps`: how many policy versions generation may run ahead of training; 0 is the
      synchronous loop, in which sampling and training take turns.
    - `max_lag`: tokens that are more versions old than this when they are trained get no weight;
      None is `async_steps`.
    - `max_mismatch`: stop when trainer and engine logprobs differ by more, on average.
    - `num_threads`: torch's, None leaves them.
    """

    num_steps: int = 100
    scope: Scope = DEFAULT_SCOPE
    share: Literal["group", "step", "rollout"] = "group"
    max_seq_len: int | None = None
    max_tokens: int = 8192
    forward: Literal["auto", "tree", "rows"] = "auto"
    tree_attention: Literal["segments", "flex"] = "segments"
    chunk_rows: int = 256
    updates_per_step: int = 1
    minibatches: int = 1
    skip_flat: bool = True
    gradient_checkpointing: bool = False
    async_steps: int = 0
    max_lag: int | None = None
    max_mismatch: float = 0.1
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "max_tokens", "chunk_rows", "updates_per_step", "minibatches"):
            value = getattr(self, name)
            need(value >= 1, f"train.{name}", value, "at least 1")
        if self.updates_per_step % self.minibatches:
            raise ConfigError(
                f"train.minibatches is {self.minibatches} and train.updates_per_step "
                f"{self.updates_per_step}: some rollouts would train more often than others. Set "
                f"train.updates_per_step to a multiple of {self.minibatches}."
            )
        cap = self.max_seq_len
        need(cap is None or cap >= 2, "train.max_seq_len", cap, "at least 2")
        need(self.async_steps >= 0, "train.async_steps", self.async_steps, "0 or more")
        lag = self.max_lag
        need(lag is None or lag >= 0, "train.max_lag", lag, "0 or more")
        if lag is not None and not self.async_steps:
            raise ConfigError(
                f"train.max_lag is {lag}, but in the synchronous loop no token is ever older than "
                "the weights, so it would do nothing. Set train.async_steps, or leave it out."
            )
        need(self.max_mismatch > 0, "train.max_mismatch", self.max_mismatch, "above 0")
        threads = self.num_threads
        need(threads is None or threads >= 1, "train.num_threads", threads, "at least 1")
        if self.share != "group" and self.scope != "tree":
            raise ConfigError(
                f"train.share is {self.share!r}, but the scope {self.scope!r} shares nothing "
                "between rollouts. Use train.scope = 'tree', or leave train.share out."
            )


class TrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything a training run is made of. Two runs with equal configs learn the same."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    env: EnvSection = EnvSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()

    def __post_init__(self) -> None:
        shared = self.engine.kind == "local" and self.model.device == "cpu"
        if self.train.async_steps and shared and self.model.backward_dtype != "float32":
            raise ConfigError(
                f"train.async_steps is {self.train.async_steps} and model.backward_dtype is "
                f"{self.model.backward_dtype!r}: that switch is the whole process's, so the "
                "engine, which samples during the backward pass, would compute in it too. Use "
                "'float32', or the synchronous loop."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: what the run store keeps, and `load_train_config` reads back."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def load_train_config(data: Mapping[str, Any]) -> TrainConfig:
    """Check plain data and return it as a `TrainConfig`.

    Raises:
        ConfigError: an unknown section or key (with the nearest one), a value of another type or
            out of range; the message names the dotted key.
    """
    sections = {field.name: field for field in msgspec.structs.fields(TrainConfig)}
    for section, values in data.items():
        if section not in sections:
            raise ConfigError(
                f"the config has no section {section!r}.{did_you_mean(section, sections)}"
            )
        if isinstance(values, Mapping):
            known = sections[section].type.__struct_fields__
            for key in values:
                if key not in known:
                    raise ConfigError(
                        f"the config has no key {section}.{key}.{did_you_mean(str(key), known)}"
                    )
    try:
        return msgspec.convert(dict(data), TrainConfig, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        text, _, path = str(error).partition(" - at `$.")
        where = path.rstrip("`")
        raise ConfigError(
            f"{where or 'the config'}: {text}. Change it in the config or on the command line."
        ) from None
