"""One episode: its context, and the recording of its rollouts.

A `Recording` holds every rollout from the moment it begins, so an episode that is cancelled or
fails loses nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rolltree._helpers.tasks import being_cancelled, contained, run_shielded
from rolltree.agents import Agent
from rolltree.agents.worlds import drive
from rolltree.inference.deadline import Clock
from rolltree.values.errors import record_error
from rolltree.values.seeds import derive_seed
from rolltree.values.steps import AgentStep, EnvironmentStep, Rollout, Step, as_number
from rolltree.values.types import (
    ChatMessage,
    ErrorRecord,
    SamplingArgs,
    SamplingParams,
    TruncationReason,
)

_LOGGER = logging.getLogger(__name__)


class RolloutBuilder:
    """One agent's rollout while it is played.

    Args:
        agent: the agent whose model calls are recorded.
        rollout_id: unique in the run.
        parent, parent_step, position: the rollout that started this one, the step there, and the
            number of the call in that step.
        meta: entries that the protocol adds to `Rollout.meta`.
    """

    def __init__(
        self,
        agent: Agent,
        rollout_id: str,
        *,
        parent: RolloutBuilder | None = None,
        parent_step: int | None = None,
        position: int = 0,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.agent = agent
        self.rollout_id = rollout_id
        self.parent = parent
        self.parent_step = parent_step
        self.position = position
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.steps: list[Step] = []
        self.meta: dict[str, Any] = dict(meta or {})
        self.error: ErrorRecord | None = None
        self.raised: ErrorRecord | None = None
        self.over = False
        self._num_taken = 0

    def take(self) -> list[int]:
        """Append the agent's new model calls; return their indices."""
        new = self.agent.steps[self._num_taken :]
        first = len(self.steps)
        self._num_taken += len(new)
        self.steps.extend(new)
        return list(range(first, len(self.steps)))

    def add_reward(self, reward: float) -> None:
        """Give a reward that came after this agent's last turn to its last step of the world.

        An agent that has not acted yet keeps it in `meta["early_reward"]`.
        """
        reward = self._number(reward)
        if not reward:
            return
        # The reward belongs to the agent's last action, though others have moved since.
        for index in range(len(self.steps) - 1, -1, -1):
            step = self.steps[index]
            if isinstance(step, EnvironmentStep):
                self.steps[index] = replace(step, reward=self._number(step.reward) + reward)
                return
        self.meta["early_reward"] = self.meta.get("early_reward", 0.0) + reward

    def end(
        self, *, terminated: bool = False, reason: TruncationReason | str | None = None
    ) -> None:
        """Mark the last step as the end; later marks have no effect.

        A truncated rollout has `meta["episode_truncated"]` and `meta["truncation_reason"]`, and its
        last step `truncated` and `info["truncation_reason"]`. The flags are also in the extras of
        the last model call, where training reads them.
        """
        # Only the first end counts: a protocol ends all its agents once more when the world is
        # over.
        if self.over:
            return
        self.over = True
        flags: dict[str, Any] = {"terminated": terminated, "truncated": reason is not None}
        self.meta["episode_truncated"] = reason is not None
        noted = {}
        if reason is not None:
            noted = {"truncation_reason": str(reason)}
            self.meta.update(noted)
        if self.steps:
            last = self.steps[-1]
            self.steps[-1] = replace(last, **flags, info={**last.info, **noted})
        for step in reversed(self.steps):
            if isinstance(step, AgentStep):
                step.record["extras"].update(flags | noted)
                break

    def fail(self, error: ErrorRecord) -> None:
        """Record why the rollout failed; only the first failure is kept."""
        self.over = True
        self.error = self.error or error

    def cut(self, error: ErrorRecord) -> None:
        """End the rollout as truncated: the world's or the agent's code raised after an answer."""
        if not self.over:
            self.raised = self.raised or error
            self.take()
            self.end(reason=TruncationReason.ENV)

    def _with_number(self, step: Step) -> Step:
        reward = self._number(step.reward)
        return step if step.reward is reward else replace(step, reward=reward)

    def _number(self, reward: Any) -> float:
        """Return a reward as a float; what is none counts as 0 and is kept as an error."""
        # It may follow from an answer, as an error of a reward function may.
        try:
            return as_number(reward, source="the world or a parser gave the reward")
        except Exception as error:  # noqa: BLE001  a `__float__` may raise anything
            self.raised = self.raised or record_error(error, "environment")
            return 0.0

    def build(self) -> Rollout:
        """Return the rollout so far, as a value."""
        self.take()
        return Rollout(
            rollout_id=self.rollout_id,
            agent=self.agent.name,
            steps=tuple(self._with_number(step) for step in self.steps),
            meta={"episode_truncated": False, **self.meta},
            parent_rollout=None if self.parent is None else self.parent.rollout_id,
            parent_step=self.parent_step,
            depth=self.depth,
            error=self.error,
        )


