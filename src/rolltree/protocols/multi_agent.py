"""Protocols for several agents: all at once, or one after another.

`MultiAgentSyncProtocol` plays worlds like PettingZoo's `ParallelEnv`: in every round all live
agents take their turns at the same time, then the world steps once. Truncation is per agent.
`TurnProtocol` plays worlds like PettingZoo's `AECEnv`: the current agent sees the world and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolltree.protocols.episode import (
    AgentSource,
    EpisodeContext,
    InteractionProtocol,
    Recording,
    RolloutBuilder,
    make_agent,
)
from rolltree.protocols.player import (
    EpisodeCut,
    ExternalToolHandler,
    Player,
    check_names,
    seat_seed,
)
from rolltree.protocols.single import check_max_steps
from rolltree.seeds import derive_seed
from rolltree.steps import AgentStep, StepOutcome
from rolltree.tools import side_by_side
from rolltree.types import TruncationReason
from rolltree.worlds import BAD_ACTION, ParallelWorld, TurnWorld, drive


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

    async def play(
        self, world: ParallelWorld, context: EpisodeContext, recording: Recording
    ) -> None:
        """Play one episode."""
        names = list(world.possible_agents)
        check_names(list(self.agents), names, "give MultiAgentSyncProtocol one agent for each")
        players = seat_players(self, self.agents, context, recording)
        first = await drive(world.reset, seed=context.seed)
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
            except EpisodeCut as cut:
                player.builder.end(reason=cut.reason)
                return None
            if step.parse_failed and self.stop_on_parse_error:
                player.builder.end(terminated=True)
            return step

        steps = await side_by_side([turn(player) for player in players.values()])
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
    protocol: Any, agents: Mapping[str, Any], context: EpisodeContext, recording: Recording
) -> dict[str, Player]:
    """Return a player for each seat, begun; seats keep the order in which they were given."""
    players: dict[str, Player] = {}
    for name, source in agents.items():
        agent = make_agent(source)
        builder = RolloutBuilder(agent, f"{context.episode_id}/{name}", meta={"seat": name})
        own = replace(context, sampling_seed=seat_seed(context, "seat", name))
        players[name] = Player(
            agent,
            recording.begin(builder),
            own,
            handler=protocol.external_tool_handler,
            max_external_calls=protocol.max_external_calls,
        )
        players[name].begin(context.messages)
    return players


@dataclass(frozen=True, slots=True)
class Opponent:
    """A player without a model: `make(seed)` gives a function from an observation to an action.

    Example: `Opponent(lambda seed: partial(pick_a_free_field, random.Random(seed)))`. It has no
    rollout: nothing of it is trained.
    """

    make: Callable[[int], Callable[[str], Any]]


class TurnProtocol(InteractionProtocol):
    """Several agents, one at a time.

    An agent whose answer holds no action is told so and keeps the turn.

    Args:
        agents: the world's names to agents, to functions that make them, or to an `Opponent`.
        max_steps: most turns of all agents together, those without an action included.
        stop_on_parse_error: an answer without an action ends the episode: `terminated` for the
            agent that gave it; for the others it is truncated by the world's rules ("env").
        external_tool_handler, max_external_calls: as in `SingleAgentProtocol`, for every agent.

    Raises:
        ConfigError: `max_steps` is below 1.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentSource | Opponent],
        *,
        max_steps: int = 200,
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

    async def play(self, world: TurnWorld, context: EpisodeContext, recording: Recording) -> None:
        """Play one episode."""
        check_names(
            list(self.agents), list(world.possible_agents), "give TurnProtocol one agent for each"
        )
        models = {n: a for n, a in self.agents.items() if not isinstance(a, Opponent)}
        scripted = {
            name: agent.make(derive_seed(context.seed or 0, "opponent", name))
            for name, agent in self.agents.items()
            if isinstance(agent, Opponent)
        }
        players = seat_players(self, models, context, recording)
        await drive(world.reset, seed=context.seed)
        reason = TruncationReason.MAX_STEPS
        try:
            for _ in range(self.max_steps):
                name = world.current
                if name is None:
                    break
                obs = await drive(world.observe, name)
                if name in scripted:
                    outcomes = await drive(world.step, scripted[name](obs))
                elif (done := await self._turn(players[name], world, obs)) is not None:
                    outcomes = done
                else:
                    if players[name].over:
                        reason = TruncationReason.ENV
                        break
                    continue
                self._tell_others(players, name, outcomes)
        except EpisodeCut as cut:
            reason = cut.reason
        for player in players.values():
            player.builder.end(reason=reason)

    async def _turn(
        self, player: Player, world: TurnWorld, obs: str
    ) -> dict[str, StepOutcome] | None:
        """Let an agent act and step the world; None when its answer held no action."""
        obs = "\n".join(part for part in (player.notice, obs) if part)
        player.notice = ""
        player.agent.observe(obs)
        step = await player.take_turn()
        parsed = step.parse_result
        assert parsed is not None
        if parsed.failed:
            player.notice = player.no_action(step)
            if self.stop_on_parse_error:
                player.builder.end(terminated=True)
            return None
        outcomes: dict[str, StepOutcome] = await drive(world.step, parsed.action)
        outcome = outcomes.get(player.builder.meta["seat"], StepOutcome(""))
        player.record_outcome(parsed.action, obs, outcome)
        if BAD_ACTION in outcome.info:
            player.notice = outcome.obs  # the turn stays, and the board says nothing about it
        return outcomes

    @staticmethod
    def _tell_others(
        players: Mapping[str, Player], actor: str, outcomes: Mapping[str, StepOutcome]
    ) -> None:
        """Give the others what the step was worth to them, and end those that it ended."""
        for name, outcome in outcomes.items():
            if name == actor or name not in players:
                continue
            builder = players[name].builder
            builder.add_reward(outcome.reward)
            if outcome.done:
                is_cut = outcome.truncated and not outcome.terminated
                builder.end(
                    terminated=outcome.terminated, reason=TruncationReason.ENV if is_cut else None
                )
