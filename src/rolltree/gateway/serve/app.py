"""The ASGI application of `rolltree serve`, and `serve`, which runs it.

Calls come in the gateway's protocols, below `/v1`, and as ids to vLLM's `/inference/v1/generate`.
Beside them are `/v1/models`, `/health`, and vLLM's `/tokenize`, `/detokenize` and weight updates,
so that the same publisher (`rolltree.scale.weights`) works with both. By default only this machine
can reach the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rolltree.gateway.fields import READ, Field, each, flag, model_in, read_fields
from rolltree.gateway.openai_chat import COMPLETION_FIELDS, ids_in, tools_and_choice
from rolltree.gateway.serve.model_server import ServedModel
from rolltree.gateway.vllm_generate import GENERATE
from rolltree.gateway.wire import (
    PROTOCOLS,
    SESSION,
    WRITE_TIMEOUT_S,
    Paths,
    WireApp,
    answering,
    asking,
    beside,
    model_card,
    models_response,
)
from rolltree.inference.call import DEFAULT_SAMPLING
from rolltree.inference.request_fields import Rendering, split_rendering
from rolltree.scale.weights.receive import WeightReceiver, weights_mark
from rolltree.values.errors import ConfigError
from rolltree.values.types import SamplingParams
from rolltree.web.answers import Handler, json_response
from rolltree.web.guard import RequestError, digest_of, has_digest, is_loopback, key_in, url_at
from rolltree.web.limits import READ_TIMEOUT_S, json_body
from rolltree.web.start import AnnouncingServer, listen, server_config

_TOKENIZE_FIELDS: dict[str, Field] = {
    **each("model prompt messages tools tool_choice", READ),
    **each("add_generation_prompt return_token_strs", READ),
    **each("chat_template_kwargs continue_final_message", READ),
    "add_special_tokens": COMPLETION_FIELDS["add_special_tokens"],
}


class ServeApp(WireApp):
    """The ASGI application; its shutdown closes the engine.

    `admin_token` is accepted for all requests, `token` for all but those that replace weights.
    Without an `admin_token`, nobody can replace them.

    Raises:
        ConfigError: the token is empty.
    """

    def __init__(
        self, served: ServedModel, token: str, admin_token: str | None, read_timeout_s: float
    ) -> None:
        super().__init__(read_timeout_s, WRITE_TIMEOUT_S)
        if not token:
            raise ConfigError(
                "the token is empty, so anybody who reaches the port could use the model. Generate "
                "one, or name the variable that holds one with --api-key-env."
            )
        self._served, self._token = served, digest_of(token)
        self._admin_token = None if admin_token is None else digest_of(admin_token)
        weights = WeightHandlers(served)
        self._admin_paths = frozenset(weights.admin_paths)
        handlers = {**Handlers(served).paths, **weights.paths}
        self._paths = Paths(
            [
                *((method, path, answering(run)) for (method, path), run in handlers.items()),
                *((("POST", f"/v1{each.path}", asking(each))) for each in PROTOCOLS),
                ("POST", GENERATE.path, asking(GENERATE)),
                *(
                    (method, f"/v1{path}", beside(each, side))
                    for each in PROTOCOLS
                    for (method, path), side in each.sides.items()
                    if "{" not in path  # of an earlier answer, which is not kept
                ),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "lifespan":
            await super().__call__(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._served.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    def admitted(self, scope: Scope) -> Handler:
        """Return the handler of a request, or raise `RequestError`."""
        path = scope["path"]
        # `/health` shows only whether the engine runs.
        if path != "/health":
            self._check_key(key_in(scope["headers"]), path)
        handler, scope["path_params"] = self._paths.find(scope["method"], path)
        scope[SESSION] = self._served
        return handler

    def _check_key(self, key: str, path: str) -> None:
        if self._admin_token is not None and has_digest(key, self._admin_token):
            return
        if not has_digest(key, self._token):
            raise RequestError(
                "the request has no valid bearer token. Send the token that `rolltree serve` "
                "printed, as the API key.",
                status=401,
            )
        if path in self._admin_paths:
            how = (
                "This server has no admin token: start it with --admin-key-env."
                if self._admin_token is None
                else "Send the admin token: engine.admin_key_env, or OpenAIClient(admin_key=...)."
            )
            raise RequestError(
                f"the token is for inference only, but {path} replaces weights, which takes the "
                f"admin token. {how}",
                status=403,
            )


class Handlers:
    """The handlers of requests that sample nothing, by method and path."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.paths: dict[tuple[str, str], Handler] = {
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/models/{name:path}"): self.model,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
        }

    def _card(self) -> dict[str, Any]:
        served = self._served
        return model_card(served) | {
            "max_model_len": served.engine.max_context,
            "logprobs_mode": f"{served.logprobs}_logprobs",
        }

    async def models(self, request: Request) -> Response:
        """List the served model."""
        return models_response(self._card())

    async def model(self, request: Request) -> Response:
        """Describe the served model."""
        self._served.check_model(request.path_params["name"])
        return json_response(self._card())

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a string or of a conversation's prompt."""
        served = self._served
        given = await self._given(request, _TOKENIZE_FIELDS)
        if ("messages" in given) == ("prompt" in given):
            raise RequestError("give either prompt or messages.", param="prompt")
        if "messages" in given:
            continues = flag(given, "continue_final_message")
            opener = flag(given, "add_generation_prompt", default=not continues)
            named = {"chat_template_kwargs": given.get("chat_template_kwargs")}
            variables = split_rendering(SamplingParams(extra=named))[0].variables
            tools = tools_and_choice(given, DEFAULT_SAMPLING)[0].tools
            messages = served.messages(given["messages"])
            rendering = Rendering(variables, continues)
            prompt = partial(served.chat_prompt, messages, tools or None, rendering, opener=opener)
        elif isinstance(given["prompt"], str):
            prompt = partial(served.text_prompt, given["prompt"])
        else:
            raise RequestError("prompt is not a string.", param="prompt")

        with_texts = flag(given, "return_token_strs")

        def answer() -> dict[str, Any]:
            ids = prompt().tolist()
            body = {"count": len(ids), "max_model_len": served.engine.max_context, "tokens": ids}
            if with_texts:
                body["token_strs"] = [served.renderer.decode([token]) for token in ids]
            return body

        return json_response(await served.run(answer))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        served = self._served
        given = await self._given(request, each("model tokens", READ))
        ids = ids_in(given.get("tokens"), served, "tokens")
        return json_response(await served.run(lambda: {"prompt": served.renderer.decode(ids)}))

    async def _given(self, request: Request, fields: Mapping[str, Field]) -> dict[str, Any]:
        given = read_fields(await json_body(request), fields).given
        self._served.check_model(model_in(given))
        return given


