"""The environment package `python_tools`: rows, reward, a whole rollout in the sandbox."""

import json
import re
from pathlib import Path

import pytest
from env_scripts import ScriptedModel

import rolltree as rt

PACKAGE = Path(__file__).parents[2] / "environments" / "python_tools"
SOLUTIONS = {  # what a model would write for each kind of question
    "digit_sum": "print(sum(map(int, str({0}**{1}))))",
    "divisors": "print(sum({0} % i == 0 for i in range(1, {0} + 1)))",
    "collatz": "n, k = {2}, 0\nwhile n - 1: n, k = (3 * n + 1 if n % 2 else n // 2), k + 1\nk",
}


@pytest.fixture
def env():
    return rt.load_environment(str(PACKAGE), num_train=8, num_eval=6)


def test_rows_are_distinct_and_repeatable(env):
    again = rt.load_environment(str(PACKAGE), num_train=8, num_eval=6)
    train = [row["prompt"][-1]["content"] for row in env.dataset]
    held_out = [row["prompt"][-1]["content"] for row in env.eval_dataset]
    assert len({*train, *held_out}) == 14
    assert [row["answer"] for row in env.dataset] == [row["answer"] for row in again.dataset]
    other = rt.load_environment(str(PACKAGE), num_train=8, num_eval=6, seed=1)
    assert [row["answer"] for row in env.dataset] != [row["answer"] for row in other.dataset]


def solve(messages):
    """Write the code for the question, then repeat what the tool said."""
    if messages[-1]["role"] == "tool":
        return f"<answer>{messages[-1]['content'].strip()}</answer>"
    question = messages[-1]["content"]
    kind = next(k for k, word in KINDS.items() if word in question)
    code = (
        SOLUTIONS[kind].format(*re.findall(r"\d+", question))
        if kind in SOLUTIONS
        else "print({!r}.count({!r}))".format(
            *re.search(r"'(.)' occur in (\w+)", question).group(2, 1)
        )
    )
    function = {"name": "python", "arguments": json.dumps({"code": code})}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


KINDS = {"digit_sum": "digits", "divisors": "divisors", "collatz": "Halve", "letters": "occur"}


def test_a_model_that_computes_gets_the_reward(env):
    for row in env.eval_dataset:
        assert row["answer"].isdigit()
    results = env.evaluate_sync(ScriptedModel(solve, solve), num_examples=4)
    assert [state["error"] for state in results.state] == [None] * 4
    assert results.metadata.avg_reward == 1.0
    assert {state["metrics"]["num_tool_calls"] for state in results.state} == {1.0}
    assert all(state["sandbox_level"]["missing"] == [] for state in results.state)


def test_a_model_that_guesses_does_not(env):
    results = env.evaluate_sync(ScriptedModel("<answer>0</answer>"), num_examples=4)
    assert results.metadata.avg_reward == 0.0
