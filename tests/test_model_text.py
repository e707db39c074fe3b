"""Whatever a model writes ends in a parse failure or a verdict, never in a recorded failure.

A failure has no reward and leaves the baseline, so a model that could cause one would learn to.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rolltree as rt
from hostile_text import NASTY, TextModel, answers, arguments
from odd_kit import ENVIRONMENTS, ROWS, TOOLS, verdict
from rolltree.agents.tool_calls import NativeCalls, ReActCalls
from rolltree.environments import PythonEnv
from rolltree.environments.parsers import (
    MaybeThinkParser,
    Parser,
    ThinkParser,
    XMLParser,
    as_text,
    by_function,
    extract_boxed_answer,
    extract_hash_answer,
    from_parser,
    one_of,
    tagged,
    without_thinking,
)
from rolltree.environments.rubrics import MathRubric, Rubric
from rolltree.environments.tools import Toolset, answer_of, call_function
from rolltree.inference import TOOL_PARSERS, ToolCall
from rolltree.inference.formats.reader import CompletionParser
from rolltree.inference.formats.rows import REASONING_TAGS
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.rollouts.decode import decode_results, export_line
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from rolltree.values.types import FinishReason

MANY = settings(max_examples=400 if os.environ.get("ROLLTREE_HYPOTHESIS") == "long" else 60)
SOME = settings(max_examples=100 if os.environ.get("ROLLTREE_HYPOTHESIS") == "long" else 4)
ROOT = Path(__file__).parents[1]


def nasty(**fixed):
    """Give a test the nasty texts one by one, beside those that Hypothesis draws."""

    def decorate(test):
        for text in NASTY:
            test = example(text=text, **fixed)(test)
        return test

    return decorate


# Readers


@pytest.mark.parametrize("style", TOOL_PARSERS)
@MANY
@given(text=answers, reasoning=st.sampled_from(list(REASONING_TAGS)))
@nasty(reasoning="none")
@nasty(reasoning="harmony")
def test_a_completion_is_a_message_whatever_it_says(style, reasoning, text):
    parser = CompletionParser(tool_parser=style, reasoning=reasoning)
    message = parser.parse(text, FinishReason.STOP, [{}]).message
    assert isinstance(message["content"], str)
    assert len(message.get("parse_problems", ())) <= 9
    for call in message.get("tool_calls", ()):
        assert json.dumps(call, ensure_ascii=False).encode()  # no lone surrogates
        json.dumps(json.loads(call["function"]["arguments"]), allow_nan=False)


PARSERS = [
    *(Parser(), ThinkParser(), MaybeThinkParser(), XMLParser(["think", ("answer", "code")])),
    *(Parser(extract_boxed_answer), MaybeThinkParser(extract_hash_answer)),
]
ACTIONS = [
    *(as_text, tagged("answer"), without_thinking(), without_thinking(required=True)),
    *(one_of(["left", "right", "İ"]), by_function(int), by_function(json.loads)),
    *(by_function(lambda text: int(float(text))), from_parser(XMLParser(["answer"]))),
]


@MANY
@given(text=answers)
@nasty()
def test_parsers_read_any_text(text):
    said = [{"role": "assistant", "content": text}]
    for parser in PARSERS:
        parser.parse_answer(said)
        assert 0.0 <= parser.get_format_reward_func()(said) <= 1.0
    for parse in ACTIONS:
        result = parse(text)
        assert result.failed or result.action is not None
    for spelling in (ReActCalls(), NativeCalls()):
        spelling.read(said[0])
        spelling.final(said[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@MANY
@given(answers | arguments.map(json.dumps), st.sampled_from(TOOLS))
async def test_any_arguments_end_in_an_answer(text, tool):
    tools = Toolset(TOOLS)
    request = tools.read(ToolCall(tool.__name__, text, "c"))
    if request.problem is None:
        result = call_function(tools[tool.__name__], request.arguments, limit_s=60.0)
        answer = await answer_of(request, result)
        assert len(answer.text) <= 1_000_100
        assert answer.text.encode()


# Whole rollouts


def no_failure(results, folder=None):
    """Check that every rollout has a reward, and comes back from the store as it went."""
    rows = [row for result in results for row in encode_result(result)]
    with Run.create(folder / "run") as run:
        run.add_rollouts(rows)
        for result in results:
            assert result.error is None, result.error.traceback
            for state in result.states:
                assert state.get("error") is None, state["error"].traceback
                assert isinstance(state["reward"], float)
                assert not state.get("scoring_errors")
        for found, result in zip(decode_results(run.rollouts()), results, strict=True):
            assert [s["completion"] for s in found.states] == [
                s["completion"] for s in result.states
            ]
        run.export(folder / "out.jsonl", render=export_line)
        for line in (folder / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
            json.loads(line)


class Crowd(TextModel):
    """Each session writes the next text, again and again, and then something harmless."""

    def __init__(self, texts, style):
        super().__init__("", style=style)
        self.next_texts = iter(texts)

    def session(self):
        text = next(self.next_texts)
        style = self.parser.tool_parser
        return TextModel(text, text, "<answer>1</answer>", style=style)


async def play(env, texts, folder, style="hermes"):
    """Play a row once per text, and check what came of it."""
    requests = build_requests(env, "eval", num_examples=1, group_size=len(texts))
    results = await RolloutEngine(env, Crowd(texts, style)).run_all(requests)
    assert len(results) == len(texts)
    no_failure(results, folder)


MADE = {"train": "generated", "test": "generated", "num_generated": 10}
PACKAGED = {
    "arithmetic": {},
    "gsm8k": MADE,
    "reverse_text": {"num_train": 5, "num_eval": 5},
    "tic_tac_toe": {"num_train": 5, "num_eval": 5},
    "tool_calls": {"num_train": 5, "num_eval": 5},
    "wordle": {},
    "reasoning_gym": {"num_train": 6, "num_eval": 6},
}


def make(name):
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]()
    if name == "reasoning_gym":
        pytest.importorskip(name, reason="no wheel for one of its needs: no C compiler here")
    return rt.load_environment(str(ROOT / "environments" / name), **PACKAGED[name])


@pytest.mark.parametrize("name", [*ENVIRONMENTS, *PACKAGED])
def test_no_text_fails_a_rollout(name, tmp_path_factory):
    env = make(name)

    @SOME
    @given(st.lists(answers, min_size=1, max_size=12))
    @example(NASTY)
    def check(texts):
        asyncio.run(play(env, texts, tmp_path_factory.mktemp("run")))

    check()


async def test_a_sandbox_takes_any_code(tmp_path):
    calls = [
        f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"
        for code in ["print('\\ud800')", "\ud800", "print(1)\0", "(" * 500, "9" * 5000, "'\x1b[2J'"]
    ]
    await play(PythonEnv(dataset=ROWS, rubric=Rubric([verdict])), calls, tmp_path)


def test_mathematics_that_cannot_be_read_is_wrong(tmp_path):
    rubric = MathRubric(time_limit_s=2.0)
    env = rt.SingleTurnEnv(dataset=ROWS, rubric=rubric)
    asyncio.run(play(env, NASTY, tmp_path))
