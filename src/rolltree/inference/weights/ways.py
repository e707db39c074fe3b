"""The ways in which servers get weights, behind one interface, and which of them a server takes.

    shared memory   servers on the trainer's machine map its weights
    transfer        the weights are sent: gloo between CPUs, nccl between GPUs
    disk            servers reload a folder that they see under the same path

Each publish goes through the frame of `publish.py`, whichever way carries the weights.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rolltree.errors import ModelError, PublishFailed
from rolltree.inference.weights.publish import (
    RELOAD_METHOD,
    HasServer,
    call,
    publish_weights,
    served_version,
)
from rolltree.inference.weights.shared import SharedWeights
from rolltree.inference.weights.transfer import WeightTransfer

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""The trained weights as they are when it is called, named as in a checkpoint, tied ones once."""


class Way(ABC):
    """How weights get to servers. Calls come one at a time, and none while weights are written."""

    name: str

    async def why_not(self, client: HasServer) -> str | None:
        """Return why a server cannot be given weights in this way; None if it can, or may."""
        return None

    def outdate(self) -> None:  # noqa: B027  (most have nothing to do)
        """Take note that the weights have changed."""

    @abstractmethod
    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Give these servers the weights as they are now; raises as `publish_weights`."""

    def forget(self, client: HasServer) -> None:  # noqa: B027
        """Take note that another process is in a server's place, or none."""

    async def aclose(self) -> None:  # noqa: B027
        """Let go of every server."""


class DiskWay(Way):
    """Writes a folder, and has servers reload it.

    Args:
        export: writes the weights as a folder of safetensors.
        folder: where versions are written, readable for the servers under the same path.
        method: the worker's method that reloads, see `publish_weights`.
    """

    name = "disk"

    def __init__(
        self, export: Callable[[Path], object], folder: Path, *, method: str = RELOAD_METHOD
    ) -> None:
        self._export, self._folder, self._method = export, folder, method
        self._written: Path | None = None

    def outdate(self) -> None:
        """Write the weights again before they are sent."""
        self._written = None

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Write the version, if it is not, and have these servers reload it."""
        if self._written is None:
            path = self._folder / f"version-{version:06d}"
            await asyncio.to_thread(self._export, path)
            self._written = path
        await publish_weights(clients, self._written, version, method=self._method)
        # The current version stays, for servers that come back.
        for old in self._folder.glob("version-*"):
            if old != self._written:
                await asyncio.to_thread(shutil.rmtree, old)


class SharedWay(Way):
    """Copies the weights into memory that servers on this machine map."""

    name = "shared memory"

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = tensors
        self._shared: SharedWeights | None = None
        self._is_written = False
        self._reserving = asyncio.Lock()

    async def why_not(self, client: HasServer) -> str | None:
        """Ask the server whether it sees this process's file, and reserve the memory."""
        try:
            shared = self._shared = self._shared or SharedWeights()
        except OSError as error:
            return str(error)
        body = {"method": "weights_mark", "kwargs": {"weights_path": str(shared.path)}}
        try:
            answer = await call(client.server, "/collective_rpc", body)
        except ModelError as error:
            return f"it cannot say whether it sees this machine's memory ({error})"
        marks = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(marks, list) or set(map(str, marks)) != {shared.mark}:
            return "it does not see this process's memory (another machine, container or user)"
        try:
            async with self._reserving:
                await asyncio.to_thread(shared.reserve, self._tensors())
        except OSError as error:
            return f"there is no memory for another copy of the weights ({error})"
        return None

    def outdate(self) -> None:
        """Copy the weights again before they are sent."""
        self._is_written = False

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Copy the weights, if they are not, and have these servers load them."""
        shared = self._shared = self._shared or SharedWeights()
        if not self._is_written:
            await asyncio.to_thread(lambda: shared.write(self._tensors()))
            self._is_written = True
        await publish_weights(clients, shared.path, version)

    async def aclose(self) -> None:
        """Give the memory back."""
        if self._shared is not None:
            self._shared.close()
        self._shared, self._is_written = None, False


class TransferWay(Way):
    """Sends the weights; `options` are `WeightTransfer`'s."""

    name = "transfer"

    def __init__(self, tensors: NamedTensors, **options: Any) -> None:
        self._tensors = tensors
        self._transfer = WeightTransfer([], **options)

    async def why_not(self, client: HasServer) -> str | None:
        """Try to connect."""
        try:
            await self._transfer.open([client])
        except ModelError as error:
            return str(error)
        return None

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Send the weights to these servers."""
        await self._transfer.publish(self._tensors(), version, clients)

    def forget(self, client: HasServer) -> None:
        """Close the connection."""
        self._transfer.forget(client)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transfer.aclose()


class AutoWay(Way):
    """Gives every server the weights in the first of `ways` that it can take, and says which.

    The last way is not asked. `because` says why there are no others. `notify` gets what a person
    should know.
    """

    name = "auto"

    def __init__(self, ways: Sequence[Way], *, because: str = "") -> None:
        self._ways, self._because = list(ways), because
        self._chosen: dict[HasServer, Way] = {}
        self._said: dict[str, str] = {}  # by URL
        self.notify: Callable[[str], None] = lambda message: None

    def outdate(self) -> None:
        """Tell every way."""
        for way in self._ways:
            way.outdate()

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Give each server the weights in its own way, at the same time."""
        found = await asyncio.gather(*map(self._choose, clients), return_exceptions=True)
        groups: dict[Way, list[HasServer]] = {}
        said: dict[str, list[str]] = {}
        failed: dict[HasServer, Exception] = {}
        for client, choice in zip(clients, found, strict=True):
            if isinstance(choice, ModelError):
                failed[client] = choice
            elif isinstance(choice, BaseException):
                raise choice
            else:
                way, why = choice
                groups.setdefault(way, []).append(client)
                # Again only when it is a different one, as after a restart elsewhere.
                url = client.server.root_url
                if self._said.get(url) != why:
                    self._said[url] = why
                    said.setdefault(why, []).append(url)
        for why, urls in said.items():
            self.notify(f"{', '.join(urls)}: weights go by {why}")
        sent = await asyncio.gather(
            *(way.send(group, version) for way, group in groups.items()), return_exceptions=True
        )
        for outcome in sent:
            if isinstance(outcome, PublishFailed):
                failed |= dict.fromkeys(outcome.clients, outcome)
            elif outcome is not None:
                raise outcome
        if failed:
            errors = list(dict.fromkeys(failed.values()))
            text = " ".join(map(str, errors))
            raise PublishFailed(text, clients=tuple(failed)) from errors[0]

    def forget(self, client: HasServer) -> None:
        """Choose again before the next sending: the process may be on another machine."""
        self._chosen.pop(client, None)
        for way in self._ways:
            way.forget(client)

    async def aclose(self) -> None:
        """Close every way."""
        for way in self._ways:
            await way.aclose()

    async def _choose(self, client: HasServer) -> tuple[Way, str]:
        """Return a server's way, and its name with the reasons against those before it."""
        way = self._chosen.get(client)
        if way is not None:
            return way, self._said[client.server.root_url]
        # A server that is away says nothing about its ways.
        await served_version(client.server)
        reasons = [f"({self._because}.)"] if self._because else []
        for way in self._ways[:-1]:
            why = await way.why_not(client)
            if why is None:
                break
            reasons.append(f"Not by {way.name}: {why.rstrip('.')}.")
        else:
            way = self._ways[-1]
        self._chosen[client] = way
        return way, " ".join([f"{way.name}.", *reasons])
