"""`ModelClient`, the one interface to a model, and conversions of clients and sampling fields."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from rolltree.inference.request_fields import KNOWN_FIELDS
from rolltree.inference.template import TemplateError
from rolltree.values.errors import (
    AnswerTooLarge,
    ConfigError,
    ModelError,
    PromptTooLong,
    ServerError,
    UnsupportedSetting,
    did_you_mean,
    follows_from_answer,
)
from rolltree.values.types import (
    GenerateRequest,
    Messages,
    MessageType,
    ModelResponse,
    SamplingArgs,
    SamplingParams,
    ToolSchema,
)

if TYPE_CHECKING:
    from rolltree.inference.chat import ChatRenderer

logger = logging.getLogger("rolltree.inference")


@runtime_checkable
class ModelClient(Protocol):
    """A model that can be called, by messages or by token ids.

    All methods raise `rolltree.values.errors.ModelError` (or a subclass) when the model gave no
    usable answer, and `TokenError` when the answer's tokens contradict themselves.
    """

    @property
    def model(self) -> str:
        """The default model for calls."""
        ...

    def session(self) -> ModelClient:
        """Return a client for one rollout.

        It remembers its calls: a prompt that continues an earlier call is sent as that call's exact
        ids plus only what is new, and `ModelResponse.extends` names the call.
        """
        ...

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[ToolSchema] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
        model: str | None = None,
        message_type: MessageType = "chat",
    ) -> ModelResponse:
        """Sample the next assistant message, or continue a string (`message_type="completion"`)."""
        ...

    async def generate(self, request: GenerateRequest) -> ModelResponse:
        """Sample one completion after exactly `request.prompt_ids`."""
        ...

    async def aclose(self) -> None:
        """Release connections. A session shares them with its parent and releases none."""
        ...


def as_client(client: object, model: str | None = None) -> ModelClient:
    """Return `client` as a `ModelClient`.

    A `ModelClient` passes through. An object with `chat.completions.create`, such as
    `AsyncOpenAI`, is wrapped; `model` is then the model of calls that name none.

    Raises:
        ConfigError: the object is neither, or it is a blocking client.
    """
    client = getattr(client, "__rolltree_client__", client)  # an OpenAI-shaped view of a client
    # Told apart by `completions`, since both kinds have a `chat`.
    if hasattr(getattr(client, "chat", None), "completions"):
        from rolltree.inference.openai_sdk import OpenAISDKClient

        return OpenAISDKClient(client, model)
    if all(callable(getattr(client, name, None)) for name in ("chat", "generate", "session")):
        return cast(ModelClient, client)
    raise ConfigError(
        f"a {type(client).__name__} is not a model client: it has neither `chat.completions` (like "
        "openai.AsyncOpenAI) nor the methods of rolltree.inference.ModelClient, so it cannot call "
        "a model. Pass openai.AsyncOpenAI(...) or rolltree.inference.OpenAIClient(...)."
    )


def with_inner(client: object) -> Iterator[Any]:
    """Yield a client and all behind it: those of a pool, or the one that gets its calls."""
    yield client
    for part in getattr(client, "clients", ()):
        yield from with_inner(part)


def check_tools(client: object, tools: Sequence[ToolSchema] | None) -> None:
    """Check that prompts which are rendered here show the model its tools.

    The clients behind a pool, or behind a client that passes calls on, are checked too.

    Raises:
        ConfigError: a chat template leaves the tools out.
    """
    for part in with_inner(client):
        renderer = getattr(part, "renderer", None)
        if renderer is not None:
            check_shown_tools(renderer, tools, getattr(part, "model", "the model"))


def check_shown_tools(
    renderer: ChatRenderer, tools: Sequence[ToolSchema] | None, model: str
) -> None:
    """Check that the template of `model` shows it its tools.

    Raises:
        ConfigError: it leaves the tools out, or nobody can read the calls.
    """
    if tools and not renderer.shows_tools(tools):
        name = tools[0]["function"]["name"]
        raise ConfigError(
            f"the chat template of {model!r} ignores tools, so the model would never hear of "
            f"{name!r} and could not call it. Use rolltree.agents.ReActAgent, which describes "
            "tools in the system prompt, or a template or model with tools."
        )
    if tools and not renderer.reads_calls:
        raise ConfigError(
            f"the chat template of {model!r} shows tools, but none of the known formats of calls, "
            "so every call would be taken for text, without a reward. Name the format "
            "(ChatRenderer(..., tool_parser='hermes')), give a row of your own "
            "(tool_parser=ToolFormat(...), see docs/tools.md), or tool_parser='none' if the model "
            "shall not call tools."
        )


def answers_for_all(client: object) -> bool:
    """Whether a client answers even for agents that have their own client, as recordings do.

    The clients behind one that passes calls on are checked, too.
    """
    return any(getattr(part, "answers_for_all", False) for part in with_inner(client))


_IN_BODY = ("top_k", "stop_token_ids")
"""Fields that OpenAI's API lacks: the openai client sends them in `extra_body`."""


