"""Protocols for several agents: all at once, or one after another.

`MultiAgentSyncProtocol` plays worlds like PettingZoo's `ParallelEnv`: in every round all live
agents take their turns at the same time, then the world steps once. Truncation is per agent.
`TurnProtocol` plays worlds like PettingZoo's `AECEnv`: the current agent sees the world and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolltree.agents.protocols.episode import EpisodeContext, Recording
from rolltree.agents.protocols.player import EpisodeCut, Player
from rolltree.agents.protocols.single import AgentSource, InteractionProtocol
from rolltree.agents.worlds import BAD_ACTION, ParallelWorld, TurnWorld, drive
from rolltree.environments.tools import side_by_side
from rolltree.values.errors import did_you_mean
from rolltree.values.seeds import derive_seed
from rolltree.values.steps import AgentStep, StepOutcome
from rolltree.values.types import TruncationReason


@dataclass(frozen=True, slots=True)
class Opponent:
    """A scripted player: `make(seed)` returns a function from an observation to an action.

    Example: `Opponent(lambda seed: partial(pick_a_free_field, random.Random(seed)))`. It has no
    rollout, so it is not trained.
    """

    make: Callable[[int], Callable[[str], Any]]


class MultiAgentSyncProtocol(InteractionProtocol):
    """Several agents, at most one step of the world per round.

    Each agent's rollout has its own id, `<episode>/<agent>`, and its own sampling seed. An agent
    whose answer has no action gets feedback, and is asked again in the next round. The world is
    stepped without it; if nobody acts, or the world needs everybody (its `needs_all`), it
    is not stepped, and the others' actions wait.

    Args:
        agents: maps the world's names to agents, to functions that make them, or to an `Opponent`.
        settings: those of `InteractionProtocol`. `max_steps` counts rounds. With
            `stop_on_parse_error`, an agent whose answer has no action is out. A world that needs
            everybody ends when an agent is out: truncated ("env") for the others.
    """

    def __init__(self, agents: Mapping[str, AgentSource | Opponent], **settings: Any) -> None:
        super().__init__(**settings)
        self.agents = dict(agents)

    async def play(
        self, world: ParallelWorld, context: EpisodeContext, recording: Recording
    ) -> None:
        """Play one episode."""
        names = list(world.possible_agents)
        check_names(list(self.agents), names, "give MultiAgentSyncProtocol one agent for each")
        players, scripted = _seated(self, self.agents, context, recording)
        first = await drive(world.reset, seed=context.seed)
        seen: dict[str, str] = {}
        for name, (obs, _) in first.items():
            seen[name] = obs
            if name in players:
                players[name].agent.observe(obs)
        reason = TruncationReason.MAX_STEPS
        needs_all = getattr(world, "needs_all", False)
        # The actions that the world has yet to take, and the turns that have yet to be answered.
        actions: dict[str, Any] = {}
        turns: dict[str, AgentStep] = {}
        for _ in range(self.max_steps):
            # In the world's order of names, so that a round does not depend on who answered first.
            names = [name for name in world.possible_agents if name in world.agents]
            live = [name for name in names if name in players and not players[name].over]
            if not live:
                break
            turns |= await self._poll({n: players[n] for n in live if n not in actions})
            if needs_all and any(players[name].over for name in names if name in players):
                reason = TruncationReason.ENV
                break
            for name in names:
                if name in scripted and name not in actions:
                    actions[name] = scripted[name](seen[name])
                elif name in turns and not turns[name].parse_failed:
                    actions[name] = _action(turns[name])
            outcomes: Mapping[str, StepOutcome] = {}
            if all(name in actions for name in names) if needs_all else actions:
                outcomes = await drive(world.step, {n: actions[n] for n in names if n in actions})
            for name, outcome in outcomes.items():
                if name in scripted:
                    seen[name] = outcome.obs
                elif name in turns and not players[name].over:
                    seen[name] = self._deliver(
                        players[name], turns.pop(name), actions.get(name), seen[name], outcome
                    )
                else:
                    # An agent that is out may still win or lose through what the others do.
                    players[name].builder.add_reward(outcome.reward)
            for name in [n for n, step in turns.items() if step.parse_failed]:
                seen[name] = players[name].no_action(turns.pop(name))
                players[name].agent.observe(seen[name])
            # A world that needs everybody refuses some actions without taking the others.
            actions = {n: a for n, a in actions.items() if needs_all and n not in outcomes}
        for player in players.values():
            player.builder.end(reason=reason)

    async def _poll(self, players: Mapping[str, Player]) -> dict[str, AgentStep]:
        """Return the turns of all agents, taken at the same time; an agent that is out has none."""

        async def turn(player: Player) -> AgentStep | None:
            try:
                step = await player.take_turn()
            except EpisodeCut as cut:
                player.builder.end(reason=cut.reason)
                return None
            if step.parse_failed and self.stop_on_parse_error:
                player.builder.end(terminated=True)
                return None
            return step

        steps = await side_by_side([turn(player) for player in players.values()])
        return {n: step for n, step in zip(players, steps, strict=True) if step is not None}

    @staticmethod
    def _deliver(
        player: Player, step: AgentStep, action: Any, before: str, outcome: StepOutcome
    ) -> str:
        """Record the round's outcome for one agent, show it, and return the agent's view."""
        feedback = player.no_action(step) if step.parse_failed else ""
        if not feedback and BAD_ACTION in outcome.info:
            feedback = f"Invalid action: {outcome.info[BAD_ACTION]}"
        obs = "\n".join(part for part in (feedback, outcome.obs) if part)
        player.record_outcome(action, before, replace(outcome, obs=obs))
        if not player.over:
            player.agent.observe(obs)
        return obs


class TurnProtocol(InteractionProtocol):
    """Several agents, one at a time.

    An agent whose answer has no action gets feedback and keeps the turn.

    Args:
        agents: maps the world's names to agents, to functions that make them, or to an `Opponent`.
        settings: those of `InteractionProtocol`. `max_steps` counts the turns of all agents
            together (200 by default). With `stop_on_parse_error`, an answer without an action ends
            the episode: `terminated` for its agent, truncated ("env") for the others.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentSource | Opponent],
        *,
        max_steps: int = 200,
        **settings: Any,
    ) -> None:
        super().__init__(max_steps=max_steps, **settings)
        self.agents = dict(agents)

    async def play(self, world: TurnWorld, context: EpisodeContext, recording: Recording) -> None:
        """Play one episode."""
        check_names(
            list(self.agents), list(world.possible_agents), "give TurnProtocol one agent for each"
        )
        players, scripted = _seated(self, self.agents, context, recording)
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
                self._update_others(players, name, outcomes)
        except EpisodeCut as cut:
            reason = cut.reason
        for player in players.values():
            player.builder.end(reason=reason)

    async def _turn(
        self, player: Player, world: TurnWorld, obs: str
    ) -> dict[str, StepOutcome] | None:
        """Let an agent act and step the world; None if its answer had no action."""
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
            # The agent keeps the turn, and the next observation does not mention the bad action.
            player.notice = outcome.obs
        return outcomes

    @staticmethod
    def _update_others(
        players: Mapping[str, Player], actor: str, outcomes: Mapping[str, StepOutcome]
    ) -> None:
        """Give the other agents their rewards for the step, and end those that it ended."""
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


