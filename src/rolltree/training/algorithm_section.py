"""The section of the training config that says what is learned: credit, loss, corrections, KL."""

from __future__ import annotations

from typing import Literal

from rolltree.samples import TruncationPolicy
from rolltree.training.advantages import (
    BaselineName,
    CreditPolicy,
    OnError,
    SoftOverlong,
    check_baseline,
)
from rolltree.training.algorithms import Algorithm, resolve_algorithm
from rolltree.training.credit import COMPARING, resolve_flow
from rolltree.training.losses import get_loss
from rolltree.training.sections import AtLeast0, AtLeast1, NonNegative, Section, Share
from rolltree.values.errors import ConfigError


class AlgorithmSection(Section, frozen=True):
    """How rewards become gradients.

    - `name`: a row of `algorithms.ALGORITHMS`; `credit`, `loss`, `aggregation`, `kl` and `kl_coef`
      replace parts of it.
    - `clip_low`, `clip_high`, `dual_clip`, `ratio_cap`: parameters of the loss, None for its own.
    - `fixed_length`: the constant of the aggregation of that name.
    - `correction`: a row of `coefficients.CORRECTIONS`; `correction_low`, `correction_high` are its
      bounds, None for its own.
    - `kl_coef`: weight of the KL to the reference, of the kind `kl` (a row of `losses.KLS`).
    - `reference`: name or folder of a model with the same vocabulary (None: the model as it was
      before training). It is kept in memory in addition to the trained one, in float32.
    - `entropy_coef`: weight of the entropy that is added to the objective.
    - `overlong_tokens`, `overlong_buffer`: a penalty for length, see `advantages.SoftOverlong`.
    - `group_size`: rollouts per task; `groups_per_step`: tasks per step.
    - `dynamic_sampling_max`: groups whose rewards are all equal give no gradient; at most this many
      per step are replaced by new ones (0: none).
    - `on_error`, `discount` and `baseline`: see `advantages.CreditPolicy`.
    - `flow` and `edge_discount`: how credit moves between parents and children, see
      `credit.FLOWS`.
    - `truncation`, `truncation_penalty` and `mask_truncated_completions`: see
      `rolltree.samples.TruncationPolicy`.
    """

    name: str = "grpo"
    # None leaves a part or a parameter to the algorithm that `name` chooses, and 0 is a value.
    credit: str | None = None
    loss: str | None = None
    aggregation: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float | None = None
    group_size: AtLeast1 = 8
    groups_per_step: AtLeast1 = 8
    dynamic_sampling_max: AtLeast0 = 0
    fixed_length: int | None = None
    correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None
    kl_coef: NonNegative | None = None
    kl: str | None = None
    reference: str | None = None
    entropy_coef: NonNegative = 0.0
    overlong_tokens: int | None = None
    overlong_buffer: int | None = None
    on_error: OnError = "exclude"
    truncation: Literal["keep", "drop", "mask", "penalise"] = "keep"
    truncation_penalty: float = 0.0
    mask_truncated_completions: bool = False
    discount: Share = 1.0
    flow: Literal["own", "shared", "discounted", "team"] = "shared"
    edge_discount: float | None = None
    baseline: BaselineName = "none"

    def __post_init__(self) -> None:
        # These calls check: a setting that cannot work is an error now, not in the first step.
        self.truncation_policy()
        algorithm = self.resolve()
        if self.reference is not None and algorithm.kl_coef == 0:
            raise ConfigError(
                f"algorithm.reference is {self.reference!r}, but algorithm.kl_coef is 0, so that "
                "model would do nothing. Set algorithm.kl_coef, or leave the reference out."
            )
        if self.overlong() is not None and algorithm.credit in ("zero", "constant"):
            raise ConfigError(
                f"algorithm.overlong_tokens is {self.overlong_tokens}, but the credit "
                f"{algorithm.credit!r} does not read the episode's reward, which the penalty is "
                "taken off. Choose another credit, or leave overlong_tokens out."
            )
        # Only returns that are summed over turns can be discounted.
        if self.discount != 1 and algorithm.credit != "monte_carlo":
            raise ConfigError(
                f"algorithm.discount is {self.discount}, but the credit {algorithm.credit!r} gives "
                "every call of an episode the same advantage, so it would do nothing. Use "
                "algorithm.credit = 'monte_carlo', or leave the discount out."
            )
        resolve_flow(self.flow, self.edge_discount)
        check_baseline(algorithm.credit, self.baseline)
        if self.dynamic_sampling_max and algorithm.credit == "zero":
            raise ConfigError(
                "algorithm.dynamic_sampling_max is set, but the credit 'zero' gives every group "
                "zero advantages, so replacing groups would never help. Leave it out."
            )
        # A single member is its own mean.
        if self.group_size == 1 and algorithm.credit in COMPARING:
            raise ConfigError(
                f"algorithm.group_size is 1, but the credit {algorithm.credit!r} compares the "
                "members of a group, so every advantage would be 0. Use at least 2, or "
                "algorithm.credit = 'reinforce'."
            )

    def resolve(self) -> Algorithm:
        """Return the algorithm with every part and parameter filled in.

        Raises:
            UnknownName: a part does not exist.
            ConfigError: a setting that no chosen part reads, or incompatible parts.
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
        """Return the policy for truncated episodes.

        Raises:
            ConfigError: a penalty without `penalise`, or the other way round.
        """
        return TruncationPolicy(
            self.truncation,
            penalty=self.truncation_penalty,
            mask_truncated_completions=self.mask_truncated_completions,
        )

    def overlong(self) -> SoftOverlong | None:
        """Return the penalty for length, None without one.

        Raises:
            ConfigError: one of its two settings without the other, or an impossible buffer.
        """
        if self.overlong_tokens is None and self.overlong_buffer is None:
            return None
        # One of them alone leaves the start or the end of the slope open.
        if self.overlong_tokens is None or self.overlong_buffer is None:
            raise ConfigError(
                "algorithm.overlong_tokens and algorithm.overlong_buffer go together: the penalty "
                "grows over the last overlong_buffer tokens before overlong_tokens. Set both."
            )
        return SoftOverlong(self.overlong_tokens, self.overlong_buffer)

    def policy(self, max_seq_len: int | None) -> CreditPolicy:
        """Return the policy for failed and truncated episodes, and for the flow of credit."""
        return CreditPolicy(
            self.on_error,
            self.truncation_policy(),
            max_seq_len,
            self.discount,
            resolve_flow(self.flow, self.edge_discount),
            self.baseline,
            overlong=self.overlong(),
            only_advantage=get_loss(self.resolve().loss).only_advantage,
        )
