"""The interface of worlds, and the base class of adapters to worlds of other libraries.

`World` is for one agent, `ParallelWorld` for several that act at once (PettingZoo's
`ParallelEnv`), and `TurnWorld` for several that act one after another (PettingZoo's `AECEnv`). A
world that can be saved and restored has `snapshot()` and `restore(saved)` (`CanSnapshot`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from rolltree._helpers.tasks import undo_own_cancellation
from rolltree._helpers.threads import run_in_thread
from rolltree.values.errors import ConfigError
from rolltree.values.steps import StepOutcome
from rolltree.values.types import Info


@runtime_checkable
class World(Protocol):
    """A world for one agent. Methods may be asynchronous.

    The optional attribute `in_thread` says whether its methods block and run in a thread (default:
    yes). For an action that it does not understand, a world returns an observation that says so,
    instead of raising.
    """

    def reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        """Begin an episode; return the first observation."""
        ...

    def step(self, action: Any) -> StepOutcome:
        """Take the agent's action, which its parser made of its text."""
        ...

    def close(self) -> None:
        """Release what the world holds."""
        ...


class ParallelWorld(Protocol):
    """A world in which all live agents act at once.

    The optional attribute `needs_all` says that it can only be stepped with an action of every live
    agent (default: no). Such a world may refuse actions: it returns outcomes for their agents only,
    with `BAD_ACTION` in their info, and changes nothing.
    """

    possible_agents: list[str]

    @property
    def agents(self) -> list[str]:
        """The agents that still play."""
        ...

    def reset(self, *, seed: int | None = None) -> dict[str, tuple[str, Info]]:
        """Begin an episode; return each agent's first observation."""
        ...

    def step(self, actions: Mapping[str, Any]) -> dict[str, StepOutcome]:
        """Take the agents' actions; an agent that gave none is missing in `actions`."""
        ...

    def close(self) -> None:
        """Release what the world holds."""
        ...


class TurnWorld(Protocol):
    """A world in which one agent acts at a time."""

    possible_agents: list[str]

    @property
    def current(self) -> str | None:
        """The agent whose turn it is; None if the episode is over."""
        ...

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode."""
        ...

    def observe(self, agent: str) -> str:
        """Return what an agent sees now."""
        ...

    def step(self, action: Any) -> dict[str, StepOutcome]:
        """Take the current agent's action; return the outcome for every agent still in play.

        An outcome's reward is that of this step alone, also for the other agents.
        """
        ...

    def close(self) -> None:
        """Release what the world holds."""
        ...


@runtime_checkable
class CanSnapshot(Protocol):
    """A world whose state can be saved and restored, any number of times."""

    def snapshot(self) -> Any:
        """Return the state, which later steps of the world do not change."""
        ...

    def restore(self, saved: Any) -> None:
        """Restore a state."""
        ...


async def drive(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a world; blocking ones run in a thread.

    Example: `outcome = await drive(world.step, action)`. If the calling task is cancelled, the
    thread is stopped as described in `rolltree._helpers.threads`.
    """
    world = getattr(method, "__self__", None)
    # By default in a thread, since a world that blocks would block all other rollouts.
    if inspect.iscoroutinefunction(method) or not getattr(world, "in_thread", True):
        result = method(*args, **kwargs)
    else:
        result = await run_in_thread(lambda: method(*args, **kwargs), name="rolltree-world")
    if inspect.isawaitable(result):
        result = await result
    await undo_own_cancellation()  # by a world that cancels its own tasks, and this one, too
    return result


BAD_ACTION = "bad_action"
"""Key of `StepOutcome.info`: why a text was not an action; the world did not change."""

Snapshots: TypeAlias = Literal["own", "deepcopy"]
"""How a world is saved: by its own `snapshot` and `restore`, or by `copy.deepcopy`, which is only
correct for worlds without state outside themselves."""


def bad_action(error: ValueError) -> StepOutcome:
    """Return the outcome that tells a model why its text is not an action."""
    return StepOutcome(f"Invalid action: {error}", info={BAD_ACTION: str(error)})


class Adapter:
    """Base class of the adapters; `env` is the world of the other library.

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
        # A class has a `step`, too, but it makes a world instead of being one.
        is_world = callable(getattr(make, "step", None)) and not isinstance(make, type)
        self.env: Any = make if is_world else make()
        self.in_thread = in_thread
        self._snapshots = snapshots

    def snapshot(self) -> Any:
        """Return the state, which later steps of the world do not change.

        Raises:
            ConfigError: this world cannot be saved.
        """
        if self._snapshots == "deepcopy":
            return copy_world(self.env)
        return self._own("snapshot")()

    def restore(self, saved: Any) -> None:
        """Restore a state, which can be restored again later.

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

    Many worlds of Gymnasium and PettingZoo define copying (by `EzPickle`) as making a new world
    from the original arguments, which loses the episode. This function bypasses that.
    """
    inner = _wrapped(world, {})
    # Filled in two steps, since worlds refer to each other.
    memo: dict[int, Any] = {key: object.__new__(type(each)) for key, each in inner.items()}
    for key, each in inner.items():
        vars(memo[key]).update(copy.deepcopy(vars(each), memo))
    return memo[id(world)]


def _wrapped(world: Any, known: dict[int, Any]) -> dict[int, Any]:
    """Return `world` and all worlds inside it, by `id`."""
    known[id(world)] = world
    for value in vars(world).values():
        is_world = callable(getattr(type(value), "step", None)) and hasattr(value, "__dict__")
        if is_world and id(value) not in known:
            _wrapped(value, known)
    return known
