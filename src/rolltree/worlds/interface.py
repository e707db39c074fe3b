"""What a world is to a protocol: text in, text out, one interface per way of taking turns.

`World` is for one agent, `ParallelWorld` for several that act at once (PettingZoo's
`ParallelEnv`), `TurnWorld` for several that act one after another (PettingZoo's `AECEnv`).
`drive` calls a world's method from an event loop. The module knows no library of worlds; the
adapters beside it do. It leaves out who plays.

A world that can be saved and restored has `snapshot()` and `restore(saved)` (`CanSnapshot`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from rolltree.steps import StepOutcome
from rolltree.threads import run_in_thread
from rolltree.types import Info


@runtime_checkable
class World(Protocol):
    """A world for one agent. Methods may be asynchronous.

    `in_thread`, where a world has it, says whether its methods block and run in a thread (default:
    yes). An action that the world does not understand is answered with an observation that says
    so; it is no exception.
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
    if not getattr(world, "in_thread", True):
        result = method(*args, **kwargs)
    else:
        result = await run_in_thread(lambda: method(*args, **kwargs), name="rolltree-world")
    return await result if inspect.isawaitable(result) else result
