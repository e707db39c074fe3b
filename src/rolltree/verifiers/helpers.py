"""Small functions of verifiers 0.1.8's `utils` that environments call, and its loggers."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

from rolltree.environments.parsers import text_of
from rolltree.inference.parse import extract_message, sampled_entries, spelled_ids
from rolltree.inference.wire import read
from rolltree.tokens import peek
from rolltree.values.errors import BadResponse
from rolltree.values.types import (
    OVERLONG_PROMPT,
    ChatMessage,
    FinishReason,
    Messages,
    MessageType,
    ModelResponse,
)

if TYPE_CHECKING:
    from rich.text import Text


class WrongResponse(BadResponse, AssertionError):
    """A response fails an assertion of verifiers; the server is to blame."""


class NullAsyncContext(nullcontext[None]):
    """An asynchronous context manager without a limit."""


_PLACEHOLDERS = {"image_url": "[image]"}


async def maybe_await(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and await its result if it is awaitable."""
    result = func(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


maybe_await.__module__ = "verifiers.utils.async_utils"  # in errors of calls, which models read


async def maybe_semaphore(limit: int | None = None) -> AbstractAsyncContextManager[Any]:
    """Return a semaphore for a positive limit, else a context manager without a limit."""
    return asyncio.Semaphore(limit) if limit and limit > 0 else NullAsyncContext()


def concat_messages(messages_list: Sequence[Messages | ChatMessage]) -> Messages:
    """Join histories and single messages in order; only strings make a string."""
    if all(isinstance(part, str) for part in messages_list):
        return "".join(str(part) for part in messages_list)
    joined: list[Any] = []
    for part in messages_list:
        joined.extend(part if isinstance(part, list) else [part])
    return joined


def strip_nones_from_content(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages without the None values that data sets put into content parts."""
    return [
        {**message, "content": [_without_none(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _without_none(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    return {key: value for key, value in part.items() if value is not None}


def message_to_printable(message: ChatMessage) -> ChatMessage:
    """Return the message with its content as one string; images and audio become placeholders.

    A message without content gets an empty list.
    """
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content or []
    shown: ChatMessage = {"role": message["role"], "content": []}
    if "tool_calls" in message:
        shown["tool_calls"] = message["tool_calls"]
    if content is not None:
        texts = [_printable(part) for part in parts]
        shown["content"] = "\n\n".join(text for text in texts if text is not None)
    return shown


def _printable(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    # Parts of other kinds are left out, as in verifiers.
    kind = str(part["type"])
    if kind == "text":
        return str(part["text"])
    return "[audio]" if kind.startswith("input_audio") else _PLACEHOLDERS.get(kind)


def messages_to_printable(messages: Messages) -> Messages:
    """Return a history with contents as strings; a string is returned as it is."""
    if isinstance(messages, str):
        return messages
    return [message_to_printable(message) for message in messages or []]


def sanitize_tool_calls(messages: Messages) -> Messages:
    """Return a history whose tool calls are JSON text, for columns of one type."""
    if not isinstance(messages, list):  # a text, or None: a rollout that has no completion
        return messages
    return [
        {
            "role": message["role"],
            "content": message.get("content", ""),
            "tool_calls": [_as_json(call) for call in message["tool_calls"] or []],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_json(call: Any) -> str:
    return json.dumps(call if isinstance(call, dict) else call.model_dump())


async def parse_response_messages(response: Any, message_type: MessageType) -> Messages:
    """Return a response's answer: a list with one message, or a string for text completions.

    Raises:
        AssertionError: it is not a response of this type.
    """
    # verifiers reads an answer without choices as an empty one.
    if read(response, "choices") == []:
        return [{"role": "assistant", "content": ""}] if message_type == "chat" else ""
    try:
        if isinstance(response, ModelResponse):
            message, text = response.message, response.text
        else:
            message, text = extract_message(response, message_type)
    except BadResponse as error:
        # verifiers asserts the response's class; authors' tests expect an AssertionError.
        raise WrongResponse(str(error)) from error
    said = {name: value for name, value in message.items() if name != "reasoning_content"}
    return [said] if message_type == "chat" else text


async def parse_response_tokens(
    response: Any, message_type: MessageType, max_seq_len: int | None = None
) -> dict[str, Any] | None:
    """Return the tokens of a response as lists, or None if it has none.

    With `max_seq_len` they are cut to that length: `is_truncated` says so, and `overlong_prompt`
    says that the prompt alone was too long.

    Raises:
        AssertionError: it is not a response of this type, or has several choices.
    """
    found = _tokens_of(response, message_type)
    if found is None:
        return None
    prompt_ids, completion_ids, logprobs = found
    tokens: dict[str, Any] = {
        "prompt_ids": prompt_ids,
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": logprobs,
    }
    cut_tokens(tokens, max_seq_len)
    return tokens


def cut_tokens(tokens: Any, max_seq_len: int | None) -> None:
    """Cut the tokens of a step to `max_seq_len`, prompt and completion, and note what was cut."""
    num_prompt, num_sampled = (len(peek(tokens, key)) for key in ("prompt_ids", "completion_ids"))
    tokens["overlong_prompt"] = max_seq_len is not None and num_prompt > max_seq_len
    tokens["is_truncated"] = max_seq_len is not None and num_prompt + num_sampled > max_seq_len
    if max_seq_len is None or not tokens["is_truncated"]:
        return
    # A prompt that is too long loses all of its completion, as in verifiers.
    room = max(0, max_seq_len - num_prompt)
    for key in ("prompt_ids", "prompt_mask"):
        tokens[key] = tokens[key][:max_seq_len]
    for key in ("completion_ids", "completion_mask", "completion_logprobs"):
        tokens[key] = tokens[key][:room]


def _tokens_of(
    response: Any, message_type: MessageType
) -> tuple[list[int], list[int], list[float]] | None:
    """Return prompt ids, sampled ids and logprobs as the server gave them."""
    if isinstance(response, ModelResponse):
        # verifiers has prompt, completion and logprobs together, or no tokens.
        kept = (response.prompt_ids, response.completion_ids, response.logprobs)
        return None if any(x is None for x in kept) else tuple(x.tolist() for x in kept)  # type: ignore
    chat, choices = message_type == "chat", read(response, "choices")
    assert isinstance(choices, list | tuple), f"{response!r:.80} has no choices"
    assert choices, "the response has no choice"
    # Tokens of several choices cannot be told apart in one step.
    assert not chat or len(choices) == 1, "Response should always have one choice"
    assert hasattr(choices[0], "message" if chat else "text") or isinstance(choices[0], dict)
    said = read(choices[0], "logprobs")
    sampled = read(choices[0], "token_ids")
    # A server that does not know `return_token_ids` may still spell ids in its logprobs.
    if not isinstance(sampled, list | tuple):
        texts = sampled_entries(said, message_type, "token", "tokens") or []
        spelled = spelled_ids(texts)
        sampled = None if spelled is None else spelled.tolist()
    found = (
        read(response if chat else choices[0], "prompt_token_ids"),
        sampled,
        sampled_entries(said, message_type, "logprob", "token_logprobs"),
    )
    if not all(isinstance(part, list | tuple) for part in found):
        return None
    return tuple(map(list, found))  # type: ignore[return-value]


def get_overlong_prompt_dummy_response(message_type: MessageType) -> Any:
    """Return the response to a prompt that is too long for the model.

    Raises:
        ValueError: the message type is neither "chat" nor "completion".
    """
    if message_type not in ("chat", "completion"):
        raise ValueError(f"Invalid message type: {message_type}")
    chat = message_type == "chat"
    text = "Prompt too long."
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    fields = {
        "id": OVERLONG_PROMPT,
        "created": 0,
        "model": "",
        "object": "chat.completion" if chat else "text_completion",
        "choices": [{"index": 0, "finish_reason": "length", **said}],
    }
    try:
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        message: ChatMessage = {"role": "assistant", "content": text}
        return ModelResponse(message, text, FinishReason.LENGTH, id=OVERLONG_PROMPT)
    # An object of the openai package, because environments read it like any other response.
    return (ChatCompletion if chat else Completion).model_validate(fields)


def print_prompt_completions_sample(
    prompts: Sequence[Messages],
    completions: Sequence[Messages],
    rewards: Sequence[float],
    step: int,
    num_samples: int = 1,
) -> None:
    """Print the first prompts with their completions and rewards."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from rolltree.reports import SafeConsole

    table = Table(show_header=True, header_style="bold white", expand=True)
    table.add_column("Prompt", style="bright_yellow")
    table.add_column("Completion", style="bright_green")
    table.add_column("Reward", style="bold cyan", justify="right")
    for index in range(min(num_samples, len(prompts))):
        reward = rewards[index] if index < len(rewards) else 0.0
        said = [messages_as_text(prompts[index]), messages_as_text(completions[index])]
        table.add_row(*said, Text(f"{reward:.2f}"), end_section=True)
    title = f"Step {step}"
    SafeConsole().print(Panel(table, expand=False, title=title, border_style="bold white"))


def messages_as_text(messages: Any) -> Text:
    """Return messages, or a string, as text with styles; tool calls follow their message."""
    from rich.text import Text

    from rolltree.reports.formatting import safe_text

    if not isinstance(messages, list):
        return safe_text(str(messages))
    text = Text()
    for index, message in enumerate(messages):
        role = str(read(message, "role", ""))
        style = "bright_cyan" if role == "assistant" else "bright_magenta"
        text.append("\n\n" * bool(index))
        text.append(f"{role}: ", style="bold")
        said = text_of(message) if isinstance(message, dict) else str(message)
        text.append_text(safe_text(said, style=style))
        for call in read(message, "tool_calls") or ():
            text.append("\n\n[tool call]\n", style=style)
            text.append_text(safe_text(_call(call), style=style))
    return text


def _call(call: Any) -> str:
    """Return a tool call, a dict or an object, as JSON; in saved results it is JSON already."""
    if isinstance(call, str):
        return call
    function = read(call, "function") or call
    arguments = read(function, "arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, default=str)
    told = {"name": read(function, "name") or "", "args": arguments}
    return json.dumps(told, indent=2, ensure_ascii=False)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which may be replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def setup_logging(
    level: str = "INFO", log_format: str | None = None, date_format: str | None = None
) -> None:
    """Make the loggers of verifiers and rolltree write `level` and above to standard error."""
    for name in ("verifiers", "rolltree"):
        write_to_stderr(name, level, log_format, date_format)


def write_to_stderr(
    name: str, level: str, log_format: str | None = None, date_format: str | None = None
) -> None:
    """Make one logger write `level` and above to standard error, and nowhere else."""
    handler = _StderrHandler()
    form = log_format or "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
    handler.setFormatter(logging.Formatter(form, date_format or "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger(name)
    # Replaced instead of added: a second call must not print every line twice.
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
