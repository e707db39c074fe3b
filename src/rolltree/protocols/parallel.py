"""`MultiAgentSyncProtocol`: several agents that act at once, as in PettingZoo's `ParallelEnv`.

In every round all live agents take their turns at the same time, then the world takes one step with
what they decided. An agent that is out (by the world, or because its own time, tokens or prompt are
spent) leaves the others playing: truncation is per agent. It leaves out worlds with turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rolltree.protocols.player import (
    Cut,
    ExternalToolHandler,
    Player,
    at_once,
    check_names,
    seat_seed,
)
from rolltree.protocols.recording import Recording, RolloutBuilder
from rolltree.protocols.setting import AgentSource, InteractionProtocol, Setting, make_agent
from rolltree.protocols.single import check_max_steps
from rolltree.steps import AgentStep, StepOutcome
from rolltree.types import TruncationReason
from rolltree.worlds import BAD_ACTION, ParallelWorld, drive


class MultiAgentSyncProtocol(InteractionProtocol):
    """Several agents, one step of the world per round.

    Each agent's rollout has its own id, `<episode>/<agent>`, and its own sampling seed.

    Args:
        agents: the world's names to agents, or to functions that make them.
        max_steps: most rounds.
        external_tool_handler, max_external_calls: as in `SingleAgentProtocol`, for every agent.
        stop_on_parse_error: an agent whose answer holds no action is out: `terminated`.

    Raises:
        ConfigError: `max_steps` is below 1.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentSource],
        *,
        max_steps: int = 50,
        stop_on_parse_error: bool = False,
        external_tool_handler: ExternalToolHandler | None = None,
        max_external_calls: int = 32,
    ) -> None:
        check_max_steps(max_steps)
        self.agents = dict(agents)
        self.max_steps = max_steps
        self.stop_on_parse_error = stop_on_parse_error
        self.external_tool_handler = external_tool_handler
        self.max_external_calls = max_external_calls

    async def play(self, world: ParallelWorld, setting: Setting, recording: Recording) -> None:
        """Play one episode."""
        names = list(world.possible_agents)
        check_names(list(self.agents), names, "give MultiAgentSyncProtocol one agent for each")
        players = seat_players(self, self.agents, setting, recording)
        first = await drive(world.reset, seed=setting.seed)
        seen: dict[str, str] = {}
        for name, (obs, _) in first.items():
            seen[name] = obs
            players[name].agent.observe(obs)
        for _ in range(self.max_steps):
            live = [name for name in names if name in world.agents and not players[name].over]
            if not live:
                break
            turns = await self._poll({name: players[name] for name in live})
            actions = {
                name: step.parse_result.action
                for name, step in turns.items()
                if step.parse_result is not None and not step.parse_failed
            }
            outcomes = await drive(world.step, actions)
            for name, outcome in outcomes.items():
                if name in turns and not players[name].over:
                    seen[name] = self._tell(
                        players[name], turns[name], actions.get(name), seen[name], outcome
                    )
                else:
                    players[name].builder.add_reward(outcome.reward)
        for player in players.values():
            player.builder.end(reason=TruncationReason.MAX_STEPS)

    async def _poll(self, players: Mapping[str, Player]) -> dict[str, AgentStep]:
        """Return the turns of all agents, taken at the same time; who is out has none."""

        async def turn(player: Player) -> AgentStep | None:
            try:
                step = await player.take_turn()
            except Cut as cut:
                player.builder.end(reason=cut.reason)
                return None
            if step.parse_failed and self.stop_on_parse_error:
                player.builder.end(terminated=True)
            return step

        steps = await at_once([turn(player) for player in players.values()])
        return {n: step for n, step in zip(players, steps, strict=True) if step is not None}

    @staticmethod
    def _tell(
        player: Player, step: AgentStep, action: Any, before: str, outcome: StepOutcome
    ) -> str:
        """Record what the round was to one agent, tell it, and return what it sees now."""
        feedback = player.no_action(step) if step.parse_failed else ""
        if not feedback and BAD_ACTION in outcome.info:
            feedback = f"That is no action: {outcome.info[BAD_ACTION]}"
        obs = "\n".join(part for part in (feedback, outcome.obs) if part)
        player.record_outcome(action, before, replace(outcome, obs=obs))
        if not player.over:
            player.agent.observe(obs)
        return obs


def seat_players(
    protocol: Any, agents: Mapping[str, Any], setting: Setting, recording: Recording
) -> dict[str, Player]:
    """Return a player for each seat, begun; seats keep the order in which they were given."""
    players: dict[str, Player] = {}
    for name, source in agents.items():
        agent = make_agent(source)
        builder = RolloutBuilder(agent, f"{setting.episode_id}/{name}", meta={"seat": name})
        own = replace(setting, sampling_seed=seat_seed(setting, "seat", name))
        players[name] = Player(
            agent,
            recording.begin(builder),
            own,
            handler=protocol.external_tool_handler,
            max_external_calls=protocol.max_external_calls,
        )
        players[name].begin(setting.messages)
    return players
