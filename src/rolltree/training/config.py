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
from rolltree.samples import TruncationPolicy
from rolltree.training.algorithms import Algorithm, resolve_algorithm
from rolltree.training.assign import BaselineName, CreditPolicy, OnError, check_baseline
from rolltree.training.credit import COMPARING
from rolltree.training.credit_graph import resolve_flow
from rolltree.training.sections import (
    CheckpointSection,
    EngineSection,
    EnvSection,
    EvalSection,
    ModelSection,
    RunSection,
    SamplingSection,
    need,
)

MAY_CHANGE: tuple[str, ...] = (
    "run.dir",
    "engine",
    "eval.every",
    "eval.after",
    "checkpoint",
    "train.num_steps",
    "train.max_tokens",
    "train.num_threads",
    "train.chunk_rows",
    "train.gradient_checkpointing",
)
"""Settings in which a continued run may differ from its first start: they do not change what is
learned from one step, or only say how long to go on."""


class AlgorithmSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is learned from the rewards.

    `name`: a row of `algorithms.ALGORITHMS`; `credit`, `loss` and `aggregation` replace parts of
    it. `clip_low`, `clip_high`, `ratio_cap`: parameters of the loss, None for its defaults.
    `group_size`: rollouts per task; `groups_per_step`: tasks per step. `fixed_length`: the constant
    of the aggregation of that name. `kl_coef`: weight of the KL to the initial model, estimated by
    `kl`. `on_error`, `discount`, `baseline` and `baseline_decay` (None: 0.9): see
    `assign.CreditPolicy`. `flow` and `edge_discount`: how credit moves between parents and
    children, see `credit_graph`. `truncation` and `truncation_penalty`: see
    `rolltree.samples.TruncationPolicy`.
    """

    name: str = "grpo"
    credit: str | None = None
    loss: str | None = None
    aggregation: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    ratio_cap: float | None = None
    group_size: int = 8
    groups_per_step: int = 8
    fixed_length: int | None = None
    kl_coef: float = 0.0
    kl: Literal["k2", "k3"] = "k3"
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
        need(self.kl_coef >= 0, "algorithm.kl_coef", self.kl_coef, "0 or more")
        need(0 <= self.discount <= 1, "algorithm.discount", self.discount, "from 0 to 1")
        self.truncation_policy()
        algorithm = self.resolve()
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
            ConfigError: a parameter is set that the loss or aggregation does not read.
        """
        return resolve_algorithm(
            self.name,
            credit=self.credit,
            loss=self.loss,
            aggregation=self.aggregation,
            parameters={
                "clip_low": self.clip_low,
                "clip_high": self.clip_high,
                "ratio_cap": self.ratio_cap,
            },
            fixed_length=self.fixed_length,
        )

    def truncation_policy(self) -> TruncationPolicy:
        """Return what becomes of truncated episodes.

        Raises:
            ConfigError: a penalty without `penalise`, or the other way round.
        """
        return TruncationPolicy(self.truncation, penalty=self.truncation_penalty)

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
    - `chunk_rows`: positions whose logits exist at once.
    - `updates_per_step`: optimizer steps on the same rollouts.
    - `skip_flat`: do not compute rollouts whose advantages are all zero. They count in the
      normalizers, so the gradient is the same; entropy and ratios are measured on the others.
    - `gradient_checkpointing`: recompute activations in the backward pass.
    - `max_mismatch`: stop when trainer and engine logprobs differ by more, on average.
    - `num_threads`: torch's, None leaves them.
    """

    num_steps: int = 100
    scope: Literal["step", "turn", "interleave", "tree"] = "tree"
    share: Literal["group", "step", "rollout"] = "group"
    max_seq_len: int | None = None
    max_tokens: int = 8192
    forward: Literal["auto", "tree", "rows"] = "auto"
    chunk_rows: int = 512
    updates_per_step: int = 1
    skip_flat: bool = True
    gradient_checkpointing: bool = False
    max_mismatch: float = 0.1
    num_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "max_tokens", "chunk_rows", "updates_per_step"):
            value = getattr(self, name)
            need(value >= 1, f"train.{name}", value, "at least 1")
        cap = self.max_seq_len
        need(cap is None or cap >= 2, "train.max_seq_len", cap, "at least 2")
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
