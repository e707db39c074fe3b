"""`assign_credit`: results of one step in, advantages written into their states and steps.

It builds the groups that are compared, lets credit flow along delegations, and applies the declared
policies for failed and truncated episodes. The functions it calls are pure: `credit`,
`credit_graph`, `credit_baseline`. It knows nothing about tokens.

What is compared with what, within one `request.group_id` (one source task): rollouts that nobody
delegated, agent by agent; children with children of the same agent that got the same subtask.
Episodes count, not rollouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rolltree.errors import ConfigError, TrainingError, UnknownName, did_you_mean
from rolltree.samples import TruncationEffect, TruncationPolicy, truncation_effect
from rolltree.training.credit import COMPARING, CREDITS, Episode, owners_of
from rolltree.training.credit_baseline import Averages, Earned, subtract_averages
from rolltree.training.credit_graph import Flow, Node, flow_credit, parents_first
from rolltree.training.shaping import SoftOverlong
from rolltree.types import RolloutResult, State

OnError = Literal["exclude", "zero", "drop_group"]
BaselineName = Literal["none", "ema"]


@dataclass(frozen=True, slots=True)
class CreditPolicy:
    """What becomes of episodes that failed or were cut, and how credit flows.

    `on_error`: `exclude` leaves a failed episode out of the group's baseline, `zero` counts it
    there with reward 0, `drop_group` trains nothing of its group; its own tokens are not trained
    in any case. `truncation` and `max_seq_len` are those that `build_samples` gets. `discount` is
    per agent turn; only `monte_carlo` reads it. `flow`: see `credit_graph`. `baseline`: `ema`
    subtracts each role's moving average (`baseline_decay`); see `credit_baseline`. `overlong` is
    subtracted from the rewards of long rollouts.
    """

    on_error: OnError = "exclude"
    truncation: TruncationPolicy = field(default_factory=TruncationPolicy)
    max_seq_len: int | None = None
    discount: float = 1.0
    flow: Flow = field(default_factory=lambda: Flow(down=1.0))
    baseline: BaselineName = "none"
    baseline_decay: float = 0.9
    overlong: SoftOverlong | None = None


@dataclass(frozen=True, slots=True)
class CreditReport:
    """The states that have an advantage, in request order, and counts of what became of all.

    `averages` are the roles' after this step: hand them to the next call.
    """

    trained: tuple[State, ...]
    effects: tuple[TruncationEffect, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    averages: Averages = field(default_factory=dict)


@dataclass(slots=True)
class _Member:
    state: State
    episode: Episode
    key: Hashable
    role: str
    effect: TruncationEffect
    trains: bool
    counts: bool = True
    penalty: float = 0.0
    values: list[float] = field(default_factory=list)


def assign_credit(
    results: Sequence[RolloutResult],
    credit: str = "grpo",
    policy: CreditPolicy | None = None,
    averages: Averages | None = None,
) -> CreditReport:
    """Write advantages into the states and steps of `results` and say which states train.

    Raises:
        UnknownName: there is no such credit.
        ConfigError: a baseline for a credit that has one already.
        TrainingError: an episode that did not fail has no finite reward, or names a parent that
            is not among its rollouts.
    """
    if credit not in CREDITS:
        raise UnknownName(f"there is no credit {credit!r}.{did_you_mean(credit, CREDITS)}")
    policy = policy or CreditPolicy()
    check_baseline(credit, policy.baseline)
    tally: Counter[str] = Counter()
    members = [m for result in results for m in _members(result, policy, tally)]
    if policy.on_error == "drop_group":
        broken = {r.request.group_id for r in results if r.error is not None}
        tally["dropped"] = len(broken)
        lost = {id(s) for r in results if r.request.group_id in broken for s in r.states}
        members = [member for member in members if id(member.state) not in lost]
    groups: dict[Hashable, list[_Member]] = {}
    for member in members:
        groups.setdefault(member.key, []).append(member)
    num_flat = num_alone = 0
    for group in groups.values():
        episodes = [member.episode for member in group]
        num_flat += len({episode.reward for episode in episodes}) == 1
        num_alone += int(owners_of(episodes).max()) == 0
        for member, values in zip(group, CREDITS[credit](episodes, policy.discount), strict=True):
            member.values = values
    after = dict(averages or {})
    if policy.baseline == "ema":
        earned = [Earned(m.role, m.episode.owner, m.values) for m in members]
        centred, after = subtract_averages(earned, after, policy.baseline_decay)
        for member, values in zip(members, centred, strict=True):
            member.values = values
    trained: dict[int, TruncationEffect] = {}
    for member in members:
        if member.trains:
            _write(member.state, member.values)
            trained[id(member.state)] = member.effect
    states = [state for result in results for state in result.states]
    count = max(1, len(states))
    metrics = {
        "credit/failed_share": tally["failed"] / count,
        "credit/truncated_share": tally["truncated"] / count,
        "credit/untrained_share": 1 - len(trained) / count,
        "credit/flat_group_share": num_flat / max(1, len(groups)),
        "credit/alone_group_share": num_alone / max(1, len(groups)),
    }
    if policy.overlong is not None:
        metrics["credit/overlong_penalty"] = sum(m.penalty for m in members) / max(1, len(members))
    if policy.on_error == "drop_group":
        metrics["credit/num_dropped_groups"] = float(tally["dropped"])
    metrics |= {f"credit/average/{role or 'agent'}": value for role, value in after.items()}
    chosen = tuple(s for s in states if id(s) in trained)
    effects = tuple(trained[id(s)] for s in chosen)
    return CreditReport(chosen, effects, metrics, after)


def check_baseline(credit: str, baseline: str) -> None:
    """Raise `ConfigError` when a credit compares with a group and would get a baseline on top."""
    if baseline != "none" and credit in (*COMPARING, "constant", "zero"):
        raise ConfigError(
            f"the baseline {baseline!r} goes with credits without one of their own, and the credit "
            f"is {credit!r}. Use the credit 'reinforce', 'monte_carlo' or 'per_step', or leave the "
            "baseline out."
        )


def _members(result: RolloutResult, policy: CreditPolicy, tally: Counter[str]) -> list[_Member]:
    """Return what of one episode counts in a baseline, with the credit that flowed to it."""
    parents = _parents(result)
    nodes: list[Node] = []
    members: list[_Member] = []
    met: Counter[str] = Counter()
    for state, parent in zip(result.states, parents, strict=True):
        _write(state, [])
        failed = result.error is not None or state.get("error") is not None
        effect = truncation_effect(state, policy.truncation, max_seq_len=policy.max_seq_len)
        tally["failed"] += failed
        tally["truncated"] += effect.truncated
        reward = 0.0 if failed else effect.reward
        if effect.counts:
            reward = _finite(reward, result)
        penalty = 0.0 if failed or policy.overlong is None else policy.overlong.of(state)
        episode = _episode(state, (reward or 0.0) - penalty, result.request.request_id)
        nodes.append(Node(episode, parent, _parent_call(state, result, parent)))
        role = _role(state)
        member = _Member(state, episode, _group(result, state, met[role]), role, effect, not failed)
        member.penalty = penalty
        member.counts = effect.counts and not (failed and policy.on_error == "exclude")
        met[role] += parent is None
        members.append(member)
    for index in parents_first(parents):
        above = parents[index]
        if above is not None and not members[above].counts and policy.flow.down:
            members[index].counts = False  # what it would inherit is not known
    for member, episode in zip(members, flow_credit(nodes, policy.flow), strict=True):
        member.episode = episode
    return [member for member in members if member.counts]


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


def _parent_call(state: State, result: RolloutResult, parent: int | None) -> int:
    if parent is None:
        return 0
    num_calls = len(result.states[parent].get("trajectory") or ())
    return min(int(state.get("parent_step") or 0), max(0, num_calls - 1))


def _group(result: RolloutResult, state: State, ordinal: int) -> Hashable:
    """Return what a rollout is compared within; `ordinal` tells an agent's rollouts apart."""
    where = (result.request.group_id, _role(state))
    if state.get("parent_rollout") is None:
        return (*where, "root", ordinal)
    return (*where, "child", str(state.get("subtask", "")))