def sampling_from_args(args: SamplingArgs) -> SamplingParams:
    """Turn OpenAI request fields into `SamplingParams`; `args` is not changed.

    Fields without a counterpart go to `.extra` unchanged, with a warning if neither OpenAI's API
    nor vLLM's has them, and so does the rest of `extra_body`, without a warning. Other fields that
    are None count as not given.

    >>> sampling_from_args({"temperature": 0.7, "max_completion_tokens": 8, "min_p": 0.1})
    SamplingParams(temperature=0.7, top_p=1.0, top_k=0, max_tokens=8, stop=(), \
stop_token_ids=(), seed=None, extra={'min_p': 0.1})

    Raises:
        ConfigError: a field has an invalid value, or `n` is not 1.
    """
    try:
        made = _shared_sampling(tuple(args.items()), tuple(map(type, args.values())))
    except TypeError:  # a value that cannot be hashed, such as a list of stop texts
        return _sampling(args)
    # A caller may change the fields of its own `extra`.
    return _sampling(args) if made.extra else made


@lru_cache(4096)
def _shared_sampling(
    fields: tuple[tuple[str, Any], ...], kinds: tuple[type, ...]
) -> SamplingParams:
    # Every turn of a rollout asks with the same fields. `kinds` tells 1 from True.
    return _sampling(dict(fields))


def _sampling(args: SamplingArgs) -> SamplingParams:
    rest = {key: value for key, value in args.items() if value is not None}
    body = dict(_mapping(rest.pop("extra_body", {})))
    for key in _IN_BODY:
        value = body.pop(key, None)
        if value is not None:
            # If a field is given in both places, the value outside of `extra_body` counts.
            rest.setdefault(key, value)
    if rest.pop("n", 1) != 1:
        raise _unusable(
            "n is not 1: one call gives one completion, so that each completion has its own seed "
            "and its own place in the trajectory. Ask for more rollouts per example instead."
        )
    known: dict[str, Any] = {}
    # In the order of the table: if a setting is given under two names, the later one wins.
    for key, name, convert in _FIELDS:
        if key in rest:
            value = rest.pop(key)
            try:
                known[name] = convert(value)
            except (TypeError, ValueError) as error:
                raise _unusable(
                    f"sampling argument {key} = {shown(value)} cannot be used ({error}); the "
                    "request would not be sampled as intended."
                ) from error
    for key in rest.keys() - KNOWN_FIELDS:
        _warn_unknown(key)
    if body:
        rest["extra_body"] = body
    return SamplingParams(**known, extra=rest)


def policy_version(client: object) -> int:
    """Return the version of the weights that a client's server was last given; 0 if unknown."""
    version = getattr(getattr(client, "__rolltree_client__", client), "version", 0)
    # A mock has every attribute.
    return version if type(version) is int else 0


