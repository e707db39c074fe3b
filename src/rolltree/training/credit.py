"""Credit: turns the rewards of a group of rollouts into an advantage for each model call.

Pure functions of `Earnings`, in three stages: `flow_credit` moves rewards between parents and the
children they delegated to, a row of `CREDITS` turns the rewards of one comparison group into one
advantage per call, and `subtract_averages` subtracts each role's moving average.
`rolltree.training.advantages` calls them. There are no value functions, so nothing is bootstrapped.

An episode counts once, however many model calls it has and however many of its rollouts are in the
group: a baseline is the mean over episodes of the mean over an episode's rollouts.

| credit          | expected gradient, relative to that of the mean reward        |
|-----------------|---------------------------------------------------------------|
| `reinforce`, `episodic`, `leave_one_out` | equal                                |
| `monte_carlo`   | equal at discount 1 (rewards per call); biased below 1        |
| `dr_grpo`       | equal times (n - 1) / n for n episodes                        |
| `grpo`          | biased: the spread depends on the actions                     |
| `per_step`      | biased: an action is not credited with what it causes later   |
| `constant`, `zero` | 0: nothing is learned from reward                          |

A child is credited with `down` times what its parent earns (its calls: from the delegating call
on), a parent with `up` times what its children earn, at the call that delegated to them.

| flow         | up | down | a rollout is credited with                    |
|--------------|----|------|-----------------------------------------------|
| `own`        | 0  | 0    | its own reward                                |
| `shared`     | 0  | 1    | its own reward and its parent's               |
| `discounted` | 0  | d    | the same, the parent's times d for each edge  |
| `team`       | 1  | 1    | everything that its root and descendants earn |

`team` is unbiased for the gradient of the total reward of a root and its descendants (credit does
not flow between roots); `shared` is unbiased for that of the root's reward alone if the children
have no rewards of their own. The others are choices: `own` trains every role for its own reward,
even if that harms the episode's total.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rolltree.environments.rubrics import centred_rewards, reward_rounding
from rolltree.values.errors import ConfigError, TrainingError, look_up
from rolltree.values.estimate import mean

# Keeps nearly equal rewards from being divided by nearly 0.
STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Earnings:
    """The input of credit for one rollout: its reward and, per model call, reward and agent turn.

    `episode` is the episode that the rollout is part of; None: it is its own episode. `role`
    is the agent that played it. `parent` is the index, among the episode's rollouts, of the one
    that delegated to it, None for a root, and `parent_call` the model call that delegated.

    Example: two calls of one turn, then one of the next, rewarded at the turns' ends:
    `Earnings(1.5, (None, 0.5, 1.0), (0, 0, 1))`.
    """

    reward: float
    call_rewards: tuple[float | None, ...]
    turns: tuple[int, ...]
    episode: Hashable = None
    role: str = ""
    parent: int | None = None
    parent_call: int = 0

    @property
    def rewards(self) -> list[float]:
        """The reward of each call; the last earns the rollout's if no call has one."""
        rewards = [reward or 0.0 for reward in self.call_rewards]
        if rewards and all(reward is None for reward in self.call_rewards):
            rewards[-1] = self.reward
        return rewards


# -- credits -------------------------------------------------------------------------------------

CreditFn = Callable[[Sequence[Earnings], float], list[list[float]]]
"""(rollouts of one group, discount) -> advantage per rollout and call."""


def _for_every_call(advantages: Sequence[float], rollouts: Sequence[Earnings]) -> list[list[float]]:
    return [[value] * len(r.turns) for value, r in zip(advantages, rollouts, strict=True)]


def _rewards(rollouts: Sequence[Earnings]) -> NDArray[np.float64]:
    return np.array([rollout.reward for rollout in rollouts], np.float64)


