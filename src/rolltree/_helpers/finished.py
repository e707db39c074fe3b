"""Results of synchronous calls that may also be awaited, without importing asyncio."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any, Self


class Finished(Coroutine[Any, Any, Any]):
    """A result of a synchronous call; awaiting it returns the result itself.

    So `await rt.evaluate(...)` and `asyncio.run(rt.evaluate(...))` work as they would with a
    coroutine.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Self]:
        """Return this result, without waiting."""
        return self._itself().__await__()

    async def _itself(self) -> Self:
        return self

    def send(self, value: Any, /) -> Any:
        """End at once, like a coroutine that returns this result."""
        raise StopIteration(self)

    def throw(self, *raised: Any) -> Any:
        """Raise what the loop throws in if the task is cancelled before it begins."""
        return super().throw(*raised)

    def close(self) -> None:
        """Do nothing: nothing is open."""
