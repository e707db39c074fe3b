"""What is learned about a template: end tokens, closes, and when glue cannot be trusted."""

from __future__ import annotations

from typing import Any

import pytest
from inference_templates import (
    COUNTING,
    HOISTING_TOKENIZER,
    MOVING_TOKENIZER,
    PLAIN,
    REPEATING,
    ROLE_MARKER_TOKENIZER,
    SPACED_TOKENIZER,
    STRIPPING,
    TEXT_ARGUMENTS,
    TOOLS,
    TWO_CLOSES_TOKENIZER,
    WORDY_TOKENIZER,
    assistant,
    user,
)

from rolltree.inference.glue import Glue, GlueError
from rolltree.inference.template import ChatTemplate
from rolltree.inference.turn_tokens import SENTINEL, learn_turn_tokens, stand_in
from rolltree.inference.vocabulary import Vocabulary
from rolltree.testing import ByteTokenizer

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLER = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1"}


def glue_of(tokenizer: ByteTokenizer, end_ids: Any = ()) -> tuple[Glue, Vocabulary]:
    vocabulary = Vocabulary(tokenizer)
    template = ChatTemplate(str(tokenizer.chat_template), vocabulary.variables)
    turn_tokens = learn_turn_tokens(template, vocabulary, end_ids)
    return Glue(template, vocabulary, turn_tokens), vocabulary


def named(vocabulary: Vocabulary, ids: Any) -> list[str]:
    return sorted(vocabulary.decode([token]) for token in ids)


@pytest.mark.parametrize(
    ("tokenizer", "ends", "closes"),
    [
        (ByteTokenizer(), ["<|im_end|>"], ["<|im_end|>"]),
        (ByteTokenizer(STRIPPING), ["<|im_end|>"], ["<|im_end|>"]),
        (TWO_CLOSES_TOKENIZER, ["<|return|>"], ["<|im_end|>", "<|return|>"]),
        (ROLE_MARKER_TOKENIZER, ["<|endoftext|>", "<|observation|>", "<|user|>"], []),
        (MOVING_TOKENIZER, ["</s>"], ["</s>"]),
        (SPACED_TOKENIZER, ["</s>"], ["</s>"]),
        (WORDY_TOKENIZER, ["</s>"], ["</s>"]),
        (ByteTokenizer(PLAIN), ["<|im_end|>"], []),
        (ByteTokenizer(eos_token="<|endoftext|>"), ["<|endoftext|>", "<|im_end|>"], ["<|im_end|>"]),
    ],
)
def test_ends_and_closes(tokenizer: ByteTokenizer, ends: list[str], closes: list[str]) -> None:
    vocabulary = Vocabulary(tokenizer)
    learned = learn_turn_tokens(ChatTemplate(str(tokenizer.chat_template)), vocabulary)
    assert named(vocabulary, learned.end_ids) == ends
    assert named(vocabulary, learned.close_ids) == closes


def test_configured_ends_are_kept() -> None:
    vocabulary = Vocabulary(ByteTokenizer())
    learned = learn_turn_tokens(
        ChatTemplate(str(ByteTokenizer().chat_template)), vocabulary, [256, 65]
    )
    assert learned.end_ids == (258, 256, 65)
    assert learned.close_ids == {258}


def test_the_start_of_an_answer_is_known() -> None:
    vocabulary = Vocabulary(ByteTokenizer())
    learned = learn_turn_tokens(ChatTemplate(STRIPPING), vocabulary)
    assert learned.start.endswith("<|im_start|>assistant\n<think>\n")


def test_a_template_that_refuses_probes_still_has_the_tokenizers_end() -> None:
    vocabulary = Vocabulary(ByteTokenizer())
    learned = learn_turn_tokens(ChatTemplate("{{ raise_exception('never') }}"), vocabulary)
    assert (learned.start, learned.end_ids, learned.close_ids) == ("", (258,), frozenset())


