"""Long conversations in many template styles: every prompt extends the one before, id for id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_templates import (
    MOVING_TOKENIZER,
    PARTS,
    PLAIN,
    ROLE_MARKER_TOKENIZER,
    STRIPPING,
    TOOLS,
    TWO_CLOSES_TOKENIZER,
    assistant,
    complete,
    user,
)

from rolltree.inference import ChatRenderer, TokenSession
from rolltree.testing import ByteTokenizer
from rolltree.values.types import FinishReason, ModelResponse

NUM_TURNS = 20


class Merging(ByteTokenizer):
    """A byte tokenizer that merges digit pairs, so one text has several spellings in ids.

    A model may sample "1", "2" where the tokenizer writes "12" as one token.
    """

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for token in super().encode(text):
            if ids and 48 <= token < 58 and 48 <= ids[-1] < 58:
                ids[-1] = 1000 + 10 * (ids[-1] - 48) + (token - 48)
            else:
                ids.append(token)
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        flat: list[int] = []
        for token in ids:
            flat += [token] if token < 1000 else [48 + (token - 1000) // 10, 48 + token % 10]
        return super().decode(flat, skip_special_tokens)


@dataclass(frozen=True)
class Style:
    """A tokenizer with its template, and how an answer starts in it."""

    tokenizer: ByteTokenizer
    before: str = ""
    rewrites: bool = False  # the template changes earlier turns


STYLES = {
    "chatml": Style(ByteTokenizer()),
    "role markers": Style(ROLE_MARKER_TOKENIZER),
    "stripping": Style(ByteTokenizer(STRIPPING), "R</think>", rewrites=True),
    "two closes": Style(TWO_CLOSES_TOKENIZER, rewrites=True),
    "moving tools": Style(MOVING_TOKENIZER),
    "plain": Style(ByteTokenizer(PLAIN)),
    "parts": Style(ByteTokenizer(PARTS)),
    "merging": Style(Merging()),
}
in_every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())


def sample(renderer: ChatRenderer, text: str, *, ended: bool = True) -> list[int]:
    """Return ids as a model samples them: one byte at a time, whatever the tokenizer merges."""
    ids = list(text.encode())
    return [*ids, renderer.end_ids[0]] if ended else ids


def converse(
    renderer: ChatRenderer, style: Style, *, truncated: frozenset[int] = frozenset()
) -> tuple[list[ModelResponse], list[dict[str, Any]]]:
    session = TokenSession(renderer)
    messages: list[dict[str, Any]] = [user("Start at 10.")]
    calls = []
    for turn in range(NUM_TURNS):
        prompt = session.prepare(messages)
        ended = turn not in truncated
        ids = sample(renderer, f"{style.before}It is {10 + turn}.", ended=ended)
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        calls.append(complete(session, prompt, ids, None, reason, temperature=1.0))
        messages += [calls[-1].message, user(f"And {turn} more?")]
    return calls, messages


def ids_of(call: ModelResponse) -> list[int]:
    assert call.prompt_ids is not None
    assert call.completion_ids is not None
    return [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]


def extension_rate(prompts: list[list[int]], calls: list[ModelResponse]) -> float:
    """Return the share of prompts that begin with all ids of the call before."""
    kept = [
        prompt[: len(ids_of(before))] == ids_of(before)
        for prompt, before in zip(prompts[1:], calls, strict=False)
    ]
    return sum(kept) / len(kept)


@in_every_style
@pytest.mark.parametrize("truncated", [frozenset(), frozenset({0, 3, 18})], ids=["whole", "cut"])
def test_twenty_turns_extend_in_every_style(style: Style, truncated: frozenset[int]) -> None:
    renderer = ChatRenderer(style.tokenizer)
    calls, _ = converse(renderer, style, truncated=truncated)
    prompts = [call.prompt_ids.tolist() for call in calls if call.prompt_ids is not None]
    assert extension_rate(prompts, calls) == 1.0
    assert [call.extends for call in calls[1:]] == [call.call_id for call in calls[:-1]]
    assert all("rerendered" not in call.info for call in calls)


@pytest.mark.parametrize(
    ("name", "rate"), [("chatml", 1.0), ("stripping", 0.0), ("merging", 0.0), ("two closes", 0.0)]
)
def test_re_rendering_loses_what_continuing_keeps(name: str, rate: float) -> None:
    """The rate that rendering the whole history anew would have had."""
    style = STYLES[name]
    renderer = ChatRenderer(style.tokenizer)
    calls, messages = converse(renderer, style)
    anew = [renderer.render(messages[: 2 * turn + 1]).tolist() for turn in range(NUM_TURNS)]
    assert extension_rate(anew, calls) == rate


@in_every_style
def test_the_text_is_that_of_the_template_where_it_rewrites_nothing(style: Style) -> None:
    renderer = ChatRenderer(style.tokenizer)
    calls, messages = converse(renderer, style, truncated=frozenset({5}))
    assert calls[-1].prompt_ids is not None
    text = renderer.decode(calls[-1].prompt_ids)
    whole = renderer.decode(renderer.render(messages[: 2 * NUM_TURNS - 1]))
    if style is STYLES["plain"]:
        # This template ends no turn, so a sampled end token stays, and it writes a space that
        # the model did not sample.
        text = text.replace("<|im_end|>", "").replace("assistant:It", "assistant: It")
    assert (text == whole) == (not style.rewrites)
    for message in messages[: 2 * NUM_TURNS - 1]:
        assert message["content"].strip() in text


@in_every_style
def test_following_the_template_gives_its_text_exactly(style: Style) -> None:
    renderer = ChatRenderer(style.tokenizer, history="template")
    calls, messages = converse(renderer, style)
    for turn, call in enumerate(calls):
        assert call.prompt_ids is not None
        whole = renderer.render(messages[: 2 * turn + 1])
        assert renderer.decode(call.prompt_ids) == renderer.decode(whole)
        if call.extends is None and turn:
            assert "rewrites the history" in call.info["rerendered"]


@pytest.mark.parametrize("name", ["chatml", "role markers"])
@pytest.mark.parametrize("num_results", [1, 3])
def test_twenty_tool_turns_extend(name: str, num_results: int) -> None:
    renderer = ChatRenderer(STYLES[name].tokenizer)
    spelled = {
        "chatml": '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
        "role markers": "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    }[name]
    session = TokenSession(renderer)
    messages: list[dict[str, Any]] = [user("Add.")]
    calls = []
    for turn in range(NUM_TURNS):
        prompt = session.prepare(messages, TOOLS)
        ids = sample(renderer, spelled * num_results)
        got = complete(session, prompt, ids, None, FinishReason.STOP, temperature=1.0)
        assert len(got.message["tool_calls"]) == num_results
        messages.append(got.message)
        messages += [
            {"role": "tool", "content": f"r{turn}", "tool_call_id": call["id"]}
            for call in got.message["tool_calls"]
        ]
        calls.append(got)
    assert [call.extends for call in calls[1:]] == [call.call_id for call in calls[:-1]]
    text = renderer.decode(session.prepare(messages, TOOLS).ids)
    assert text.count(spelled) == NUM_TURNS * num_results
    for turn in range(NUM_TURNS):
        assert text.count(f"\nr{turn}<") == num_results


KINDS = st.sampled_from(["user", "tool", "two users", "nothing"])


@settings(max_examples=40)
@given(st.lists(st.tuples(KINDS, st.booleans(), st.text("ab\n ", max_size=4)), max_size=6))
def test_any_mix_of_turns_extends(turns: list[tuple[str, bool, str]]) -> None:
    renderer = STYLE_RENDERER
    session = TokenSession(renderer)
    messages: list[dict[str, Any]] = [user("Go.")]
    before: ModelResponse | None = None
    for kind, ended, said in turns:
        prompt = session.prepare(messages)
        if before is not None:
            assert prompt.extends == before.call_id
            assert prompt.ids[: len(ids_of(before))].tolist() == ids_of(before)
        ids = sample(renderer, said, ended=ended)
        reason = FinishReason.STOP if ended else FinishReason.LENGTH
        before = complete(session, prompt, ids, None, reason, temperature=1.0)
        messages.append(before.message)
        messages += {
            "user": [user("u")],
            "tool": [{"role": "tool", "content": "t"}],
            "two users": [user("u"), assistant("hint"), user("v")],
            "nothing": [],
        }[kind]
    assert session.prepare(messages).ids.tolist() == renderer.render(messages).tolist()


STYLE_RENDERER = ChatRenderer(ByteTokenizer())


def test_a_rollout_of_many_turns_is_linear_in_memory() -> None:
    """Prompts are views of one growing array, not copies: 200 turns hold about twice the ids."""
    session = TokenSession(STYLE_RENDERER)
    messages: list[dict[str, Any]] = [user("x" * 200)]
    prompts = []
    for _ in range(200):
        prompt = session.prepare(messages)
        ids = sample(STYLE_RENDERER, "y" * 50)
        got = complete(session, prompt, ids, None, FinishReason.STOP, temperature=1.0)
        prompts.append(got.prompt_ids)
        messages += [got.message, user("z" * 50)]
    arrays = {id(each.base): each.base for each in prompts if each is not None}
    held = sum(base.nbytes for base in arrays.values() if base is not None)
    longest = max(len(each) for each in prompts if each is not None) * np.dtype(np.int32).itemsize
    assert held <= 5 * longest
