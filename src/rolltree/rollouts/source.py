"""What the rollout engine runs: anything that has examples and can play one episode.

It knows the shape of a source and nothing of environments, datasets or rubrics; `Environment`
implements it, and so may a class that no environment ever heard of. It leaves out how an episode
is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from rolltree.inference.client import ModelClient
from rolltree.types import RolloutInput, RolloutRequest, State

Split: TypeAlias = Literal["train", "eval"]


@runtime_checkable
class RolloutSource(Protocol):
    """Examples, and one episode of one example.

    Optional: an attribute `sampling_args` (OpenAI fields) with what the source wants where the
    caller says nothing; `rolltree.rollouts.resolve_sampling` merges it under the caller's fields.
    """

    env_id: str

    def num_examples(self, split: Split) -> int:
        """Return how many examples the split holds."""
        ...

    def example(self, split: Split, index: int) -> RolloutInput:
        """Return example `index`, a fresh dict that the caller may change."""
        ...

    async def run_request(self, request: RolloutRequest, client: ModelClient) -> Sequence[State]:
        """Play one episode, score it, and return its states: one per trajectory.

        A failed rollout is data: `state["error"]` is an `ErrorRecord` and `state["reward"]` None.
        Only cancellation is raised.
        """
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """A source whose rewards compare the members of a group."""

    @property
    def has_group_rewards(self) -> bool:
        """Whether `score_group` must run before a member's reward is known."""
        ...

    async def score_group(self, states: Sequence[State]) -> None:
        """Finish the scores of all rollouts of one group, in place. Failed ones are left out."""
        ...
