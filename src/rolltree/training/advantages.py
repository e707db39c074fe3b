"""`assign_credit`: the results of one step in, an advantage for each of their model calls out.

It decides what becomes of failed and truncated episodes, forms the groups that are compared, and
calls the functions of `credit`. Within one `request.group_id` (one source task), root rollouts are
compared agent by agent, and delegated ones with those of the same agent that got the same subtask.
Episodes are counted, not rollouts.

Nothing is written into the results: `state["advantage"]` stays as the rubric set it,
the reward minus the group's mean. Pass `CreditReport.advantages` to `build_samples`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolltree.environments.rubrics import are_equal
from rolltree.samples import TruncationEffect, TruncationPolicy, truncation_effect
from rolltree.samples.resolve import changed_sampling
from rolltree.tokens import peek
from rolltree.training.credit import (
    COMPARING,
    CREDITS,
    Averages,
    Earnings,
    Flow,
    episode_numbers,
    flow_credit,
    parents_first,
    subtract_averages,
)
from rolltree.values.errors import ConfigError, TrainingError, look_up
from rolltree.values.types import RolloutResult, State

OnError = Literal["exclude", "zero", "drop_group"]
BaselineName = Literal["none", "ema"]
BASELINE_DECAY = 0.9
"""Decay of `ema`: it averages about the last ten steps, so it follows a policy that improves."""


@dataclass(frozen=True, slots=True)
class SoftOverlong:
    """DAPO's penalty for length: Yu et al. 2025, arXiv:2503.14476, equation 13.

    Args:
        max_tokens: from here on the penalty is 1, L_max in the paper.
        buffer: over how many tokens before it the penalty grows from 0, L_cache in the paper.

    Raises:
        ConfigError: the buffer is below 1 or above the limit.

    >>> [SoftOverlong(100, 20).penalty(n) for n in (80, 85, 100, 101)]
    [0.0, 0.25, 1.0, 1.0]
    """

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.max_tokens:
            raise ConfigError(
                f"algorithm.overlong_buffer is {self.buffer} and algorithm.overlong_tokens is "
                f"{self.max_tokens}; the buffer must be at least 1 and at most overlong_tokens, "
                "because the penalty grows over the buffer's tokens and is full at the limit."
            )

    def penalty(self, num_tokens: int) -> float:
        """Return what is subtracted for a rollout that sampled `num_tokens` in all its calls."""
        beyond = num_tokens - (self.max_tokens - self.buffer)
        return min(1.0, max(0.0, beyond / self.buffer))

    def of(self, state: Mapping[str, Any]) -> float:
        """Return the penalty of a rollout's state."""
        steps = state.get("trajectory") or ()
        counts = ((peek(step, "extras") or {}).get("num_completion_tokens") for step in steps)
        return self.penalty(sum(int(count or 0) for count in counts))


@dataclass(frozen=True, slots=True)
class CreditPolicy:
    """The treatment of episodes that failed or were cut, and the flow of credit.

    `on_error`: `exclude` leaves a failed episode out of the group's baseline, `zero` counts it
    there with reward 0, `drop_group` trains nothing of its group; the tokens of a failed episode
    are never trained. A failed sub-agent of an episode that did not fail counts with `zero` only.
    `truncation` and `max_seq_len` decide about truncated rollouts. `discount` is per agent turn;
    only `monte_carlo` reads it. `flow`: how credit moves between parents and children.
    `baseline`: `ema` subtracts each role's moving average (`baseline_decay`). `overlong` is
    subtracted from the rewards of long rollouts. `only_advantage`: a call without an advantage
    teaches nothing, see `losses.Loss`.
    """

    on_error: OnError = "exclude"
    truncation: TruncationPolicy = field(default_factory=TruncationPolicy)
    max_seq_len: int | None = None
    discount: float = 1.0
    flow: Flow = field(default_factory=lambda: Flow(down=1.0))
    baseline: BaselineName = "none"
    baseline_decay: float = BASELINE_DECAY
    overlong: SoftOverlong | None = None
    only_advantage: bool = True


