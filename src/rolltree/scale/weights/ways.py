"""The ways to get weights to servers, behind one interface, and the choice of one per server.

    shared memory   servers on the trainer's machine map a copy of its weights
    transfer        the weights are sent: gloo between CPUs, nccl between GPUs
    disk            servers reload a folder that they see under the same path

Every way publishes by the procedure of `publish.py`.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rolltree.inference.reachable import call, served_version
from rolltree.scale.weights.publish import HasServer, publish_weights
from rolltree.scale.weights.shared import SharedWeights
from rolltree.scale.weights.transfer import WeightTransfer
from rolltree.values.errors import ModelError, PublishFailed, as_sentence

NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns the current trained weights, named as in a checkpoint; tied weights come once."""


class Way(ABC):
    """A way to get weights to servers.

    Calls must not overlap, and the trainer must not write the weights during a call.
    """

    name: str

    async def why_not(self, client: HasServer) -> str | None:
        """Return why a server cannot get weights in this way; None if it can, or perhaps can."""
        return None

    def outdate(self) -> None:  # noqa: B027  (most have nothing to do)
        """Note that the weights have changed."""

    @abstractmethod
    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Give these servers the current weights; raises as `publish_weights` does."""

    def forget(self, client: HasServer) -> None:  # noqa: B027
        """Note that a server is gone, or was replaced by another process."""

    async def aclose(self) -> None:  # noqa: B027
        """Release connections and memory."""


class DiskWay(Way):
    """Writes a folder, and has servers reload it.

    Args:
        export: writes the weights as a folder of safetensors.
        folder: the folder for versions, which servers can read under the same path.
    """

    name = "disk"

    def __init__(self, export: Callable[[Path], object], folder: Path) -> None:
        self._export, self._folder = export, folder
        self._written: Path | None = None

    def outdate(self) -> None:
        """Note that the weights must be written again."""
        self._written = None

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Write the weights unless that is done, and have these servers reload them."""
        if self._written is None:
            path = self._folder / f"version-{version:06d}"
            await asyncio.to_thread(self._export, path)
            self._written = path
        await publish_weights(clients, self._written, version)
        # The current version is kept for servers that come back.
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
            return f"it did not say whether it sees this machine's memory ({error})"
        marks = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(marks, list) or set(map(str, marks)) != {shared.mark}:
            return "it does not see this process's memory (another machine, container or user)"
        try:
            async with self._reserving:
                await asyncio.to_thread(shared.reserve, self._tensors())
        except OSError as error:
            return f"there is not enough memory for another copy of the weights ({error})"
        return None

    def outdate(self) -> None:
        """Note that the weights must be copied again."""
        self._is_written = False

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Copy the weights unless that is done, and have these servers load them."""
        shared = self._shared = self._shared or SharedWeights()
        if not self._is_written:
            await asyncio.to_thread(lambda: shared.write(self._tensors()))
            self._is_written = True
        await publish_weights(clients, shared.path, version)

    async def aclose(self) -> None:
        """Free the memory."""
        if self._shared is not None:
            self._shared.close()
        self._shared, self._is_written = None, False


class TransferWay(Way):
    """Sends the weights; `options` are passed to `WeightTransfer`."""

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
    """Gives every server the weights in the first of `ways` that works for it.

    The last way is used without a check. `because` says why there are no other ways. `notify`
    receives a notice for the user when a server's way is chosen or changes, or its reason does.
    """

    name = "auto"

    def __init__(self, ways: Sequence[Way], *, because: str = "") -> None:
        self._ways, self._because = list(ways), because
        self._chosen: dict[HasServer, tuple[Way, str]] = {}
        self._reasons: dict[str, str] = {}  # by URL
        self.notify: Callable[[str], None] = lambda message: None

    def outdate(self) -> None:
        """Note for every way that the weights have changed."""
        for way in self._ways:
            way.outdate()

    async def send(self, clients: Sequence[HasServer], version: int) -> None:
        """Give each server the weights in its own way, all at the same time."""
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
                # Said again only if it changed, for example after a restart on another machine.
                url = client.server.root_url
                if self._reasons.get(url) != why:
                    self._reasons[url] = why
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
        """Choose again before the next `send`, since the new process may be on another machine."""
        self._chosen.pop(client, None)
        for way in self._ways:
            way.forget(client)

    async def aclose(self) -> None:
        """Close every way."""
        for way in self._ways:
            await way.aclose()

    async def _choose(self, client: HasServer) -> tuple[Way, str]:
        """Return a server's way, and the way's name with the reasons against earlier ways."""
        if client in self._chosen:
            return self._chosen[client]
        # Raises if the server is unreachable: failures would then not show which way works.
        await served_version(client.server)
        reasons = [f"({self._because}.)"] if self._because else []
        for way in self._ways[:-1]:
            why = await way.why_not(client)
            if why is None:
                break
            reasons.append(f"Not by {way.name}: {as_sentence(why)}")
        else:
            way = self._ways[-1]
        choice = self._chosen[client] = way, " ".join([f"{way.name}.", *reasons])
        return choice