class WeightHandlers:
    """The handlers of weight updates for one served model.

    `paths` maps method and path to the handler; `admin_paths` are the paths that change something.
    """

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
        # GET requests need just the ordinary token.
        self.admin_paths = [path for method, path in self.paths if method == "POST"]

    async def health(self, request: Request) -> Response:
        """Answer 200 while the engine's thread runs, 503 after it has ended."""
        if self._served.is_alive:
            return Response()
        raise RequestError(
            "the engine has stopped, so no request can be answered; the server's log says why. "
            "Restart the server.",
            status=503,
        )

    async def pause(self, request: Request) -> Response:
        """Stop decoding until `/resume`; requests in flight are kept (`mode=keep`)."""
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
        """Continue decoding after a pause."""
        await self._served.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Answer `{"is_paused": ...}`."""
        return json_response({"is_paused": self._served.is_paused})

    async def collective_rpc(self, request: Request) -> Response:
        """Load the weights of a folder or a file, with kwargs `{"weights_path": PATH}`.

        vLLM's `reload_weights` and the worker extension's `reload_all_weights` are the same here.
        `weights_mark` returns the mark by which a trainer recognizes its own file.
        """
        body = await json_body(request)
        kwargs = body.get("kwargs", {})
        method = body.get("method")
        if method not in ("reload_weights", "reload_all_weights", "weights_mark"):
            raise RequestError(
                "the only methods here are reload_weights, reload_all_weights and weights_mark.",
                param="method",
            )
        given = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
        if not isinstance(given, str) or kwargs.keys() != {"weights_path"} or body.get("args"):
            raise RequestError(
                f'{method} takes kwargs {{"weights_path": PATH}} and nothing else.',
                param="kwargs",
            )
        if not self._served.can_reload:
            raise RequestError("this server was started without weight updates.", status=404)
        if method == "weights_mark":
            return json_response({"results": [await asyncio.to_thread(weights_mark, Path(given))]})
        await self._served.reload(Path(given))
        return json_response({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop the KV cache of earlier prompts."""
        # Without a version, this only drops the cache.
        await self._served.set_version()
        return json_response({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        """Set the version of the weights: `{"new_version": "3"}`, a whole number as text."""
        version: Any = (await json_body(request)).get("new_version")
        # Checked before `int`, which takes other alphabets' digits and up to 4,300 of them.
        is_short = isinstance(version, str) and len(version) <= 10 and version.isascii()
        if not (is_short and version.isdecimal() and int(version) < 2**31):
            raise RequestError(
                f"new_version = {shown(version)} is not a whole number as text, and tokens carry "
                'their policy version as a number. Send {"new_version": "3"}.',
                param="new_version",
            )
        await self._served.set_version(int(version))
        return json_response({"success": True, "new_version": version})

    async def weight_info(self, request: Request) -> Response:
        """Return the version of the weights, "default" until a trainer sets one."""
        return json_response({"weight_version": self._served.weight_version})

    async def get_world_size(self, request: Request) -> Response:
        """Return how many processes of this server receive a transfer."""
        return json_response({"world_size": self._receiver().world_size})

    async def init_weight_transfer(self, request: Request) -> Response:
        """Connect to a trainer: `{"init_info": ...}`, as `WeightTransfer` sends it."""
        info = await _object_in(request, "init_info")
        # In a thread, since it blocks until the trainer has connected.
        await asyncio.to_thread(self._receiver().meet, info)
        return json_response({"message": "met"})

    async def start_weight_update(self, request: Request) -> Response:
        """Start an update."""
        self._receiver().start()
        return json_response({"message": "started"})

    async def update_weights(self, request: Request) -> Response:
        """Receive the weights that `{"update_info": ...}` lists; answer after the transfer."""
        info = await _object_in(request, "update_info")
        self._receiver()
        await self._served.receive(info)
        return json_response({"message": "received"})

    async def finish_weight_update(self, request: Request) -> Response:
        """End an update; `/update_weights` has already copied the weights."""
        self._receiver()
        return json_response({"message": "finished"})

    def _receiver(self) -> WeightReceiver:
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


def create_app(
    served: ServedModel,
    token: str,
    *,
    admin_token: str | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> ServeApp:
    """Return the ASGI application; its shutdown closes the engine.

    Args:
        served: the model.
        token: the bearer token of requests that do not replace weights; `/health` needs none.
        admin_token: accepted for all requests, and needed to replace weights; without it nobody
            can.
        read_timeout_s: how long a request's body may take to arrive.

    Raises:
        ConfigError: the token is empty.
    """
    return ServeApp(served, token, admin_token, read_timeout_s)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The address that the server listens on, and the tokens that requests must carry.

    Raises:
        ConfigError: a token is empty, or the host is not loopback and `allow_remote` or the token
            is missing.
    """

    # An address that is not loopback needs both `allow_remote` and a token.
    host: str = "127.0.0.1"
    # 0 takes a free port.
    port: int = 8000
    # None generates a token, which only a loopback address allows.
    token: str | None = None
    allow_remote: bool = False
    # Requests that replace weights must carry it. None generates a token for a loopback address;
    # for any other address, weights then cannot be replaced.
    admin_token: str | None = None
    # A request that has not arrived after this time is refused.
    read_timeout_s: float = READ_TIMEOUT_S

    def __post_init__(self) -> None:
        if "" in (self.token, self.admin_token):
            raise ConfigError(
                "the token or key of a server is empty, so it would protect nothing. Was the "
                "variable that it is read from set? Give a token of your own, or None to have one "
                "generated."
            )
        if is_loopback(self.host):
            return
        if not self.allow_remote:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and anyone who reaches it "
                "with the token can use the model. Connections are not encrypted. If that is "
                "intended, add --allow-remote."
            )
        if self.token is None:
            raise ConfigError(
                "a server that other machines can reach needs a token of your own. Put one into "
                "an environment variable and name it: --api-key-env ROLLTREE_SERVE_TOKEN."
            )


def serve(
    served: ServedModel, options: ServerOptions, *, on_ready: Callable[[str, str, str | None], None]
) -> None:
    """Serve until the process receives SIGINT or SIGTERM.

    `on_ready(url, token, admin_token)` is called when the server accepts requests; `url` ends in
    `/v1`.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    token = options.token or secrets.token_urlsafe(24)
    admin_token = options.admin_token
    if admin_token is None and is_loopback(options.host):
        admin_token = secrets.token_urlsafe(24)
    # Bound here, since with port 0 the URL is known only afterwards.
    listener = listen(options.host, options.port)
    url = f"{url_at(options.host, listener.getsockname()[1])}/v1"
    config = server_config(
        create_app(served, token, admin_token=admin_token, read_timeout_s=options.read_timeout_s),
        options.read_timeout_s,
        # Streams may take minutes, and the engine stops with the server anyway.
        timeout_graceful_shutdown=5,
    )
    with listener:
        AnnouncingServer(config, lambda: on_ready(url, token, admin_token)).run([listener])
