"""`WorldEnv`: a world somebody else wrote, played by text, one world per rollout.

It knows the way of a turn: what the model says is a step of the world, at once, so that the last
turn counts and the end of a game costs no further call. It knows nothing about any world's library;
`gym_env` and `textarena_env` do. It leaves out several model-driven players.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

from rolltree.environments.environment import settle
from rolltree.environments.lifecycle import cleanup, in_phase, stop
from rolltree.environments.multiturn import MultiTurnEnv
from rolltree.errors import ConfigError
from rolltree.parsers import text_of
from rolltree.steps import StepOutcome
from rolltree.threads import run_in_thread
from rolltree.types import Messages, State

WORLD = "world"


class WorldEnv(MultiTurnEnv):
    """Plays worlds that are made, seeded and closed per rollout.

    The first observation is the end of the prompt. A step's reward is the world's; the rollout's
    reward is their sum, unless a rubric with functions says otherwise. `state["world"]` is the
    world while the rollout lasts, `state["world_info"]` what its last step said.

    Args:
        num_train, num_eval: how many worlds there are to train on and to evaluate; each has its
            seed, derived from the run's seed and the example (`state["seed"]`).
        in_thread: run the world in a thread, so that a slow one holds nobody up. False for quick
            ones, and for those that are bound to one thread.
        settings: `MultiTurnEnv`'s. `dataset` replaces the rows that are made here.
    """

    def __init__(
        self, *, num_train: int = 1000, num_eval: int = 100, in_thread: bool = True, **settings: Any
    ) -> None:
        if settings.get("message_type", "chat") != "chat":
            raise ConfigError(f"{type(self).__name__} plays by chat messages only.")
        if settings.get("dataset") is None and settings.get("eval_dataset") is None:
            settings["dataset"] = [{"prompt": []}] * num_train or None
            settings["eval_dataset"] = [{"prompt": []}] * num_eval or None
        super().__init__(**settings)
        self._in_thread = in_thread

    @abstractmethod
    def open_world(self, state: State) -> tuple[Any, str]:
        """Return a new world, reset with `state["seed"]`, and its first observation."""

    @abstractmethod
    def step_world(self, world: Any, text: str, state: State) -> StepOutcome:
        """Play what the model said."""

    def close_world(self, world: Any) -> None:
        """Release what the world holds."""

    async def setup_state(self, state: State) -> State:
        """Open the world and put its first observation behind the prompt."""
        state[WORLD], first = await self._call(self.open_world, state)
        state["prompt"] = [*state["prompt"], {"role": "user", "content": first}]
        state["world_info"], state["world_step"] = {}, None
        state["reward"] = 0.0
        return state

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Any
    ) -> None:
        """Append the step of the call, and play it."""
        await super().add_model_response(state, prompt_messages, response)
        if state.get("prompt_too_long"):
            return
        step = state["trajectory"][-1]
        with in_phase("environment"):
            done = await self._call(
                self.step_world, state[WORLD], text_of(step["completion"][-1]), state
            )
        step["reward"] = done.reward
        state["reward"] += done.reward
        state["world_step"], state["world_info"] = done, dict(done.info)
        if done.terminated or done.truncated:
            state["truncated"] = done.truncated and not done.terminated
            state["final_env_response"] = [{"role": "user", "content": done.obs}]

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Return the observation after the model's last action."""
        return [{"role": "user", "content": state["world_step"].obs}]

    @stop(priority=60)
    async def world_ended(self, state: State) -> bool:
        """The world said `terminated` or `truncated`."""
        done = state.get("world_step")
        return done is not None and (done.terminated or done.truncated)

    @cleanup
    async def release_world(self, state: State) -> None:
        """Close the world."""
        world = state.pop(WORLD, None)
        if world is not None:
            await self._call(self.close_world, world)

    async def _call(self, func: Any, *args: Any) -> Any:
        if self._in_thread:
            work = functools.partial(func, *args)
            return await settle(await run_in_thread(work, name="rolltree-world"))
        return await settle(func(*args))
