"""`GymWorld`: any `gymnasium.Env`, read and acted on by text.

It knows Gymnasium's interface: `reset(seed=)`, five values from `step`, spaces, ANSI rendering. It
leaves out vector environments and images. Needs the `gymnasium` package only to make a world by its
id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rolltree.errors import ConfigError, did_you_mean
from rolltree.seeds import MAX_SEED
from rolltree.steps import StepOutcome
from rolltree.types import Info
from rolltree.worlds.adapter import Adapter, Snapshots, bad_action
from rolltree.worlds.spaces import action_reader

_HIGHLIGHT = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class GymWorld(Adapter):
    """A Gymnasium world for one agent.

    An action that is a text becomes one of the world's by `to_action`, without it by the action
    space (`action_reader`); a `ValueError` is told to the model and changes nothing. Any other
    action, which the agent's parser made, is passed on as it is. An observation becomes text by
    `to_text`; without it, strings stay as they are and everything else is an error.

    Args:
        world: a Gymnasium id, a world, or a function that returns one.
        to_action: from text to an action.
        to_text: from an observation to text, or "render": what the world renders as "ansi" (then
            make it with `render_mode="ansi"`), highlighted cells in brackets.
        action_names: names of a `Discrete` space's actions, in order.
        world_args: arguments of `gymnasium.make`, or of the function.
        snapshots: "own", or "deepcopy" for worlds that keep nothing outside themselves.
        in_thread: whether its methods block and are called in a thread.

    Raises:
        ConfigError: there is no such id, or the action space needs `to_action`.
    """

    def __init__(
        self,
        world: Any,
        *,
        to_action: Callable[[str], Any] | None = None,
        to_text: Callable[[Any], str] | Literal["render"] | None = None,
        action_names: Sequence[str] = (),
        world_args: dict[str, Any] | None = None,
        snapshots: Snapshots = "own",
        in_thread: bool = True,
    ) -> None:
        super().__init__(
            gym_maker(world, world_args or {}), snapshots=snapshots, in_thread=in_thread
        )
        self._to_action = to_action or action_reader(self.env.action_space, tuple(action_names))
        self._to_text = self._render if to_text == "render" else to_text or plain_text

    def reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Begin an episode; Gymnasium seeds are 31 bits."""
        observation, info = self.env.reset(seed=None if seed is None else seed % MAX_SEED)
        return self._to_text(observation), info

    def step(self, action: Any) -> StepOutcome:
        """Step the world, or say why the text is no action."""
        if isinstance(action, str):
            try:
                action = self._to_action(action)
            except ValueError as error:
                return bad_action(error)
        observation, reward, terminated, truncated, info = self.env.step(action)
        return StepOutcome(
            self._to_text(observation), float(reward), bool(terminated), bool(truncated), info
        )

    def _render(self, observation: Any) -> str:
        text = self.env.render()
        if not isinstance(text, str):
            raise ConfigError(
                f"the world renders as {type(text).__name__}, not as text. Make it with "
                'render_mode="ansi" (world_args={"render_mode": "ansi"}), or pass a function as '
                "to_text."
            )
        return plain_ansi(text)


def gym_maker(world: Any, args: dict[str, Any]) -> Any:
    """Return a function that makes the world; a world that exists passes through.

    Raises:
        ConfigError: the package is missing, or has no such id.
    """
    if not isinstance(world, str):
        return (lambda: world(**args)) if args else world
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"making {world!r} by its id needs the `gymnasium` package. Install it with "
            "`pip install rolltree[envs]`."
        ) from error
    if ":" not in world and world not in gymnasium.registry:
        raise ConfigError(
            f"Gymnasium has no world {world!r}.{_nearest(world, gymnasium.registry)} Import the "
            "package that registers it first, or write 'package:id'."
        )
    return lambda: gymnasium.make(world, **args)


def plain_text(observation: Any) -> str:
    """Return an observation that is text.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(observation, str):
        return observation
    raise ConfigError(
        f"the world's observation is a {type(observation).__name__}, not text. Pass to_text=..., a "
        "function from an observation to the text that the model reads."
    )


def plain_ansi(text: str) -> str:
    r"""Return ANSI text without escapes, what was coloured in brackets.

    >>> plain_ansi("\x1b[41mS\x1b[0mFF")
    '[S]FF'
    """
    return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", text)).strip("\n")


def _nearest(name: str, known: Any) -> str:
    hint = did_you_mean(name, known)
    return hint if "Did you mean" in hint else ""
