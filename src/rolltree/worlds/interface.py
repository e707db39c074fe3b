"""The interface of worlds, and the base of the adapters to other libraries' worlds.

`World` is for one agent, `ParallelWorld` for several that act at once (PettingZoo's
`ParallelEnv`), and `TurnWorld` for several that act one after another (PettingZoo's `AECEnv`). A
world that can be saved and restored has `snapshot()` and `restore(saved)` (`CanSnapshot`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from rolltree.errors import ConfigError
from rolltree.steps import StepOutcome
from rolltree.threads import run_in_thread
from rolltree.types import Info


@runtime_checkable
class World(Protocol):
    """A world for one agent. Methods may be asynchronous.

    `in_thread`, if a world has it, says whether its methods block and run in a thread (default:
    yes). An action that the world does not understand is answered with an observation that says
    so; it is not an exception.
    """

    def reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Begin an episode; return the first observation."""
        ...

    def step(self, action: Any) -> StepOutcome:
        """Do what the agent decided: what its parser made of its text."""
        ...

    def close(self) -> None:
        """Release what the world holds."""
        ...


class ParallelWorld(Protocol):
    """A world in which all live agents act at once."""

    possible_agents: list[str]

    @property
    def agents(self) -> list[str]:
        """The agents that still play."""
        ...

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        """Begin an episode; return each agent's first observation."""
        ...

    def step(self, actions: Mapping[str, Any]) -> dict[str, StepOutcome]:
        """Do what the agents decided; an agent that gave no action is absent from `actions`."""
        ...

    def close(self) -> None:
        """Release what the world holds."""
        ...


class TurnWorld(Protocol):
    """A world in which one agent acts at a time."""

    possible_agents: list[str]

    @property
    def current(self) -> str | None:
        """Whose turn it is, None when the episode is over."""
        ...

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""
        ...

    def observe(self, agent: str) -> str:
        """Return what an agent sees now."""
        ...

    def step(self, action: Any) -> dict[str, StepOutcome]:
        """Do what the current agent decided; return what that was to every agent still in play.

        An outcome's reward is that of this step alone, also for agents whose turn it is not.
        """
        ...

    def close(self) -> None:
        """Release what the world holds."""
        ...


@runtime_checkable
class CanSnapshot(Protocol):
    """A world whose state can be saved and put back, any number of times."""

    def snapshot(self) -> Any:
        """Return the state, independent of what happens to the world later."""
        ...

    def restore(self, saved: Any) -> None:
        """Put a state back."""
        ...


async def drive(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a world; blocking ones run in a thread.

    Example: `outcome = await drive(world.step, action)`. When the calling task is cancelled, a
    thread is stopped as `rolltree.threads` says.
    """
    world = getattr(method, "__self__", None)
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    # By default in a thread: a world that blocks would hold every other rollout.
    if not getattr(world, "in_thread", True):
        result = method(*args, **kwargs)
    else:
        result = await run_in_thread(lambda: method(*args, **kwargs), name="rolltree-world")
    return await result if inspect.isawaitable(result) else result


BAD_ACTION = "bad_action"
"""Key of `StepOutcome.info`: why a text was not an action. Nothing was done then."""

Snapshots: TypeAlias = Literal["own", "deepcopy"]
"""How a world is saved: by its own `snapshot` and `restore`, or by `copy.deepcopy`, which is right
only for worlds that keep nothing outside themselves."""


def bad_action(error: ValueError) -> StepOutcome:
    """Return what a model is told about a text that is not an action."""
    return StepOutcome(f"Invalid action: {error}", info={BAD_ACTION: str(error)})


class Adapter:
    """Base of the adapters; `env` is the world of the other library.

    Args:
        make: a world, or a function that returns one.
        snapshots: how it can be saved.
        in_thread: whether its methods block and are called in a thread (`drive`).
    """

    def __init__(
        self,
        make: Callable[[], Any] | Any,
        *,
        snapshots: Snapshots = "own",
        in_thread: bool = True,
    ) -> None:
        if snapshots not in ("own", "deepcopy"):
            raise ConfigError(f"snapshots is {snapshots!r}; it is 'own' or 'deepcopy'.")
        # A class has a `step` too, and is what makes a world.
        is_world = callable(getattr(make, "step", None)) and not isinstance(make, type)
        self.env: Any = make if is_world else make()
        self.in_thread = in_thread
        self._snapshots = snapshots

    def snapshot(self) -> Any:
        """Return the state, independent of what happens to the world later.

        Raises:
            ConfigError: this world cannot be saved.
        """
        if self._snapshots == "deepcopy":
            return copy_world(self.env)
        return self._own("snapshot")()

    def restore(self, saved: Any) -> None:
        """Put a state back; it can be put back again later.

        Raises:
            ConfigError: this world cannot be saved.
        """
        if self._snapshots == "deepcopy":
            self.env = copy_world(saved)
        else:
            self._own("restore")(saved)

    def close(self) -> None:
        """Release what the world holds."""
        self.env.close()

    def _own(self, name: str) -> Any:
        method = getattr(getattr(self.env, "unwrapped", self.env), name, None)
        if method is None:
            raise ConfigError(
                f"a {type(self.env).__name__} has no {name}(), so this world cannot be saved. If "
                "it keeps nothing outside itself, pass snapshots='deepcopy'."
            )
        return method


def copy_world(world: Any) -> Any:
    """Return a deep copy of a world and of the worlds that it wraps.

    Many worlds of Gymnasium and PettingZoo say (`EzPickle`) that copying them means making new ones
    from the arguments that they were made with, which forgets the episode. That is passed over.
    """
    inner = _wrapped(world, {})
    # Filled in two steps, since worlds refer to each other.
    memo: dict[int, Any] = {key: object.__new__(type(each)) for key, each in inner.items()}
    for key, each in inner.items():
        vars(memo[key]).update(copy.deepcopy(vars(each), memo))
    return memo[id(world)]


def _wrapped(world: Any, known: dict[int, Any]) -> dict[int, Any]:
    """Return `world` and all worlds that it holds, by their id."""
    known[id(world)] = world
    for value in vars(world).values():
        is_world = callable(getattr(type(value), "step", None)) and hasattr(value, "__dict__")
        if is_world and id(value) not in known:
            _wrapped(value, known)
    return known
