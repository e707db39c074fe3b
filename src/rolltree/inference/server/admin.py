"""What whoever owns the weights asks of the server: pause, reload, version, resume, health.

Paths and bodies are vLLM's, so that one publisher (`rolltree.inference.publish`, `.transfer`) works
on both. A request must carry the server's token. It leaves out LoRA adapters.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from rolltree.inference.server.errors import RequestError
from rolltree.inference.server.http import Handler, json_body, json_response

if TYPE_CHECKING:
    from rolltree.inference.server.served import Receiver, ServedModel


class AdminHandlers:
    """Weight updates of one served model; `paths` says which request is answered by what."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.paths: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self.health,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("GET", "/is_paused"): self.is_paused,
            ("POST", "/collective_rpc"): self.collective_rpc,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            ("POST", "/update_weight_version"): self.update_weight_version,
            ("GET", "/weight_info"): self.weight_info,
            ("GET", "/get_world_size"): self.get_world_size,
            ("POST", "/init_weight_transfer_engine"): self.init_weight_transfer,
            ("POST", "/start_weight_update"): self.start_weight_update,
            ("POST", "/update_weights"): self.update_weights,
            ("POST", "/finish_weight_update"): self.finish_weight_update,
        }

    async def health(self, request: Request) -> Response:
        """Answer 200 while the engine decodes, 503 when its thread has ended."""
        if self._served.is_alive:
            return Response()
        raise RequestError(
            "the engine does not run, so no request can be answered; the server's log says why. "
            "Start it again.",
            status=503,
        )

    async def pause(self, request: Request) -> Response:
        """Let no step run until `/resume`; requests in flight stay (`mode=keep`)."""
        mode = request.query_params.get("mode", "abort")
        if mode != "keep":
            raise RequestError(
                f"mode = {mode!r} (vLLM's default is abort): this server only freezes requests "
                "where they are. Use mode=keep.",
                param="mode",
            )
        await self._served.pause()
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Go on after a pause."""
        await self._served.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Say whether the server is paused."""
        return json_response({"is_paused": self._served.is_paused})

    async def collective_rpc(self, request: Request) -> Response:
        """Load the weights of a folder: method `reload_weights`, kwargs `{"weights_path": DIR}`."""
        body = await json_body(request)
        kwargs = body.get("kwargs", {})
        if body.get("method") != "reload_weights":
            raise RequestError("the only method here is reload_weights.", param="method")
        given = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
        if not isinstance(given, str) or kwargs.keys() != {"weights_path"} or body.get("args"):
            raise RequestError(
                'reload_weights takes kwargs {"weights_path": DIR} and nothing else.',
                param="kwargs",
            )
        if not self._served.can_reload:
            raise RequestError("this server was started without weight updates.", status=404)
        await self._served.reload(Path(given))
        return json_response({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the keys of earlier prompts."""
        await self._served.set_version()
        return json_response({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        """Give the weights a version: `{"new_version": "3"}`, a whole number as text."""
        version = (await json_body(request)).get("new_version")
        if not isinstance(version, str) or not version.isdecimal() or int(version) >= 2**31:
            raise RequestError(
                f"new_version = {version!r} is no whole number as text, and tokens carry their "
                'policy version as a number. Send {"new_version": "3"}.',
                param="new_version",
            )
        await self._served.set_version(int(version))
        return json_response({"success": True, "new_version": version})

    async def weight_info(self, request: Request) -> Response:
        """Say which version the weights have."""
        return json_response({"weight_version": str(self._served.engine.version)})

    async def get_world_size(self, request: Request) -> Response:
        """Say how many processes take part in a transfer."""
        return json_response({"world_size": self._receiver().world_size})

    async def init_weight_transfer(self, request: Request) -> Response:
        """Meet a trainer: `{"init_info": ...}`, as `WeightTransfer` sends it."""
        info = await _object_in(request, "init_info")
        await asyncio.to_thread(self._receiver().meet, info)
        return json_response({"message": "met"})

    async def start_weight_update(self, request: Request) -> Response:
        """Begin an update."""
        self._receiver().start()
        return json_response({"message": "started"})

    async def update_weights(self, request: Request) -> Response:
        """Receive weights: `{"update_info": ...}` says which; it lasts as long as the transfer."""
        info = await _object_in(request, "update_info")
        self._receiver()
        await self._served.receive(info)
        return json_response({"message": "received"})

    async def finish_weight_update(self, request: Request) -> Response:
        """End an update; the weights are in their places already."""
        self._receiver()
        return json_response({"message": "finished"})

    def _receiver(self) -> Receiver:
        if self._served.receiver is None:
            raise RequestError(
                "this server was started without weight transfers; `rolltree serve` has them.",
                status=404,
            )
        return self._served.receiver


async def _object_in(request: Request, name: str) -> dict[str, Any]:
    value = (await json_body(request)).get(name)
    if not isinstance(value, dict):
        raise RequestError(f"{name} is not an object.", param=name)
    return value
