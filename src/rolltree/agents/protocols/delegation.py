"""`DelegatingProtocol`: an agent hands subtasks to other agents through external tools.

A call of a registered tool starts a child agent with its own history, its own budget and, if it
has one, its own world. Calls of one message run concurrently. The child's result is the tool's
answer; so is its failure or a spent budget. All rollouts are returned: each names its parent's
rollout and the step that started it. Credit between them is assigned in training.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rolltree._helpers.tasks import contained
from rolltree.agents import Agent
from rolltree.agents.protocols.budget import Budget
from rolltree.agents.protocols.episode import EpisodeContext, Recording, RolloutBuilder, open_world
from rolltree.agents.protocols.player import Player
from rolltree.agents.protocols.single import (
    AgentSource,
    SingleAgentProtocol,
    check_max_steps,
    play_alone,
)
from rolltree.agents.worlds import World
from rolltree.inference.client import as_client, may_follow
from rolltree.inference.deadline import Clock, RolloutClient
from rolltree.inference.wire import sent_text
from rolltree.values.errors import ConfigError, record_error
from rolltree.values.steps import AgentStep, ToolAnswer, ToolRequest
from rolltree.values.types import ToolSchema

GRACE_S = 5.0
"""Seconds after a child's time limit until it is stopped in the middle of a turn."""


