"""The server's ASGI application with the handlers of all paths, and `serve`, which runs it.

The paths are OpenAI's `/v1/models`, `/v1/chat/completions` and `/v1/completions`; vLLM's
`/tokenize`, `/detokenize`, `/inference/v1/generate` and weight updates, so that the same publisher
(`rolltree.scale.weights`) works with both; and `/health`. By default only this machine can
reach the server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rolltree.gateway.serve.model_server import ServedModel
from rolltree.gateway.serve.requests import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    MAX_COMPLETIONS,
    SAMPLING_PARAMS_FIELDS,
    TEXT_FIELDS,
    TOKENIZE_FIELDS,
    ParsedRequest,
    check_fields,
    error_body,
    flag,
    includes_usage,
    messages_of,
    num_choices,
    parse_request,
    sampling_of,
    tools_of,
)
from rolltree.gateway.serve.responses import Responses, ResponseStream, TokenResponses
from rolltree.scale.weights.receive import WeightReceiver, weights_mark
from rolltree.values.errors import ConfigError
from rolltree.values.types import IntArray
from rolltree.web.answers import Handler, answering_errors, error_response, json_response
from rolltree.web.guard import RawHeaders, RequestError, has_token, is_loopback, url_at
from rolltree.web.limits import READ_TIMEOUT_S, json_body, while_connected
from rolltree.web.start import AnnouncingServer, listen, server_config

logger = logging.getLogger("rolltree.inference")


class Unauthorized:
    """Refuses requests without a bearer token (RFC 6750) before their bodies are read.

    `admin_token` is accepted everywhere, `token` everywhere but in `admin_paths`, which replace
    weights. Without an `admin_token`, every request to these is refused.
    """

    def __init__(
        self, app: ASGIApp, token: str, admin_token: str | None, admin_paths: Collection[str]
    ) -> None:
        self._app, self._admin_paths = app, frozenset(admin_paths)
        self._token, self._admin_token = token, admin_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 or 403."""
        app = self._app
        # `/health` shows only whether the engine runs.
        if scope["type"] == "http" and scope["path"] != "/health":
            # Before the body, so that a client without a token cannot make the server read
            # megabytes.
            error = self._refusal(scope["headers"], scope["path"])
            app = self._app if error is None else failure(error)
        await app(scope, receive, send)

    def _refusal(self, headers: RawHeaders, path: str) -> RequestError | None:
        if self._admin_token is not None and has_token(headers, self._admin_token):
            return None
        if not has_token(headers, self._token):
            return RequestError(
                "the request has no valid bearer token. Send the token that `rolltree serve` "
                "printed, as the API key.",
                status=401,
            )
        if path not in self._admin_paths:
            return None
        how = (
            "This server has no admin token: start it with --admin-key-env."
            if self._admin_token is None
            else "Send the admin token: engine.admin_key_env, or OpenAIClient(admin_key=...)."
        )
        return RequestError(
            f"the token is for inference only, but {path} replaces weights, which takes the admin "
            f"token. {how}",
            status=403,
        )


def failure(error: Exception) -> Response:
    """Return the error response of OpenAI's servers for an exception."""
    return error_response(*error_body(error))


def _failed(request: Request, error: Exception) -> Response:
    response = failure(error)
    if response.status_code >= 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not served here"
    return failure(RequestError(what, status=status))


