"""The application: which path is answered by what.

OpenAI's `/v1/models`, `/v1/chat/completions` and `/v1/completions`; vLLM's `/tokenize`,
`/detokenize`, `/inference/v1/generate` and, from `admin`, its weight updates; `/health`. It knows
starlette and the served model. It leaves out sockets and processes (`run`).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rolltree.errors import ConfigError
from rolltree.inference.server import answers
from rolltree.inference.server.admin import AdminHandlers
from rolltree.inference.server.errors import RequestError
from rolltree.inference.server.fields import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    SAMPLING_PARAMS_FIELDS,
    TEXT_FIELDS,
    TOKENIZE_FIELDS,
    asked,
    check_fields,
    num_choices,
    sampling_of,
    tools_of,
)
from rolltree.inference.server.http import (
    Handler,
    Unauthorized,
    failure,
    guarded,
    json_body,
    json_response,
    while_connected,
)
from rolltree.inference.server.served import ServedModel
from rolltree.inference.server.stream import AnswerStream

_MAX_PROMPTS = 1024


class Handlers:
    """What answers requests for one served model."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: the one model."""
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
        served, body = self._served, await json_body(request)
        given = check_fields(body, CHAT_FIELDS, served.name)
        wanted, tools = asked(given, chat=True, body=body), tools_of(given)
        prompt = served.chat_prompt(given.get("messages"), tools)
        if wanted.stream:
            return _streamed(AnswerStream(served, wanted, [prompt], chat=True, tools=tools))
        sampling = served.sample([prompt], wanted.sampling, wanted.n)
        outputs = await while_connected(request, sampling)
        return json_response(answers.chat_answer(served, wanted, tools, prompt, outputs))

    async def text(self, request: Request) -> Response:
        """`POST /v1/completions`: one string or list of ids, or several of either."""
        served, body = self._served, await json_body(request)
        given = check_fields(body, TEXT_FIELDS, served.name)
        wanted = asked(given, chat=False, body=body)
        prompts = [served.text_prompt(prompt) for prompt in _prompts(given.get("prompt"))]
        if wanted.stream:
            return _streamed(AnswerStream(served, wanted, prompts, chat=False))
        sampling = served.sample(prompts, wanted.sampling, wanted.n)
        outputs = await while_connected(request, sampling)
        return json_response(answers.text_answer(served, wanted, prompts, outputs))

    async def generate(self, request: Request) -> Response:
        """`POST /inference/v1/generate`: ids in, ids out, with the version of each span."""
        served = self._served
        given = check_fields(await json_body(request), GENERATE_FIELDS, served.name)
        params = given.get("sampling_params", {})
        if not isinstance(params, dict):
            raise RequestError("sampling_params is not an object.", param="sampling_params")
        if given.get("stream"):
            raise RequestError(
                "this endpoint does not stream here; /v1/completions does.", param="stream"
            )
        if not isinstance(given.get("token_ids"), list):
            raise RequestError("token_ids is not a list of ids.", param="token_ids")
        params = check_fields(params, SAMPLING_PARAMS_FIELDS, served.name)
        if params.get("logprobs", 0) not in (0, 1):
            raise RequestError("logprobs: only the sampled tokens' own can be had.")
        prompt = served.text_prompt(given["token_ids"])
        sampling = served.sample([prompt], sampling_of(params), num_choices(params))
        outputs = await while_connected(request, sampling)
        answer = answers.ids_answer(
            served,
            prompt,
            outputs,
            request_id=str(given.get("request_id", secrets.token_hex(12))),
            logprobs="logprobs" in params,
            prompt_ids=bool(given.get("return_token_ids")),
        )
        return json_response(answer)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: a string, or the prompt of a conversation, as ids."""
        served = self._served
        given = check_fields(await json_body(request), TOKENIZE_FIELDS, served.name)
        if ("messages" in given) == ("prompt" in given):
            raise RequestError("give either prompt or messages.", param="prompt")
        if "messages" in given:
            opener = given.get("add_generation_prompt", True) is True
            ids = served.chat_prompt(given["messages"], tools_of(given), opener=opener)
        elif isinstance(given["prompt"], str):
            ids = served.text_prompt(given["prompt"])
        else:
            raise RequestError("prompt is not a string.", param="prompt")
        answer = {
            "count": len(ids),
            "max_model_len": served.engine.max_context,
            "tokens": ids.tolist(),
        }
        if given.get("return_token_strs"):
            answer["token_strs"] = [served.renderer.decode([token]) for token in ids.tolist()]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: ids as text."""
        body = await json_body(request)
        given = check_fields(body, frozenset(("model", "tokens")), self._served.name)
        ids = self._served.text_prompt(given.get("tokens", ""))
        return json_response({"prompt": self._served.renderer.decode(ids)})


def create_app(served: ServedModel, token: str) -> Starlette:
    """Return the ASGI application; its shutdown closes the engine.

    Args:
        served: the model.
        token: what requests must carry as a bearer token (all but `/health`).

    Raises:
        ConfigError: the token is empty.
    """
    if not token:
        raise ConfigError(
            "the token is empty, so anybody who reaches the port could use the model and replace "
            "its weights. Generate one, or name the variable that holds one with --api-key-env."
        )
    handlers, admin = Handlers(served), AdminHandlers(served)
    paths: dict[tuple[str, str], Handler] = {
        ("GET", "/v1/models"): handlers.models,
        ("POST", "/v1/chat/completions"): handlers.chat,
        ("POST", "/v1/completions"): handlers.text,
        ("POST", "/inference/v1/generate"): handlers.generate,
        ("POST", "/tokenize"): handlers.tokenize,
        ("POST", "/detokenize"): handlers.detokenize,
        **admin.paths,
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await served.aclose()

    return Starlette(
        routes=[
            Route(path, guarded(run), methods=[method]) for (method, path), run in paths.items()
        ],
        middleware=[Middleware(Unauthorized, token=token)],
        exception_handlers={HTTPException: _unknown_path},
        lifespan=lifespan,
    )


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not served here"
    return failure(RequestError(what, status=status))


def _streamed(stream: AnswerStream) -> Response:
    return StreamingResponse(
        stream.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _prompts(prompt: object) -> list[object]:
    """Return the prompts of a text completion, which may be one or a list of them."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts: list[object] = list(prompt) if several else [prompt]  # type: ignore[call-overload]
    if len(prompts) > _MAX_PROMPTS:
        raise RequestError(f"more than {_MAX_PROMPTS} prompts in one request.", param="prompt")
    return prompts
