from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_templates import (
    HOISTING_TOKENIZER,
    REPEATING,
    STRIPPING,
    TOOL_ID_TOKENIZER,
    TOOLS,
    assistant,
    complete,
    user,
)

from rolltree.inference import ChatRenderer, Prompt, TokenSession
from rolltree.inference.call import CallTree
from rolltree.testing import ByteTokenizer
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError, TokenError
from rolltree.values.types import FinishReason, ModelResponse

RENDERER = ChatRenderer(ByteTokenizer())
STOP = FinishReason.STOP


def answer(
    session: TokenSession, prompt: Prompt, text: str, reason: FinishReason = STOP
) -> ModelResponse:
    ids = session.renderer.encode_text(text, start=False)
    return complete(session, prompt, ids, [-0.5] * len(ids), reason, temperature=0.7)


def full(response: ModelResponse) -> list[int]:
    assert response.prompt_ids is not None
    assert response.completion_ids is not None
    return [*response.prompt_ids.tolist(), *response.completion_ids.tolist()]


def test_a_call_carries_everything_that_was_sampled() -> None:
    session = TokenSession(RENDERER)
    prompt = session.prepare([user("7 + 5 =")])
    got = complete(
        session,
        prompt,
        [49, 50, 258],
        [-0.1, -0.2, -0.3],
        STOP,
        temperature=0.7,
        versions=[3, 3, 4],
        wait_s=1.5,
    )
    assert got.message == {"role": "assistant", "content": "12"}
    assert got.text == "12"
    assert got.prompt_ids is not None
    assert got.prompt_ids.tolist() == RENDERER.render([user("7 + 5 =")]).tolist()
    assert got.completion_ids is not None
    assert got.completion_ids.tolist() == [49, 50, 258]
    assert got.completion_ids.dtype == np.int32
    assert got.logprobs is not None
    np.testing.assert_allclose(got.logprobs, [-0.1, -0.2, -0.3])
    assert got.logprobs.dtype == np.float32
    assert got.versions is not None
    assert got.versions.tolist() == [3, 3, 4]
    assert (got.num_prompt_tokens, got.num_completion_tokens) == (len(prompt.ids), 3)
    assert (got.temperature, got.wait_s, got.extends) == (0.7, 1.5, None)


def test_later_calls_name_the_call_they_extend() -> None:
    session = TokenSession(RENDERER)
    messages = [user("a")]
    first = answer(session, session.prepare(messages), "b<|im_end|>")
    messages += [first.message, user("c")]
    second = answer(session, session.prepare(messages), "d", FinishReason.LENGTH)
    messages += [second.message, user("e")]
    third = answer(session, session.prepare(messages), "f<|im_end|>")
    assert [second.extends, third.extends] == [first.call_id, second.call_id]
    for before, after in ((first, second), (second, third)):
        assert full(after)[: len(full(before))] == full(before)
    # The truncated answer was closed as context, behind what was sampled.
    assert third.prompt_ids is not None
    closed = third.prompt_ids[len(full(second)) :]
    assert closed[0] == 258
    assert full(third)[: len(third.prompt_ids)] == RENDERER.render(messages).tolist()


def test_call_ids_are_unique_across_sessions() -> None:
    calls = [
        answer(session, session.prepare([user("a")]), "b<|im_end|>")
        for session in (TokenSession(RENDERER), TokenSession(RENDERER))
        for _ in range(2)
    ]
    assert len({call.call_id for call in calls}) == 4
    assert all(call.extends is None for call in calls)


def test_a_history_copied_through_json_still_continues() -> None:
    session = TokenSession(RENDERER)
    first = answer(session, session.prepare([user("a")]), "b<|im_end|>")
    prompt = session.prepare([user("a"), {"content": "b", "role": "assistant"}, user("c")])
    assert prompt.extends == first.call_id


def test_a_rewritten_history_starts_anew() -> None:
    session = TokenSession(RENDERER)
    answer(session, session.prepare([user("a")]), "b<|im_end|>")
    prompt = session.prepare([user("A"), assistant("b"), user("c")])
    assert prompt.extends is None
    assert prompt.reason is None
    assert prompt.ids.tolist() == RENDERER.render([user("A"), assistant("b"), user("c")]).tolist()


def test_two_branches_of_one_call_extend_it_both() -> None:
    session = TokenSession(RENDERER)
    first = answer(session, session.prepare([user("a")]), "b<|im_end|>")
    left = session.prepare([user("a"), first.message, user("left")])
    right = session.prepare([user("a"), first.message, user("right")])
    one, two = answer(session, left, "1<|im_end|>"), answer(session, right, "2<|im_end|>")
    assert one.extends == two.extends == first.call_id
    for call, question in ((one, "left"), (two, "right")):
        assert call.prompt_ids is not None
        expected = RENDERER.render([user("a"), assistant("b"), user(question)])
        assert call.prompt_ids.tolist() == expected.tolist()


