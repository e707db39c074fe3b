"""The base of protocols, and `SingleAgentProtocol`: one agent in one world.

    observe -> act (tools in between) -> step the world -> observe -> ...

The episode ends with the world, after `max_steps` turns, or when time, tokens or budget are spent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from rolltree._helpers.tasks import contained
from rolltree.agents import Agent
from rolltree.agents.protocols.episode import EpisodeContext, Recording, RolloutBuilder
from rolltree.agents.protocols.player import EpisodeCut, ExternalToolHandler, Player
from rolltree.agents.worlds import World, drive
from rolltree.inference.client import may_follow
from rolltree.values.errors import ConfigError, record_error
from rolltree.values.steps import Rollout
from rolltree.values.types import TruncationReason

AgentSource: TypeAlias = Agent | Callable[[], Agent]
"""An agent, for one episode at a time, or a function that makes one, for many at once."""


class InteractionProtocol(ABC):
    """A loop between agents and a world. It holds no state of an episode, so it can play many.

    Args:
        max_steps: the most turns, including those without an action. A turn may be many model
            calls.
        stop_on_parse_error: an answer without an action ends the episode as `terminated`, since
            that is then a rule of the game.
        external_tool_handler: answers external tool calls, `handler(request) -> str`; it may be
            asynchronous, and an error that it raises becomes the answer.
        max_external_calls: how many external calls are answered in one episode, for each agent.

    Raises:
        ConfigError: `max_steps` is below 1.
    """

    def __init__(
        self,
        *,
        max_steps: int = 50,
        stop_on_parse_error: bool = False,
        external_tool_handler: ExternalToolHandler | None = None,
        max_external_calls: int = 32,
    ) -> None:
        check_max_steps(max_steps)
        self.max_steps = max_steps
        self.stop_on_parse_error = stop_on_parse_error
        self.external_tool_handler = external_tool_handler
        self.max_external_calls = max_external_calls

    async def run(
        self, world: Any, context: EpisodeContext | None = None, recording: Recording | None = None
    ) -> list[Rollout]:
        """Play one episode and return its rollouts, parents before their children.

        A failure is in `Rollout.error`: of the rollout that failed or, if that is not known, of
        all the episode's own agents. Only cancellation and failures before any
        rollout has begun are raised; `recording`, when given, keeps what was played. The caller
        makes and closes the world.
        """
        recording = recording if recording is not None else Recording()
        try:
            with contained():
                await self.play(world, context or EpisodeContext(), recording)
        except Exception as error:
            # Children report failures to their parents, so only the episode's own agents fail here.
            own = [builder for builder in recording.builders if builder.parent is None]
            if not own:
                raise
            failure = record_error(error, "environment")
            # An illegal move, say. What a model wrote must not decide whether it has a reward.
            is_cut = may_follow(error) and any(builder.agent.trajectory for builder in own)
            if not any(builder.error for builder in own):
                for builder in own:
                    (builder.cut if is_cut else builder.fail)(failure)
        return recording.rollouts()

    @abstractmethod
    async def play(self, world: Any, context: EpisodeContext, recording: Recording) -> None:
        """Play one episode into `recording`."""

    def seat(
        self,
        source: AgentSource,
        context: EpisodeContext,
        recording: Recording,
        name: str | None = None,
    ) -> Player:
        """Return a player for the agent; with a `name` it has its own rollout id and seed."""
        # A function makes one for each episode: an agent has a history, and many episodes run at
        # once.
        agent = source if isinstance(source, Agent) else source()
        rollout_id, meta = context.episode_id, {}
        if name is not None:
            rollout_id, meta = f"{rollout_id}/{name}", {"seat": name}
            context = replace(context, sampling_seed=context.derive_seed("seat", name))
        builder = recording.begin(RolloutBuilder(agent, rollout_id, meta=meta))
        return self.make_player(agent, builder, context, recording)

    def make_player(
        self, agent: Agent, builder: RolloutBuilder, context: EpisodeContext, recording: Recording
    ) -> Player:
        """Return the player of an agent; protocols with their own players override it."""
        return Player(
            agent,
            builder,
            context,
            handler=self.external_tool_handler,
            max_external_calls=self.max_external_calls,
        )


class SingleAgentProtocol(InteractionProtocol):
    """One agent acts in one world until the episode ends.

    Without a world the agent answers `context.messages`, and its first answer with an action ends
    the episode.

    Args:
        agent: an agent, or a function that makes one for each episode.
        settings: those of `InteractionProtocol`.
    """

    def __init__(self, agent: AgentSource, **settings: Any) -> None:
        super().__init__(**settings)
        self.agent = agent

    async def play(
        self, world: World | None, context: EpisodeContext, recording: Recording
    ) -> None:
        """Play one episode."""
        player = self.seat(self.agent, context, recording)
        await play_alone(
            player,
            world,
            max_steps=self.max_steps,
            stop_on_parse_error=self.stop_on_parse_error,
        )


async def play_alone(
    player: Player,
    world: World | None,
    *,
    max_steps: int,
    stop_on_parse_error: bool = False,
    task: str | None = None,
) -> None:
    """Play one agent in its world, or without one, to the end of its rollout.

    `task`, if given, is shown to the agent first; the world's first observation follows.
    """
    player.begin(player.context.messages)
    obs = ""
    if task is not None:
        # The task comes first, since it explains the world's observation.
        player.agent.observe(task)
        obs = task
    if world is not None:
        obs, _ = await drive(world.reset, seed=player.context.seed)
        player.agent.observe(obs)
    try:
        for _ in range(max_steps):
            step = await player.take_turn()
            parsed = step.parse_result
            assert parsed is not None
            if parsed.failed:
                if stop_on_parse_error:
                    player.builder.end(terminated=True)
                    return
                obs = player.no_action(step)
                player.agent.observe(obs)
                continue
            if world is None:
                player.builder.end(terminated=True)
                return
            outcome = await drive(world.step, parsed.action)
            player.record_outcome(parsed.action, obs, outcome)
            if player.over:
                return
            obs = outcome.obs
            player.agent.observe(obs)
        player.builder.end(reason=TruncationReason.MAX_STEPS)
    except EpisodeCut as cut:
        player.builder.end(reason=cut.reason)


def check_max_steps(max_steps: int) -> None:
    """Raise `ConfigError` if no turn would ever be taken."""
    if max_steps < 1:
        raise ConfigError(f"max_steps must be >= 1, got {max_steps}: no agent would ever act.")