def episode_numbers(rollouts: Sequence[Earnings]) -> NDArray[np.int64]:
    """Return the number of each rollout's episode, int `[num rollouts]`, counted from 0."""
    numbers: dict[Hashable, int] = {}
    keys = [
        # Tagged, so that an episode named 0 is not taken for the lone rollout 0.
        ("alone", index) if rollout.episode is None else ("episode", rollout.episode)
        for index, rollout in enumerate(rollouts)
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _weights(episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return weights that add up to 1: every episode the same, shared by its rollouts."""
    counts = np.bincount(episodes)
    return np.asarray(1.0 / (len(counts) * counts[episodes]))


def _centred(rewards: NDArray[np.float64], episodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Subtract the mean over episodes; exactly zero when nothing can be compared."""
    if episodes.max() == 0:
        return np.zeros_like(rewards)
    return centred_rewards(rewards, _weights(episodes))


def grpo(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return `(r - mean) / (std + 1e-6)`, std with Bessel's correction.

    GRPO: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision).
    """
    rewards, episodes = _rewards(rollouts), episode_numbers(rollouts)
    centred, count = _centred(rewards, episodes), episodes.max() + 1
    # Bessel's correction counts episodes, because they are the independent draws.
    variance = (_weights(episodes) * centred**2).sum() * count / max(count - 1, 1)
    return _for_every_call((centred / (variance**0.5 + STD_EPSILON)).tolist(), rollouts)


def dr_grpo(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return `r - mean`. Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, section 3.2."""
    return _for_every_call(
        _centred(_rewards(rollouts), episode_numbers(rollouts)).tolist(), rollouts
    )


def leave_one_out(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return `r` minus the mean of the other episodes; 0 if there are no others.

    A rollout is not compared with those of its own episode: they may depend on what it did.

    RLOO: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (Kool et al. 2019).
    """
    rewards, episodes = _rewards(rollouts), episode_numbers(rollouts)
    means = np.bincount(episodes, rewards) / np.bincount(episodes)
    if len(means) == 1:
        return _for_every_call([0.0] * len(rewards), rollouts)
    others = (means.sum() - means[episodes]) / (len(means) - 1)
    left = rewards - others
    # For equal rewards, rounding could leave an advantage of 1e-17, which would count as a signal.
    left[np.abs(left) <= reward_rounding(rewards)] = 0.0
    return _for_every_call(left.tolist(), rollouts)


def episodic_return(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return the rollout's reward for every call, without a baseline: the episodic return.

    REINFORCE: Williams 1992, equation 11, with zero baseline.
    """
    return _for_every_call([rollout.reward for rollout in rollouts], rollouts)


def monte_carlo(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return each call's discounted return, `sum_k discount^(turn_k - turn_t) reward_k, k >= t`.

    Sutton and Barto 2018, equation 3.8; the discount counts agent turns, not model calls. A
    rollout whose calls carry no rewards earns its reward at its last call.
    """
    result = []
    for rollout in rollouts:
        returns: list[float] = []
        following, turn = 0.0, rollout.turns[-1] if rollout.turns else 0
        for reward, this_turn in zip(
            reversed(rollout.rewards), reversed(rollout.turns), strict=True
        ):
            # Calls of the same turn are not discounted against each other.
            following = reward + discount ** (turn - this_turn) * following
            turn = this_turn
            returns.append(following)
        result.append(returns[::-1])
    return result


def per_step(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return each turn's own reward for all calls of the turn; later rewards do not count."""
    result = []
    for rollout in rollouts:
        earned: dict[int, float] = {}
        for turn, reward in zip(rollout.turns, rollout.rewards, strict=True):
            earned[turn] = earned.get(turn, 0.0) + reward
        result.append([earned[turn] for turn in rollout.turns])
    return result


def constant(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return 1 for every call: imitation of all samples, good or bad."""
    return _for_every_call([1.0] * len(rollouts), rollouts)


def zero(rollouts: Sequence[Earnings], discount: float = 1.0) -> list[list[float]]:
    """Return 0 for every call: the control run, in which nothing can be learned from reward."""
    return _for_every_call([0.0] * len(rollouts), rollouts)


CREDITS: dict[str, CreditFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "leave_one_out": leave_one_out,
    "reinforce": episodic_return,
    "episodic": episodic_return,
    "monte_carlo": monte_carlo,
    "per_step": per_step,
    "constant": constant,
    "zero": zero,
}

COMPARING: tuple[str, ...] = ("grpo", "dr_grpo", "leave_one_out")
"""Credits that compare the members of a group, and so need at least two episodes."""


# -- flow between parents and children -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flow:
    """The shares of a reward that move along one edge; see the table of this module."""

    up: float = 0.0
    down: float = 0.0


FLOWS: dict[str, Flow] = {
    "own": Flow(),
    "shared": Flow(down=1.0),
    "discounted": Flow(down=0.5),
    "team": Flow(up=1.0, down=1.0),
}
"""`discounted` takes its share from `edge_discount`; 0.5 is the default of that setting."""


def resolve_flow(name: str, edge_discount: float | None = None) -> Flow:
    """Return a row of `FLOWS`.

    Raises:
        UnknownName: there is no such flow.
        ConfigError: an edge discount for a flow that does not read it, or not between 0 and 1.
    """
    flow = look_up("flow", name, FLOWS)
    if edge_discount is None:
        return flow
    if name != "discounted":
        raise ConfigError(
            f"edge_discount is {edge_discount}, but the flow {name!r} does not read it. Use the "
            "flow 'discounted', or leave the discount out."
        )
    if not 0 <= edge_discount <= 1:
        raise ConfigError(f"edge_discount is {edge_discount}; it must be from 0 to 1.")
    return Flow(down=edge_discount)


def parents_first(parents: Sequence[int | None]) -> list[int]:
    """Return all indices, every parent before its children.

    Raises:
        TrainingError: a rollout is its own ancestor.
    """
    ordered: list[int] = []
    placed: set[int] = set()
    left = list(range(len(parents)))
    while left:
        ready = [i for i in left if parents[i] is None or parents[i] in placed]
        if not ready:
            raise TrainingError(
                f"among rollouts {left} of one episode, some are each other's parents, so credit "
                "cannot flow. The protocol that returned them wrote wrong parent ids."
            )
        ordered += ready
        placed.update(ready)
        left = [i for i in left if i not in placed]
    return ordered


def flow_credit(rollouts: Sequence[Earnings], flow: Flow) -> list[Earnings]:
    """Return the rollouts of one episode with the rewards that they are credited with.

    What a child inherits arrives at its last call, if it has one.

    Example, `shared`: a root that delegates in its first call and earns 1 in its second, a child
    that earns 0.2 of its own in two calls: the root's rewards stay (0, 1), the child's become
    (0, 1.2).
    """
    total = [rollout.reward for rollout in rollouts]
    # What a rollout without calls earns is passed on as if it had made one.
    calls = [rollout.rewards or [rollout.reward] for rollout in rollouts]
    order = parents_first([rollout.parent for rollout in rollouts])
    sent = [0.0] * len(rollouts)
    # Children first, because what a child sends up includes what its own children sent to it.
    for index in reversed(order):
        parent, at = rollouts[index].parent, rollouts[index].parent_call
        if parent is not None and flow.up:
            sent[index] = flow.up * total[index]
            total[parent] += sent[index]
            calls[parent][at] += sent[index]
    # Parents first. What a child itself sent up is subtracted, or it would come back to the child.
    for index in order:
        parent, at = rollouts[index].parent, rollouts[index].parent_call
        if parent is not None and flow.down:
            total[index] += flow.down * (total[parent] - sent[index])
            # From the delegating call on: the child did not cause anything before it.
            calls[index][-1] += flow.down * (sum(calls[parent][at:]) - sent[index])
    calls = [mine if r.call_rewards else [] for mine, r in zip(calls, rollouts, strict=True)]
    return [
        rollout
        if reward == rollout.reward and rewards == rollout.rewards
        else replace(rollout, reward=reward, call_rewards=tuple(rewards))
        for rollout, reward, rewards in zip(rollouts, total, calls, strict=True)
    ]


# -- moving averages -----------------------------------------------------------------------------

Averages = Mapping[str, float]
"""Role -> moving average of what it earns."""


def subtract_averages(
    rollouts: Sequence[Earnings],
    values: Sequence[Sequence[float]],
    averages: Averages,
    decay: float,
) -> tuple[list[list[float]], dict[str, float]]:
    """Return each rollout's values minus its role's average, and the averages after this step.

    An average moves to `decay * old + (1 - decay) * new`; the first average is `new`. For `new`,
    values are averaged per rollout, these per episode, and these over all episodes. Rollouts
    without calls do not count.

    The average that is subtracted comes from earlier steps, so it does not depend on this step's
    actions and the gradient stays unbiased. A role that has no average yet is compared with
    the other episodes of the step, which do not depend on its own actions either.

    >>> pair = [Earnings(r, (None,), (0,), i, "a") for i, r in enumerate((1.0, 0.0))]
    >>> subtract_averages(pair, [[1.0], [0.0]], {"a": 0.5}, 0.9)
    ([[0.5], [-0.5]], {'a': 0.5})
    """
    numbers = episode_numbers(rollouts).tolist()
    # By role and episode: the mean value of each rollout.
    levels: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rollout, own, mine in zip(rollouts, numbers, values, strict=True):
        if mine:
            levels[rollout.role][own].append(mean(mine))
    means = {
        role: {episode: mean(earned) for episode, earned in episodes.items()}
        for role, episodes in levels.items()
    }
    result = []
    for rollout, own, mine in zip(rollouts, numbers, values, strict=True):
        baseline = averages.get(rollout.role)
        if baseline is None:
            known = means.get(rollout.role, {}).items()
            others = [mean for episode, mean in known if episode != own]
            baseline = mean(others) if others else 0.0
        result.append([value - baseline for value in mine])
    after = dict(averages)
    for role, episodes in means.items():
        new = mean(episodes.values())
        after[role] = decay * averages[role] + (1 - decay) * new if role in averages else new
    return result, after