def test_a_stand_in_ends_with_the_sentinel() -> None:
    assert stand_in(assistant("anything")) == {"role": "assistant", "content": SENTINEL}
    probe = stand_in({**CALLER, "tool_calls": [CALL, {**CALL, "id": "2"}]})
    assert [call["id"] for call in probe["tool_calls"]] == ["1", "2"]
    last = probe["tool_calls"][-1]["function"]
    assert last == {"name": "add", "arguments": {"probe": SENTINEL}}
    assert CALL["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("last_id", "text"),
    [
        (258, "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
        (65, "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
        (None, "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_the_close_is_written_unless_it_was_sampled(last_id: int | None, text: str) -> None:
    glue, vocabulary = glue_of(ByteTokenizer())
    ids, found = glue.suffix(last_id, assistant("b"), [user("c")])
    assert found == text
    assert ids.tolist() == vocabulary.encode(text).tolist()


def test_an_end_token_in_place_of_the_close_counts_as_closed() -> None:
    glue, vocabulary = glue_of(ByteTokenizer(eos_token="<|endoftext|>"))
    endoftext = vocabulary.encode("<|endoftext|>")[0]
    _, text = glue.suffix(int(endoftext), assistant("b"), [])
    assert text == "\n<|im_start|>assistant\n"


def test_where_nothing_closes_a_marker_is_dropped_only_if_it_was_sampled() -> None:
    glue, vocabulary = glue_of(ROLE_MARKER_TOKENIZER)
    marker, endoftext, observation = vocabulary.encode("<|user|><|endoftext|><|observation|>")
    for last_id, text in [
        (int(marker), "\nc<|assistant|>"),
        (int(endoftext), "<|user|>\nc<|assistant|>"),
        (int(observation), "<|user|>\nc<|assistant|>"),
    ]:
        assert glue.suffix(last_id, assistant("b"), [user("c")])[1] == text


def test_an_end_token_behind_other_text_is_not_written_twice() -> None:
    glue, vocabulary = glue_of(SPACED_TOKENIZER)
    (end,) = vocabulary.encode("</s>")
    for last_id, text in [
        (int(end), "<s>[INST] c [/INST]"),
        (65, " </s><s>[INST] c [/INST]"),
    ]:
        ids, found = glue.suffix(last_id, assistant("b"), [user("c")])
        assert (found, vocabulary.decode(ids)) == (text, text)
    glue, vocabulary = glue_of(WORDY_TOKENIZER)
    (end,) = vocabulary.encode("</s>")
    ids, found = glue.suffix(int(end), assistant("b"), [user("c")])
    assert found == vocabulary.decode(ids) == "<|user|>c\n<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ([{"role": "system", "content": "n"}, user("c")], "moves a new system message"),
        ([user("c"), {"role": "system", "content": "n"}], "moves a new system message"),
        ([{"role": "developer", "content": "n"}], "leaves out a new developer message"),
    ],
)
def test_a_new_message_that_is_not_where_it_stands_is_found_out(new: Any, reason: str) -> None:
    glue, _ = glue_of(HOISTING_TOKENIZER)
    with pytest.raises(GlueError, match=reason):
        glue.suffix(258, assistant("b"), new)
    assert (
        glue.suffix(None, assistant("b"), [user("n")])[1] == "<|endoftext|><|user|>n<|assistant|>"
    )


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), ByteTokenizer(TEXT_ARGUMENTS)])
def test_tool_calls_are_cut_at_their_end_token(tokenizer: ByteTokenizer) -> None:
    glue, _ = glue_of(tokenizer)
    _, text = glue.suffix(258, CALLER, [RESULT], TOOLS)
    assert text == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_tools_that_move_are_left_out_of_the_new_text() -> None:
    glue, _ = glue_of(MOVING_TOKENIZER)
    _, text = glue.suffix(None, assistant("b"), [user("c")], TOOLS)
    assert text == "</s>[INST]c[/INST]"


DROPPING = """\
{%- for m in messages %}{%- if m.role == 'user' %}{{- m.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}"""
CASES = [
    (REPEATING, assistant("b"), "shows an earlier assistant message 2 times"),
    (DROPPING, assistant("b"), "shows an earlier assistant message 0 times"),
    ("{{ raise_exception('no') }}", assistant("b"), "rejects the probe conversation"),
]


