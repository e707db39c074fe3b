"""`ProtocolEnvironment`: agents, a protocol and worlds as an `Environment`.

Each rollout of an episode becomes a state, and each model call of an agent a step of its
trajectory, so evaluation, training and the store need to know only one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from typing import Any

from rolltree._helpers.tasks import contained
from rolltree.agents.protocols import (
    EpisodeContext,
    InteractionProtocol,
    Recording,
    RolloutBuilder,
    open_world,
)
from rolltree.environments.environment import Environment
from rolltree.environments.lifecycle import discover, in_phase, note_raised
from rolltree.environments.rubrics import PerAgentRubric, Rubric, as_rubric
from rolltree.inference.client import as_client
from rolltree.rollouts import derive_seed, merge_args
from rolltree.rollouts.requests import current_episode
from rolltree.rollouts.settle import settle_state
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError
from rolltree.values.steps import INCOMPLETE, AgentStep, EnvironmentStep, Rollout
from rolltree.values.types import RolloutInput, SamplingArgs, State

MakeWorld = Callable[[RolloutInput], Any]
"""Returns a new world for a row. It may be asynchronous; a plain function should not block."""


class ProtocolEnvironment(Environment):
    """Plays a protocol's episodes as rollouts.

    An episode has one state per rollout: first those of the episode's own agents, then delegated
    ones. `state["agent"]`, `["rollout_id"]`, `["parent_rollout"]`, `["parent_step"]` (the parent's
    model call that delegated), `["depth"]`, and for delegated ones `["subtask"]` and `["result"]`
    say which is which. A step's reward is the sum of what parser, agent and world gave for it; a
    rollout's is the sum over its steps, unless a rubric with functions scores it.

    Args:
        protocol: how agents and worlds interact. Give it functions that make agents, not agents,
            because many episodes run at once.
        world: returns a new world for a row; it is closed after the episode. None: the row's prompt
            is the question, and the first answer with an action ends the episode.
        rubrics: rubrics by agent name, for agents that `rubric` does not score. A delegated rollout
            of an agent without a rubric keeps the sum of its steps' rewards.
        num_train, num_eval: number of worlds, if there is a world and no dataset. Each has a seed
            that is derived from the run's seed and the example.
        settings: `Environment`'s. A row's prompt is in the agents' histories before the first
            observation.

    Raises:
        ConfigError: a setting has no effect with a protocol.
    """

    def __init__(
        self,
        protocol: InteractionProtocol,
        world: MakeWorld | None = None,
        *,
        rubrics: Mapping[str, Rubric] | None = None,
        num_train: int = 1000,
        num_eval: int = 100,
        **settings: Any,
    ) -> None:
        # An environment's tools and stop conditions would silently have no effect here.
        ignored = [name for name in ("oai_tools",) if settings.get(name)]
        ignored += [name for name, _ in discover(type(self))["stop"]]
        if settings.get("message_type", "chat") != "chat":
            ignored.append("message_type")
        if ignored:
            raise ConfigError(
                f"{ignored[0]!r} has no effect in a {type(self).__name__}: agents have their own "
                "tools and speak by chat, and the protocol and the world decide when an episode "
                "ends. Give tools to the agents; end the episode in the world."
            )
        if world is not None and not settings.get("dataset") and not settings.get("eval_dataset"):
            # Rows only count worlds here; worlds differ by their seed.
            settings["dataset"] = [{"prompt": []}] * num_train or None
            settings["eval_dataset"] = [{"prompt": []}] * num_eval or None
        default = as_rubric(settings.pop("rubric", None))
        others = {name: as_rubric(rubric) for name, rubric in (rubrics or {}).items()}
        super().__init__(rubric=PerAgentRubric(default, others), **settings)
        self.protocol = protocol
        self.make_world = world

    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one episode and return the state of its first rollout."""
        return (await self.rollouts(input, client, model, sampling_args))[0]

    async def rollouts(
        self,
        input: RolloutInput,
        client: Any,
        model: str = "",
        sampling_args: SamplingArgs | None = None,
    ) -> list[State]:
        """Play one episode and return the state of each rollout.

        A failure is in `state["error"]`. If the episode is cancelled, the engine's `Episode` has
        the states, with the steps so far.
        """
        first = await self.init_state(
            input, client=client, model=model, sampling_args=sampling_args
        )
        recording = Recording()
        states = [first]
        try:
            with in_phase("setup"), contained():
                state = await self._set_up(first)
                context = self._context(state, client, model, sampling_args)
            make = self.make_world
            world = None if make is None else (lambda: make(input))
            with contained():
                async with open_world(world) as place:
                    await self.protocol.run(place, context, recording)
        except Exception as error:  # noqa: BLE001  a failed rollout is data
            self.record_failure(first, error)
        finally:
            # Also when cancelled: the recording becomes states before the cancellation goes on.
            states = await self._states(input, first, recording)
            for state in states:
                await self._cleanup(state)
        return states

    def _context(
        self, state: State, client: Any, model: str, sampling_args: SamplingArgs | None
    ) -> EpisodeContext:
        # The seed is passed separately, since every agent derives its own from it.
        args = dict(merge_args(self.sampling_args, sampling_args))
        seed = args.pop("seed", None)
        episode = current_episode()
        return EpisodeContext(
            seed=state.seed,
            # Not from the rollout's own series of seeds, which calls of `state["client"]` use.
            sampling_seed=None if seed is None else derive_seed(seed, "agents"),
            client=as_client(client, model or None),
            sampling=args,
            # Messages, since only chats are allowed here.
            messages=state["prompt"],
            clocks=() if episode is None else (episode.clock,),
            max_seq_len=self.max_seq_len,
            episode_id="episode" if episode is None else episode.request.request_id,
        )

    async def _states(self, input: RolloutInput, first: State, recording: Recording) -> list[State]:
        """Turn the recording into states; `first` becomes the first rollout's."""
        builders = recording.ordered()
        failed = first.get("error")
        # A copy from before the first rollout is written into it: the other states begin as
        # `setup_state` left them, without the first one's reward.
        before = first.copy()
        states: list[State] = []
        for builder in builders:
            state = first if not states else _another(before)
            fill_state(state, builder)
            if failed is not None and builder.parent is None:
                state.error, state.reward = failed, None
            states.append(state)
        states = states or [first]
        for state in states:
            settle_state(state, input)
            await self._render_timing(state)
            await self._render_completion(state)
            Trajectory.of(state.trajectory).trim()
        episode = current_episode()
        if episode is not None:
            episode.states[:] = [s for s in episode.states if s is not first] + states
        return states