@dataclass(frozen=True, slots=True)
class CreditReport:
    """The states that are trained, in request order, and metrics of all states.

    `advantages` has an array per trained state, float64 `[num_calls]`, one value per step of its
    trajectory. `effects` has what the truncation policy decided about each of them: pass both to
    `build_samples`. `places` says where each of them is: the index of its result, and its index
    among the result's states. `averages` are the roles' averages after this step: pass them to the
    next call. `problems` says of each episode without usable credit why it is left out.
    """

    trained: tuple[State, ...]
    advantages: tuple[NDArray[np.float64], ...] = ()
    effects: tuple[TruncationEffect, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    averages: Averages = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def first_advantages(self, results: Sequence[RolloutResult]) -> dict[tuple[str, int], float]:
        """Return the advantage of each trained rollout's first call, if it has one.

        The keys name the rollouts as a store does: id of the request, index of the trajectory.
        """
        return {
            (results[result].request.request_id, index): float(values[0])
            for (result, index), values in zip(self.places, self.advantages, strict=True)
            if len(values)
        }


class _Member(NamedTuple):
    """A rollout that counts in the baseline of its group; if it failed, it is not trained."""

    state: State
    place: tuple[str, int]  # the id of its request, its index in the result
    failed: bool
    effect: TruncationEffect
    group: Hashable
    penalty: float
    earned: Earnings


@dataclass(frozen=True, slots=True, eq=False)
class GroupCredit:
    """The credit of one group's episodes, before a run's averages are subtracted.

    `credit_group` makes it once, when the group is complete: dynamic sampling reads `has_signal`,
    and `join_credit` makes a step's report from the groups that it trains.
    """

    results: tuple[RolloutResult, ...]
    members: tuple[_Member, ...]
    # One per member, one value per step of its trajectory.
    values: tuple[list[float], ...]
    tally: Mapping[str, int]
    only_advantage: bool = True
    problems: tuple[str, ...] = ()

    @property
    def has_signal(self) -> bool:
        """Whether any call that trains teaches something: has an advantage, or needs none."""
        return any(
            value != 0 or not self.only_advantage
            for member, mine in zip(self.members, self.values, strict=True)
            if not member.failed and member.effect.in_loss
            for value, step in zip(mine, member.state.get("trajectory") or (), strict=True)
            if changed_sampling(step) is None and "left_out" not in (peek(step, "extras") or {})
        )


def assign_credit(
    results: Sequence[RolloutResult],
    credit: str = "grpo",
    policy: CreditPolicy | None = None,
    averages: Averages | None = None,
) -> CreditReport:
    """Return which states of `results` train, and the advantage of each of their calls.

    Raises:
        UnknownName: there is no such credit.
        ConfigError: a baseline for a credit that has one already.
    """
    policy = policy or CreditPolicy()
    look_up("credit", credit, CREDITS)
    check_baseline(credit, policy.baseline)
    groups = [credit_group(group, credit, policy) for group in by_group(results)]
    return join_credit(results, groups, policy, averages)


def credit_group(
    results: Sequence[RolloutResult], credit: str, policy: CreditPolicy
) -> GroupCredit:
    """Return the credit of the results of one `request.group_id`.

    Raises:
        UnknownName: there is no such credit.
    """
    to_advantages = look_up("credit", credit, CREDITS)
    tally: Counter[str] = Counter()
    members: list[_Member] = []
    problems = []
    for result in results:
        try:
            members += _members(result, policy, tally)
        except TrainingError as error:
            # One odd episode must not end a training, which would meet it again in its store.
            tally["unusable"] += len(result.states)
            problems.append(str(error))
    if policy.on_error == "drop_group" and any(result.error is not None for result in results):
        # `_members` has counted the failures by now, so the metrics still show them.
        members = []
        tally["dropped"] = 1
    compared: dict[Hashable, list[int]] = {}
    for index, member in enumerate(members):
        compared.setdefault(member.group, []).append(index)
    values: list[list[float]] = [[] for _ in members]
    for indices in compared.values():
        rollouts = [members[index].earned for index in indices]
        tally["flat"] += are_equal([rollout.reward for rollout in rollouts])
        tally["alone"] += int(episode_numbers(rollouts).max()) == 0
        for index, mine in zip(indices, to_advantages(rollouts, policy.discount), strict=True):
            values[index] = mine
    tally["compared"] = len(compared)
    return GroupCredit(
        tuple(results),
        tuple(members),
        tuple(values),
        tally,
        policy.only_advantage,
        tuple(problems),
    )


def join_credit(
    results: Sequence[RolloutResult],
    groups: Sequence[GroupCredit],
    policy: CreditPolicy,
    averages: Averages | None = None,
) -> CreditReport:
    """Return the report of a step's results; `groups` are their credit, group by group."""
    members = [member for group in groups for member in group.members]
    values = [mine for group in groups for mine in group.values]
    tally: Counter[str] = Counter()
    for group in groups:
        tally.update(group.tally)
    after = dict(averages or {})
    if policy.baseline == "ema":
        values, after = subtract_averages(
            [member.earned for member in members], values, after, policy.baseline_decay
        )
    # The results of a group may stand between those of others.
    order = {(r.request.group_id, r.request.request_id): at for at, r in enumerate(results)}
    places = [
        (order[group.results[0].request.group_id, request_id], index)
        for group in groups
        for request_id, index in (member.place for member in group.members)
    ]
    trained = sorted((at for at, m in enumerate(members) if not m.failed), key=places.__getitem__)
    count = max(1, sum(len(result.states) for result in results))
    num_compared = max(1, tally["compared"])
    metrics = {
        "credit/failed_share": tally["failed"] / count,
        "credit/truncated_share": tally["truncated"] / count,
        "credit/truncated_completions_share": tally["cut"] / count,
        "credit/masked_completions_share": tally["masked"] / count,
        "credit/untrained_share": 1 - len(trained) / count,
        "train/frac_reward_zero_std": tally["flat"] / num_compared,
        "credit/alone_group_share": tally["alone"] / num_compared,
    }
    if policy.overlong is not None:
        metrics["credit/overlong_penalty"] = sum(m.penalty for m in members) / max(1, len(members))
    if policy.on_error == "drop_group":
        metrics["credit/num_dropped_groups"] = float(tally["dropped"])
    if tally["unusable"]:
        metrics["credit/unusable_share"] = tally["unusable"] / count
    # `agent` reads better, and an environment with names rarely has agents without one, too.
    unnamed = _UNNAMED if "agent" in after else "agent"
    metrics |= {_AVERAGE + (role or unnamed): value for role, value in after.items()}
    return CreditReport(
        trained=tuple(members[at].state for at in trained),
        advantages=tuple(np.array(values[at], np.float64) for at in trained),
        effects=tuple(members[at].effect for at in trained),
        places=tuple(places[at] for at in trained),
        metrics=metrics,
        averages=after,
        problems=tuple(problem for group in groups for problem in group.problems),
    )


_AVERAGE = "credit/average/"
_UNNAMED = "(unnamed)"


def averages_of(metrics: Mapping[str, float], roles: Collection[str | None]) -> dict[str, float]:
    """Return the averages in a step's metrics, by role; `roles` are those of the run."""
    unnamed = {_UNNAMED} if "agent" in roles else {_UNNAMED, "agent"}
    averages = {
        name.removeprefix(_AVERAGE): value
        for name, value in metrics.items()
        if name.startswith(_AVERAGE)
    }
    return {"" if name in unnamed else name: value for name, value in averages.items()}


def by_group(results: Sequence[RolloutResult]) -> list[tuple[RolloutResult, ...]]:
    """Return the results of each group, groups in the order of their first member."""
    groups: dict[str, list[RolloutResult]] = {}
    for result in results:
        groups.setdefault(result.request.group_id, []).append(result)
    return [tuple(group) for group in groups.values()]


def check_baseline(credit: str, baseline: str) -> None:
    """Raise `ConfigError` if a baseline is set for a credit that cannot be combined with it."""
    if baseline != "none" and credit in (*COMPARING, "constant", "zero"):
        raise ConfigError(
            f"the baseline {baseline!r} needs a credit without its own baseline, and the credit "
            f"is {credit!r}. Use the credit 'reinforce', 'monte_carlo' or 'per_step', or leave the "
            "baseline out."
        )


def _members(result: RolloutResult, policy: CreditPolicy, tally: Counter[str]) -> list[_Member]:
    """Return the rollouts of one episode that count in a baseline, with their flowed credit."""
    parents = _parents(result)
    members: list[_Member] = []
    counts: list[bool] = []
    met: Counter[str] = Counter()
    for index, (state, parent) in enumerate(zip(result.states, parents, strict=True)):
        failed = result.error is not None or state.get("error") is not None
        effect = truncation_effect(state, policy.truncation, max_seq_len=policy.max_seq_len)
        tally["failed"] += failed
        tally["truncated"] += effect.truncated
        tally["cut"] += effect.is_completion_cut
        tally["masked"] += effect.is_completion_masked
        # A failed rollout that still counts in the baseline counts as 0, and does not train.
        reward = 0.0 if failed else effect.reward
        if effect.counts:
            reward = _finite(reward, result)
        penalty = 0.0 if failed or policy.overlong is None else policy.overlong.of(state)
        # By now only a rollout that does not count can have a reward of None.
        earned = _earnings(result, state, (reward or 0.0) - penalty, parent)
        where = (result.request.group_id, earned.role)
        # If an agent has several rollouts in an episode, their order tells them apart.
        if state.get("parent_rollout") is None:
            group: Hashable = (*where, "root", met[earned.role])
        else:
            group = (*where, "child", str(state.get("subtask", "")))
        met[earned.role] += parent is None
        place = result.request.request_id, index
        members.append(_Member(state, place, failed, effect, group, penalty, earned))
        counts.append(effect.counts and not (failed and policy.on_error != "zero"))
    # Parents first, so that a grandchild sees whether its parent was left out.
    for index in parents_first(parents):
        above = parents[index]
        if above is not None and not counts[above] and policy.flow.down:
            # Its parent's credit is unknown, and so is what it would inherit.
            counts[index] = False
    # Over all rollouts, because parents are indices into them; some are left out afterwards.
    flowed = flow_credit([member.earned for member in members], policy.flow)
    return [
        member._replace(earned=earned)
        for member, earned, counted in zip(members, flowed, counts, strict=True)
        if counted
    ]


def _parents(result: RolloutResult) -> list[int | None]:
    places = {state.get("rollout_id"): index for index, state in enumerate(result.states)}
    parents: list[int | None] = []
    for state in result.states:
        name = state.get("parent_rollout")
        if name is not None and name not in places:
            raise TrainingError(
                f"rollout {state.get('rollout_id')!r} of {result.request.request_id} has the "
                f"parent {name!r}, which is not among the episode's rollouts, so its credit is "
                "unknown. A protocol returns all rollouts of an episode."
            )
        parents.append(None if name is None else places[name])
    return parents


def _finite(reward: float | None, result: RolloutResult) -> float:
    if reward is None or not math.isfinite(reward):
        raise TrainingError(
            f"rollout {result.request.request_id} did not fail, but has the reward {reward!r}, so "
            "no advantage can be computed from it. A reward function must return a finite number; "
            "one that cannot should raise, which records the rollout as failed."
        )
    return reward


def _earnings(result: RolloutResult, state: State, reward: float, parent: int | None) -> Earnings:
    steps = state.get("trajectory") or []
    # If False, each step's reward only repeats the rollout's.
    own = state.get("has_step_rewards") is not False
    rewards = [step.get("reward") if own else None for step in steps]
    # Whatever a truncation policy or a penalty changed goes to the last call.
    if any(value is not None for value in rewards):
        change = reward - float(state.get("reward") or 0.0)
        rewards[-1] = (rewards[-1] or 0.0) + change
    turns = [(peek(step, "extras") or {}).get("turn") for step in steps]
    parent_call = 0
    if parent is not None:
        num_calls = len(result.states[parent].get("trajectory") or ())
        parent_call = min(int(state.get("parent_step") or 0), max(0, num_calls - 1))
    return Earnings(
        reward,
        tuple(rewards),
        # A call without a turn number is its own turn, as in samples.
        tuple(turn if isinstance(turn, int) else index for index, turn in enumerate(turns)),
        episode=result.request.request_id,
        role=str(state.get("agent") or ""),
        parent=parent,
        parent_call=parent_call,
    )
