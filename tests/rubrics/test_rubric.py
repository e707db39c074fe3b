import asyncio
from socket import gaierror

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rubric_states import a_state, a_step

from rolltree._helpers.tasks import Terminated
from rolltree.environments.parsers import Parser, XMLParser
from rolltree.environments.rubrics import Rubric, run_inline, write_advantages
from rolltree.values.errors import ConfigError, RolltreeError, record_error


@run_inline
def correct(completion, answer):
    return float(completion[-1]["content"] == answer)


@run_inline
def length(completion):
    return len(completion[-1]["content"])


@run_inline
def broken(completion):
    raise RuntimeError("no judge")


def quits(completion):
    raise SystemExit(3)


async def quits_later(completion):
    raise SystemExit


class NoFloat:
    def __float__(self):
        raise ZeroDivisionError


def no_float(completion):
    return NoFloat()


def score(rubric, *states):
    for state in states:
        asyncio.run(rubric.score_rollout(state))
    return states[0]


def test_reward_is_the_weighted_sum_and_metrics_are_not_weighted():
    state = score(Rubric([correct, length], [1.0, 0.5]), a_state("4"))
    assert state["reward"] == 1.5
    assert state["metrics"] == {"correct": 1.0, "length": 1.0}
    assert state["error"] is None


@given(
    values=st.lists(st.floats(-10, 10), min_size=1, max_size=5),
    data=st.data(),
)
def test_weighted_sum_for_any_weights(values, data):
    weights = data.draw(st.lists(st.floats(-3, 3), min_size=len(values), max_size=len(values)))
    rubric = Rubric()
    for index, (value, weight) in enumerate(zip(values, weights, strict=True)):

        def func(completion, value=value):
            return value

        func.__name__ = f"f{index}"
        rubric.add_reward_func(func, weight, run_inline=True)
    state = score(rubric, a_state())
    expected = 0.0
    for value, weight in zip(values, weights, strict=True):
        expected += value * weight
    assert state["reward"] == pytest.approx(expected)
    assert list(state["metrics"].values()) == values


def test_metrics_do_not_change_the_reward():
    rubric = Rubric([correct])
    rubric.add_metric(length)
    state = score(rubric, a_state("4"))
    assert state["reward"] == 1.0
    assert state["metrics"]["length"] == 1.0


def test_metrics_the_environment_wrote_stay():
    state = score(Rubric([correct]), a_state(metrics={"turns": 3.0}))
    assert state["metrics"] == {"turns": 3.0, "correct": 1.0}


def test_scoring_time_is_written():
    state = score(Rubric([correct]), a_state())
    assert state["timing"]["scoring_ms"] > 0
    assert state["timing"]["total_ms"] == pytest.approx(5.0 + state["timing"]["scoring_ms"])


def test_a_function_that_raises_on_an_answer_earns_nothing_and_says_so():
    """Without a reward the answer would count nowhere, which a model could learn to choose."""
    state = score(Rubric([correct, broken]), a_state())
    assert (state["reward"], state["error"]) == (1.0, None)
    assert state["metrics"] == {"correct": 1.0, "broken": 0.0}
    assert state["scoring_errors"]["broken"]["type"] == "RuntimeError"
    assert "no judge" in state["scoring_errors"]["broken"]["message"]
    assert "in broken" in state["scoring_errors"]["broken"]["traceback"]
    assert state["trajectory"][0]["reward"] == 1.0


class Away(RolltreeError):
    """A service that the author's function asks."""

    kind = "infrastructure"


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), gaierror("no such host"), ConfigError("no key"), Away()]
)
def test_what_cannot_follow_from_an_answer_gives_no_reward(error):
    def ask(completion):
        raise error

    state = score(Rubric([correct, ask]), a_state())
    assert (state["reward"], state["metrics"]) == (None, {"correct": 1.0, "ask": None})
    assert (state["error"].type, state["error"].phase) == (type(error).__name__, "scoring")
    assert state["trajectory"][0]["reward"] is None


def test_an_error_without_an_answer_gives_no_reward():
    state = score(Rubric([broken]), a_state(steps=[]))
    assert (state["reward"], state["error"].type) == (None, "RuntimeError")


