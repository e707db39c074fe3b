"""Credit: from the rewards of a group of episodes to the advantage of each model call.

Pure functions in a table, each from the episodes of one group to one advantage per call, and
`assign_credit`, which groups rollouts by `request.group_id`, applies the declared policies for
failed and truncated episodes, and writes `state["advantage"]` and `step["advantage"]`. It knows
nothing about tokens. It leaves out value functions, so nothing is bootstrapped.

An episode is counted once, however many model calls it has. When a request gives several states
(several agents), the first are compared with the first of the other episodes, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rolltree.errors import TrainingError, UnknownName, did_you_mean
from rolltree.samples import TruncationPolicy, truncation_effect
from rolltree.types import RolloutResult, State

OnError = Literal["exclude", "zero"]

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Episode:
    """What credit sees of one episode: its reward and, per model call, reward and agent turn."""

    reward: float
    call_rewards: tuple[float | None, ...]
    turns: tuple[int, ...]

    @property
    def num_calls(self) -> int:
        """How many model calls share this episode's credit."""
        return len(self.turns)


CreditFn = Callable[[Sequence[Episode], float], list[list[float]]]
"""(episodes of one group, discount) -> advantage per episode and call."""


@dataclass(frozen=True, slots=True)
class CreditPolicy:
    """What becomes of an episode that failed or was cut.

    `on_error`: `exclude` leaves a failed episode out of the group's baseline, `zero` counts it
    there with reward 0; its own tokens are not trained either way. `truncation` and `max_seq_len`
    are those that `build_samples` gets. `discount` is per agent turn; only `monte_carlo` reads it.
    """

    on_error: OnError = "exclude"
    truncation: TruncationPolicy = field(default_factory=TruncationPolicy)
    max_seq_len: int | None = None
    discount: float = 1.0


@dataclass(frozen=True, slots=True)
class CreditReport:
    """The states that have an advantage, in request order, and counts of what became of all."""

    trained: tuple[State, ...]
    metrics: dict[str, float] = field(default_factory=dict)


def _per_episode(advantages: Sequence[float], episodes: Sequence[Episode]) -> list[list[float]]:
    return [[value] * e.num_calls for value, e in zip(advantages, episodes, strict=True)]


def _rewards(episodes: Sequence[Episode]) -> np.ndarray:
    return np.array([episode.reward for episode in episodes], np.float64)


def _centred(rewards: np.ndarray) -> np.ndarray:
    """Subtract the mean; exactly zero when all rewards are equal, whatever the rounding."""
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    return np.asarray(rewards - rewards.mean())


def grpo(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return `(r - mean) / (std + 1e-6)`, std with Bessel's correction.

    GRPO: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2 (outcome supervision).
    """
    rewards = _rewards(episodes)
    spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
    return _per_episode((_centred(rewards) / (spread + STD_EPSILON)).tolist(), episodes)


def dr_grpo(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return `r - mean`. Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, section 3.2."""
    return _per_episode(_centred(_rewards(episodes)).tolist(), episodes)


def leave_one_out(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return `r` minus the mean of the others; 0 for a group of one, which has no others.

    RLOO: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2 (Kool et al. 2019).
    """
    rewards = _rewards(episodes)
    count = len(rewards)
    scale = count / (count - 1) if count > 1 else 0.0
    return _per_episode((_centred(rewards) * scale).tolist(), episodes)


def reinforce(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return the episode's reward for every call, without a baseline.

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
        rewards = [reward or 0.0 for reward in episode.call_rewards]
        if all(reward is None for reward in episode.call_rewards) and rewards:
            rewards[-1] = episode.reward
        returns: list[float] = []
        following, turn = 0.0, episode.turns[-1] if episode.turns else 0
        for reward, this_turn in zip(reversed(rewards), reversed(episode.turns), strict=True):
            following = reward + discount ** (turn - this_turn) * following
            turn = this_turn
            returns.append(following)
        result.append(returns[::-1])
    return result


def zero(episodes: Sequence[Episode], discount: float = 1.0) -> list[list[float]]:
    """Return 0 for everybody: the control run, in which nothing can be learned from reward."""
    return _per_episode([0.0] * len(episodes), episodes)


CREDITS: dict[str, CreditFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "leave_one_out": leave_one_out,
    "reinforce": reinforce,
    "monte_carlo": monte_carlo,
    "zero": zero,
}


@dataclass(slots=True)
class _Member:
    state: State
    episode: Episode
    trains: bool


def assign_credit(
    results: Sequence[RolloutResult], credit: str = "grpo", policy: CreditPolicy | None = None
) -> CreditReport:
    """Write advantages into the states and steps of `results` and say which states train.

    Raises:
        UnknownName: there is no such credit.
        TrainingError: an episode that did not fail has no finite reward.
    """
    if credit not in CREDITS:
        raise UnknownName(f"there is no credit {credit!r}.{did_you_mean(credit, CREDITS)}")
    policy = policy or CreditPolicy()
    groups: dict[tuple[str, int], list[_Member]] = {}
    num_failed = num_truncated = 0
    for result in results:
        for slot, state in enumerate(result.states):
            _write(state, [])
            failed = result.error is not None or state.get("error") is not None
            num_failed += failed
            effect = truncation_effect(state, policy.truncation, max_seq_len=policy.max_seq_len)
            num_truncated += effect.truncated
            if (failed and policy.on_error == "exclude") or not effect.in_baseline:
                continue
            reward = 0.0 if failed else _finite(effect.reward, result)
            member = _Member(state, _episode(state, reward), trains=not failed)
            groups.setdefault((result.request.group_id, slot), []).append(member)
    trained: set[int] = set()
    num_flat = 0
    for members in groups.values():
        episodes = [member.episode for member in members]
        num_flat += len({episode.reward for episode in episodes}) == 1
        values = CREDITS[credit](episodes, policy.discount)
        for member, advantages in zip(members, values, strict=True):
            if member.trains:
                _write(member.state, advantages)
                trained.add(id(member.state))
    states = [state for result in results for state in result.states]
    count = max(1, len(states))
    return CreditReport(
        tuple(state for state in states if id(state) in trained),
        {
            "credit/failed_share": num_failed / count,
            "credit/truncated_share": num_truncated / count,
            "credit/untrained_share": 1 - len(trained) / count,
            "credit/flat_group_share": num_flat / max(1, len(groups)),
        },
    )


def _finite(reward: float | None, result: RolloutResult) -> float:
    if reward is None or not math.isfinite(reward):
        raise TrainingError(
            f"rollout {result.request.request_id} did not fail and has the reward {reward!r}, so "
            "no advantage can be computed from it. A reward function must return a finite number; "
            "one that cannot should raise, which records the rollout as failed."
        )
    return reward


def _episode(state: State, reward: float) -> Episode:
    steps = state.get("trajectory") or []
    return Episode(
        reward,
        tuple(step.get("reward") for step in steps),
        tuple(_turn(step.get("extras") or {}, index) for index, step in enumerate(steps)),
    )


def _turn(extras: dict[str, object], index: int) -> int:
    turn = extras.get("turn")
    return turn if isinstance(turn, int) else index


def _write(state: State, advantages: Sequence[float]) -> None:
    """Write one advantage per call; none at all means that the state is not trained."""
    state["advantage"] = advantages[0] if advantages else None
    steps = state.get("trajectory") or []
    for index, step in enumerate(steps):
        step["advantage"] = advantages[index] if advantages else None
