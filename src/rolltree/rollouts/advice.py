"""Advice on what to do next after an evaluation or a training run, from its measurements.

`RULES` is a table of conditions, each with a sentence and the docs page that says more. The first
`MOST` rules that hold are shown, so what stops a run comes before what slows it down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

MOST = 2
LOW, HIGH = 0.05, 0.95
"""Mean rewards below and above which most groups have equal rewards, and so teach nothing."""
OFTEN = 0.2
"""From this share of rollouts on, a problem is the first thing to fix."""
CLEAR = 0.02
"""A smaller change of the reward counts as no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The input of the rules. Shares are of rollouts unless stated otherwise; None: unknown."""

    kind: Literal["eval", "train"]
    num_rollouts: int = 0  # for training, the number of steps
    num_examples: int = 0
    reward: float | None = None  # mean; for training, held out or of the last steps
    reward_before: float | None = None  # the same before training
    half_width: float | None = None  # of the reward's interval
    failed: float = 0.0  # for training, in the last steps, as the next two
    cut_by_tokens: float = 0.0
    equal_groups: float | None = None  # share of groups, in the last steps
    num_steps: int = 0
    idle_gpu: bool = False  # the machine has one, and the model was on the CPU

    @property
    def gain(self) -> float | None:
        """How much the reward rose in training."""
        if self.reward is None or self.reward_before is None:
            return None
        return self.reward - self.reward_before


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do next."""

    rule: str
    text: str
    page: str  # below docs/

    def __str__(self) -> str:
        return f"{self.text} (rolltree docs {self.page.replace('.md', '')})"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition and its advice; `sentence` is a format string over the fields of `Measured`."""

    holds: Callable[[Measured], bool]
    sentence: str
    page: str


def _is_low(at: Measured) -> bool:
    return at.reward is not None and 0 <= at.reward < LOW


def _is_wide(at: Measured) -> bool:
    return at.half_width is not None and at.half_width > 0.1


RULES: Mapping[str, Rule] = {
    "all_failed": Rule(
        lambda at: at.failed >= 1.0 and at.num_rollouts > 0,
        "Every rollout failed, so nothing was measured: fix the first failure and run it again.",
        "first-hour.md#something-fails",
    ),
    "failures": Rule(
        lambda at: at.failed >= OFTEN,
        "{failed:.0%} of rollouts failed and are not in the means; failures are rarely random: "
        "read the failures before the reward.",
        "first-hour.md#something-fails",
    ),
    "cut": Rule(
        lambda at: at.cut_by_tokens >= OFTEN,
        "{cut_by_tokens:.0%} of rollouts were cut by max_tokens before they ended: allow more "
        "tokens, or ask for shorter answers and put an example into the prompt.",
        "first-hour.md#answers-are-cut",
    ),
    "none_scored": Rule(
        lambda at: at.reward is None and at.num_rollouts > 0,
        "No rollout has a reward: make the rubric score every rollout, however it ends.",
        "environments.md#rubrics",
    ),
    "cold_eval": Rule(
        lambda at: at.kind == "eval" and _is_low(at),
        "The mean reward is {reward:.3f}, too little for reinforcement learning to start from: add "
        "two solved examples to the prompt (few_shot) if it has none, give partial credit, or warm "
        "the model up on good answers.",
        "first-hour.md#the-reward-is-near-0",
    ),
    "cold_train": Rule(
        lambda at: at.kind == "train" and _is_low(at) and (at.gain is None or at.gain < CLEAR),
        "The reward stayed near 0 ({reward:.3f}), so there was hardly anything to learn from: add "
        "solved examples to the prompt (few_shot) if it has none, give partial credit, or warm the "
        "model up on good answers.",
        "first-hour.md#the-reward-is-near-0",
    ),
    "solved_eval": Rule(
        lambda at: at.kind == "eval" and at.reward is not None and HIGH < at.reward <= 1,
        "The mean reward is {reward:.3f}: the model can do this, and training would find little to "
        "improve. Take harder rows, or a stricter rubric.",
        "first-hour.md#all-groups-are-equal",
    ),
    "equal_groups": Rule(
        lambda at: at.equal_groups is not None and at.equal_groups >= 0.9,
        "In {equal_groups:.0%} of the last groups all rewards were equal, and equal rewards teach "
        "nothing: take easier or harder rows, larger groups (algorithm.group_size), a higher "
        "temperature, or algorithm.dynamic_sampling_max.",
        "first-hour.md#all-groups-are-equal",
    ),
    "fell": Rule(
        lambda at: at.gain is not None and at.gain < -CLEAR,
        "The reward fell from {reward_before:.3f} to {reward:.3f}: halve optim.lr, and look at "
        "train/kl and entropy in `rolltree view`.",
        "training.md",
    ),
    "flat": Rule(
        lambda at: at.kind == "train" and at.gain is not None and abs(at.gain) <= CLEAR,
        "The reward did not move ({reward_before:.3f} to {reward:.3f} in {num_steps} steps): "
        "raise optim.lr two to five times, or train for more steps.",
        "first-hour.md#the-reward-is-flat",
    ),
    "idle_gpu": Rule(
        lambda at: at.idle_gpu,
        "This machine has a GPU and the model ran on the CPU: `rolltree doctor` says which torch "
        "to install and which settings use it (model.device = 'cuda').",
        "gpu.md",
    ),
    "few_examples": Rule(
        lambda at: at.kind == "eval" and _is_wide(at),
        "With {num_examples} examples the reward is known only to ±{half_width:.2f}: measure more "
        "(-n 100) before you compare it with anything.",
        "evaluation.md",
    ),
    "train_it": Rule(
        lambda at: at.kind == "eval" and at.reward is not None and LOW <= at.reward <= HIGH,
        "A mean reward of {reward:.3f} leaves room and has something to learn from: train on it "
        "(rolltree train).",
        "training.md",
    ),
    "go_on": Rule(
        lambda at: at.gain is not None and at.gain > CLEAR and (at.reward or 0) <= HIGH,
        "The reward rose from {reward_before:.3f} to {reward:.3f} and may rise further: train for "
        "more steps, and measure against a control (algorithm.name=zero).",
        "training.md",
    ),
}
"""Name of a rule to the rule, the most important ones first."""


def advise(measured: Measured, rules: Mapping[str, Rule] = RULES) -> tuple[Advice, ...]:
    """Return at most `MOST` pieces of advice, the most important one first."""
    values = asdict(measured)
    held = [
        Advice(name, rule.sentence.format(**values), rule.page)
        for name, rule in rules.items()
        if rule.holds(measured)
    ]
    return tuple(held[:MOST])


def of_training(
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[float | None],
    *,
    idle_gpu: bool = False,
) -> Measured:
    """Return the measurements of training, from its steps' metrics and held-out rewards, in order.

    The end is the last tenth of the steps, at least three. The rewards are the first and the last
    held-out one if there are two; else means of the last steps and, if there are enough steps, of
    as many first ones.
    """
    num = max(3, len(metrics) // 10)
    ends = metrics[:num], metrics[-num:]
    trained = [_mean(part, "reward/mean") for part in ends] if len(metrics) >= 2 * num else []
    held_out = [reward for reward in evaluations if reward is not None]
    first, *_, last = held_out if len(held_out) > 1 else trained or [None, None]
    last = last if last is not None else _mean(ends[1], "reward/mean")
    return Measured(
        kind="train",
        num_rollouts=len(metrics),
        num_steps=len(metrics),
        reward=last,
        reward_before=first,
        failed=_mean(ends[1], "credit/failed_share") or 0.0,
        cut_by_tokens=_mean(ends[1], "credit/truncated_completions_share") or 0.0,
        equal_groups=_mean(ends[1], "train/frac_reward_zero_std"),
        idle_gpu=idle_gpu,
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return sum(values) / len(values) if values else None