def delegate_tool(
    name: str = "delegate",
    description: str = "Hand a subtask to another agent and get its answer.",
) -> ToolSchema:
    """Return the schema of a tool with one argument, `task`: for an agent's `external_tools`."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"task": {"type": "string", "description": "What is to be done."}},
                "required": ["task"],
            },
        },
    }


def task_text(arguments: Mapping[str, Any]) -> str:
    """Return the argument `task`, or all arguments as JSON if there is none."""
    task = arguments.get("task")
    return task if isinstance(task, str) else json.dumps(dict(arguments), sort_keys=True)


@dataclass(frozen=True, slots=True)
class SubAgent:
    """One kind of agent that can be delegated to."""

    # A new agent for each subtask, because several may run at once.
    make: Callable[[], Agent]
    # Makes the child's own world from the call's arguments; opened and closed here. None: the
    # child's first answer with an action is its result.
    world: Callable[[Mapping[str, Any]], World] | None = None
    # Most turns of a child.
    max_steps: int = 4
    # What one child may spend.
    budget: Budget = field(default_factory=Budget)
    # Makes the child's task from the call's arguments.
    task_of: Callable[[Mapping[str, Any]], str] = task_text
    # How many external tool calls of a child are answered.
    max_external_calls: int = 8

    def __post_init__(self) -> None:
        check_max_steps(self.max_steps)


class DelegatingProtocol(SingleAgentProtocol):
    """One agent acts in a world (or answers a question) and may delegate.

    Args:
        agent: the episode's own agent, or a function that makes one.
        children: maps external tool names to the kinds of agents that answer them.
        max_depth: the number of levels that may delegate; 1: only the episode's own agent.
        max_children: the most children of one episode, at all depths.
        max_concurrent: how many children of the episode's own agent may run at once.
        settings: those of `InteractionProtocol`. `external_tool_handler` answers the external
            tools that are not in `children`.

    Raises:
        ConfigError: there are no children, or a limit is below 1.
    """

    def __init__(
        self,
        agent: AgentSource,
        children: Mapping[str, SubAgent],
        *,
        max_depth: int = 1,
        max_children: int = 16,
        max_concurrent: int = 8,
        **settings: Any,
    ) -> None:
        super().__init__(agent, **settings)
        for name, value in (
            ("len(children)", len(children)),
            ("max_depth", max_depth),
            ("max_children", max_children),
            ("max_concurrent", max_concurrent),
        ):
            if value < 1:
                raise ConfigError(
                    f"{name} is {value}; nothing could be delegated. Give at least 1, or use "
                    "SingleAgentProtocol."
                )
        self.children = dict(children)
        self.max_depth = max_depth
        self.max_children = max_children
        self.max_concurrent = max_concurrent

    def make_player(
        self, agent: Agent, builder: RolloutBuilder, context: EpisodeContext, recording: Recording
    ) -> Player:
        """Return a player that can delegate."""
        return _Delegator(
            agent,
            builder,
            context,
            handler=self.external_tool_handler,
            max_external_calls=self.max_external_calls,
            family=_Family(self, recording, asyncio.Semaphore(self.max_concurrent)),
        )


@dataclass(slots=True)
class _Family:
    """The shared state of all agents of one episode."""

    protocol: DelegatingProtocol
    recording: Recording
    running: asyncio.Semaphore
    num_children: int = 0


class _Delegator(Player):
    """A player whose calls of registered external tools start other players."""

    def __init__(self, *args: Any, family: _Family, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.family = family

    async def answer_one(self, request: ToolRequest, position: int) -> ToolAnswer:
        """Return a child's result, or the handler's."""
        kind = self.family.protocol.children.get(request.name)
        if kind is None or request.problem is not None:
            return await super().answer_one(request, position)
        # An answer instead of an error: the model can go on by itself.
        refusal = self._refusal()
        if refusal:
            return ToolAnswer(request.call_id, request.name, refusal)
        # Counted before anything is awaited, since calls of one message run concurrently.
        self.family.num_children += 1
        # Grandchildren take no slot: a child that waits for its own children holds one already.
        if self.builder.depth:
            return await self._run(kind, request, position)
        async with self.family.running:
            return await self._run(kind, request, position)

    def _refusal(self) -> str:
        protocol = self.family.protocol
        if self.builder.depth >= protocol.max_depth:
            return "You cannot delegate further. Do it yourself."
        if self.family.num_children >= protocol.max_children:
            return "No more subtasks can be handed out. Go on with what you have."
        return ""

    def _child(
        self, kind: SubAgent, request: ToolRequest, position: int
    ) -> tuple[_Delegator, Clock]:
        arguments = dict(request.arguments or {})
        step = len(self.builder.steps) - 1
        # Named by position, not by a counter: ids and seeds must not depend on timing.
        name = f"{request.name}.{step}.{position}"
        agent = kind.make()
        clock = Clock(kind.budget.time_limit_s, GRACE_S)
        builder = RolloutBuilder(
            agent,
            f"{self.builder.rollout_id}/{name}",
            parent=self.builder,
            parent_step=step,
            position=position,
            meta={
                # A text, whatever the parent wrote as its argument.
                "subtask": sent_text(kind.task_of(arguments)),
                "tool": request.name,
                "arguments": arguments,
            },
        )
        # Recorded before it acts, so that a cancelled child is kept.
        self.family.recording.begin(builder)
        client = self.context.client
        context = replace(
            self.context,
            seed=self.context.derive_seed("world", name),
            sampling_seed=self.context.derive_seed("child", name),
            messages=(),
            # The parent's limits hold for the child, too.
            clocks=(*self.context.clocks, clock),
            client=None if client is None else RolloutClient(as_client(client), clock),
        )
        child = _Delegator(
            agent,
            builder,
            context,
            handler=self.handler,
            max_external_calls=kind.max_external_calls,
            budget=kind.budget,
            family=self.family,
        )
        return child, clock

    async def _run(self, kind: SubAgent, request: ToolRequest, position: int) -> ToolAnswer:
        try:
            with contained():
                child, clock = self._child(kind, request, position)
        except Exception as error:  # noqa: BLE001  the parent is told; there is no rollout yet
            failure = record_error(error, "setup")
            text = f"The agent failed: {failure.type}: {failure.message}"
            return ToolAnswer(request.call_id, request.name, text, failure)
        builder = child.builder
        make = kind.world
        world = None if make is None else (lambda: make(builder.meta["arguments"]))
        try:
            async with clock.guard() as scope:
                with contained():
                    async with open_world(world) as place:
                        await play_alone(
                            child, place, max_steps=kind.max_steps, task=builder.meta["subtask"]
                        )
        except Exception as error:  # noqa: BLE001  the parent is told, the child's rollout keeps it
            # A TimeoutError of the child's own world is not its budget's.
            late = isinstance(error, TimeoutError) and scope.expired()
            failure = record_error(error, "timeout" if late else "environment")
            is_cut = not late and child.agent.trajectory and may_follow(error)
            (builder.cut if is_cut else builder.fail)(failure)
        finally:
            clock.stop()
        builder.meta["result"] = _result(builder)
        return ToolAnswer(request.call_id, request.name, builder.meta["result"], builder.error)


def _result(builder: RolloutBuilder) -> str:
    """Return the child's action, else its last message, or why there is none, for the parent."""
    if builder.error is not None:
        return f"The agent failed: {builder.error.type}: {builder.error.message}"
    reason = builder.meta.get("truncation_reason")
    steps = [step for step in builder.steps if isinstance(step, AgentStep)]
    final = [s for s in steps if s.parse_result is not None and s.action_target == "env"]
    said = ""
    if final and final[-1].parse_result is not None and not final[-1].parse_failed:
        said = str(final[-1].parse_result.action)
    elif steps:
        said = str(steps[-1].message.get("content") or "")
    if reason is None:
        return said
    return f"The agent did not finish ({reason})." + (f" It said last: {said}" if said else "")
