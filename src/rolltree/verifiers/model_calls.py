"""A model call as verifiers 0.1.8 makes it, on clients of the openai package and rolltree's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

from rolltree._helpers.threads import run_in_thread
from rolltree.environments.openai_view import OpenAIView, openai_view
from rolltree.inference.client import as_client, sampling_from_args
from rolltree.rollouts import current_episode
from rolltree.values.errors import ConfigError, PromptTooLong
from rolltree.values.types import (
    ChatMessage,
    Messages,
    MessageType,
    SamplingArgs,
    ToolSchema,
)
from rolltree.verifiers.helpers import get_overlong_prompt_dummy_response, strip_nones_from_content

logger = logging.getLogger("rolltree.verifiers")


def is_blocking(client: Any) -> bool:
    """Return whether `client` is a blocking client of the openai package."""
    # By module, without importing openai: the client may be a subclass, and the package absent.
    ours = any(kind.__module__.partition(".")[0] == "openai" for kind in type(client).__mro__)
    return ours and not hasattr(client, "__aenter__") and hasattr(client, "chat")


def async_client(client: Any) -> Any:
    """Return a client whose `create` methods can be awaited: a blocking one is called in threads.

    A model client of rolltree gets OpenAI's methods; other clients are returned as they are.
    """
    if client is None or not is_blocking(client):
        return openai_view(client)
    _warn_of_threads()
    return ThreadedOpenAI(client)


@cache
def _warn_of_threads() -> None:
    logger.warning(
        "a blocking openai.OpenAI client is asked in threads, one per request, which costs more "
        "than openai.AsyncOpenAI would."
    )


class ThreadedOpenAI:
    """A blocking client whose `chat.completions.create` and `completions.create` can be awaited.

    All other attributes are the client's own.
    """

    def __init__(self, blocking: Any) -> None:
        self._blocking = blocking

    async def create(self, **fields: Any) -> Any:
        """Request once, in a thread that ends when its caller stops waiting."""
        return await run_in_thread(lambda: self._blocking.create(**fields), name="openai-request")

    def __getattr__(self, name: str) -> Any:
        # Copying looks up attributes before there is a client.
        if "_blocking" not in vars(self):
            raise AttributeError(name)
        found = getattr(self._blocking, name)
        # Authors await `client.chat.completions.create`, whatever the client is.
        return ThreadedOpenAI(found) if name in ("chat", "completions") else found


def is_direct(client: Any) -> bool:
    """Whether `client` is called by its own OpenAI methods."""
    # By shape and not by class: authors pass mocks and wrappers of clients.
    return not isinstance(client, OpenAIView) and hasattr(
        getattr(client, "chat", None), "completions"
    )


class MissingClient:
    """Stands for the client None: an environment may answer by itself."""

    model = ""

    def session(self) -> MissingClient:
        """Return itself."""
        return self

    async def chat(self, *args: Any, **settings: Any) -> Any:
        """Fail: there is no client.

        Raises:
            AttributeError: always, as None would.
        """
        raise AttributeError(
            "the client is None, so no model can be asked. Pass openai.AsyncOpenAI(...), or "
            "override get_model_response to answer without a model."
        )

    generate = chat


async def ask(
    client: Any,
    model: str,
    prompt: Messages,
    tools: Sequence[ToolSchema] | None,
    sampling_args: SamplingArgs | None,
    message_type: MessageType,
) -> Any:
    """Return the response to one call; if the prompt is too long, the response's `id` says so.

    Raises:
        ConfigError: tools are offered to a text completion.
        Exception: the client's error.
    """
    # Checked before the call, as in verifiers: a server would silently ignore the tools.
    if message_type == "completion" and tools:
        raise ConfigError("oai_tools are not supported for completion tasks.")
    messages, args = for_model(prompt, sampling_args)
    # verifiers accepts None for environments that answer without a model.
    client = MissingClient() if client is None else client
    client = async_client(client) if is_blocking(client) else client
    if is_direct(client):
        return await _ask_directly(client, model, messages, tools, args, message_type)
    try:
        return await as_client(client, model).chat(
            messages,
            tools=tools or None,
            sampling=sampling_from_args(args),
            model=model or None,
            message_type=message_type,
        )
    # The rollout ends by the stop condition `prompt_too_long` instead of failing.
    except PromptTooLong:
        return get_overlong_prompt_dummy_response(message_type)


def as_sent(args: SamplingArgs, message_type: MessageType) -> SamplingArgs:
    """Return sampling arguments with the name that `max_tokens` has in a request."""
    sent = {key: value for key, value in args.items() if key != "max_tokens"}
    # `max_tokens: None` from the command line means the server's default.
    if args.get("max_tokens") is not None:
        # OpenAI's newer models refuse `max_tokens` in chats.
        name = "max_completion_tokens" if message_type == "chat" else "max_tokens"
        sent[name] = args["max_tokens"]
    return sent


def request_fields(args: SamplingArgs, message_type: MessageType) -> SamplingArgs:
    """Return sampling arguments as the fields of a request, in which verifiers has no None."""
    sent = as_sent(args, message_type)
    return {key: value for key, value in sent.items() if value is not None}


async def _ask_directly(
    client: Any,
    model: str,
    messages: Messages,
    tools: Sequence[ToolSchema] | None,
    args: SamplingArgs,
    message_type: MessageType,
) -> Any:
    args = request_fields(args, message_type)
    if message_type == "chat":
        if tools:
            args["tools"] = tools
        call = client.chat.completions.create(model=model, messages=messages, **args)
    else:
        call = client.completions.create(model=model, prompt=messages, **args)
    episode = current_episode()
    try:
        # Waiting for the author's own client counts as waiting for the server, which time limits
        # exclude.
        with nullcontext() if episode is None else episode.clock.excluded():
            response = await call
        if episode is not None:
            episode.clock.num_answered += 1
        return response
    except Exception as error:  # any client's, known by its text
        if _is_overlong(error):
            return get_overlong_prompt_dummy_response(message_type)
        raise


def _is_overlong(error: Exception) -> bool:
    # By attribute, since clients that look like openai's raise their own classes. `status_error`
    # knows more phrasings of a full context than the six of verifiers.
    status = getattr(error, "status_code", None)
    if status != 400:
        return False
    from rolltree.inference.http import status_error

    text = str(getattr(getattr(error, "response", None), "text", error))
    return isinstance(status_error(400, text, "the server"), PromptTooLong)


def is_sendable(prompt: Any) -> bool:
    """Whether `for_model` accepts a prompt."""
    return isinstance(prompt, str) or all(hasattr(message, "get") for message in prompt)


def for_model(
    prompt: Messages, sampling_args: SamplingArgs | None
) -> tuple[Messages, SamplingArgs]:
    """Return the messages to send, without data sets' Nones, and the sampling arguments."""
    args = dict(sampling_args or {})
    if isinstance(prompt, str):
        return prompt, args
    parts = [p for m in prompt if isinstance(m.get("content"), list) for p in m["content"]]
    # Audio models answer with sound unless told otherwise, and parsers need text.
    if args.get("modalities") is None and any(_is_audio(part) for part in parts):
        args["modalities"] = ["text"]
    return [_without_nones(message) for message in prompt], args


def _is_audio(part: Any) -> bool:
    return isinstance(part, Mapping) and str(part.get("type", "")).startswith("input_audio")


def _without_nones(message: ChatMessage) -> ChatMessage:
    (message,) = strip_nones_from_content([message])
    # Nothing to leave out: the same dict, so that histories keep sharing messages.
    if all(value is not None or key == "content" for key, value in message.items()):
        return message
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "content": message.get("content")}