def _seated(
    protocol: InteractionProtocol,
    agents: Mapping[str, AgentSource | Opponent],
    context: EpisodeContext,
    recording: Recording,
) -> tuple[dict[str, Player], dict[str, Callable[[str], Any]]]:
    """Return the players of the agents, whose episodes have begun, and the opponents' functions."""
    players = {
        name: protocol.seat(agent, context, recording, name)
        for name, agent in agents.items()
        if not isinstance(agent, Opponent)
    }
    for player in players.values():
        player.begin(context.messages)
    scripted = {
        # Seeded from the world's seed: members of a group must meet the same opponent.
        name: agent.make(derive_seed(context.seed or 0, "opponent", name))
        for name, agent in agents.items()
        if isinstance(agent, Opponent)
    }
    return players, scripted


def _action(step: AgentStep) -> Any:
    assert step.parse_result is not None
    return step.parse_result.action


def check_names(given: Sequence[str], wanted: Sequence[str], what: str) -> None:
    """Raise `ValueError` unless the given agents are exactly the world's."""
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted]
    if missing or extra:
        said = f"{missing[0]!r} has no agent" if missing else f"{extra[0]!r} is not one of them"
        hint = did_you_mean((missing or extra)[0], given if missing else wanted)
        raise ValueError(f"the world's agents are {list(wanted)}, but {said}: {what}.{hint}")