def _another(first: State) -> State:
    """Return a state of the same episode, with its own row."""
    state = first.copy()
    # A state's prompt is stored in its input, so two states must not share one.
    dict.__setitem__(state, "input", deepcopy(dict(dict.__getitem__(first, "input"))))
    state.timing = copy(first.timing)
    # Each state has its own cleanup.
    state.pop("cleaned_up", None)
    return state


def fill_state(state: State, builder: RolloutBuilder) -> None:
    """Write one rollout into a state.

    `environment_steps` keeps the world's part as plain data; `metrics` has the numbers of turns and
    model calls, and the rates of answers without an action and of answers that were cut off.
    """
    rollout = builder.build()
    state.trajectory = Trajectory.of(builder.agent.trajectory)
    _write_step_rewards(rollout)
    # A reward that the world gave an agent before its first turn is added to its first step.
    early = float(rollout.meta.get("early_reward", 0.0))
    if early and state.trajectory:
        state.trajectory[0]["reward"] += early
    failed = rollout.error is not None
    state.update(
        agent=rollout.agent,
        rollout_id=rollout.rollout_id,
        parent_rollout=rollout.parent_rollout,
        parent_step=_parent_call(builder),
        depth=rollout.depth,
        rollout_meta=dict(rollout.meta),
        environment_steps=[_plain(step) for step in rollout.environment_steps],
        reward=None if failed else rollout.reward + early,
        has_step_rewards=True,
        error=rollout.error,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        truncation_reason=None if not rollout.truncated else str(rollout.truncation_reason),
        is_completed=not failed and builder.over,
        stop_condition=_stop_condition(rollout),
        metrics=_metrics(rollout),
    )
    if rollout.environment_steps:
        last = rollout.environment_steps[-1]
        state["world_info"] = dict(last.info)
        if last.terminated or last.truncated:
            state.final_env_response = [{"role": "user", "content": last.next_obs}]
    for key in ("subtask", "result", "seat"):
        if key in rollout.meta:
            state[key] = rollout.meta[key]
    if builder.raised is not None:
        note_raised(state, builder.raised)
    if state.trajectory:
        state.prompt = list(state.trajectory[0]["prompt"])


def _write_step_rewards(rollout: Rollout) -> None:
    """Set each call's reward to the agent's, and add the world's to the last call of the turn."""
    # First the agents' rewards, then the worlds' in addition: each counts once (`steps`).
    for step in rollout.steps:
        if isinstance(step, AgentStep):
            step.record["reward"] = step.reward
    for step in rollout.environment_steps:
        if step.agent_steps:
            call = rollout.steps[step.agent_steps[-1]]
            assert isinstance(call, AgentStep)
            call.record["reward"] = (call.record["reward"] or 0.0) + step.reward


def _parent_call(builder: RolloutBuilder) -> int | None:
    """Return the index, among model calls, of the parent's call that delegated this rollout."""
    if builder.parent is None or builder.parent_step is None:
        return None
    return sum(isinstance(step, AgentStep) for step in builder.parent.steps[: builder.parent_step])


def _plain(step: EnvironmentStep) -> dict[str, Any]:
    return {
        "turn": step.turn,
        "action": step.action,
        "next_obs": step.next_obs,
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": dict(step.info),
    }


def _stop_condition(rollout: Rollout) -> str | None:
    if rollout.truncated:
        return str(rollout.truncation_reason)
    return "terminated" if rollout.terminated else None


def _metrics(rollout: Rollout) -> dict[str, float]:
    calls = rollout.agent_steps
    turns = [step for step in calls if step.action_target == "env"]
    count = max(1, len(turns))
    return {
        "num_turns": float(len(turns)),
        "num_model_calls": float(len(calls)),
        "parse_failure_rate": sum(step.parse_failed for step in turns) / count,
        "incomplete_rate": sum(bool(step.info.get(INCOMPLETE)) for step in turns) / count,
    }
