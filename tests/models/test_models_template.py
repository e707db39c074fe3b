"""The tiny model's template, case by case, and the same through rolltree's own renderer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.inference import ChatRenderer
from rolltree.inference.models.made import byte_tokenizer

TOKENIZER = byte_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
USER = {"role": "user", "content": "7 + 5 ="}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def render(*messages, **options):
    return TOKENIZER.apply_chat_template(
        list(messages), tokenize=False, **{"add_generation_prompt": True, **options}
    )


def assistant(content="", **fields):
    return {"role": "assistant", "content": content, **fields}


def call(arguments, name="add"):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def answer_of(text):
    """Return what the last assistant message was rendered as."""
    return text.rpartition("<|im_start|>assistant\n")[2]


class TestAnswers:
    def test_arguments_may_be_text_or_an_object(self):
        spelled = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 5}}\n</tool_call>'
        for arguments in ('{"a": 7, "b": 5}', {"a": 7, "b": 5}):
            text = render(
                USER, assistant(tool_calls=[call(arguments)]), add_generation_prompt=False
            )
            assert answer_of(text) == spelled + "<|im_end|>\n"

    def test_several_calls_and_text_stand_on_lines_of_their_own(self):
        message = assistant("So:", tool_calls=[call("{}"), call("{}", "sub")])
        assert answer_of(render(USER, message, add_generation_prompt=False)) == (
            'So:\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call><|im_end|>\n'
        )

    @pytest.mark.parametrize("content", [None, ""])
    def test_no_content_is_no_text(self, content):
        text = render(USER, assistant(content), add_generation_prompt=False)
        assert answer_of(text) == "<|im_end|>\n"

    def test_calls_without_the_function_wrapper(self):
        plain = {"name": "add", "arguments": {"a": 1}}
        text = render(USER, assistant(tool_calls=[plain]), add_generation_prompt=False)
        assert json.loads(text.split("<tool_call>\n")[1].split("\n</tool_call>")[0]) == plain


class TestReasoning:
    def test_the_field_wins_over_tags_in_the_text(self):
        message = assistant("12", reasoning_content="carry")
        text = render(USER, message, add_generation_prompt=False)
        assert answer_of(text) == "<think>\ncarry\n</think>\n\n12<|im_end|>\n"

    def test_every_answer_after_the_last_question_keeps_its_own(self):
        tool = {"role": "tool", "content": "12"}
        first = assistant(reasoning_content="ask", tool_calls=[call("{}")])
        second = assistant("12", reasoning_content="done")
        text = render(USER, first, tool, second, add_generation_prompt=False)
        assert text.count("<think>") == 2
        later = render(USER, first, tool, second, USER)
        assert "<think>" not in later
        assert later.count("<tool_call>") == 1  # calls are history, thoughts are not

    def test_only_turns_before_the_last_question_lose_it(self):
        old, new = assistant("1", reasoning_content="old"), assistant("2", reasoning_content="new")
        text = render(USER, old, USER, new, add_generation_prompt=False)
        assert "old" not in text
        assert "<think>\nnew\n</think>\n\n2" in text

    def test_an_unfinished_thought_is_text(self):
        text = render(USER, assistant("<think>\nhm"), add_generation_prompt=False)
        assert answer_of(text) == "<think>\nhm<|im_end|>\n"

    def test_thinking_off_is_an_empty_thought_and_only_when_asked(self):
        closed = "<think>\n\n</think>\n\n"
        assert render(USER, enable_thinking=False).endswith("assistant\n" + closed)
        assert closed not in render(USER, enable_thinking=True)
        assert closed not in render(USER)


class TestToolsAndSystem:
    def test_tool_answers_in_a_row_are_one_message(self):
        tools = [{"role": "tool", "content": str(n)} for n in (1, 2)]
        one = render(USER, assistant(tool_calls=[call("{}")]), *tools)
        assert one.count("<|im_start|>user") == 2  # the question, and both answers together
        assert one.index("\n1\n") < one.index("\n2\n")
        between = render(USER, assistant("x"), tools[0], assistant("y"), tools[1])
        assert between.count("<|im_start|>user") == 3

    def test_a_tool_schema_is_one_line_of_json(self):
        text = render(USER, tools=[ADD, ADD])
        lines = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
        assert [json.loads(line) for line in lines] == [ADD, ADD]

    def test_no_tools_and_no_system_add_nothing(self):
        assert (
            render(USER, tools=[])
            == render(USER)
            == ("<|im_start|>user\n7 + 5 =<|im_end|>\n<|im_start|>assistant\n")
        )

    def test_a_system_message_in_the_middle_stays_where_it_is(self):
        text = render(USER, {"role": "system", "content": "Now in German."}, USER)
        assert text.index("7 + 5") < text.index("<|im_start|>system\nNow in German.")


words = st.text('ab <>/\n"\\é🙂', max_size=8)
turns = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, words),
    st.builds(lambda text: assistant(text), words),
    st.builds(lambda text, why: assistant(text, reasoning_content=why), words, words),
    st.builds(
        lambda text, n: assistant(text, tool_calls=[call({"a": n, "b": text})]),
        words,
        st.integers(),
    ),
    st.builds(lambda text: {"role": "tool", "content": text}, words),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(turns, max_size=5), st.booleans(), st.booleans())
def test_rolltrees_renderer_gives_the_ids_of_transformers(messages, has_system, has_tools):
    system = [{"role": "system", "content": "Be brief."}] if has_system else []
    conversation = [*system, USER, *messages]
    tools = [ADD] if has_tools else None
    text = render(*conversation, tools=tools)
    assert RENDERER.render(conversation, tools).tolist() == TOKENIZER.encode(text)
