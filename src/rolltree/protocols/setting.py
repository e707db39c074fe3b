"""What one episode is played with, and the one method that every protocol has.

It knows the values that cross into a protocol: client, sampling, seeds, clocks. It knows nothing
about the rollout engine. It leaves out the loops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rolltree.agents import Agent
from rolltree.errors import record_error
from rolltree.inference.timed import Clock
from rolltree.protocols.recording import Recording
from rolltree.steps import Rollout
from rolltree.types import ChatMessage, SamplingArgs, SamplingParams

AgentSource: TypeAlias = Agent | Callable[[], Agent]
"""An agent, for one episode at a time, or a function that makes one, for many at once."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What one episode is played with; every field has a default for playing by hand.

    Fields:
        seed: of the world.
        sampling_seed: of all sampling; every agent derives its own. None: nothing is seeded.
        client: the model for agents that bring none; its calls are timed by `clocks` already.
        sampling: the fields it names go over the agents' own.
        messages: what a row of a dataset asks, put into the history of the episode's own agents.
        clocks: when one of them is over, the episode ends at its next turn boundary.
        max_seq_len: no call begins once one had this many tokens, prompt and completion.
        episode_id: the first part of the rollouts' ids.
    """

    seed: int | None = None
    sampling_seed: int | None = None
    client: Any = None
    sampling: SamplingParams | SamplingArgs | None = None
    messages: Sequence[ChatMessage] = ()
    clocks: tuple[Clock, ...] = ()
    max_seq_len: int | None = None
    episode_id: str = "episode"


class InteractionProtocol(ABC):
    """A loop between agents and a world. It keeps nothing of an episode, so it can play many."""

    async def run(
        self, world: Any, setting: Setting | None = None, recording: Recording | None = None
    ) -> list[Rollout]:
        """Play one episode and return its rollouts, parents before their children.

        A failure is in `Rollout.error`: of the rollout that failed or, where none is to blame, of
        all that nobody delegated. Only cancellation is raised, and what fails before any rollout
        has begun; `recording`, when given, then holds what there was. The world is neither made
        nor closed here.
        """
        recording = recording if recording is not None else Recording()
        try:
            await self.play(world, setting or Setting(), recording)
        except Exception as error:
            own = [builder for builder in recording.builders if builder.parent is None]
            if not own:
                raise
            if not any(builder.error for builder in own):
                failure = record_error(error, "environment")
                for builder in own:
                    builder.fail(failure)
        return recording.rollouts()

    @abstractmethod
    async def play(self, world: Any, setting: Setting, recording: Recording) -> None:
        """Play one episode into `recording`."""


def make_agent(source: AgentSource) -> Agent:
    """Return the agent, or a new one."""
    return source if isinstance(source, Agent) else source()
