"""The fields of all protocols, in three classes, with the reason of each.

A field without effect is taken. A hint is a wish that may be followed or not: it is taken, and
noted once in a session. Everything else changes what is sampled or answered: it is done, or refused
by name. Fields of the same meaning stand in the same row, so all protocols treat them the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from rolltree.gateway.fields import Effect, Field, Use
from rolltree.inference.request_fields import FIELDS

CHAT, TEXT, RESPONSES, MESSAGES = "chat/completions", "completions", "responses", "messages"
_UNREAD = {
    *("add_generation_prompt", "chat_template", "documents", "kv_transfer_params"),
    *("prompt_logprobs", "return_routed_experts", "truncate_prompt_tokens"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Fields that are treated the same, for the same reason.

    `fields` has them by path and name; a name in a nested object has dots.
    """

    effect: Effect
    why: str
    fields: Mapping[tuple[str, str], Field]


def _row(
    effect: Effect,
    use: Use,
    why: str,
    *values: object,
    openai: str = "",
    chat: str = "",
    text: str = "",
    responses: str = "",
    messages: str = "",
) -> Row:
    """Return a row; `openai` are fields of both completions, and `a=b` passes `a` on as `b`.

    Without `values`, fields that OpenAI's or vLLM's requests have take theirs from `FIELDS`.
    """
    listed = {
        CHAT: f"{openai} {chat}",
        TEXT: f"{openai} {text}",
        RESPONSES: responses,
        MESSAGES: messages,
    }
    fields: dict[tuple[str, str], Field] = {}
    for path, entries in listed.items():
        pairs = [entry.partition("=")[::2] for entry in entries.split()]
        for name, setting in pairs:
            known = FIELDS.get(setting or name)
            neutral = values or (known.neutral if known is not None else ())
            fields[path, name] = Field(use, setting, neutral, why, effect)
    return Row(effect, why, fields)


def _rest() -> str:
    """Return the names of `FIELDS` that change the answer, and that no row of `_FIRST` has."""
    known = {name for row in _FIRST for path, name in row.fields if path in (CHAT, TEXT)}
    names = (name for name, field in FIELDS.items() if field.kind in ("shaping", "answer"))
    return " ".join(name for name in names if name not in known | _UNREAD)