def test_a_keyboard_interrupt_of_code_in_a_thread_is_an_error_like_any_other():
    """The user's Ctrl-C reaches only the main thread."""

    def runs_code(completion):
        raise KeyboardInterrupt

    state = score(Rubric([runs_code]), a_state())
    assert state["reward"] == 0.0
    assert state["scoring_errors"]["runs_code"]["type"] == "KeyboardInterrupt"


def test_a_failed_metric_leaves_the_reward():
    rubric = Rubric([correct])
    rubric.add_metric(broken)
    state = score(rubric, a_state())
    assert state["reward"] == 1.0
    assert state["metrics"]["broken"] is None
    assert state["error"] is None
    said = state["scoring_errors"]["broken"]["message"]
    assert said.startswith("reward function 'broken', ")
    assert said.endswith(": no judge")


@pytest.mark.parametrize("value", [None, float("nan"), "1.0", [1.0], 1e308, -(10**200)])
def test_a_score_that_is_no_number_is_a_failure(value):
    @run_inline
    def odd(completion):
        return value

    state = score(Rubric([odd]), a_state())
    assert (state["reward"], state["error"]) == (0.0, None)
    assert state["metrics"] == {"odd": 0.0}
    assert "odd" in state["scoring_errors"]


def test_a_weight_that_makes_a_score_too_large_is_a_failure_of_the_function():
    state = score(Rubric([length, correct], [1e300, 1.0]), a_state("4"))
    assert (state["reward"], state["metrics"]) == (1.0, {"length": 0.0, "correct": 1.0})
    assert "with its weight 1e+300" in state["scoring_errors"]["length"]["message"]


def test_an_earlier_error_is_kept():
    earlier = record_error(ValueError("first"), "environment")
    assert score(Rubric([broken]), a_state(error=earlier))["error"] is earlier


def test_a_rubric_without_functions_leaves_the_reward_alone():
    assert score(Rubric(), a_state())["reward"] is None
    state = score(Rubric(), a_state(reward=0.7))
    assert state["reward"] == 0.7
    assert state["trajectory"][0]["reward"] == 0.7


def test_duplicate_names_are_an_error():
    rubric = Rubric([correct])
    with pytest.raises(ConfigError, match="'correct'"):
        rubric.add_metric(correct)
    with pytest.raises(ConfigError, match="<lambda>"):
        Rubric([lambda answer: 1.0, lambda answer: 2.0])
    with pytest.raises(ConfigError, match="'correct'"):
        rubric.add_step_reward_func(correct)


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 1.0, 1.0]])
def test_one_weight_per_function(weights):
    with pytest.raises(ConfigError, match="weight"):
        Rubric([correct, length], weights)


def test_names_functions_and_weights_can_be_read():
    rubric = Rubric([correct, length], [1.0, 0.5])
    assert rubric.get_reward_func_names() == ["correct", "length"]
    assert rubric.get_reward_funcs() == [correct, length]
    assert rubric.get_reward_weights() == [1.0, 0.5]


def test_the_parser_is_an_argument():
    parser = XMLParser(["answer"])
    rubric = Rubric(parser=parser)

    @run_inline
    def parsed(parser, completion, answer):
        return parser.parse_answer(completion) == answer

    rubric.add_reward_func(parsed)
    assert score(rubric, a_state("<answer>4</answer>"))["reward"] == 1.0


def test_the_environments_parser_is_adopted_unless_there_is_one():
    parser, own = Parser(), Parser()
    rubric = Rubric()
    rubric.adopt_parser(parser)
    assert rubric.parser is parser
    assert rubric.class_objects["parser"] is parser
    rubric = Rubric(parser=own)
    rubric.adopt_parser(parser)
    assert rubric.parser is own


def test_class_objects_are_arguments():
    rubric = Rubric()
    rubric.class_objects["judge"] = lambda text: 0.5

    async def judged(judge, completion):
        return judge(completion)

    rubric.add_reward_func(judged)
    assert score(rubric, a_state())["reward"] == 0.5


# Steps


def test_without_step_functions_every_step_gets_the_rollouts_reward():
    state = score(Rubric([correct]), a_state("4", steps=[a_step("3"), a_step("4")]))
    assert [step["reward"] for step in state["trajectory"]] == [1.0, 1.0]
    assert state["has_step_rewards"] is False


