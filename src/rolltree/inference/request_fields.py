"""The fields of a request: OpenAI's sampling fields, and vLLM's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rolltree.values.errors import ConfigError, UnsupportedSetting, did_you_mean
from rolltree.values.types import ChatMessage, MessageType, SamplingParams


class RequestField(NamedTuple):
    """A field of OpenAI's and vLLM's completion requests, as clients and servers treat it.

    Its `kind` is "setting" (`SamplingParams` has it), "shaping" (it changes the distribution of
    tokens), "answer" (the prompt, the end or the report of an answer), "hint" (a wish that a model
    may follow or not; an engine that cannot says so, and samples), "ask" (how many answers, as a
    stream, with ids), "note" (nothing) or "client" (an argument that is not sent). A `neutral`
    value asks for what is done without the field.
    """

    kind: str
    neutral: tuple[Any, ...] = ()


def _rows(kind: str, names: str, *neutral: Any) -> dict[str, RequestField]:
    return dict.fromkeys(names.split(), RequestField(kind, neutral))


# All fields beside the prompt, the tools and the model; servers ignore most others.
FIELDS: Mapping[str, RequestField] = {
    **_rows("setting", "max_tokens max_completion_tokens stop stop_token_ids seed"),
    **_rows("shaping", "temperature"),
    **_rows("shaping", "top_k", 0, -1),
    **_rows("shaping", "frequency_penalty presence_penalty min_p min_tokens", 0),
    **_rows("shaping", "top_p repetition_penalty best_of typical_p", 1),
    **_rows("shaping", "allowed_token_ids bad_words", []),
    **_rows("shaping", "logit_bias", {}),
    **_rows("shaping", "response_format", {"type": "text"}),
    **_rows("shaping", "tool_choice", "auto", "none"),
    **_rows("shaping", "use_beam_search", False),
    **_rows("shaping", "guided_choice guided_grammar guided_json guided_regex structured_outputs"),
    **_rows("answer", "add_special_tokens continue_final_message echo ignore_eos", False),
    **_rows("answer", "include_stop_str_in_output", False),
    **_rows("answer", "include_reasoning", True),
    **_rows("answer", "detokenize skip_special_tokens spaces_between_special_tokens", True, False),
    **_rows("answer", "priority top_logprobs", 0),
    **_rows("answer", "length_penalty", 1),
    **_rows("answer", "output_kind", 0, 2),
    **_rows("answer", "chat_template_kwargs", {}),
    **_rows("answer", "modalities", ["text"]),
    **_rows("answer", "suffix", ""),
    **_rows("answer", "add_generation_prompt", True),
    **_rows("answer", "chat_template documents kv_transfer_params"),
    **_rows("answer", "prompt_logprobs return_routed_experts truncate_prompt_tokens"),
    **_rows("hint", "parallel_tool_calls", True),
    **_rows("answer", "audio"),
    **_rows("answer", "function_call functions", "auto", "none", []),
    **_rows("hint", "reasoning_effort verbosity moderation web_search_options"),
    **_rows("ask", "n logprobs stream stream_options return_token_ids return_tokens_as_token_ids"),
    **_rows("note", "cache_salt metadata prediction prompt_cache_key prompt_cache_retention"),
    **_rows("note", "prompt_cache_options request_id"),
    **_rows("note", "safety_identifier service_tier store user"),
    **_rows("client", "extra_body extra_headers extra_query timeout"),
}
KNOWN_FIELDS = frozenset(FIELDS)
_UNKNOWN = RequestField("shaping")
CONSTRAINTS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""The fields that ask for a form of the answer; so does `tool_choice`."""


class Rendering(NamedTuple):
    """How a call's prompt is rendered: names for the template, and whether it ends in an answer.

    With `continues` the last message is the beginning of the answer, which goes on from there.
    """

    variables: Mapping[str, Any] = {}
    continues: bool = False


PLAIN = Rendering()
RENDERING = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
"""The fields that say how a chat's prompt is rendered."""


def split_rendering(sampling: SamplingParams) -> tuple[Rendering, SamplingParams]:
    """Return how the prompt is to be rendered, and the settings that are left for the engine.

    Raises:
        UnsupportedSetting: a value cannot be followed.
    """
    extra = sampling.extra
    body = extra.get("extra_body") or {} if extra else {}
    if not extra or not any(name in extra or name in body for name in RENDERING):
        return PLAIN, sampling
    from rolltree.inference.rendering import split

    return split(sampling)


