"""How a chat template ends an assistant's turn, learned by rendering short probes.

It knows templates and vocabularies. It leaves out what comes between turns (`glue`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from rolltree.inference.template import ChatTemplate, TemplateError, TemplateLimitError
from rolltree.inference.vocabulary import Vocabulary
from rolltree.types import ChatMessage, ToolSchema

SENTINEL = f"Qz{secrets.token_hex(6)}Zq"
"""A text that stands for what an assistant said last; no message can hold it by design."""
PROBE: list[ChatMessage] = [{"role": "user", "content": "Probe."}]
_TOOL: ChatMessage = {
    "role": "tool",
    "name": "probe",
    "content": "Probe.",
    "tool_call_id": "probe0000",
}
_CALLER: ChatMessage = {
    "role": "assistant",
    "tool_calls": [{"id": "probe0000", "function": {"name": "probe", "arguments": "{}"}}],
}


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """What one template does at the end of a turn.

    `start` is a rendered prompt up to where an answer begins. `end_ids` are the tokens that end a
    turn when they are sampled. `close_ids` are those that the template itself writes behind an
    assistant message, in the middle or at the end of a conversation.
    """

    start: str
    end_ids: tuple[int, ...]
    close_ids: frozenset[int]


def learn_ends(
    template: ChatTemplate, vocabulary: Vocabulary, configured: Sequence[int] = ()
) -> TurnEnds:
    """Learn the ends of turns; `configured` ids and the tokenizer's own are end tokens too.

    Where the template writes nothing behind a last assistant message, the role markers that follow
    one end a turn (GLM stops at `<|user|>` and `<|observation|>`).
    """

    def tail(messages: list[ChatMessage], behind: str = "") -> list[int]:
        """Return the ids of what follows the sentinel and the text `behind` it."""
        text = render(template, [*PROBE, *messages]).rpartition(SENTINEL)[2]
        return [int(token) for token in vocabulary.encode(text.removeprefix(behind))]

    answer, caller = stand_in({}), stand_in(_CALLER)
    behind_call = render(template, [*PROBE, caller]).rpartition(SENTINEL)[2]
    closes = [token for token in tail([answer])[:1] if vocabulary.is_special(token)]
    if closes:
        learned = closes + [i for i in tail([caller]) if vocabulary.is_special(i)][-1:]
        inner = [token for token in tail([answer, *PROBE])[:1] if vocabulary.is_special(token)]
        closes = [*learned, *inner]
    else:
        following = tail([answer, *PROBE])[:1] + tail([caller, _TOOL], behind_call)[:1]
        learned = [token for token in following if vocabulary.is_special(token)]
    end_ids = tuple(dict.fromkeys((*learned, *configured, *vocabulary.end_ids)))
    return TurnEnds(render(template, PROBE, add_generation_prompt=True), end_ids, frozenset(closes))


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
    """Return the rendered messages, or nothing where the template refuses them."""
    try:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except TemplateLimitError:
        raise
    except TemplateError:
        return ""
