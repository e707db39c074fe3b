import asyncio

import pytest
from rubric_states import a_state, a_step

from rolltree.environments.parsers import Parser
from rolltree.environments.rubrics import Rubric, RubricGroup, run_inline
from rolltree.values.errors import ConfigError


def constant(name, value):
    @run_inline
    def func(completion):
        return value

    func.__name__ = name
    return func


def each(name, values):
    @run_inline
    def func(step_index):
        return values[step_index]

    func.__name__ = name
    return func


def score(rubric, state):
    asyncio.run(rubric.score_rollout(state))
    return state


def test_rewards_add_up_and_metrics_are_joined():
    group = RubricGroup([Rubric([constant("a", 1.0)]), Rubric([constant("b", 2.0)], [0.5])])
    state = score(group, a_state())
    assert state["reward"] == 2.0
    assert state["metrics"] == {"a": 1.0, "b": 2.0}


def test_step_rewards_of_all_rubrics_add_up():
    first, second = Rubric(), Rubric([constant("end", 1.0)])
    first.add_step_reward_func(each("x", [0.1, 0.2]))
    second.add_step_reward_func(each("y", [1.0, 2.0]))
    state = score(RubricGroup([first, second]), a_state(steps=[a_step(), a_step()]))
    assert state["reward"] == pytest.approx(4.3)
    assert [s["reward"] for s in state["trajectory"]] == pytest.approx([1.1, 3.2])


def test_a_rubric_that_only_scores_the_end_adds_to_the_last_step():
    steps_only = Rubric()
    steps_only.add_step_reward_func(each("x", [0.25, 0.5]))
    group = RubricGroup([Rubric([constant("end", 1.0)]), steps_only])
    state = score(group, a_state(steps=[a_step(), a_step()]))
    assert [s["reward"] for s in state["trajectory"]] == [0.25, 1.5]


def test_advantages_come_from_the_total():
    @run_inline
    def rank(states):
        return [float(index) for index in range(len(states))]

    group = RubricGroup([Rubric([constant("a", 5.0)]), Rubric([rank])])
    assert group.has_group_rewards
    states = [a_state(), a_state(), a_state()]
    asyncio.run(group.score_group(states))
    assert [state["reward"] for state in states] == [5.0, 6.0, 7.0]
    assert [state["advantage"] for state in states] == [-1.0, 0.0, 1.0]


def test_a_failure_in_one_rubric_fails_the_total():
    @run_inline
    def broken(completion):
        raise ConnectionError("down")

    group = RubricGroup([Rubric([constant("a", 1.0)]), Rubric([broken])])
    state = score(group, a_state())
    assert state["reward"] is None
    assert state["metrics"] == {"a": 1.0, "broken": None}
    assert state["error"].type == "ConnectionError"
    assert "broken" in state["scoring_errors"]


def test_rubrics_without_functions_add_nothing():
    state = score(RubricGroup([Rubric(), Rubric([constant("a", 1.0)])]), a_state())
    assert state["reward"] == 1.0
    assert score(RubricGroup([Rubric(), Rubric()]), a_state())["reward"] is None


class Handmade(Rubric):
    """Scores as environments of the old style do: by overriding `score_rollout`."""

    async def score_rollout(self, state):
        state["reward"] = 3.0
        state["metrics"] = {"handmade": 3.0}


class HandmadeGroup(Rubric):
    async def score_group(self, states):
        for index, state in enumerate(states):
            state["reward"] = float(index)
            state["metrics"] = {"place": float(index)}


def test_a_rubric_that_overrides_score_rollout_is_asked():
    state = score(RubricGroup([Rubric([constant("a", 1.0)]), Handmade()]), a_state())
    assert state["reward"] == 4.0
    assert state["metrics"] == {"a": 1.0, "handmade": 3.0}
    assert state["trajectory"][0]["reward"] == 4.0


def test_a_rubric_that_overrides_score_group_is_asked():
    states = [a_state(), a_state()]
    asyncio.run(RubricGroup([HandmadeGroup(), Rubric([constant("a", 1.0)])]).score_group(states))
    assert [state["reward"] for state in states] == [1.0, 2.0]
    assert [state["metrics"]["place"] for state in states] == [0.0, 1.0]


def test_overriding_rubrics_see_a_copy():
    seen = []

    class Nosy(Rubric):
        async def score_rollout(self, state):
            seen.append((state["reward"], state["trajectory"][0]["reward"]))
            state["reward"] = 1.0
            state["metrics"] = {}

    state = a_state(steps=[a_step(reward=0.5)])
    score(RubricGroup([Nosy()]), state)
    assert seen == [(None, None)]
    assert state["trajectory"][0]["reward"] == 0.5  # the environment's own stays


class Noting(Rubric):
    """Scores as usual, and writes a key into the state."""

    async def score_rollout(self, state):
        await super().score_rollout(state)
        state["note"] = state["seen"] = "by the judge"