def is_form(name: str, value: Any) -> bool:
    """Whether a field of `CONSTRAINTS`, or `tool_choice`, asks for a form of the answer."""
    return value is not None and value not in FIELDS[name].neutral


def asks_for_form(extra: Mapping[str, Any]) -> bool:
    """Whether a request's settings, or their `extra_body`, ask for a form of the answer."""
    bodies = (extra, extra.get("extra_body") or {}) if extra else ()
    names = (*CONSTRAINTS, "tool_choice")
    return any(is_form(name, body.get(name)) for body in bodies for name in names)


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{name} = {value!r} is not a known value.{did_you_mean(value, known)}")


def sampling_fields(sampling: SamplingParams, message_type: MessageType) -> dict[str, Any]:
    """Return the fields that OpenAI's API has.

    Temperature and top_p are always sent, since servers take defaults from the model folder; so is
    `max_tokens` for text completions, where leaving it out means 16 and null means no limit (but
    vLLM reads null as 16, so `OpenAIClient` computes how many fit).
    """
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.max_tokens is not None or message_type == "completion":
        fields["max_tokens"] = sampling.max_tokens
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


def extension_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields beyond OpenAI's API that this call needs, including `extra_body`."""
    fields: dict[str, Any] = {}
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    fields.update(sampling.extra.get("extra_body") or {})
    return fields


def extra_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return the caller's other fields.

    Raises:
        UnsupportedSetting: the caller requests streaming, which gives no tokens here.
    """
    if sampling.extra.get("stream"):
        raise UnsupportedSetting(
            "stream = True is set, but an answer is used only when it is complete. Leave it out."
        )
    return {name: value for name, value in sampling.extra.items() if name != "extra_body"}


def token_in_fields(sampling: SamplingParams) -> Mapping[str, Any]:
    """Return vLLM's `SamplingParams` for its token-in endpoint, which include logprobs.

    All fields are set for which a model folder could give a different default.
    """
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # vLLM's "off".
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        # Only the sampled token's.
        "logprobs": 0,
        # Older versions of vLLM take a missing one as 16. Null is the rest of the context.
        "max_tokens": sampling.max_tokens,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params


def outgoing(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages without fields that are not sent."""
    return [
        # The same dict if there is nothing to leave out, as nearly always.
        {name: value for name, value in message.items() if name != "parse_problems"}
        if "parse_problems" in message
        else message
        for message in messages
    ]


def distribution_changes(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings that make a token's distribution differ from softmax(logits / T).

    A field whose effect is unknown counts as one of them.

    >>> asked = SamplingParams(temperature=0.7, top_p=0.9, extra={"min_p": 0, "user": "me"})
    >>> distribution_changes(asked)
    {'top_p': 0.9}
    """
    if not sampling.extra and sampling.top_p == 1 and sampling.top_k in FIELDS["top_k"].neutral:
        return {}  # the fast path of most calls
    own = {"top_p": sampling.top_p, "top_k": sampling.top_k}
    body: Mapping[str, Any] = sampling.extra.get("extra_body") or {}
    changes: dict[str, Any] = {}
    for name, value in itertools.chain(own.items(), sampling.extra.items(), body.items()):
        field = FIELDS.get(name, _UNKNOWN)
        neutral = (sampling.temperature,) if name == "temperature" else field.neutral
        # None is not sent.
        if field.kind == "shaping" and value is not None and value not in neutral:
            changes[name] = value
    return changes


def hints_in(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among `extra` that are only wishes and ask for something.

    >>> hints_in({"reasoning_effort": "low", "parallel_tool_calls": True, "min_p": 0.1})
    {'reasoning_effort': 'low'}
    """
    return {
        name: value
        for name, value in extra.items()
        if (field := FIELDS.get(name, _UNKNOWN)).kind == "hint" and value not in field.neutral
    }


def samples_the_model(sampling: SamplingParams) -> bool:
    """Whether the distribution sampled from is the model's own, unchanged."""
    return sampling.temperature == 1.0 and not distribution_changes(sampling)
