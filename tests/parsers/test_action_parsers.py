"""Text to action, with rewards and feedback."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.environments.parsers import (
    ThinkParser,
    as_text,
    by_function,
    compose_parsers,
    from_parser,
    one_of,
    tagged,
    without_thinking,
)
from rolltree.values.errors import ConfigError
from rolltree.values.steps import ParseResult


def test_text_as_it_is():
    assert as_text("  go\n") == ParseResult("go")
    assert as_text(" \n") == ParseResult(None, 0.0, "You said nothing.")


def test_a_function_decides():
    parse = by_function(int, reward=0.5, penalty=-1.0)
    assert parse("12") == ParseResult(12, 0.5)
    failed = parse("twelve")
    assert (failed.action, failed.reward) == (None, -1.0)
    assert "twelve" in failed.obs
    assert by_function(int, feedback="A number, please.")("x").obs == "A number, please."
    assert by_function(lambda text: None)("x").failed
    assert not by_function(lambda text: 0)("x").failed  # 0 is an action
    with pytest.raises(ZeroDivisionError):  # a mistake of the function is not the model's answer
        by_function(lambda text: 1 / 0)("x")


def test_tags():
    parse = tagged("move", reward=0.1, penalty=-0.2)
    assert parse("a <move> up </move> b") == ParseResult("up", 0.1)
    assert parse("<move>up</move><move>down</move>").action == "down"
    for text in ("up", "<move>up", "<move></move>", "<move> </move>"):
        assert parse(text) == ParseResult(None, -0.2, "Put your answer between <move> and </move>.")


def test_reasoning():
    assert without_thinking()("<think>a</think> b").action == "b"
    assert without_thinking()("b").action == "b"
    assert without_thinking(required=True, penalty=-1)("b").reward == -1
    assert without_thinking()("<think>a</think> ").failed


def test_names():
    parse = one_of(["left", "Right", "turn left"])
    assert parse("RIGHT, no: Left!").action == "left"
    assert parse("turn left").action == "turn left"
    assert parse("bright lefts").failed
    assert parse("right").action == "Right"
    assert parse("up").obs == "Say one of: left, Right, turn left."
    assert one_of(["c++", "c"])("i like C++").action == "c++"
    with pytest.raises(ConfigError):
        one_of([])


def test_spec_1_parsers_serve_agents():
    parse = from_parser(ThinkParser(), penalty=-1.0, feedback="Think first.")
    assert parse("<think>x</think> 4") == ParseResult("4")
    assert parse("4") == ParseResult(None, -1.0, "Think first.")


def test_composition_adds_rewards_and_stops_at_the_first_failure():
    def note(text):
        seen.append(text)
        return ParseResult(text, 0.01, "noted")

    seen = []
    parse = compose_parsers(
        without_thinking(reward=0.1), tagged("n", reward=0.2), note, by_function(int, penalty=-1.0)
    )
    assert parse("<think>3</think><n>4</n>").action == 4
    result = parse("<think>3</think><n>4</n>")
    assert result.reward == pytest.approx(0.31)
    assert result.obs == "noted"
    assert parse("<n>x</n>").reward == pytest.approx(-0.69)
    assert parse("4") == ParseResult(None, 0.1, "Put your answer between <n> and </n>.")
    assert seen == ["4", "4", "x"]
    with pytest.raises(ConfigError, match="at least one"):
        compose_parsers()


@given(st.text())
def test_no_text_makes_a_parser_raise(text):
    parse = compose_parsers(without_thinking(), tagged("a"), one_of(["x", "y z"]))
    result = parse(text)
    assert result.failed == (result.action not in ("x", "y z"))
    assert not (result.failed and not result.obs)


@given(st.text(alphabet="abc 123", min_size=1).filter(lambda text: text.strip()))
def test_composition_is_associative(text):
    one, two, three = tagged("t", reward=1.0), one_of(["a", "b"], reward=2.0), as_text
    wrapped = f"<t>{text}</t>"
    left = compose_parsers(compose_parsers(one, two), three)(wrapped)
    assert left == compose_parsers(one, compose_parsers(two, three))(wrapped)