@pytest.mark.parametrize(("source", "message", "reason"), CASES)
def test_what_cannot_be_cut_says_why(source: str, message: Any, reason: str) -> None:
    glue, _ = glue_of(ByteTokenizer(source))
    for _ in range(2):  # the second time from memory
        with pytest.raises(GlueError, match=reason):
            glue.suffix(258, message, [user("c")])


def test_new_text_that_depends_on_the_earlier_messages_is_cut_from_the_conversation() -> None:
    glue, _ = glue_of(ByteTokenizer(COUNTING))
    before = [user("1"), assistant("2"), user("3")]
    _, text = glue.suffix(258, assistant("4"), [user("c")], before=before)
    assert text == "<|im_start|>5user\nc<|im_end|><|im_start|>assistant\n"


# Results name the number of their call in the conversation (Command R7B's manner); the next answer
# is opened whether or not it is asked for.
NUMBERED = """\
{%- set ns = namespace(calls=0) %}
{%- for m in messages %}
{%- if m.tool_calls %}{{- '<|im_start|>assistant\n' }}
{%- for call in m.tool_calls %}
{{- '<call>' + (ns.calls | string) + call.function.name }}
{{- (call.function.arguments | tojson) + '</call>' }}
{%- set ns.calls = ns.calls + 1 %}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>tool\n' + (ns.calls - 1) | string + ': ' + m.content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}{{- '<|im_start|>assistant\n<think></think>' }}"""


def test_results_name_the_call_that_they_answer() -> None:
    tokenizer = ByteTokenizer(NUMBERED, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    glue, vocabulary = glue_of(tokenizer)
    opened = "<|im_start|>assistant\n<think></think>"
    for num in (0, 1, 2):
        before = [user("a"), *num * [CALLER, RESULT]]
        _, text = glue.suffix(257, CALLER, [RESULT], TOOLS, before)
        assert text == f"\n<|im_start|>tool\n{num}: 5<|im_end|>\n{opened}"
    assert named(vocabulary, glue.turn_tokens.end_ids) == ["<|im_end|>"]


def test_calls_that_a_template_does_not_show_are_closed_as_text() -> None:
    glue, _ = glue_of(ByteTokenizer(PLAIN))
    assert glue.suffix(None, CALLER, [user("c")])[1] == "user: c\nassistant:"


def test_a_tokenizer_that_merges_across_the_cut_is_found_out() -> None:
    class Joining(ByteTokenizer):
        """Merges the last letter of a word with a following newline."""

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            ids: list[int] = []
            for token in super().encode(text):
                if ids and token == 10 and ids[-1] == ord(SENTINEL[-1]):
                    ids[-1] = 999
                elif ids and ids[-1] == 999:
                    ids[-1] = 998
                else:
                    ids.append(token)
            return ids

        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            return super().decode([63 if token > 900 else token for token in ids])

    glue, _ = glue_of(Joining(PLAIN))
    with pytest.raises(GlueError, match="splits the new text differently"):
        glue.suffix(None, assistant("b"), [user("c")])


def test_each_shape_is_verified_once() -> None:
    glue, _ = glue_of(ByteTokenizer())
    template = glue.template
    rendered: list[int] = []
    render = template.render

    def counting(messages: Any, *args: Any, **kwargs: Any) -> str:
        rendered.append(len(messages))
        return render(messages, *args, **kwargs)

    template.render = counting  # type: ignore[method-assign]
    glue.suffix(258, assistant("b"), [user("c")])
    num_first = len(rendered)
    glue.suffix(258, assistant("other"), [user("again " * 100)])
    assert num_first > 1
    assert len(rendered) == num_first + 1
    assert rendered[-1] == 3  # the probe, the stand-in, the new message
    glue.suffix(258, assistant("b"), [user("c"), user("d")])
    assert len(rendered) > num_first + 2
