"""Credit: from the rewards of episodes that are compared to the advantage of each model call.

Pure functions in one table, each from the episodes of one comparison group to one advantage per
call. They know nothing about tokens, states or groups: `assign` builds the groups, `credit_graph`
lets credit flow between parents and children. They leave out value functions, so nothing is
bootstrapped.

An episode counts once, however many model calls it has and however many of its rollouts are in the
group: a baseline is the mean over episodes of the mean over an episode's rollouts.

| credit          | expected gradient, against that of the mean reward            |
|-----------------|---------------------------------------------------------------|
| `reinforce`, `episodic`, `leave_one_out` | equal                                |
| `monte_carlo`   | equal at discount 1 (rewards per call); biased below 1        |
| `dr_grpo`       | equal times (n - 1) / n for n episodes                        |
| `grpo`          | biased: the spread depends on the actions                     |
| `per_step`      | biased: an action is not credited with what it causes later   |
| `constant`      | 0: nothing is learned from reward                             |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rolltree.rubrics import centred_rewards

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Episode:
    """What credit sees of one rollout: its reward and, per model call, reward and agent turn.

    `owner` is the episode that the rollout is part of; None: it is an episode of its own.

    Example: two calls of one turn, then one of the next, rewarded at the turns' ends:
    `Episode(1.5, (None, 0.5, 1.0), (0, 0, 1))`.
    """

    reward: float
    call_rewards: tuple[float | None, ...]
    turns: tuple[int, ...]
    owner: Hashable = None

    @property
    def num_calls(self) -> int:
        """How many model calls share this episode's credit."""
        return len(self.turns)

    @property
    def rewards(self) -> list[float]:
        """The reward of each call; the last earns the rollout's where no call has one."""
        rewards = [reward or 0.0 for reward in self.call_rewards]
        if rewards and all(reward is None for reward in self.call_rewards):
            rewards[-1] = self.reward
        return rewards


CreditFn = Callable[[Sequence[Episode], float], list[list[float]]]
"""(episodes of one group, discount) -> advantage per episode and call."""


def _per_episode(advantages: Sequence[float], episodes: Sequence[Episode]) -> list[list[float]]:
    return [[value] * e.num_calls for value, e in zip(advantages, episodes, strict=True)]


def _rewards(episodes: Sequence[Episode]) -> np.ndarray:
    return np.array([episode.reward for episode in episodes], np.float64)


def owners_of(episodes: Sequence[Episode]) -> np.ndarray:
    """Return the number of each rollout's episode, int `[num rollouts]`, counted from 0."""
    numbers: dict[Hashable, int] = {}
    keys = [
        ("alone", index) if episode.owner is None else ("owner", episode.owner)
        for index, episode in enumerate(episodes)
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _weights(owners: np.ndarray) -> np.ndarray:
    """Return weights that add up to 1: every episode the same, shared by its rollouts."""
    counts = np.bincount(owners)
    return np.asarray(1.0 / (len(counts) * counts[owners]))


def _centred(rewards: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Subtract the mean over episodes; exactly zero when nothing can be compared."""
    if owners.max() == 0:
        return np.zeros_like(rewards)
    return centred_rewards(rewards, _weights(owners))


def grpo(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return `(r - mean) / (std + 1e-6)`, std with Bessel's correction.

    GRPO: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision).
    """
    rewards, owners = _rewards(episodes), owners_of(episodes)
    centred, count = _centred(rewards, owners), owners.max() + 1
    variance = (_weights(owners) * centred**2).sum() * count / max(count - 1, 1)
    return _per_episode((centred / (variance**0.5 + STD_EPSILON)).tolist(), episodes)


def dr_grpo(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return `r - mean`. Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, section 3.2."""
    return _per_episode(_centred(_rewards(episodes), owners_of(episodes)).tolist(), episodes)


def leave_one_out(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return `r` minus the mean of the other episodes; 0 where there are no others.

    A rollout is not compared with those of its own episode: they may depend on what it did.

    RLOO: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (Kool et al. 2019).
    """
    rewards, owners = _rewards(episodes), owners_of(episodes)
    means = np.bincount(owners, rewards) / np.bincount(owners)
    if len(means) == 1 or rewards.max() == rewards.min():
        return _per_episode([0.0] * len(rewards), episodes)
    others = (means.sum() - means[owners]) / (len(means) - 1)
    return _per_episode((rewards - others).tolist(), episodes)


def reinforce(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return the episode's reward for every call, without a baseline: the episodic return.

    REINFORCE: Williams 1992, equation 11, with zero baseline.
    """
    return _per_episode([episode.reward for episode in episodes], episodes)


def monte_carlo(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return each call's discounted return, `sum_k discount^(turn_k - turn_t) reward_k, k >= t`.

    Sutton and Barto 2018, equation 3.8; the discount counts agent turns, not model calls. An
    episode whose calls carry no rewards earns its reward at its last call.
    """
    result = []
    for episode in episodes:
        returns: list[float] = []
        following, turn = 0.0, episode.turns[-1] if episode.turns else 0
        for reward, this_turn in zip(
            reversed(episode.rewards), reversed(episode.turns), strict=True
        ):
            following = reward + discount ** (turn - this_turn) * following
            turn = this_turn
            returns.append(following)
        result.append(returns[::-1])
    return result


def per_step(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return each turn's own reward for all calls of the turn: nothing of what comes later."""
    result = []
    for episode in episodes:
        earned: dict[int, float] = {}
        for turn, reward in zip(episode.turns, episode.rewards, strict=True):
            earned[turn] = earned.get(turn, 0.0) + reward
        result.append([earned[turn] for turn in episode.turns])
    return result


def constant(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return 1 for everybody: imitation of whatever is trained, good or bad."""
    return _per_episode([1.0] * len(episodes), episodes)


def zero(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return 0 for everybody: the control run, in which nothing can be learned from reward."""
    return _per_episode([0.0] * len(episodes), episodes)


CREDITS: dict[str, CreditFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "leave_one_out": leave_one_out,
    "reinforce": reinforce,
    "episodic": reinforce,
    "monte_carlo": monte_carlo,
    "per_step": per_step,
    "constant": constant,
    "zero": zero,
}

COMPARING: tuple[str, ...] = ("grpo", "dr_grpo", "leave_one_out")
"""Credits that compare the members of a group, and so need at least two episodes."""
