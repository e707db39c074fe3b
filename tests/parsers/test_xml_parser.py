import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.environments.parsers import XMLParser
from rolltree.values.errors import ConfigError

PARSER = XMLParser(["think", ("answer", "code")])


def say(*texts):
    return [{"role": "assistant", "content": text} for text in texts]


def test_fields_are_read_and_stripped():
    found = PARSER.parse("<think>\n2 + 2\n</think>\n<answer> 4 </answer>")
    assert (found.think, found.answer, found.code) == ("2 + 2", "4", None)


def test_raw_text_when_asked():
    assert PARSER.parse("<answer> 4 </answer>", strip=False).answer == " 4 "


def test_missing_fields_are_none():
    found = PARSER.parse("nothing here")
    assert vars(found) == {"think": None, "answer": None, "code": None}


def test_unclosed_fields_are_missing():
    assert PARSER.parse("<answer>4").answer is None


def test_the_first_occurrence_counts_unless_the_last_is_asked_for():
    text = "<answer>1</answer> no, <answer>2</answer>"
    assert PARSER.parse(text).answer == "1"
    assert PARSER.parse(text, last=True).answer == "2"


def test_comparisons_inside_a_field_do_not_break_it():
    assert PARSER.parse("<code>if a < b and c > d: x</code>").code == "if a < b and c > d: x"


def test_field_names_are_not_patterns():
    assert XMLParser(["a.b"]).parse("<axb>1</axb>").__dict__["a.b"] is None
    assert XMLParser(["a.b"]).parse("<a.b>1</a.b>").__dict__["a.b"] == "1"


def test_the_answer_comes_from_the_latest_message_that_has_one():
    completion = say("<answer>1</answer>", "<answer>2</answer> or <answer>3</answer>", "thanks")
    assert PARSER.parse_answer(completion) == "3"


def test_an_alternative_name_answers_too():
    assert PARSER.parse_answer(say("<code>print(4)</code>")) == "print(4)"


def test_an_empty_answer_is_an_answer():
    assert PARSER.parse_answer(say("<answer>1</answer>", "<answer></answer>")) == ""


def test_no_answer_is_none_and_text_outside_tags_is_ignored():
    assert PARSER.parse_answer(say("4")) is None
    assert PARSER.parse_answer([]) is None
    assert PARSER.parse_answer([{"role": "user", "content": "<answer>4</answer>"}]) is None


def test_completion_strings():
    assert PARSER.parse_answer("x <answer>4</answer>") == "4"


def test_extract_fn_is_applied_to_the_answer():
    assert XMLParser(["answer"], extract_fn=int).parse_answer("<answer>4</answer>") == 4


def test_another_answer_field():
    parser = XMLParser(["guess"], answer_field="guess")
    assert parser.parse_answer("<guess>crane</guess>") == "crane"


def test_an_answer_field_that_is_no_field_is_an_error_when_used():
    parser = XMLParser(["guess"], answer_field="gess")
    with pytest.raises(ConfigError, match="Did you mean 'guess'"):
        parser.parse_answer("<guess>crane</guess>")


@pytest.mark.parametrize("fields", [[], [""], ["a", "a"], ["a", ("b", "a")]])
def test_bad_fields(fields):
    with pytest.raises(ConfigError):
        XMLParser(fields)


def test_fields_and_format_template():
    assert PARSER.get_fields() == ["think", "answer"]
    assert PARSER.get_format_str() == ("<think>\n...\n</think>\n<answer|code>\n...\n</answer|code>")


def test_format_writes_fields_in_order():
    text = PARSER.format(code="x = 1", think="easy")
    assert text == "<think>\neasy\n</think>\n<code>\nx = 1\n</code>"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"think": "a"}, "no value"),
        ({"think": "a", "answer": "b", "code": "c"}, "several values"),
        ({"think": "a", "anwser": "b"}, "Did you mean 'answer'"),
    ],
)
def test_format_refuses(values, match):
    with pytest.raises(ConfigError, match=match):
        PARSER.format(**values)


@given(
    think=st.text(st.characters(exclude_characters="<")).map(str.strip),
    answer=st.text(st.characters(exclude_characters="<")).map(str.strip),
)
def test_what_is_formatted_parses_back(think, answer):
    found = PARSER.parse(PARSER.format(think=think, answer=answer))
    assert (found.think, found.answer, found.code) == (think, answer, None)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>\na\n</think>\n<answer>\nb\n</answer>", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<answer>b</answer>", 0.8),  # one field of two: 0.2 + 0.2 + 0.2 + 0.2
        ("well, <answer>b</answer>", 0.6),  # does not begin with a tag
        ("<think>a</think><answer>b</answer> done", 0.8),  # does not end with one
        ("<think>a</think><answer>   b   </answer>", 0.8),  # white space around the text
        ("plain", 0.0),
        ("<answer></answer>", 0.0),  # empty fields do not count
    ],
)
def test_format_score(text, score):
    assert PARSER.score_format(text) == pytest.approx(score)


def test_format_reward_function():
    reward = PARSER.get_format_reward_func()
    assert reward(completion=say("<answer>b</answer>", "plain")) == pytest.approx(0.4)
    assert reward(completion=[]) == 0.0
    assert reward(completion="<answer>b</answer>") == pytest.approx(0.8)