def test_scoring_again_replaces_what_was_filled():
    state = a_state("4", steps=[a_step("3"), a_step("4")])
    score(Rubric([correct]), state)
    score(Rubric([correct], [2.0]), state)
    assert state["reward"] == 2.0
    assert [step["reward"] for step in state["trajectory"]] == [2.0, 2.0]
    assert state["has_step_rewards"] is False


def test_step_rewards_that_the_environment_set_stay():
    state = score(Rubric([correct]), a_state("4", steps=[a_step("3", reward=-0.1), a_step("4")]))
    assert [step["reward"] for step in state["trajectory"]] == [-0.1, 1.0]
    assert state["has_step_rewards"] is True


def test_step_functions_score_each_step_and_add_up():
    @run_inline
    def good(step, step_index):
        return 0.25 if step["completion"][0]["content"] == "b" else 0.1 * step_index

    rubric = Rubric([correct])
    rubric.add_step_reward_func(good, 2.0)
    state = score(rubric, a_state("4", steps=[a_step("a"), a_step("b"), a_step("4")]))
    # steps: 0.0, 0.25, 0.2 -> metric 0.45, weighted 0.9, and 1.0 for the rollout on the last
    assert state["metrics"] == pytest.approx({"correct": 1.0, "good": 0.45})
    assert state["reward"] == pytest.approx(1.9)
    assert [s["reward"] for s in state["trajectory"]] == pytest.approx([0.0, 0.5, 1.4])
    assert state["has_step_rewards"] is True


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(-2, 2))
def test_step_rewards_always_add_up_to_the_reward(values, weight):
    @run_inline
    def each(step_index):
        return values[step_index]

    rubric = Rubric([correct])
    rubric.add_step_reward_func(each, weight)
    state = score(rubric, a_state("4", steps=[a_step() for _ in values]))
    assert sum(s["reward"] for s in state["trajectory"]) == pytest.approx(state["reward"])


def test_a_step_on_which_a_function_raises_earns_nothing():
    @run_inline
    def sometimes(step_index):
        return 1.0 if step_index == 0 else 1 / 0

    rubric = Rubric()
    rubric.add_step_reward_func(sometimes)
    state = score(rubric, a_state(steps=[a_step(), a_step()]))
    assert (state["reward"], state["error"]) == (1.0, None)
    assert state["metrics"] == {"sometimes": 1.0}
    assert state["scoring_errors"]["sometimes"]["type"] == "ZeroDivisionError"
    assert [step["reward"] for step in state["trajectory"]] == [1.0, 0.0]


def test_step_functions_of_a_rollout_without_steps():
    @run_inline
    def each(step):
        return 1.0

    rubric = Rubric([correct])
    rubric.add_step_reward_func(each)
    state = score(rubric, a_state("4", steps=[]))
    assert state["reward"] == 1.0
    assert state["metrics"]["each"] == 0.0


# Groups


@run_inline
def longest(completions):
    sizes = [len(completion[-1]["content"]) for completion in completions]
    return [float(size == max(sizes)) for size in sizes]


def score_group(rubric, states):
    asyncio.run(rubric.score_group(states))
    return [state["reward"] for state in states]


def test_group_functions_compare():
    rubric = Rubric([correct, longest], [1.0, 0.5])
    assert rubric.has_group_rewards
    states = [a_state("4"), a_state("4444"), a_state("44")]
    assert score_group(rubric, states) == [1.0, 0.5, 0.0]
    assert [state["advantage"] for state in states] == [0.5, 0.0, -0.5]
    assert [state["trajectory"][0]["advantage"] for state in states] == [0.5, 0.0, -0.5]


def test_a_group_function_on_one_rollout_scores_a_group_of_one():
    assert score(Rubric([longest]), a_state("4"))["reward"] == 1.0


def broken_midway(states):
    yield 1.0
    raise RuntimeError("no second score")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *(([1.0] * num, f"{num} scores for 2 rollouts") for num in (0, 1, 3)),
        (1.0, "a float"),
        (None, "a NoneType"),
        ({0: 1.0, 1: 2.0}, "a dict"),
        ({1.0, 2.0}, "a set"),
        ("10", "a str"),
    ],
)
def test_a_group_function_without_one_score_each_counts_as_one_that_raises(value, said):
    @run_inline
    def odd(states):
        return value

    states = [a_state("4"), a_state("44")]
    assert score_group(Rubric([odd, correct]), states) == [1.0, 0.0]
    for state in states:
        assert state["error"] is None
        assert said in state["scoring_errors"]["odd"]["message"]
        assert "one number per rollout" in state["scoring_errors"]["odd"]["message"]
    assert states[0]["advantage"] == 0.5