def sampling_to_args(sampling: SamplingParams) -> SamplingArgs:
    """Return OpenAI request fields that `sampling_from_args` turns into the same params."""
    args: SamplingArgs = {**sampling.extra}
    # Always set, since servers have different defaults.
    args["temperature"] = sampling.temperature
    args["top_p"] = sampling.top_p
    if sampling.max_tokens is not None:
        args["max_tokens"] = sampling.max_tokens
    if sampling.stop:
        args["stop"] = list(sampling.stop)
    if sampling.top_k:
        args["top_k"] = sampling.top_k
    if sampling.stop_token_ids:
        args["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        args["seed"] = sampling.seed
    return args


def is_refusal(error: Exception) -> bool:
    """Whether a model call failed because of the messages or the answer, and would fail again."""
    refusals = (ServerError, AnswerTooLarge, TemplateError, PromptTooLong)
    # 403 is a key without rights before the first answer; after it, moderation of a text.
    is_moderated = isinstance(error, ServerError) and error.status == 403
    return is_moderated or (isinstance(error, refusals) and error.kind == "episode")


def may_follow(error: Exception) -> bool:
    """Whether a failure after a model call may follow from what the model wrote.

    A call of an environment's own, say of a simulated user, may quote it, and a setting may be
    computed from it: `max_tokens = budget - used`.
    """
    if isinstance(error, ExceptionGroup):
        return any(map(may_follow, error.exceptions))
    if isinstance(error, ModelError) and not isinstance(error, UnsupportedSetting):
        return is_refusal(error)
    # A wrong setting shows before the first answer. What shows later, such as an observation that
    # is not text, may be a branch that an answer chose.
    return isinstance(error, ConfigError) or follows_from_answer(error)


def merge_sampling(
    own: SamplingArgs | SamplingParams | None, given: SamplingArgs | SamplingParams | None
) -> SamplingParams:
    """Return `own` with the fields in `given` replaced: all of them if it is `SamplingParams`.

    >>> merge_sampling({"max_tokens": 8, "temperature": 0.5}, {"temperature": 1.0}).max_tokens
    8
    """
    # It has a value for every field, so nothing of `own` is left.
    if isinstance(given, SamplingParams):
        return given
    if isinstance(own, SamplingParams):
        own = sampling_to_args(own)
    return sampling_from_args({**(own or {}), **(given or {})})


def _unusable(message: str) -> ConfigError:
    error = ConfigError(message)
    # An environment may compute it from what the model wrote.
    error.kind = "episode"
    return error


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unusable(
            f"extra_body is a {type(value).__name__}, not a mapping of request fields, so nothing "
            "of it could be sent. Pass a dict."
        )
    return value


def _integer(value: Any) -> int:
    # In Python, `True` equals the integer 1.
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("not a whole number")
    return int(value)


def _positive(value: Any) -> int:
    number = _integer(value)
    if number < 1:
        raise ValueError("below 1")
    return number


def _temperature(value: Any) -> float:
    number = float(value)
    if not 0.0 <= number < float("inf"):
        raise ValueError("must be a finite number >= 0")
    return number


def _probability(value: Any) -> float:
    number = float(value)
    if not 0.0 < number <= 1.0:
        raise ValueError("not in (0, 1]")
    return number


def _top_k(value: Any) -> int:
    number = _integer(value)
    if number < -1:
        raise ValueError("below 0; use 0 or -1 to turn it off")
    return max(number, 0)  # -1 is vLLM's "off"


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError("stop strings must be non-empty strings")
    return strings


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_integer(item) for item in value)


_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("temperature", "temperature", _temperature),
    ("top_p", "top_p", _probability),
    ("top_k", "top_k", _top_k),
    ("max_tokens", "max_tokens", _positive),
    # OpenAI's newer name of the same field.
    ("max_completion_tokens", "max_tokens", _positive),
    ("stop", "stop", _strings),
    ("stop_token_ids", "stop_token_ids", _integers),
    ("seed", "seed", _integer),
)
"""OpenAI's name of a field, its name here, and the function that converts its value."""


def check_sampling_names(args: SamplingArgs) -> None:
    """Check that OpenAI or vLLM has a field of each name; in `extra_body` any name is allowed.

    Raises:
        ConfigError: a name is unknown; the message has the nearest known one.
    """
    for key in args.keys() - _KNOWN - {"extra_body"}:
        raise ConfigError(
            f"the sampling argument {key!r} is in neither OpenAI's API nor vLLM's, and most "
            f"servers would ignore it.{_nearest(key)} If yours takes it, put it into extra_body."
        )


# Once per name in a process, not once per call.
@cache
def _warn_unknown(key: str) -> None:
    """Warn once about a field that neither API has: most servers ignore such fields."""
    logger.warning(
        "the sampling argument %r is in neither OpenAI's API nor vLLM's; it is sent as it is, and "
        "most servers ignore such a field.%s",
        key,
        _nearest(key),
    )


_KNOWN = KNOWN_FIELDS.union(name for name, _, _ in _FIELDS)


def _nearest(key: str) -> str:
    near = did_you_mean(key, _KNOWN)
    # All of them would be too many to read.
    return near if "Did you mean" in near else ""