class Handlers:
    """The handlers of inference requests for one served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: list the served model."""
        served = self._served
        card = {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "rolltree",
            "max_model_len": served.engine.max_context,
            "logprobs_mode": f"{served.logprobs}_logprobs",
        }
        return json_response({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = await json_body(request)
        given = check_fields(body, CHAT_FIELDS, self._served.name)
        # Before the prompt is rendered, so that a wrong field is refused without that work.
        parsed = parse_request(given, chat=True, body=body, request_id=_request_id(request))
        messages = messages_of(given.get("messages"))
        # In a thread, since templates and tokenizers would block the event loop.
        prompt = await self._served.run(lambda: self._served.chat_prompt(messages, parsed.tools))
        return await self._complete(request, parsed, [prompt])

    async def text(self, request: Request) -> Response:
        """`POST /v1/completions`: complete a string, a list of ids, or several of either."""
        body = await json_body(request)
        given = check_fields(body, TEXT_FIELDS, self._served.name)
        parsed = parse_request(given, chat=False, body=body, request_id=_request_id(request))
        given_prompts = _prompts(given.get("prompt"), parsed.n)
        prompts = await self._served.run(
            lambda: [self._served.text_prompt(prompt) for prompt in given_prompts]
        )
        return await self._complete(request, parsed, prompts)

    async def _complete(
        self,
        request: Request,
        parsed: ParsedRequest,
        prompts: list[IntArray],
        kind: type[Responses] = Responses,
    ) -> Response:
        served, responses = self._served, kind(self._served, parsed)
        if parsed.stream:
            events = ResponseStream(responses, prompts).events()
            headers = {"Cache-Control": "no-cache"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        # If the client disconnects, its place in the batch is freed.
        outputs = await while_connected(request, served.sample(prompts, parsed.sampling, parsed.n))
        # Not in a thread if there is no text to decode: ids need no tokenizer.
        if not kind.has_text:
            return json_response(responses.whole(prompts, outputs))
        return await served.run(lambda: json_response(responses.whole(prompts, outputs)))

    async def generate(self, request: Request) -> Response:
        """`POST /inference/v1/generate`: ids in, ids out, with the version of each span."""
        served = self._served
        given = check_fields(await json_body(request), GENERATE_FIELDS, served.name)
        params = given.get("sampling_params", {})
        if not isinstance(params, dict):
            raise RequestError("sampling_params is not an object.", param="sampling_params")
        if not isinstance(given.get("token_ids"), list):
            raise RequestError("token_ids is not a list of ids.", param="token_ids")
        params = check_fields(params, SAMPLING_PARAMS_FIELDS, served.name)
        if params.get("logprobs", 0) not in (0, 1):
            raise RequestError("only logprobs of sampled tokens are supported. Use 0 or 1.")
        # Not in a thread, since ids need no tokenizer.
        prompt = served.text_prompt(given["token_ids"])
        asked = ParsedRequest(
            sampling_of(params),
            chat=False,
            n=num_choices(params),
            stream=flag(given, "stream"),
            include_usage=includes_usage(given),
            logprobs=params.get("logprobs", False) is not False,
            token_ids=flag(given, "return_token_ids"),
            # The client's own id, if any, by which it recognizes its answer.
            request_id=_request_id_in(given) or _request_id(request) or secrets.token_hex(12),
        )
        return await self._complete(request, asked, [prompt], TokenResponses)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: return the ids of a string or of a conversation's prompt."""
        served = self._served
        given = check_fields(await json_body(request), TOKENIZE_FIELDS, served.name)
        if ("messages" in given) == ("prompt" in given):
            raise RequestError("give either prompt or messages.", param="prompt")
        if "messages" in given:
            opener = flag(given, "add_generation_prompt", default=True)
            messages, tools = messages_of(given["messages"]), tools_of(given)
            prompt = partial(served.chat_prompt, messages, tools, opener=opener)
        elif isinstance(given["prompt"], str):
            prompt = partial(served.text_prompt, given["prompt"])
        else:
            raise RequestError("prompt is not a string.", param="prompt")

        with_texts = flag(given, "return_token_strs")

        def answer() -> Response:
            ids = prompt().tolist()
            found = {"count": len(ids), "max_model_len": served.engine.max_context, "tokens": ids}
            if with_texts:
                found["token_strs"] = [served.renderer.decode([token]) for token in ids]
            return json_response(found)

        return await served.run(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: return the text of ids."""
        served = self._served
        given = check_fields(
            await json_body(request), frozenset(("model", "tokens")), self._served.name
        )
        if not isinstance(given.get("tokens"), list):
            raise RequestError("tokens is not a list of ids.", param="tokens")
        return await served.run(
            lambda: json_response(
                {"prompt": served.renderer.decode(served.text_prompt(given["tokens"]))}
            )
        )


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
) -> Starlette:
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
    if not token:
        raise ConfigError(
            "the token is empty, so anybody who reaches the port could use the model. Generate "
            "one, or name the variable that holds one with --api-key-env."
        )
    handlers, weights = Handlers(served), WeightHandlers(served)
    paths: dict[tuple[str, str], Handler] = {
        ("GET", "/v1/models"): handlers.models,
        ("POST", "/v1/chat/completions"): handlers.chat,
        ("POST", "/v1/completions"): handlers.text,
        ("POST", "/inference/v1/generate"): handlers.generate,
        ("POST", "/tokenize"): handlers.tokenize,
        ("POST", "/detokenize"): handlers.detokenize,
        **weights.paths,
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await served.aclose()

    app = Starlette(
        routes=[
            Route(path, answering_errors(run, _failed), methods=[method])
            for (method, path), run in paths.items()
        ],
        middleware=[
            Middleware(
                Unauthorized,
                token=token,
                admin_token=admin_token,
                admin_paths=weights.admin_paths,
            )
        ],
        exception_handlers={HTTPException: _unknown_path},
        lifespan=lifespan,
    )
    app.state.read_timeout_s = read_timeout_s
    return app


def _request_id(request: Request) -> str:
    """Return the client's own id of the request, by which it recognizes the answer."""
    return request.headers.get("x-request-id", "")[:128]


def _request_id_in(given: Mapping[str, Any]) -> str:
    """Return the client's own id in the body of the request, or ""."""
    name = given.get("request_id", "")
    if not isinstance(name, str):
        raise RequestError("request_id is not a string.", param="request_id")
    return name[:128]


def _prompts(prompt: object, n: int) -> list[object]:
    """Return the prompts of a text completion; `prompt` is one of them or a list."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts: list[object] = list(prompt) if several else [prompt]  # type: ignore[call-overload]
    if len(prompts) * n > MAX_COMPLETIONS:
        raise RequestError(
            f"{len(prompts)} prompts with n = {n} are more than {MAX_COMPLETIONS} completions. "
            "Send several requests.",
            param="prompt",
        )
    return prompts


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
        proxy_headers=True,  # a proxy's https in redirects
        # Streams may take minutes, and the engine stops with the server anyway.
        timeout_graceful_shutdown=5,
    )
    with listener:
        AnnouncingServer(config, lambda: on_ready(url, token, admin_token)).run([listener])
