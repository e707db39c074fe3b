"""`TurnProtocol`: agents that act one after another, as in PettingZoo's `AECEnv`.

Whose turn it is sees the world and acts; what the step was worth to the others is added to their
last step, so a game that is lost by the opponent's move is lost in the loser's rollout. It leaves
out worlds in which several act at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rolltree.protocols.parallel import seat_players
from rolltree.protocols.player import Cut, ExternalToolHandler, Player, check_names
from rolltree.protocols.recording import Recording
from rolltree.protocols.setting import AgentSource, InteractionProtocol, Setting
from rolltree.protocols.single import check_max_steps
from rolltree.seeds import derive_seed
from rolltree.steps import StepOutcome
from rolltree.types import TruncationReason
from rolltree.worlds import BAD_ACTION, TurnWorld, drive


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

    async def play(self, world: TurnWorld, setting: Setting, recording: Recording) -> None:
        """Play one episode."""
        check_names(
            list(self.agents), list(world.possible_agents), "give TurnProtocol one agent for each"
        )
        models = {n: a for n, a in self.agents.items() if not isinstance(a, Opponent)}
        scripted = {
            name: agent.make(derive_seed(setting.seed or 0, "opponent", name))
            for name, agent in self.agents.items()
            if isinstance(agent, Opponent)
        }
        players = seat_players(self, models, setting, recording)
        await drive(world.reset, seed=setting.seed)
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
        except Cut as cut:
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
