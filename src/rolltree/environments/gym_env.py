"""`GymEnv`: any `gymnasium.Env` that can be played by text, one world per rollout.

It joins `rolltree.worlds.GymWorld` and `WorldEnv`. It leaves out vector environments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from rolltree.environments.worlds import WorldEnv
from rolltree.steps import StepOutcome
from rolltree.types import State
from rolltree.worlds import GymWorld, action_reader
from rolltree.worlds.gym import gym_maker


class GymEnv(WorldEnv):
    """Play a Gymnasium world, as `rolltree.worlds.GymWorld` reads it.

    A text that is no action is told to the model, costs a turn and changes nothing in the world.

    Args:
        world: a Gymnasium id, or a function that returns a new `gymnasium.Env`.
        to_action: from text to an action.
        to_text: from an observation to text, or "render".
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `gymnasium.make`, or of the function.
        settings: `WorldEnv`'s.

    Raises:
        ConfigError: there is no such id, or the action space needs `to_action`.
    """

    def __init__(
        self,
        world: str | Callable[..., Any],
        *,
        to_action: Callable[[str], Any] | None = None,
        to_text: Callable[[Any], str] | Literal["render"] | None = None,
        action_names: Sequence[str] = (),
        world_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._make = gym_maker(world, world_args or {})
        probe = self._make()
        try:
            space = probe.action_space
        finally:
            probe.close()
        self._to_action = to_action or action_reader(space, tuple(action_names))
        self._to_text = to_text
        if isinstance(world, str):
            settings.setdefault("env_id", world)
        super().__init__(**settings)

    def open_world(self, state: State) -> tuple[Any, str]:
        """Make and reset a world."""
        world = GymWorld(self._make, to_action=self._to_action, to_text=self._to_text)
        return world, world.reset(seed=state["seed"])[0]

    def step_world(self, world: Any, text: str, state: State) -> StepOutcome:
        """Step the world, or tell the model why its text is no action."""
        outcome: StepOutcome = world.step(text)
        return outcome

    def close_world(self, world: Any) -> None:
        """Close the world."""
        world.close()
