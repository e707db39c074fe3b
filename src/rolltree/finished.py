"""Results of synchronous calls that may be awaited, without importing asyncio."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Self


class Finished(Coroutine[Any, Any, Any]):
    """A result of a synchronous call, which may be awaited all the same, and is itself then.

    So `await rt.evaluate(...)` and `asyncio.run(rt.evaluate(...))` work as they would with a
    coroutine, and nobody has to know which it is.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Self]:
        """Return this result, without waiting."""
        return self._itself().__await__()

    async def _itself(self) -> Self:
        return self

    def send(self, value: Any, /) -> Any:
        """End at once, as a coroutine that returns this result."""
        raise StopIteration(self)

    def throw(self, *raised: Any) -> Any:
        """Raise what a loop throws into a coroutine: its task was cancelled before it began."""
        return super().throw(*raised)

    def close(self) -> None:
        """Do nothing: nothing is open."""
