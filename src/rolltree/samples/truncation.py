"""The policy for truncated rollouts, decided once per rollout.

| mode      | sample | loss       | group baseline        | reward statistics |
|-----------|--------|------------|-----------------------|-------------------|
| keep      | yes    | as any     | its reward            | counted           |
| drop      | no     | nothing    | left out              | left out          |
| mask      | yes    | weight 0   | its reward            | counted           |
| penalise  | yes    | as any     | reward - penalty      | counted, unshaped |
| bootstrap | yes    | as any     | reward + g * value    | counted, unshaped |

A rollout is truncated if its episode says so, or if a call is longer than `max_seq_len`. This is
neither `terminated` nor the model's finish reason: a completion that `max_tokens` cut does not make
a truncated episode, in any mode. Such completions have their own setting,
`mask_truncated_completions`, as in TRL: the tokens of a rollout whose last answer was cut have
weight 0, and its reward counts as usual. `assign_credit` decides with `truncation_effect` and
reports the effects; `build_samples` takes them, or decides itself if it gets a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rolltree.tokens import num_call_tokens, peek
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import FinishReason, TruncationReason

TruncationMode = Literal["keep", "drop", "mask", "penalise", "bootstrap"]
WithoutValue = Literal["keep", "drop", "mask"]


@dataclass(frozen=True, slots=True)
class TruncationPolicy:
    """How training treats truncated rollouts; see the table of this module.

    Args:
        mode: a mode of the table.
        reasons: truncation reasons that it applies to; None: all. Other rollouts are kept.
        penalty: for `penalise`, subtracted from the reward.
        discount: for `bootstrap`, g in the table.
        without_value: for `bootstrap`, the mode for a rollout without `state["bootstrap_value"]`.
        mask_truncated_completions: leave a rollout out of the loss if its last answer reached
            `max_tokens` or the context window; its reward still counts in the baseline (TRL's
            setting of this name, after DAPO, https://arxiv.org/abs/2503.14476).

    Raises:
        ConfigError: the mode is unknown, or a setting would be ignored in this mode.
    """

    mode: TruncationMode = "keep"
    reasons: frozenset[str] | None = None
    penalty: float = 0.0
    discount: float = 1.0
    without_value: WithoutValue = "drop"
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        for value, known in (
            (self.mode, get_args(TruncationMode)),
            (self.without_value, get_args(WithoutValue)),
        ):
            if value not in known:
                raise ConfigError(
                    f"there is no truncation mode {value!r}.{did_you_mean(value, known)}"
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
    """The effect of the policy on one rollout.

    `reward` is what credit is computed from (None if the rollout has no reward). `mode` is the mode
    in effect, `keep` for a rollout that is not truncated. `is_completion_cut`: its last answer
    reached a token limit; `is_completion_masked`: it is left out of the loss for that reason.
    """

    mode: TruncationMode
    truncated: bool
    reason: str | None
    reward: float | None
    is_completion_cut: bool = False
    is_completion_masked: bool = False

    @property
    def counts(self) -> bool:
        """Whether it has samples and counts in baselines and statistics; not so for `drop`."""
        return self.mode != "drop"

    @property
    def in_loss(self) -> bool:
        """Whether its tokens have a loss weight other than 0."""
        return self.mode not in ("drop", "mask") and not self.is_completion_masked


def own_truncation(
    trajectory: Mapping[str, Any] | Sequence[Mapping[str, Any]],
) -> tuple[bool, str | None]:
    """Return whether the episode was marked as truncated, and its reason.

    The mark is in the state, or else in the `extras` of the last step.
    """
    state: Mapping[str, Any] = trajectory if isinstance(trajectory, Mapping) else {}
    steps = state.get("trajectory") if isinstance(trajectory, Mapping) else trajectory
    last = (peek(steps[-1], "extras") or {}) if steps else {}
    truncated = bool(state.get("truncated", last.get("truncated")))
    reason = state.get("truncation_reason") or last.get("truncation_reason")
    return truncated, str(reason) if truncated and reason is not None else None


def truncation_effect(
    trajectory: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    policy: TruncationPolicy,
    *,
    max_seq_len: int | None = None,
) -> TruncationEffect:
    """Apply the policy to one rollout.

    Args:
        trajectory: a state, whose `truncated`, `truncation_reason`, `reward`, `bootstrap_value`
            and `trajectory` are read, or a plain list of steps.
        policy: the policy for truncated rollouts.
        max_seq_len: a rollout with a longer call counts as truncated by `max_seq_len`.
    """
    state: Mapping[str, Any] = (
        trajectory if isinstance(trajectory, Mapping) else {"trajectory": trajectory}
    )
    truncated, reason = own_truncation(trajectory)
    # An episode's own reason takes precedence.
    if not truncated and max_seq_len is not None:
        # Steps without tokens are in no sample and cannot be cut.
        calls = [s for s in state.get("trajectory") or () if peek(s, "tokens") is not None]
        if any(num_call_tokens(step) > max_seq_len for step in calls):
            truncated, reason = True, str(TruncationReason.MAX_SEQ_LEN)
    mode: TruncationMode = "keep"
    if truncated and (policy.reasons is None or str(reason) in policy.reasons):
        mode = policy.mode
    # rolltree trains no value function, so the environment has to provide this value.
    value = state.get("bootstrap_value")
    if mode == "bootstrap" and value is None:
        mode = policy.without_value
    reward = None if state.get("reward") is None else float(state["reward"])
    # This changes credit only; statistics read the reward in the state.
    if reward is not None and mode == "penalise":
        reward -= policy.penalty
    if reward is not None and mode == "bootstrap":
        reward += policy.discount * float(value)  # type: ignore[arg-type]
    steps = state.get("trajectory") or ()
    # Only the last answer, since an earlier one that was cut did not end the rollout.
    last = (peek(steps[-1], "extras") or {}) if steps else {}
    is_cut = str(last.get("finish_reason")) == FinishReason.LENGTH
    is_masked = is_cut and policy.mask_truncated_completions
    return TruncationEffect(mode, truncated, reason, reward, is_cut, is_masked)
