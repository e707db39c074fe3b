import pytest

from rolltree.environments.parsers import (
    MaybeThinkParser,
    Parser,
    ThinkParser,
    extract_boxed_answer,
    extract_hash_answer,
    text_of,
)

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "first"},
    {"role": "tool", "content": "4", "tool_call_id": "a"},
    {"role": "assistant", "content": "last"},
]


def test_parse_applies_the_extract_function():
    assert Parser().parse(" as it is ") == " as it is "
    assert Parser(str.upper).parse("a") == "A"


def test_the_answer_is_in_the_last_assistant_message():
    assert Parser().parse_answer(CHAT) == "last"
    assert Parser(len).parse_answer(CHAT) == 4


def test_a_completion_string_is_parsed_whole():
    assert Parser(str.strip).parse_answer(" 4 ") == "4"


def test_without_an_assistant_message_there_is_no_answer():
    assert Parser().parse_answer([]) is None
    assert Parser().parse_answer([{"role": "user", "content": "hi"}]) is None


@pytest.mark.parametrize(
    ("method", "contents"),
    [
        ("get_assistant_messages", ["first", "last"]),
        ("get_user_messages", ["2 + 2?"]),
        ("get_system_messages", ["be brief"]),
        ("get_tool_messages", ["4"]),
    ],
)
def test_messages_by_role(method, contents):
    assert [m["content"] for m in getattr(Parser(), method)(CHAT)] == contents


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image_url", "image_url": {}}, "c"], "c"),
        (7, ""),
    ],
)
def test_text_of_content_parts(content, text):
    assert text_of({"role": "assistant", "content": content}) == text


def test_text_of_a_message_without_content():
    assert text_of({"role": "assistant", "tool_calls": []}) == ""


def test_a_plain_parser_has_no_format_to_break():
    reward = Parser().get_format_reward_func()
    assert reward(completion=CHAT) == 1.0
    assert reward(completion="anything") == 1.0
    assert reward(completion=[]) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("<think>2 + 2</think> 4", "4", 1.0),
        ("<think>a</think>b</think> c", "c", 0.0),  # two closing tags
        ("no reasoning, 4", "", 0.0),
        ("<think>never closed", "", 0.0),
        ("<think>only reasoning</think>", "", 0.0),
        ("4 <think>too late</think> 5", "5", 0.0),
        ("  <think>\nx\n</think>\n\n7\n ", "7", 1.0),
    ],
)
def test_think_parser(text, answer, score):
    parser = ThinkParser()
    assert parser.parse(text) == answer
    assert parser.score_format(text) == score


def test_think_parser_extracts_from_the_answer_only():
    parser = ThinkParser(extract_boxed_answer)
    assert parser.parse(r"<think>\boxed{1}</think> it is \boxed{2}") == "2"


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("just 4 ", "just 4", 1.0),
        ("<think>x</think>4", "4", 1.0),
        ("<think>never closed", "<think>never closed", 0.0),
    ],
)
def test_maybe_think_parser(text, answer, score):
    parser = MaybeThinkParser()
    assert parser.parse(text) == answer
    assert parser.score_format(text) == score


def test_format_reward_is_the_mean_over_assistant_messages():
    reward = ThinkParser().get_format_reward_func()
    completion = [
        {"role": "assistant", "content": "<think>a</think>b"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "b"},
    ]
    assert reward(completion=completion, answer="ignored") == 0.5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{ unbalanced", r"\boxed{ unbalanced"),
        ("42", "42"),
    ],
)
def test_boxed(text, answer):
    assert extract_boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12/4=3\n#### 3", "3"),
        ("#### 1\n#### 1,000 ", "1,000"),
        ("####", ""),
        ("3", None),
    ],
)
def test_hash(text, answer):
    assert extract_hash_answer(text) == answer