class Recording:
    """All rollouts of one episode, from the moment each begins."""

    def __init__(self) -> None:
        self.builders: list[RolloutBuilder] = []

    def begin(self, builder: RolloutBuilder) -> RolloutBuilder:
        """Add a rollout and return it."""
        self.builders.append(builder)
        return builder

    def ordered(self) -> list[RolloutBuilder]:
        """Return parents before their children, children in the order of the calls for them.

        The order does not depend on which of several children was faster.
        """
        below: dict[int | None, list[RolloutBuilder]] = {}
        for builder in self.builders:
            key = None if builder.parent is None else id(builder.parent)
            below.setdefault(key, []).append(builder)

        def walk(builders: Sequence[RolloutBuilder]) -> list[RolloutBuilder]:
            found: list[RolloutBuilder] = []
            for builder in builders:
                found.append(builder)
                # By identity, since two rollouts may have the same agent and name.
                children = below.get(id(builder), [])
                found += walk(sorted(children, key=lambda c: (c.parent_step or 0, c.position)))
            return found

        return walk(below.get(None, []))

    def rollouts(self) -> list[Rollout]:
        """Return the rollouts as values, in that order."""
        return [builder.build() for builder in self.ordered()]


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The settings with which one episode is played; every field has a default."""

    # The world's seed.
    seed: int | None = None
    # The seed of all sampling; every agent derives its own. None: nothing is seeded.
    sampling_seed: int | None = None
    # The model client of agents without one; `clocks` time its calls already.
    client: Any = None
    # Sampling fields that override the agents' own.
    sampling: SamplingParams | SamplingArgs | None = None
    # The prompt of a dataset's row, put into the history of the episode's own agents.
    messages: Sequence[ChatMessage] = ()
    # When one of them has expired, no other call begins.
    clocks: tuple[Clock, ...] = ()
    # After a call with this many tokens, prompt and completion, no other call begins.
    max_seq_len: int | None = None
    # The first part of the rollouts' ids.
    episode_id: str = "episode"

    def derive_seed(self, *parts: str | int) -> int | None:
        """Return a sampling seed for a part of the episode, None if nothing is seeded."""
        return None if self.sampling_seed is None else derive_seed(self.sampling_seed, *parts)


@asynccontextmanager
async def open_world(make: Callable[[], Any] | None) -> AsyncIterator[Any]:
    """Make a world, and close it when the block ends, fails or is cancelled; None for no world.

    `make` may be asynchronous. A plain one runs in the event loop and should not block.
    """
    world = None if make is None else make()
    if inspect.isawaitable(world):
        world = await world
    try:
        yield world
    finally:
        if world is not None:
            # A world may hold a process or a file; it is closed even if the episode is cancelled.
            try:
                await run_shielded(_close(world))
            except (Exception, asyncio.CancelledError) as error:
                # What was played stays as it is, also if the world cancelled its own closing.
                if isinstance(error, asyncio.CancelledError) and being_cancelled():
                    raise
                _LOGGER.warning("a world's close() raised", exc_info=True)


async def _close(world: Any) -> None:
    # In a task of its own, SystemExit would end the event loop, and with it all other rollouts.
    with contained():
        await drive(world.close)
