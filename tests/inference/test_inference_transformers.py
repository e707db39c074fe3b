"""Prompts and continuations with real Hugging Face tokenizers, beside transformers' own."""

from __future__ import annotations

import functools
import json
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


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<go (?P<name>\w+)>",
            "close": "</go>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)=(?P<value>[^>]*)>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
TYPED = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "unit": {"type": "string"}},
            },
        },
    }
]


@pytest.fixture(scope="module")
def responding(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """A checkpoint that ships a response template, loaded as every checkpoint is."""
    from rolltree.inference.models.load import load_tokenizer

    folder = tmp_path_factory.mktemp("responding")
    tokenizer = tokenizer_of("tiny")
    if not hasattr(tokenizer, "parse_response"):
        pytest.skip("this transformers has no response templates")
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"response_template": RESPONSE_TEMPLATE}))
    return ChatRenderer(load_tokenizer(str(folder)))


SHOWN = ("tool_calls", "content", "reasoning_content")
ANSWERS = {
    "a call": "<think>Hm.</think>Well:\n<go add><a=4><unit=12></go>",
    "two calls": "<go add><a=4></go>\n<go add><a=5></go>",
    "text": "It is 4.",
    "reasoning that is not closed": "<think>Hm. It is",
    "a call that is not closed": "So <go add><a=4>",
    "an odd value": "<go add><a=four></go>",
    "a tool of no schema": "<go sub><a=4></go>",
    "nothing": "",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_response_template_reads_the_same_whole_and_streamed(
    responding: ChatRenderer, answer: str
) -> None:
    assert responding.formats == ("response_template", "response_template")
    ids = [*responding.encode_text(answer, start=False).tolist(), responding.end_ids[0]]
    for tools in (TYPED, None):
        whole = responding.parse(ids, FinishReason.STOP, tools).message
        reading = responding.reading(tools)
        for end in range(len(answer) + 1):
            reasoning, content = reading.advance(answer[:end])
            assert str(whole.get("reasoning_content", "")).startswith(reasoning)
            assert whole["content"].startswith(content)
        assert reading.finish(answer) == whole
        # Nothing that the model wrote is lost.
        assert not answer or any(whole.get(name) for name in SHOWN)


def test_a_response_template_gives_arguments_the_types_of_the_schema(
    responding: ChatRenderer,
) -> None:
    message = responding.parse_text(ANSWERS["a call"], FinishReason.STOP, TYPED).message
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Well:")
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 4, "unit": "12"}'}
    odd = responding.parse_text(ANSWERS["an odd value"], FinishReason.STOP, TYPED).message
    assert odd["tool_calls"][0]["function"]["arguments"] == '{"a": "four"}'
    # Without tools nobody can be called: the text stays as it was written.
    bare = responding.parse_text(ANSWERS["two calls"], FinishReason.STOP).message
    assert bare["content"] == ANSWERS["two calls"]
    assert "tool_calls" not in bare


def test_a_response_template_continues_a_rollout(responding: ChatRenderer) -> None:
    session = TokenSession(responding)
    prompt = session.prepare([user("4?")], TYPED)
    ids = [*responding.encode_text(ANSWERS["a call"], start=False), responding.end_ids[0]]
    got = complete(session, prompt, ids, None, FinishReason.STOP)
    assert got.finish_reason == FinishReason.TOOL_CALLS
    done = {"role": "tool", "tool_call_id": got.message["tool_calls"][0]["id"], "content": "done"}
    following = session.prepare([user("4?"), got.message, done], TYPED)
    assert following.extends == got.call_id
