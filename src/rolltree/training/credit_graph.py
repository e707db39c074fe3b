"""How credit flows between the rollouts of one episode: parents, the children they delegated to.

Pure: from the rewards that each rollout earned to the rewards it is credited with, before anything
is compared. It knows the graph by indices. It knows nothing about states, groups or tokens.

A child is credited with `down` times what its parent earns from the delegating call on, a parent
with `up` times what its children earn, at the call that asked for them.

| flow         | up | down | a rollout is credited with                    |
|--------------|----|------|-----------------------------------------------|
| `own`        | 0  | 0    | its own reward                                |
| `shared`     | 0  | 1    | its own reward and its parent's               |
| `discounted` | 0  | d    | the same, the parent's times d for each edge  |
| `team`       | 1  | 1    | everything that the episode earned            |

Towards the gradient of the episode's total reward `team` is unbiased, always. Towards that of the
root's reward alone, `shared` is unbiased when the children have no rewards of their own. The others
are choices: `own` trains every role for its own reward whatever that does to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rolltree.errors import ConfigError, TrainingError, UnknownName, did_you_mean
from rolltree.training.credit import Episode


@dataclass(frozen=True, slots=True)
class Flow:
    """The shares of a reward that move along one edge; see the table of this module."""

    up: float = 0.0
    down: float = 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """One rollout of an episode, and who asked for it.

    `parent` is an index into the same list, None for a rollout that nobody asked for;
    `parent_call` is the model call of the parent that did.
    """

    episode: Episode
    parent: int | None = None
    parent_call: int = 0


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
    if name not in FLOWS:
        raise UnknownName(f"there is no flow {name!r}.{did_you_mean(name, FLOWS)}")
    if edge_discount is None:
        return FLOWS[name]
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
        TrainingError: somebody is their own ancestor.
    """
    ordered: list[int] = []
    placed: set[int] = set()
    left = list(range(len(parents)))
    while left:
        ready = [i for i in left if parents[i] is None or parents[i] in placed]
        if not ready:
            raise TrainingError(
                f"rollouts {left} of one episode are each other's parents, so no credit can flow "
                "between them. The protocol that returned them wrote wrong parent ids."
            )
        ordered += ready
        placed.update(ready)
        left = [i for i in left if i not in placed]
    return ordered


def flow_credit(nodes: Sequence[Node], flow: Flow) -> list[Episode]:
    """Return the rollouts of one episode with the rewards that they are credited with.

    What a child inherits arrives at its last call; a child without calls passes nothing on.

    Example, `shared`: a root that delegates in its first call and earns 1 in its second, a child
    that earns 0.2 by itself in two calls: the root's rewards stay (0, 1), the child's are (0, 1.2).
    """
    total = [node.episode.reward for node in nodes]
    calls = [node.episode.rewards for node in nodes]
    order = parents_first([node.parent for node in nodes])
    sent = [0.0] * len(nodes)
    for index in reversed(order):
        node = nodes[index]
        if node.parent is not None and flow.up:
            sent[index] = flow.up * total[index]
            total[node.parent] += sent[index]
            if calls[node.parent]:
                calls[node.parent][node.parent_call] += sent[index]
    for index in order:
        node = nodes[index]
        if node.parent is not None and flow.down:
            total[index] += flow.down * (total[node.parent] - sent[index])
            if calls[index]:
                following = sum(calls[node.parent][node.parent_call :])
                calls[index][-1] += flow.down * (following - sent[index])
    return [
        node.episode
        if total[index] == node.episode.reward and calls[index] == node.episode.rewards
        else replace(node.episode, reward=total[index], call_rewards=tuple(calls[index]))
        for index, node in enumerate(nodes)
    ]