@pytest.mark.parametrize("flag", [{}, {"has_step_rewards": True}])
def test_an_overriding_rubric_leaves_the_step_rewards_of_a_world(flag):
    steps = [a_step(reward=0.25), a_step(reward=0.75)]
    group = RubricGroup([Noting([constant("a", 1.0)]), Rubric([constant("b", 1.0)])])
    state = score(group, a_state(steps=steps, **flag))
    assert state["reward"] == 2.0
    assert [step["reward"] for step in state["trajectory"]] == [0.25, 0.75]
    assert state["has_step_rewards"]


def test_step_functions_and_written_step_rewards_of_overriding_rubrics_count():
    class Written(Rubric):
        async def score_rollout(self, state):
            state["reward"] = 3.0
            state["trajectory"][0]["reward"], state["trajectory"][1]["reward"] = 1.0, 2.0

    noting = Noting()
    noting.add_step_reward_func(each("x", [0.5, 0.25]))
    steps = [a_step(reward=9.0), a_step(reward=9.0)]
    state = score(RubricGroup([noting, Written()]), a_state(steps=steps, has_step_rewards=True))
    assert state["reward"] == 3.75
    assert [step["reward"] for step in state["trajectory"]] == [1.5, 2.25]
    state = score(RubricGroup([Written()]), a_state(steps=[a_step(), a_step()]))
    assert [step["reward"] for step in state["trajectory"]] == [1.0, 2.0]


def test_errors_and_keys_of_overriding_rubrics_are_kept():
    @run_inline
    def broken(completion):
        raise OSError("down")

    class Told(Rubric):
        async def score_rollout(self, state):
            state["reward"], state["scoring_errors"] = 0.0, {"told": "in plain words"}

    noting = Noting([constant("a", 1.0), broken], [1.0, 0.0])
    state = score(RubricGroup([noting, Told()]), a_state(seen="before"))
    assert (state["reward"], state["error"]) == (1.0, None)
    assert state["metrics"] == {"a": 1.0, "broken": None}
    assert state["scoring_errors"]["broken"]["type"] == "OSError"
    assert state["scoring_errors"]["told"] == "in plain words"
    assert (state["note"], state["seen"]) == ("by the judge", "by the judge")


def test_functions_are_added_to_the_first_rubric():
    first = Rubric()
    group = RubricGroup([first, Rubric([constant("a", 1.0)])])
    group.add_reward_func(constant("b", 2.0))
    group.add_step_reward_func(each("c", [1.0]))
    group.add_metric(constant("d", 2.0))
    assert first.get_reward_func_names() == ["b", "c", "d"]
    assert group.get_reward_func_names() == ["b", "c", "d", "a"]
    assert group.get_reward_weights() == [1.0, 1.0, 0.0, 1.0]


def test_duplicate_names_are_an_error():
    with pytest.raises(ConfigError, match="'a'"):
        RubricGroup([Rubric([constant("a", 1.0)]), Rubric([constant("a", 2.0)])])
    group = RubricGroup([Rubric(), Rubric([constant("a", 1.0)])])
    with pytest.raises(ConfigError, match="'a'"):
        group.add_reward_func(constant("a", 1.0))


def test_an_empty_group_is_an_error():
    with pytest.raises(ConfigError, match="at least one"):
        RubricGroup([])


def test_the_environments_parser_reaches_every_rubric_without_its_own():
    own, given = Parser(), Parser()
    rubrics = [Rubric(), Rubric(parser=own)]
    group = RubricGroup(rubrics)
    group.adopt_parser(given)
    assert [rubric.parser for rubric in rubrics] == [given, own]
    assert group.parser is given


@pytest.mark.parametrize("order", [(None, 0.5), (0.5, None)])
def test_a_function_that_returns_none_does_not_apply_and_changes_nothing(order):
    first, second = order
    rubric = Rubric([constant("a", first), constant("b", second)], weights=[2.0, 2.0])
    state = score(rubric, a_state())
    assert (state["reward"], state["error"]) == (1.0, None)
    assert state["metrics"] == {"a": first, "b": second}
    assert "scoring_errors" not in state


def test_if_no_function_scores_a_rollout_it_is_said():
    rubric = Rubric([constant("a", None), constant("b", None), constant("c", 1.0)], [1.0, 1.0, 0.0])
    state = score(rubric, a_state())
    assert state["scoring_errors"].keys() == {"a", "b"}
    assert "returned None" in state["scoring_errors"]["a"]["message"]
    assert (state["reward"], state["metrics"]["c"]) == (0.0, 1.0)


def test_a_metric_that_does_not_apply_is_no_error():
    state = score(Rubric([constant("a", 1.0), constant("b", None)], [1.0, 0.0]), a_state())
    assert (state["reward"], state["metrics"]) == (1.0, {"a": 1.0, "b": None})
    assert "scoring_errors" not in state