_FIRST = (
    # -- what changes the answer: done
    _row(
        "changes",
        "read",
        "done: the prompt. Only text can be recorded as the tokens that the model saw",
        chat="messages",
        text="prompt",
        responses="input instructions previous_response_id",
        messages="messages system",
    ),
    _row(
        "changes",
        "read",
        "done: functions are offered to the model, custom tools as functions; tools of the API's "
        "own servers are left out, and noted",
        chat="tools",
        responses="tools",
        messages="tools",
    ),
    _row(
        "changes",
        "read",
        "`auto` and `none` are done; a call that is required or named is done by the embedded "
        "engine (with the extra `constrained`) and by servers that can, and refused by the others",
        chat="tool_choice",
        responses="tool_choice",
        messages="tool_choice tool_choice.type tool_choice.name",
    ),
    _row("changes", "read", "done: every answer is a call of its own", openai="n"),
    _row(
        "changes",
        "read",
        "done for what was sampled; more than that is refused",
        openai="logprobs",
        responses="include",
    ),
    _row(
        "changes",
        "sampling",
        "done by every engine; the run's settings override them",
        openai="temperature top_p top_k max_tokens max_completion_tokens stop stop_token_ids seed",
        responses="temperature top_p max_output_tokens=max_tokens",
        messages="max_tokens temperature top_p top_k stop_sequences=stop",
    ),
    # -- what changes the answer: refused
    _row(
        "changes",
        "only",
        "refused: the chat template decides which tokens a prompt has",
        openai="add_special_tokens",
    ),
    _row("changes", "only", "refused: every sample is a separate call", openai="best_of"),
    _row(
        "changes",
        "passed",
        "done where prompts are rendered here: the answer continues the final message; passed on "
        "to a server that renders them itself",
        chat="continue_final_message add_generation_prompt",
    ),
    _row(
        "changes",
        "passed",
        "done where prompts are rendered here: names that the chat template reads, such as "
        "`enable_thinking`; passed on to a server that renders them itself",
        chat="chat_template_kwargs",
    ),
    _row(
        "changes",
        "only",
        "refused: a text is continued as it is",
        {},
        text="chat_template_kwargs",
    ),
    _row(
        "changes",
        "only",
        "refused: a text is always continued where it ends",
        text="continue_final_message",
    ),
    _row("changes", "only", "refused: an answer has only what was sampled", openai="echo"),
    _row(
        "changes",
        "only",
        "refused: an answer ends before its stop string",
        openai="include_stop_str_in_output",
    ),
    _row("changes", "only", "refused: text can only be continued at its end", openai="suffix"),
    _row(
        "changes",
        "only",
        "refused: only text can be recorded as tokens",
        openai="modalities",
        chat="audio",
    ),
    _row(
        "changes",
        "only",
        "refused: they are the older form of tools. Send tools and tool_choice",
        "auto",
        "none",
        [],
        chat="functions function_call",
    ),
    _row(
        "changes",
        "read",
        "the likeliest tokens at each place, by the embedded engine; refused where a server gives "
        "only what was sampled",
        chat="top_logprobs",
        responses="top_logprobs",
    ),
    _row("changes", "only", "refused: logprobs says how many", 0, text="top_logprobs"),
    _row(
        "changes",
        "only",
        "refused: a session keeps its responses only. Send input, or previous_response_id",
        responses="conversation",
    ),
    _row(
        "changes",
        "only",
        "refused: a response is sampled while its request waits",
        False,
        "soonest",
        responses="background background_options.completion_window",
    ),
    _row(
        "changes",
        "only",
        "refused: the gateway keeps no prompt templates. Send instructions and input",
        responses="prompt",
    ),
    _row(
        "changes",
        "only",
        "refused: the model reads the whole history of the request; the agent may shorten it",
        [],
        responses="context_management",
        messages="thread compaction",
    ),
    _row(
        "changes",
        "read",
        "edits that clear nothing are taken; others are refused: the model reads the whole history "
        "of the request",
        messages="context_management context_management.edits",
    ),
    _row(
        "changes",
        "only",
        "refused: the model's template decides which reasoning it sees again",
        "auto",
        responses="reasoning.context",
    ),
    _row(
        "changes",
        "only",
        "refused: every model has one mode",
        "standard",
        responses="reasoning.mode",
    ),
    _row(
        "changes",
        "only",
        "refused: every request samples an answer; prompts are not read in advance",
        False,
        responses="prompt_cache_options.prewarm",
    ),
    # -- wishes
    _row(
        "hint",
        "passed",
        "how much the model should think or write, is for a server that renders prompts itself",
        openai="reasoning_effort verbosity",
        responses="reasoning.effort=reasoning_effort text.verbosity=verbosity",
    ),
    _row(
        "hint",
        "passed",
        "how much the model should think; `high` is the API's default",
        "high",
        messages="output_config.effort=reasoning_effort",
    ),
    _row(
        "hint",
        "passed",
        "several calls in one answer are the model's choice",
        openai="parallel_tool_calls",
        responses="parallel_tool_calls",
    ),
    _row(
        "hint",
        "read",
        "several calls in one answer are the model's choice",
        True,
        False,
        messages="tool_choice.disable_parallel_tool_use",
    ),
    _row(
        "hint",
        "passed",
        "searching and moderating are for the API's own servers",
        chat="web_search_options moderation",
        responses="moderation",
    ),
    _row(
        "hint",
        "taken",
        "an input that is too long is refused, never cut",
        "disabled",
        responses="truncation",
    ),
    _row(
        "hint",
        "read",
        "no model shortens its reasoning: a summary is the whole of it",
        "auto",
        "detailed",
        responses="reasoning.summary reasoning.generate_summary",
    ),
    _row(
        "hint",
        "taken",
        "there are no images and no access programs here",
        {},
        responses="image access_programs",
    ),
    _row(
        "hint",
        "taken",
        "tools of the API's own servers are left out, and run nowhere",
        [],
        messages="container mcp_servers",
    ),
    _row(
        "hint",
        "taken",
        "every call is answered by the session's model, wherever its server is",
        "global",
        "default",
        [],
        messages="inference_geo fallbacks",
    ),
    _row(
        "hint",
        "taken",
        "the model is not told how many tokens it has left",
        messages="thinking.budget_tokens output_config.task_budget",
    ),
    # -- what changes nothing that is sampled
    _row(
        "no effect",
        "read",
        "the session's model answers to every name",
        openai="model",
        responses="model",
        messages="model",
    ),
    _row(
        "no effect",
        "read",
        "the form of the answer: done",
        openai="stream stream_options return_token_ids return_tokens_as_token_ids",
        responses="stream",
        messages="stream",
    ),
    _row(
        "no effect",
        "read",
        "an object, whose fields stand in rows of their own",
        responses="reasoning text stream_options prompt_cache_options background_options",
        messages="thinking output_config",
    ),
    _row(
        "no effect",
        "taken",
        "the form of the answer: events are not padded",
        responses="stream_options.include_obfuscation",
    ),
    _row(
        "no effect",
        "only",
        "the model decides when it thinks; the type says whether its thinking is shown",
        "enabled",
        "adaptive",
        "between_tools",
        "disabled",
        messages="thinking.type",
    ),
    _row(
        "no effect",
        "only",
        "thinking is shown as it was sampled, or not at all",
        "summarized",
        "omitted",
        messages="thinking.display",
    ),
    _row(
        "no effect",
        "taken",
        "only a server that decodes ahead would be faster for it",
        openai="prediction",
    ),
    _row(
        "no effect",
        "read",
        "repeated in the response; every response is kept, and no tool is run here",
        responses="metadata store max_tool_calls user safety_identifier prompt_cache_key",
    ),
    _row(
        "no effect",
        "taken",
        "who asks, what is cached, kept and billed, and how fast",
        openai="cache_salt metadata prompt_cache_key prompt_cache_retention prompt_cache_options "
        "request_id safety_identifier service_tier store user",
        responses="service_tier prompt_cache_retention client_metadata prompt_cache_options.mode "
        "prompt_cache_options.ttl background_options.continuation_id",
        messages="cache_control metadata service_tier speed user_profile_id workspace_id "
        "diagnostics billing_policy fallback_credit_token betas thinking.block_binding",
    ),
)
ROWS: tuple[Row, ...] = (
    *_FIRST,
    _row(
        "changes",
        "read",
        "done by the embedded engine (with the extra `constrained`) and by servers that can, and "
        "refused by the others",
        responses="text.format",
        messages="output_config.format output_format",
    ),
    _row(
        "changes",
        "passed",
        "done by the engines and servers that can, and refused by the others",
        openai=_rest(),
        responses="presence_penalty frequency_penalty",
    ),
)
"""Every field that a protocol knows."""


@cache
def fields_at(path: str, part: str = "") -> Mapping[str, Field]:
    """Return the fields of a request at `path`, or those of the object `part` in it, by name."""
    prefix = f"{part}." if part else ""
    found = {
        name.removeprefix(prefix): field
        for row in ROWS
        for (at, name), field in row.fields.items()
        if at == path and name.startswith(prefix)
    }
    return {name: field for name, field in found.items() if "." not in name}
