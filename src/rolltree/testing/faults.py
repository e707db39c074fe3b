"""Faults in a row: what goes wrong at the first call, the second, and so on.

`FaultyClient` puts them in front of any model client; `ScriptedServer` takes `HttpFault`s;
`rolltree.testing.hostile` has a table of them.
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
from rolltree.types import ModelResponse

FaultT = TypeVar("FaultT")


class FaultRow(Generic[FaultT]):
    """Faults by call number: a list (none after its end) or a function of 0, 1, ...

    `num_calls` and `num_faults` count what was handed out. It may be used from several threads.
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
    """How a server fails one request; the fields combine."""

    # Answers with this error; 0 answers normally.
    status: int = 0
    message: str = "scripted fault"
    # Adds the header `Retry-After`.
    retry_after_s: float | None = None
    # Passes before anything else.
    delay_s: float = 0.0
    # Drops the connection without an answer.
    reset: bool = False
    # Spoils a normal answer: "broken" is complete and not JSON, "truncated" ends before its stated
    # length.
    body: Literal["whole", "broken", "truncated"] = "whole"
    # From the answer, as JSON data that it may change, to what is sent in its place: bytes, or data
    # (NaN, integers of any size and lone surrogates are written as Python does).
    spoil: Callable[[dict[str, Any]], object] | None = None
    # Added to the answer.
    headers: Mapping[str, str] = field(default_factory=dict)
    # These are fields of `Reply`.
    drip_s: float = 0.0
    raw: bytes | None = None
    num_copies: int = 1
    gap_s: float = 0.0
    gone: bool = False


ClientFault: TypeAlias = BaseException | float
"""A fault before a call: an exception, or a delay in seconds."""


class FaultyClient(DelegatingClient):
    """Any client with faults in front of it, in the order of the calls of all its sessions.

    Example:
        >>> from rolltree.errors import ConnectionFailed
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
        """Meet the next fault, then ask the inner client."""
        fault = self.faults.next()
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            await asyncio.sleep(fault)
        return await super().call(call)

    async def aclose(self) -> None:
        """Close the inner client."""
        await self._inner.aclose()
