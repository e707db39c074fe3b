"""Two games small enough to enumerate: every episode, its probability, and the true gradient.

A policy is one table of logits per decision. A score is the gradient of the log probability of one
call by all logits in one vector, so an expected gradient is a sum over episodes and nothing is
sampled.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np

from rolltree.training.advantages import CreditPolicy, assign_credit
from rolltree.values.types import RolloutRequest, RolloutResult, State


class Policy:
    """Softmax over the actions of each decision; `logits` maps a decision's name to a row."""

    def __init__(self, **logits):
        self.logits = {name: np.array(row, np.float64) for name, row in logits.items()}
        sizes = [len(row) for row in self.logits.values()]
        starts = np.cumsum([0, *sizes])
        self.slices = {
            name: slice(start, start + size)
            for name, start, size in zip(self.logits, starts, sizes, strict=False)
        }
        self.size = int(starts[-1])

    def probabilities(self, name):
        row = np.exp(self.logits[name] - self.logits[name].max())
        return row / row.sum()

    def choices(self, name):
        """Yield (action, probability, score)."""
        found = self.probabilities(name)
        for action, probability in enumerate(found):
            score = np.zeros(self.size)
            score[self.slices[name]] = -found
            score[self.slices[name].start + action] += 1
            yield action, probability, score


@dataclass
class Rollout:
    agent: str = ""
    reward: float = 0.0
    scores: list = field(default_factory=list)
    call_rewards: list | None = None
    parent: int | None = None
    parent_step: int = 0
    subtask: str = ""


@dataclass
class Play:
    """One whole episode."""

    probability: float
    rollouts: list

    @property
    def total(self):
        return sum(rollout.reward for rollout in self.rollouts)


def result_of(play, index, group="g"):
    """Return the play as the result of a request, as a protocol would."""
    request_id = f"{group}/{index}"
    states = []
    for number, rollout in enumerate(play.rollouts):
        rewards = rollout.call_rewards or [None] * len(rollout.scores)
        state = State(
            agent=rollout.agent,
            rollout_id=f"{request_id}#{number}",
            reward=rollout.reward,
            error=None,
            has_step_rewards=rollout.call_rewards is not None,
            trajectory=[
                {"reward": reward, "advantage": None, "extras": {"turn": turn}}
                for turn, reward in enumerate(rewards)
            ],
        )
        if rollout.parent is not None:
            state["parent_rollout"] = f"{request_id}#{rollout.parent}"
            state["parent_step"] = rollout.parent_step
            state["subtask"] = rollout.subtask
        states.append(state)
    request = RolloutRequest(
        request_id, "game", {"prompt": "p", "example_id": 0, "task": "t"}, 0, 0, group, index
    )
    return RolloutResult(request, tuple(states), None)


def credited(results, *settings):
    """Assign credit, and write it where these tests look: None for what does not train."""
    report = assign_credit(results, *settings)
    given = dict(zip(report.places, report.advantages, strict=True))
    states = {
        (r, s): state for r, result in enumerate(results) for s, state in enumerate(result.states)
    }
    for place, state in states.items():
        steps = state.get("trajectory") or ()
        values = given[place].tolist() if place in given else [None] * len(steps)
        state["advantage"] = values[0] if values else None
        for step, value in zip(steps, values, strict=True):
            step["advantage"] = value
    return report


def expected_gradient(plays, credit, policy=None, *, group_size=2, averages=None):
    """Return the exact expectation of the mean over a group of sum(advantage * score)."""
    size = len(plays[0].rollouts[0].scores[0])
    total = np.zeros(size)
    for group in itertools.product(plays, repeat=group_size):
        probability = np.prod([play.probability for play in group])
        results = [result_of(play, index) for index, play in enumerate(group)]
        credited(results, credit, policy or CreditPolicy(), averages)
        for play, result in zip(group, results, strict=True):
            for rollout, state in zip(play.rollouts, result.states, strict=True):
                for score, step in zip(rollout.scores, state["trajectory"], strict=True):
                    total += probability * (step["advantage"] or 0.0) * score / group_size
    return total


def true_gradient(plays, value):
    """Return the gradient of the expectation of `value(play)`."""
    return sum(
        play.probability * value(play) * sum(s for r in play.rollouts for s in r.scores)
        for play in plays
    )


def stopping_game():
    """Stop for 0.3, or go on for -0.1 and then choose between 1 and 0."""
    policy = Policy(first=[0.4, -0.2], second=[0.7, -0.5])
    plays = []
    for go_on, p_first, s_first in policy.choices("first"):
        if not go_on:
            plays.append(Play(p_first, [Rollout("", 0.3, [s_first], [0.3])]))
            continue
        for miss, p_second, s_second in policy.choices("second"):
            last = 0.0 if miss else 1.0
            plays.append(
                Play(
                    p_first * p_second,
                    [Rollout("", last - 0.1, [s_first, s_second], [-0.1, last])],
                )
            )
    return policy, plays


FINAL = {("a", 0): (0.1, 0.9), ("a", 1): (0.6, 0.2), ("b", 0): (0.4, 0.0), ("b", 1): (0.3, 1.2)}


def delegation_game(child_reward=0.5):
    """A parent delegates subtask a, b, or a once more when the first answer was 0; then it ends.

    The root's reward depends on the subtask, on the last answer and on the parent's second choice;
    a child earns `child_reward` for the answer 1.
    """
    policy = Policy(ask=[0.2, -0.3, 0.1], a=[0.3, -0.4], b=[-0.6, 0.1], end=[0.25, -0.15])
    plays = []
    for asked, p_ask, s_ask in policy.choices("ask"):
        task = "b" if asked == 1 else "a"
        for answers, p_child, s_child in _answers(policy, task, twice=asked == 2):
            for end, p_end, s_end in policy.choices("end"):
                reward = FINAL[task, answers[-1]][end]
                children = [
                    Rollout("child", child_reward * answer, [score], None, 0, 0, task)
                    for answer, score in zip(answers, s_child, strict=True)
                ]
                root = Rollout("root", reward, [s_ask, s_end], [0.0, reward])
                plays.append(Play(p_ask * p_child * p_end, [root, *children]))
    return policy, plays


def _answers(policy, task, twice):
    for answer, p, score in policy.choices(task):
        if answer or not twice:
            yield [answer], p, [score]
            continue
        for again, p_again, s_again in policy.choices(task):
            yield [answer, again], p * p_again, [score, s_again]
