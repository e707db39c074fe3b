"""`SingleAgentProtocol`: one agent in one world.

    observe -> act (tools in between) -> step the world -> observe -> ...

It ends when the world ends, after `max_steps` turns, or when time, tokens or budget are spent.
"""

from __future__ import annotations

from rolltree.errors import ConfigError
from rolltree.protocols.episode import (
    AgentSource,
    EpisodeContext,
    InteractionProtocol,
    Recording,
    RolloutBuilder,
    make_agent,
)
from rolltree.protocols.player import EpisodeCut, ExternalToolHandler, Player
from rolltree.types import TruncationReason
from rolltree.worlds import World, drive


class SingleAgentProtocol(InteractionProtocol):
    """One agent acts in one world until an end.

    Without a world the agent is asked what `context.messages` ask, and its first answer that holds
    an action is the end.

    Args:
        agent: an agent, or a function that makes one for each episode.
        max_steps: most turns, those without an action included. A turn may be many model calls.
        stop_on_parse_error: an answer that holds no action is the end: `terminated`, because that
            is then the rule of the game.
        external_tool_handler: answers external tool calls, `handler(request) -> str`; it may be
            asynchronous, and what it raises becomes the answer.
        max_external_calls: how many of them are answered in one episode.

    Raises:
        ConfigError: `max_steps` is below 1.
    """

    def __init__(
        self,
        agent: AgentSource,
        *,
        max_steps: int = 50,
        stop_on_parse_error: bool = False,
        external_tool_handler: ExternalToolHandler | None = None,
        max_external_calls: int = 32,
    ) -> None:
        check_max_steps(max_steps)
        self.agent = agent
        self.max_steps = max_steps
        self.stop_on_parse_error = stop_on_parse_error
        self.external_tool_handler = external_tool_handler
        self.max_external_calls = max_external_calls

    async def play(
        self, world: World | None, context: EpisodeContext, recording: Recording
    ) -> None:
        """Play one episode."""
        agent = make_agent(self.agent)
        builder = recording.begin(RolloutBuilder(agent, context.episode_id))
        player = Player(
            agent,
            builder,
            context,
            handler=self.external_tool_handler,
            max_external_calls=self.max_external_calls,
        )
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

    `task`, when given, is what the agent is told first; the world's first observation follows.
    """
    player.begin(player.context.messages)
    obs = ""
    if task is not None:
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
    """Raise `ConfigError` when no turn would ever be taken."""
    if max_steps < 1:
        raise ConfigError(
            f"max_steps is {max_steps}; nobody would ever act. Give the most turns of an episode."
        )