def test_a_group_function_that_fails_while_its_scores_are_read_earns_its_group_nothing():
    states = [a_state(), a_state()]
    assert score_group(Rubric([broken_midway]), states) == [0.0, 0.0]
    assert "no second score" in states[1]["scoring_errors"]["broken_midway"]["message"]


def test_one_bad_score_in_a_group_is_that_rollouts_alone():
    @run_inline
    def odd(states):
        return [1.0, None, 3.0]

    states = [a_state(), a_state(), a_state()]
    assert score_group(Rubric([odd]), states) == [1.0, 0.0, 3.0]
    assert ["scoring_errors" in state for state in states] == [False, True, False]


def test_a_group_function_that_raises_earns_its_group_nothing():
    @run_inline
    def odd(states):
        raise KeyError("gone")

    states = [a_state(), a_state()]
    assert score_group(Rubric([odd]), states) == [0.0, 0.0]
    assert [s["scoring_errors"]["odd"]["type"] for s in states] == ["KeyError", "KeyError"]


def test_advantages_keep_what_a_step_already_has():
    states = [a_state(steps=[a_step(advantage=9.0), a_step()]), a_state()]
    states[0]["reward"], states[1]["reward"] = 1.0, 0.0
    write_advantages(states)
    assert [step["advantage"] for step in states[0]["trajectory"]] == [9.0, 0.5]
    assert states[1]["advantage"] == -0.5


def test_advantages_of_a_group_in_which_nothing_was_scored():
    states = [a_state(), a_state()]
    write_advantages(states)
    assert [state["advantage"] for state in states] == [None, None]


def test_the_advantage_of_a_group_is_credits_dr_grpo():
    from rolltree.training.credit import Earnings, dr_grpo

    rewards = [0.1, 0.7, 0.7, -2.0, 0.3]
    states = [a_state(steps=[a_step()]) for _ in rewards]
    for state, reward in zip(states, rewards, strict=True):
        state["reward"] = reward
    write_advantages(states)
    credit = dr_grpo([Earnings(reward, (None,), (0,)) for reward in rewards])
    assert [[state["advantage"]] for state in states] == credit
    assert [step["advantage"] for state in states for step in state["trajectory"]] == [
        state["advantage"] for state in states
    ]


@pytest.mark.parametrize(("func", "said"), [(quits, "exit(3)"), (quits_later, "exit()")])
def test_a_function_that_calls_exit_does_not_end_the_program(func, said):
    state = score(Rubric([func, length]), a_state("4"))
    assert (state["reward"], state["metrics"]) == (1.0, {func.__name__: 0.0, "length": 1.0})
    assert said in state["scoring_errors"][func.__name__]["message"]


def test_sigterm_ends_the_program_while_a_function_runs():
    @run_inline
    def stopped(completion):
        raise Terminated(143)

    with pytest.raises(Terminated):
        score(Rubric([stopped]), a_state("4"))


def test_a_value_that_cannot_become_a_float_is_an_error_with_the_name_of_its_function():
    state = score(Rubric([no_float]), a_state("4"))
    assert state["metrics"] == {"no_float": 0.0}
    assert "no_float" in state["scoring_errors"]["no_float"]["message"]


@pytest.mark.parametrize("weight", ["1", None, 10**400])
def test_a_weight_that_is_not_a_number_is_refused_with_its_function(weight):
    with pytest.raises(ConfigError, match="length"):
        Rubric([length], weights=[weight])


async def test_group_functions_have_lists_of_their_own():
    def drains(states):
        while states:
            states.pop()
        raise ZeroDivisionError

    def counts(states):
        return [1.0 for _ in states]

    def compares(completions, answer):
        return [1.0 for _ in completions]

    rubric = Rubric([drains, counts, compares])
    states = [a_state(), a_state()]
    await rubric.score_group(states)
    for state in states:
        assert state["reward"] == 1.0
        said = {name: error["message"] for name, error in state["scoring_errors"].items()}
        assert said.keys() == {"drains", "compares"}
        assert "Did you mean 'answers'?" in said["compares"]