def _role(state: State) -> str:
    return str(state.get("agent") or "")


def _finite(reward: float | None, result: RolloutResult) -> float:
    if reward is None or not math.isfinite(reward):
        raise TrainingError(
            f"rollout {result.request.request_id} did not fail and has the reward {reward!r}, so "
            "no advantage can be computed from it. A reward function must return a finite number; "
            "one that cannot should raise, which records the rollout as failed."
        )
    return reward


def _episode(state: State, reward: float, owner: str) -> Episode:
    steps = state.get("trajectory") or []
    own = state.get("has_step_rewards") is not False  # else a step's reward repeats the rollout's
    rewards = [step.get("reward") if own else None for step in steps]
    if any(value is not None for value in rewards):  # what a truncation policy took or added
        change = reward - float(state.get("reward") or 0.0)
        rewards[-1] = (rewards[-1] or 0.0) + change
    return Episode(
        reward,
        tuple(rewards),
        tuple(_turn(step.get("extras") or {}, index) for index, step in enumerate(steps)),
        owner,
    )


def _turn(extras: Mapping[str, object], index: int) -> int:
    turn = extras.get("turn")
    return turn if isinstance(turn, int) else index


def _write(state: State, advantages: Sequence[float]) -> None:
    """Write one advantage per call; none at all means that the state is not trained."""
    state["advantage"] = advantages[0] if advantages else None
    steps = state.get("trajectory") or []
    for index, step in enumerate(steps):
        step["advantage"] = advantages[index] if advantages else None
