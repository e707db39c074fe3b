"""Prompts and continuations with real Hugging Face tokenizers, beside transformers' own."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from inference_templates import TOOLS, assistant, complete, user

from rolltree.inference import ChatRenderer, TokenSession
from rolltree.values.types import FinishReason

transformers = pytest.importorskip("transformers")

MODELS = ["tiny", pytest.param("smollm2-135m", marks=pytest.mark.model)]


@functools.cache
def tokenizer_of(name: str) -> Any:
    from rolltree.inference.models import resolve_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return transformers.AutoTokenizer.from_pretrained(resolve_model(name))


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [user("7 + 5 =")],
    [{"role": "system", "content": "Be brief."}, user("Grüß dich! 你好 🙂")],
    [user("a"), assistant("b"), user("  c\n")],
    [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")],
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_are_those_of_transformers(name: str, messages: Any, tools: Any) -> None:
    tokenizer = tokenizer_of(name)
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    renderer = ChatRenderer(tokenizer)
    assert renderer.render(messages, tools).tolist() == list(expected)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in expected
    assert tokenizer.eos_token_id in renderer.end_ids


def converse(session: TokenSession, answers: list[str], *, truncate: int = -1) -> list[Any]:
    """Talk for one turn per answer; answer number `truncate` lacks its end token."""
    messages: list[dict[str, Any]] = [user("Let us count.")]
    calls = []
    for number, text in enumerate(answers):
        prompt = session.prepare(messages)
        ids = session.renderer.encode_text(text, start=False).tolist()
        reason = FinishReason.LENGTH if number == truncate else FinishReason.STOP
        if number != truncate:
            ids.append(session.renderer.end_ids[0])
        calls.append(complete(session, prompt, ids, None, reason, temperature=1.0))
        messages += [calls[-1].message, user(f"And {number}, what comes next?")]
    return calls


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("history", ["keep", "template"])
def test_twenty_turns_extend_turn_by_turn(name: str, history: Any) -> None:
    renderer = ChatRenderer(tokenizer_of(name), history=history)
    answers = [f"It is {number} + {number}. Über all!" for number in range(20)]
    calls = converse(TokenSession(renderer), answers, truncate=7)
    assert [call.extends for call in calls] == [None, *(call.call_id for call in calls[:-1])]
    history_of_last: list[dict[str, Any]] = [user("Let us count.")]
    for number, call in enumerate(calls[:-1]):
        history_of_last += [call.message, user(f"And {number}, what comes next?")]
    assert renderer.decode(calls[-1].prompt_ids) == renderer.decode(
        renderer.render(history_of_last)
    )


@pytest.mark.parametrize(("history", "num_extending"), [("keep", 19), ("template", 0)])
def test_reasoning_across_user_turns_is_the_users_choice(history: Any, num_extending: int) -> None:
    """The tiny model's template strips earlier reasoning, as Qwen3's does."""
    renderer = ChatRenderer(tokenizer_of("tiny"), history=history)
    answers = [f"<think>\nR{number}\n</think>\n\nA{number}" for number in range(20)]
    calls = converse(TokenSession(renderer), answers)
    assert sum(call.extends is not None for call in calls) == num_extending
    assert calls[3].message == {
        "role": "assistant",
        "content": "A3",
        "reasoning_content": "R3",
    }
    text = renderer.decode(calls[-1].prompt_ids)
    assert ("R3" in text) == (history == "keep")
    reasons = [call.info.get("rerendered", "") for call in calls[1:]]
    assert all(("rewrites the history" in why) == (history == "template") for why in reasons)


def test_tool_turns_of_the_tiny_model_extend() -> None:
    renderer = ChatRenderer(tokenizer_of("tiny"))
    session = TokenSession(renderer)
    messages: list[dict[str, Any]] = [user("2 + 3?")]
    text = '<think>\nadd\n</think>\n\n<tool_call>{"name":"add", "arguments":{"a":2}}</tool_call>'
    calls = []
    for _ in range(5):
        prompt = session.prepare(messages, TOOLS)
        ids = [*renderer.encode_text(text, start=False).tolist(), renderer.end_ids[0]]
        got = complete(session, prompt, ids, None, FinishReason.STOP, temperature=1.0)
        assert got.finish_reason == FinishReason.TOOL_CALLS
        call_id = got.message["tool_calls"][0]["id"]
        messages += [got.message, {"role": "tool", "content": "5", "tool_call_id": call_id}]
        calls.append(got)
    assert [call.extends for call in calls] == [None, *(call.call_id for call in calls[:-1])]
    text = renderer.decode(session.prepare(messages, TOOLS).ids)
    assert text.count("<tool_response>\n5\n</tool_response>") == 5
    # The model's own spelling of the call is kept, not the template's.
    assert text.count('{"name":"add", "arguments":{"a":2}}') == 5
