"""One declared policy for truncated rollouts, and what it does to loss, baseline and statistics.

| mode      | sample | loss       | group baseline        | reward statistics |
|-----------|--------|------------|-----------------------|-------------------|
| keep      | yes    | as any     | its reward            | counted           |
| drop      | no     | nothing    | left out              | left out          |
| mask      | yes    | weight 0   | its reward            | counted           |
| penalise  | yes    | as any     | reward - penalty      | counted, unshaped |
| bootstrap | yes    | as any     | reward + g * value    | counted, unshaped |

`truncated` is the episode's flag (spec 2), or a call longer than `max_seq_len`. It is neither
`terminated` nor the model's finish reason: a completion cut by `max_tokens` is not a truncated
episode. Credit assignment calls `truncation_effect` for reward and baseline, `build_samples` for
sample and loss; both with the same policy. Leaves out how a value is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rolltree.errors import ConfigError, did_you_mean
from rolltree.tokens import StepTokens, peek
from rolltree.types import TruncationReason

TruncationMode = Literal["keep", "drop", "mask", "penalise", "bootstrap"]
WithoutValue = Literal["keep", "drop", "mask"]


@dataclass(frozen=True, slots=True)
class TruncationPolicy:
    """What training does with a truncated rollout. See the table of this module.

    Args:
        mode: one of the table.
        reasons: truncation reasons it applies to; None is all. Others are kept.
        penalty: for `penalise`, subtracted from the reward.
        discount: for `bootstrap`, g in the table.
        without_value: for `bootstrap`, the mode for a rollout without `state["bootstrap_value"]`.

    Raises:
        ConfigError: an unknown mode, or a number that this mode would ignore.
    """

    mode: TruncationMode = "keep"
    reasons: frozenset[str] | None = None
    penalty: float = 0.0
    discount: float = 1.0
    without_value: WithoutValue = "drop"

    def __post_init__(self) -> None:
        for value, known in (
            (self.mode, get_args(TruncationMode)),
            (self.without_value, get_args(WithoutValue)),
        ):
            if value not in known:
                raise ConfigError(
                    f"{value!r} is no way to treat truncated rollouts.{did_you_mean(value, known)}"
                )
        ignored = {
            "penalty": self.penalty != 0.0 and self.mode != "penalise",
            "discount": self.discount != 1.0 and self.mode != "bootstrap",
            "without_value": self.without_value != "drop" and self.mode != "bootstrap",
        }
        for name, is_ignored in ignored.items():
            if is_ignored:
                raise ConfigError(
                    f"truncation mode {self.mode!r} does not read {name!r}; it would be ignored "
                    "silently. Remove it, or change the mode."
                )
        if self.mode == "penalise" and self.penalty <= 0.0:
            raise ConfigError(
                f"truncation mode 'penalise' has penalty {self.penalty}; it would change nothing "
                "or reward truncation. Give a positive number."
            )


@dataclass(frozen=True, slots=True)
class TruncationEffect:
    """What the policy does to one rollout.

    `reward` is the one for credit (None when the rollout has none). `mode` is the mode in effect,
    `keep` for a rollout that is not truncated.
    """

    mode: TruncationMode
    truncated: bool
    reason: str | None
    reward: float | None
    in_loss: bool
    in_baseline: bool
    in_statistics: bool

    @property
    def has_sample(self) -> bool:
        """Whether samples are made of it."""
        return self.mode != "drop"


def truncation_effect(
    state: Mapping[str, Any],
    policy: TruncationPolicy,
    *,
    max_seq_len: int | None = None,
) -> TruncationEffect:
    """Apply the policy to one rollout.

    Args:
        state: reads `truncated`, `truncation_reason`, `reward`, `bootstrap_value`, `trajectory`.
        policy: what to do.
        max_seq_len: a rollout with a longer call counts as truncated by `max_seq_len`.
    """
    truncated = bool(state.get("truncated"))
    reason = state.get("truncation_reason") if truncated else None
    if not truncated and max_seq_len is not None:
        lengths = map(call_len, state.get("trajectory") or ())
        if any(length > max_seq_len for length in lengths):
            truncated, reason = True, TruncationReason.MAX_SEQ_LEN
    mode: TruncationMode = "keep"
    if truncated and (policy.reasons is None or str(reason) in policy.reasons):
        mode = policy.mode
    value = state.get("bootstrap_value")
    if mode == "bootstrap" and value is None:
        mode = policy.without_value
    reward = None if state.get("reward") is None else float(state["reward"])
    if reward is not None and mode == "penalise":
        reward -= policy.penalty
    if reward is not None and mode == "bootstrap":
        reward += policy.discount * float(value)  # type: ignore[arg-type]
    return TruncationEffect(
        mode=mode,
        truncated=truncated,
        reason=None if reason is None else str(reason),
        reward=reward,
        in_loss=mode not in ("drop", "mask"),
        in_baseline=mode != "drop",
        in_statistics=mode != "drop",
    )


def call_len(step: Mapping[str, Any]) -> int:
    """Return how many prompt and sampled tokens a step has, without building lists."""
    tokens = peek(step, "tokens")
    if tokens is None:
        return 0
    if isinstance(tokens, StepTokens) and tokens.as_recorded:
        return tokens.tree.path_len(tokens.call)
    return len(tokens["prompt_ids"]) + len(tokens["completion_ids"])


def truncation_effects(
    states: Sequence[Mapping[str, Any]],
    policy: TruncationPolicy,
    *,
    max_seq_len: int | None = None,
) -> list[TruncationEffect]:
    """Apply the policy to each rollout, in order."""
    return [truncation_effect(state, policy, max_seq_len=max_seq_len) for state in states]