def test_a_list_that_grows_while_the_engine_samples_does_no_harm() -> None:
    session = TokenSession(RENDERER)
    messages = [user("a")]
    prompt = session.prepare(messages)
    messages.append(user("too early"))
    first = answer(session, prompt, "b<|im_end|>")
    assert session.prepare([user("a"), first.message, user("c")]).extends == first.call_id


def test_reasoning_is_kept_though_the_history_leaves_it_out() -> None:
    session = TokenSession(ChatRenderer(ByteTokenizer(STRIPPING)))
    first = answer(session, session.prepare([user("a")]), "R</think>A<|im_end|>")
    assert first.message["reasoning_content"] == "R"
    prompt = session.prepare([user("a"), assistant("A"), user("b")])
    assert prompt.extends == first.call_id
    assert "R</think>A" in session.renderer.decode(prompt.ids)


def test_why_a_prompt_was_rendered_anew_is_recorded() -> None:
    session = TokenSession(ChatRenderer(ByteTokenizer(REPEATING)))
    first = answer(session, session.prepare([user("a")]), "b<|im_end|>")
    prompt = session.prepare([user("a"), first.message, user("c")])
    second = answer(session, prompt, "d<|im_end|>")
    assert second.extends is None
    assert "2 times" in second.info["rerendered"]


def test_a_system_message_in_the_middle_reaches_the_model() -> None:
    session = TokenSession(ChatRenderer(HOISTING_TOKENIZER))
    renderer = session.renderer
    end = renderer.end_ids[0]

    def answer(prompt: Prompt) -> ModelResponse:
        ids = [*renderer.encode_text("b", start=False), end]
        return complete(session, prompt, ids, None, FinishReason.STOP, temperature=1.0)

    first = answer(session.prepare([user("a")]))
    messages = [user("a"), first.message, {"role": "system", "content": "Be brief."}, user("c")]
    second = session.prepare(messages)
    assert renderer.decode(second.ids).startswith("<|sys|>Be brief.<|user|>a")
    assert (second.extends, second.reason) == (
        None,
        "the template moves a new system message",
    )
    later = answer(second)
    assert later.info["rerendered"] == second.reason
    third = session.prepare([*messages, later.message, user("d")])
    assert third.extends == later.call_id  # only the message itself costs a break


def test_a_result_names_the_id_that_the_model_wrote() -> None:
    session = TokenSession(ChatRenderer(TOOL_ID_TOKENIZER))
    renderer = session.renderer
    written = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "Ab3dEf6hI"}]</s>'
    prompt = session.prepare([user("a")], TOOLS)
    ids = renderer.encode_text(written, start=False)
    called = complete(session, prompt, ids, None, FinishReason.STOP, temperature=1.0)
    (call,) = called.message["tool_calls"]
    result = {"role": "tool", "content": "5", "tool_call_id": call["id"]}
    second = session.prepare([user("a"), called.message, result], TOOLS)
    assert second.extends == called.call_id
    assert renderer.decode(second.ids) == (
        f"[INST]a[/INST]{written}[TOOL_RESULTS]5 of Ab3dEf6hI[/TOOL_RESULTS]"
    )


def test_tools_and_models_do_not_mix() -> None:
    session = TokenSession(RENDERER)
    first = answer(session, session.prepare([user("a")], TOOLS, model="m"), "b<|im_end|>")
    history = [user("a"), first.message, user("c")]
    assert session.prepare(history, TOOLS, model="m").extends == first.call_id
    assert session.prepare(history, None, model="m").extends is None
    assert session.prepare(history, TOOLS, model="n").extends is None


def test_text_continues_text() -> None:
    session = TokenSession(RENDERER)
    first = answer(session, session.prepare("Q: 7+5\nA:", message_type="completion"), " 12\n")
    assert first.message == {"role": "assistant", "content": " 12\n"}
    prompt = session.prepare("Q: 7+5\nA: 12\nQ: 6+6\nA:", message_type="completion")
    assert prompt.extends == first.call_id
    assert session.renderer.decode(prompt.ids) == "Q: 7+5\nA: 12\nQ: 6+6\nA:"


def test_text_without_the_sampled_end_token_is_not_called_an_extension() -> None:
    session = TokenSession(RENDERER)
    answer(session, session.prepare("A:", message_type="completion"), " 12<|im_end|>")
    prompt = session.prepare("A: 12 B:", message_type="completion")
    assert prompt.extends is None
    assert "end" in str(prompt.reason)
    assert session.renderer.decode(prompt.ids) == "A: 12 B:"


