"""One running episode: its clock, and the states it has made so far."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from rolltree.inference.deadline import Clock, TimedClient
from rolltree.types import RolloutRequest, State

__all__ = ["Clock", "Episode", "TimedClient", "current_episode", "playing"]


@dataclass(slots=True)
class Episode:
    """What the engine and the source share about one episode."""

    request: RolloutRequest
    clock: Clock = field(default_factory=Clock)
    states: list[State] = field(default_factory=list)  # registered as they are made


_CURRENT: ContextVar[Episode | None] = ContextVar("rolltree_episode", default=None)


def current_episode() -> Episode | None:
    """Return the episode that the calling task plays, or None outside an episode."""
    return _CURRENT.get()


class playing:  # noqa: N801  (a context manager that reads as a verb)
    """`with playing(episode):` makes `episode` the current one of this task."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def __enter__(self) -> Episode:
        self._token = _CURRENT.set(self._episode)
        return self._episode

    def __exit__(self, *exc: object) -> None:
        _CURRENT.reset(self._token)
