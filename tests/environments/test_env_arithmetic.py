import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rolltree as rt
from rolltree.testing import ScriptedClient

FOLDER = Path(__file__).parents[2] / "environments" / "arithmetic"


@pytest.fixture(scope="module")
def env():
    return rt.load_environment(FOLDER)


@pytest.fixture(scope="module")
def module(env):
    return sys.modules[type(env).__module__]


def pairs(rows):
    return [(row["info"]["a"], row["info"]["b"]) for row in rows]


def test_the_splits_are_apart_as_unordered_sums(env):
    train, held_out = pairs(env.dataset), pairs(env.eval_dataset)
    assert len(held_out) == len(set(held_out)) == 100
    assert len(train) == len(set(train)) == 67  # 19 * 9 - 100 - the 4 orders of the examples
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}


def test_the_examples_of_the_prompt_are_in_neither_split(env):
    shown = {frozenset((8, 3)), frozenset((5, 4))}
    assert not shown & {frozenset(pair) for pair in pairs(env.dataset) + pairs(env.eval_dataset)}


@given(st.integers(3, 20), st.integers(3, 20), st.integers(1, 9), st.integers(0, 9))
def test_any_split(module, max_a, max_b, num_eval, seed):
    try:
        train, held_out = module.split(max_a, max_b, num_eval, seed)
    except rt.ConfigError:
        assert max_a * max_b < 20
        return
    assert len(held_out) == num_eval
    assert not {frozenset(p) for p in pairs(train)} & {frozenset(p) for p in pairs(held_out)}
    for row in train + held_out:
        a, b = row["info"]["a"], row["info"]["b"]
        assert 1 <= a <= max_a
        assert 1 <= b <= max_b
        assert row["answer"] == str(a + b)
        assert row["question"] == f"{a} + {b} ="
    assert module.split(max_a, max_b, num_eval, seed) == (train, held_out)


def test_the_seed_decides_the_split(env):
    assert pairs(rt.load_environment(FOLDER).eval_dataset) == pairs(env.eval_dataset)
    assert pairs(rt.load_environment(FOLDER, seed=1).eval_dataset) != pairs(env.eval_dataset)


@pytest.mark.parametrize(
    ("args", "message"),
    [({"num_eval": 170}, "held-out"), ({"max_a": 0}, "held-out"), ({"tries": 0}, "tries is 0")],
)
def test_impossible_arguments(args, message):
    with pytest.raises(rt.ConfigError, match=message):
        rt.load_environment(FOLDER, **args)


def test_prompts_differ_in_the_last_message_only(env):
    prompts = [row["prompt"] for row in [*env.dataset, *env.eval_dataset]]
    assert all(prompt[:-1] == prompts[0][:-1] for prompt in prompts)
    assert [message["content"] for message in prompts[0][:-1]] == [
        "Answer with the number only.",
        "8 + 3 =",
        "9",
        "No, 2 too low. 8 + 3 =",
        "11",
        "5 + 4 =",
        "12",
        "No, 3 too high. 5 + 4 =",
        "9",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        (" 12\n", 12),
        ("012", 12),
        ("12.", None),
        ("-3", None),
        ("7 + 5 = 12", None),
        ("12 or 13", None),
        ("", None),
        ("1" * 5000, None),
        ("\u0661\u0662", None),  # 12 in Arabic-Indic digits
    ],
)
def test_number(module, text, value):
    assert module.number(text) == value


@given(st.integers(1, 99), st.integers(1, 99), st.none() | st.integers(0, 999))
def test_feedback_is_true_and_never_says_the_sum(module, a, b, given):
    if given == a + b:
        return
    text = module.feedback(given, a, b)
    assert text.endswith(f" {a} + {b} =")
    if given is None:
        assert text.startswith("Answer with the number only.")
        return
    off, way = re.fullmatch(r"No, (\d+) too (high|low)\. .*", text).groups()
    assert given + (int(off) if way == "low" else -int(off)) == a + b


async def play(env, *replies, index=0):
    model = ScriptedClient(list(replies))
    state = await env.rollout(env.example("eval", index), model, "m")
    await env.rubric.score_rollout(state)
    return state, model


def outcome(state):
    metrics = state["metrics"]
    tries = (metrics["solved_first_try"], metrics["solved_second_try"])
    return state["reward"], *tries, state["stop_condition"], state["truncated"]


async def test_right_at_once(env):
    state, model = await play(env, env.example("eval", 0)["answer"])
    assert outcome(state) == (1.0, 1.0, 0.0, "solved", False)
    assert len(model.calls) == 1


async def test_right_on_the_second_try(env):
    goal = int(env.example("eval", 0)["answer"])
    state, model = await play(env, str(goal + 2), str(goal))
    assert outcome(state) == (1.0, 0.0, 1.0, "solved", False)
    told = model.calls[1].messages
    assert told[:-2] == model.calls[0].messages
    assert told[-1]["content"].startswith("No, 2 too high.")


async def test_wrong_twice_is_lost_and_not_cut_short(env):
    state, model = await play(env, "0", "x")
    assert outcome(state) == (0.0, 0.0, 0.0, "tries_used_up", False)
    assert state["terminated"]
    assert len(model.calls) == 2


async def test_an_answer_that_is_no_number_is_told_so(env):
    state, model = await play(env, "the sum is 3", env.example("eval", 0)["answer"])
    assert outcome(state)[:3] == (1.0, 0.0, 1.0)
    assert model.calls[1].messages[-1]["content"].startswith("Answer with the number only. ")


async def test_one_and_three_tries():
    one, three = rt.load_environment(FOLDER, tries=1), rt.load_environment(FOLDER, tries=3)
    goal = three.example("eval", 0)["answer"]
    state, _ = await play(one, "0", goal)
    assert outcome(state) == (0.0, 0.0, 0.0, "tries_used_up", False)
    assert len(state["trajectory"]) == 1
    state, _ = await play(three, "0", "0", goal)
    assert outcome(state) == (1.0, 0.0, 0.0, "solved", False)


@pytest.mark.parametrize("constant", ["9", "12", "16"])
async def test_a_constant_answer_scores_low(env, constant):
    results = await env.evaluate(ScriptedClient(lambda messages: constant), "m")
    assert results.metadata.num_failed == 0
    assert results.metadata.avg_reward < 0.15


async def test_one_who_only_uses_the_distance_wins_on_the_second_try(env):
    def listen(messages):
        said = re.match(r"No, (\d+) too (low|high)", messages[-1]["content"])
        if said is None:
            return "1"
        off = int(said[1]) if said[2] == "low" else -int(said[1])
        return str(int(messages[-2]["content"]) + off)

    results = await env.evaluate(ScriptedClient(listen), "m")
    assert results.metadata.avg_reward == 1.0
    assert results.metadata.avg_metrics["solved_second_try"] == 1.0