def test_a_stop_string_given_back_is_an_extension_again() -> None:
    session = TokenSession(RENDERER)
    prompt = session.prepare("A:", message_type="completion")
    ids = RENDERER.encode_text(" 12\n", start=False)
    first = complete(session, prompt, ids, None, STOP, text=" 12", temperature=1.0)
    assert first.text == " 12"
    again = session.prepare("A: 12\nB:", message_type="completion")
    assert again.extends == first.call_id
    cut = session.prepare("A: 12. B:", message_type="completion")
    assert cut.extends is None
    assert session.renderer.decode(cut.ids) == "A: 12. B:"


def test_messages_and_type_must_fit() -> None:
    session = TokenSession(RENDERER)
    with pytest.raises(ConfigError, match="a string"):
        session.prepare("text")
    with pytest.raises(ConfigError, match="a list of messages"):
        session.prepare([user("a")], message_type="completion")
    with pytest.raises(ConfigError, match="'chat' or 'completion'"):
        session.prepare([user("a")], message_type="chats")  # type: ignore[arg-type]


def test_an_answer_without_ids_is_an_answer() -> None:
    session = TokenSession(RENDERER)
    prompt = session.prepare([user("a")])
    got = complete(session, prompt, None, None, STOP, text="b", temperature=1.0, wait_s=2.0)
    assert got.message == {"role": "assistant", "content": "b"}
    assert (got.prompt_ids, got.completion_ids, got.logprobs, got.versions) == (None,) * 4
    assert session.prepare([user("a"), got.message, user("c")]).extends is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "what"),
    [
        ([1, 2], [-0.1], 0, "2 sampled tokens came with 1 logprobs"),
        ([-1], [-0.1], 0, "ids from -1"),
        ([1, 2], None, [0], r"versions has shape \(1,\) for 2 tokens"),
    ],
)
def test_contradicting_tokens_are_refused(
    ids: list[int], logprobs: list[float] | None, versions: Any, what: str
) -> None:
    session = TokenSession(RENDERER)
    prompt = session.prepare([user("a")])
    with pytest.raises(TokenError, match=what):
        complete(session, prompt, ids, logprobs, STOP, temperature=1.0, versions=versions)


@pytest.mark.parametrize("value", [float("nan"), 0.5, float("-inf")])
def test_placeholders_are_dropped_and_the_call_is_kept(value: float) -> None:
    session = TokenSession(RENDERER)
    prompt = session.prepare([user("a")])
    got = complete(session, prompt, [1], [value], STOP, temperature=1.0)
    assert got.logprobs is None
    assert "placeholder" in got.info["unusable_logprobs"]
    # The conversation goes on after the same ids.
    assert session.prepare([user("a"), got.message, user("c")]).extends == got.call_id


@pytest.mark.parametrize("value", [-9999.0, float("nan"), float("inf"), 0.5])
def test_placeholders_of_a_client_of_ones_own_are_dropped_and_the_call_is_kept(
    value: float,
) -> None:
    made = ModelResponse(
        assistant("b"),
        "b",
        FinishReason.STOP,
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([3], np.int32),
        logprobs=np.array([value], np.float32),
    )
    adopted = CallTree().adopt(made, None)
    step = Trajectory().append_call(prompt=[user("a")], completion=[made.message], response=made)
    for response in (adopted, step["response"]):
        assert response.logprobs is None
        assert "placeholder" in response.info["unusable_logprobs"]
    assert not step["tokens"]["completion_logprobs"]
    assert step["tokens"]["completion_ids"] == [3]


def test_rounding_above_zero_is_forgiven() -> None:
    session = TokenSession(RENDERER)
    got = complete(session, session.prepare([user("a")]), [1], [3e-6], STOP, temperature=1.0)
    assert got.logprobs is not None
    assert got.logprobs.tolist() == [0.0]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TURN = st.tuples(st.integers(0, 3), TEXT, TEXT, st.booleans())


@settings(max_examples=80)
@given(st.lists(TURN, min_size=1, max_size=8))
def test_whatever_branch_is_continued_its_ids_come_first(
    turns: list[tuple[int, str, str, bool]],
) -> None:
    """Continue any earlier call, from any branch: its exact ids are the prompt's first."""
    session = TokenSession(RENDERER)
    calls: list[tuple[list[dict[str, object]], ModelResponse | None]] = [([], None)]
    for which, question, said, truncated in turns:
        history, parent = calls[which % len(calls)]
        messages = [*history, user(question)]
        prompt = session.prepare(messages)
        assert prompt.ids.tolist() == RENDERER.render(messages).tolist()
        if parent is None:
            assert prompt.extends is None
        else:
            assert prompt.extends is not None
            assert prompt.ids[: len(full(parent))].tolist() == full(parent)
        got = answer(session, prompt, said + "<|im_end|>" * (not truncated))
        calls.append(([*messages, got.message], got))
