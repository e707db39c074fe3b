"""Rows of faults: what goes wrong at the first call, the second, and so on.

`FaultyClient` injects faults in front of any model client; `ScriptedServer` takes `HttpFault`s, of
which `rolltree.testing.hostile` has a table.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from rolltree.inference.call import ModelCall
from rolltree.inference.client import ModelClient
from rolltree.inference.client_base import DelegatingClient
from rolltree.values.types import ModelResponse

FaultT = TypeVar("FaultT")


class FaultRow(Generic[FaultT]):
    """Faults by call number: a list (with none after its end) or a function of 0, 1, ...

    `num_calls` and `num_faults` count the calls and faults so far. It is thread-safe.
    """

    def __init__(
        self, faults: Sequence[FaultT | None] | Callable[[int], FaultT | None] = ()
    ) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self.num_calls = 0
        self.num_faults = 0

    def next(self) -> FaultT | None:
        """Return the next call's fault."""
        # A scripted server runs in its own thread, and several clients may share one row.
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
            if callable(self._faults):
                fault = self._faults(number)
            else:
                fault = self._faults[number] if number < len(self._faults) else None
            self.num_faults += fault is not None
            return fault


@dataclass(frozen=True, slots=True)
class HttpFault:
    """How a server fails one request; the fields can be combined."""

    # Status of an error answer; 0 answers normally.
    status: int = 0
    message: str = "scripted fault"
    # Value of the header `Retry-After`.
    retry_after_s: float | None = None
    # Delay before anything else.
    delay_s: float = 0.0
    # Whether the connection is dropped without an answer.
    reset: bool = False
    # How a normal answer is spoiled: "broken" is complete but not JSON, "truncated" ends before its
    # stated length.
    body: Literal["whole", "broken", "truncated"] = "whole"
    # A function from the answer's JSON data, which it may change, to what is sent instead: bytes,
    # or data (with NaN, large integers and lone surrogates written as Python's `json` does).
    spoil: Callable[[dict[str, Any]], object] | None = None
    # Headers that are added to the answer.
    headers: Mapping[str, str] = field(default_factory=dict)
    # The rest are fields of `Reply`.
    drip_s: float = 0.0
    raw: bytes | None = None
    num_copies: int = 1
    gap_s: float = 0.0
    gone: bool = False


ClientFault: TypeAlias = BaseException | float
"""A fault before a call: an exception, or a delay in seconds."""


class FaultyClient(DelegatingClient):
    """A client with faults in front of it, in the order of the calls of all its sessions.

    Example:
        >>> from rolltree.values.errors import ConnectionFailed
        >>> from rolltree.testing import ScriptedClient
        >>> client = FaultyClient(ScriptedClient(["12"]), [ConnectionFailed("no route"), 0.5])
    """

    def __init__(
        self,
        client: ModelClient,
        faults: Sequence[ClientFault | None]
        | Callable[[int], ClientFault | None]
        | FaultRow[ClientFault],
    ) -> None:
        super().__init__(client)
        self.faults: FaultRow[ClientFault]
        if isinstance(faults, FaultRow):
            self.faults = faults
        else:
            self.faults = FaultRow(faults)

    async def call(self, call: ModelCall) -> ModelResponse:
        """Apply the next fault, then call the inner client."""
        fault = self.faults.next()
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            await asyncio.sleep(fault)
        return await super().call(call)

    async def aclose(self) -> None:
        """Close the inner client."""
        await self._inner.aclose()
