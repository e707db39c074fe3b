"""Learns which tokens a chat template writes around a turn, by rendering short probes."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rolltree.inference.template import ChatTemplate, TemplateError, TemplateLimitError
from rolltree.inference.vocabulary import Vocabulary
from rolltree.values.types import ChatMessage, ToolSchema

SENTINEL = f"Qz{secrets.token_hex(6)}Zq"
"""Stands in for the last assistant text; random, so that no message contains it."""
PROBE: list[ChatMessage] = [{"role": "user", "content": "Probe."}]
TOOL: ChatMessage = {
    "role": "tool",
    "name": "probe",
    "content": "Probe.",
    "tool_call_id": "probe0000",
}
# Arguments as text, which `for_template` converts for templates.
CALLER: ChatMessage = {
    "role": "assistant",
    "tool_calls": [{"id": "probe0000", "function": {"name": "probe", "arguments": "{}"}}],
}


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The tokens of one template around a turn.

    `start` is a rendered prompt up to where an answer begins. `end_ids` are the tokens that end a
    turn when they are sampled. `close_ids` are the tokens with which the template itself closes an
    assistant message, in the middle or at the end of a conversation. `num_close` is how many tokens
    it writes at the end of a conversation: other tokens may precede the closing one.
    """

    start: str
    end_ids: tuple[int, ...]
    close_ids: frozenset[int]
    num_close: int


def learn_turn_tokens(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    configured: Sequence[int] = (),
    of_calls: Collection[int] = (),
) -> TurnTokens:
    """Learn the ends of turns; `configured` ids and the tokenizer's own are end tokens too.

    If the template writes nothing after a final assistant message, the role markers that follow one
    end a turn (GLM stops at `<|user|>` and `<|observation|>`). Tokens `of_calls` end a call, after
    which another one may follow, and no turn.
    """

    def tail(messages: list[ChatMessage], skip: str = "") -> list[int]:
        """Return the ids of what follows the sentinel, without the text `skip` at its start."""
        # After the last sentinel: templates may show an answer's text twice.
        text = render(template, [*PROBE, *messages]).rpartition(SENTINEL)[2]
        return [int(token) for token in vocabulary.encode(text.removeprefix(skip))]

    answer, caller = stand_in({}), stand_in(CALLER)
    after_call = render(template, [*PROBE, caller]).rpartition(SENTINEL)[2]
    after_answer = tail([answer])
    # The closing token comes first, or after some text such as a line break: then only a known end
    # token counts.
    closes = [token for token in after_answer[:1] if vocabulary.is_special(token)]
    known = (*configured, *vocabulary.end_ids)
    closes = closes or [token for token in after_answer if token in known][:1]
    if closes:
        # A message with tool calls may be closed by another token. The last one is not always it:
        # some templates open the next answer whether or not they are asked to.
        after = [i for i in tail([caller]) if vocabulary.is_special(i) and i not in of_calls]
        ends = [token for token in after if token in (*closes, *known)][:1] or after[-1:]
        # Nothing closes it before a result (Gemma).
        following = [] if ends else tail([caller, TOOL], after_call)[:1]
        learned = closes + ends + [token for token in following if vocabulary.is_special(token)]
        inner = [token for token in tail([answer, *PROBE])[:1] if vocabulary.is_special(token)]
        closes = [*learned, *inner]
    else:
        following = tail([answer, *PROBE])[:1] + tail([caller, TOOL], after_call)[:1]
        learned = [token for token in following if vocabulary.is_special(token)]
    end_ids = tuple(dict.fromkeys((*learned, *configured, *vocabulary.end_ids)))
    start = render(template, PROBE, add_generation_prompt=True)
    return TurnTokens(start, end_ids, frozenset(closes), len(after_answer))


def stand_in(assistant: ChatMessage) -> ChatMessage:
    """Return a message like `assistant` with the sentinel where its text would end."""
    calls = assistant.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": SENTINEL}
    probes = [
        {
            "id": call.get("id", "call_0"),
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": {"probe": "x"}},
        }
        for call in calls
    ]
    probes[-1]["function"]["arguments"] = {"probe": SENTINEL}
    return {"role": "assistant", "content": "", "tool_calls": probes}


def render(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[ToolSchema] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Return the rendered messages, or an empty string if the template rejects them."""
    try:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except TemplateLimitError:
        raise
    # Nothing is learned from a probe that the template rejects.
    except TemplateError:
        return ""
