import pytest
from env_scripts import Echo, ScriptedModel, exact, single, user

import rolltree as rt
from rolltree.environments import EnvGroup, MultiTurnEnv, SingleTurnEnv, cleanup, teardown
from rolltree.environments.rubrics import Rubric, RubricGroup
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.values.errors import ConfigError, UnknownName

ADD = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]
SAY = [{"question": "say one", "answer": "one"}]


def add_env(**settings):
    return SingleTurnEnv(**{"dataset": ADD, "rubric": Rubric([exact]), "env_id": "add", **settings})


def say_env(**settings):
    return Echo(**{"dataset": SAY, "max_turns": 3, "env_id": "say", **settings})


def replying(messages):
    answers = {"1+1": "2", "2+2": "5", "say one": "two", "not two": "one"}
    return answers[messages[-1]["content"]]


async def test_each_environment_plays_and_scores_its_own_rows():
    group = EnvGroup([add_env(), say_env()])
    assert [row["task"] for row in group.dataset] == ["add", "add", "say"]
    assert [row["example_id"] for row in group.dataset] == [0, 1, 2]
    results = await group.evaluate(ScriptedModel(replying), "m")
    assert results.reward == [1.0, 0.0, 1.0]
    assert results.task == ["add", "add", "say"]
    assert [len(state["trajectory"]) for state in results.state] == [1, 1, 2]
    assert group.get_env_for_task("say") is group.envs[1]


def test_environments_that_only_have_evaluation_data():
    group = EnvGroup([add_env(), say_env(dataset=None, eval_dataset=SAY)])
    assert [row["task"] for row in group.dataset] == ["add", "add"]
    assert [row["task"] for row in group.eval_dataset] == ["add", "add", "say"]
    only = EnvGroup([say_env(dataset=None, eval_dataset=SAY)])
    assert only.num_examples("eval") == 1
    with pytest.raises(ConfigError, match="evaluation data only"):
        only.num_examples("train")


async def test_a_group_of_groups_keeps_the_rows_own_tasks():
    rows = [{"question": "1+1", "answer": "2", "task": "easy"}]
    inner = EnvGroup([add_env(dataset=rows), say_env()], env_id="inner")
    outer = EnvGroup([inner, add_env()], ["both", "sums"])
    assert [r["task"] for r in outer.dataset] == ["both/add/easy", "both/say", "sums", "sums"]
    seen = []

    def task_seen(task):
        seen.append(task)
        return 0.0

    inner.envs[0].rubric.add_metric(task_seen, run_inline=True)
    results = await outer.evaluate(ScriptedModel(replying), "m")
    assert results.reward == [1.0, 1.0, 1.0, 0.0]
    assert results.task == ["both/add/easy", "both/say", "sums", "sums"]
    assert seen == ["easy"]


async def test_lifecycle_and_failures_stay_with_their_environment():
    log = []

    class Closing(MultiTurnEnv):
        async def env_response(self, messages, state):
            raise ValueError("broken world")

        @cleanup
        async def release(self, state):
            log.append(("cleanup", state["task"]))

        @teardown
        async def end(self):
            log.append(("teardown",))

    broken = Closing(dataset=SAY, max_turns=3, env_id="broken")
    async with EnvGroup([add_env(), broken]) as group:
        results = await group.evaluate(ScriptedModel(lambda messages: "2"), "m")
        assert ["environment_errors" in state for state in results.state] == [False, False, True]
        assert results.state[2]["environment_errors"]["environment"]["message"] == "broken world"
        assert results.state[2]["task"] == "broken"
    assert log == [("cleanup", "broken"), ("teardown",)]


async def test_a_rollout_that_runs_out_of_time_is_cleaned_up_once():
    log = []

    class Slow(MultiTurnEnv):
        async def env_response(self, messages, state):
            import asyncio

            await asyncio.sleep(30)

        @cleanup
        async def release(self, state):
            log.append(state["task"])

    group = EnvGroup([Slow(dataset=SAY, max_turns=3, env_id="slow")])
    engine = RolloutEngine(group, ScriptedModel("x"), time_limit_s=0.5, grace_s=0.0)
    result = (await engine.run_all(build_requests(group, "eval")))[0]
    assert result.error.type == "RolloutTimeout"
    assert result.states[0]["task"] == "slow"
    assert log == ["slow"]


async def test_group_rewards_of_one_environment():
    def rank(completions) -> list[float]:
        sizes = [len(c[-1]["content"]) for c in completions]
        return [float(size == max(sizes)) for size in sizes]

    replies = iter(["long answer", "short", "2", "2", "2", "2"])
    ranked = add_env(dataset=ADD[:1], rubric=Rubric([rank]), env_id="ranked")
    group = EnvGroup([ranked, add_env(dataset=ADD[:1])])
    assert group.has_group_rewards
    results = await group.evaluate(
        ScriptedModel(lambda messages: next(replies)), "m", rollouts_per_example=2, max_concurrent=1
    )
    assert results.reward == [1.0, 0.0, 1.0, 1.0]
    assert [state["advantage"] for state in results.state] == [0.5, -0.5, 0.0, 0.0]


async def test_a_groups_rubric_in_a_rubric_group():
    group = EnvGroup([add_env(), say_env()])
    states = (await group.generate(group.dataset, ScriptedModel("2"), score_rollouts=False)).state
    both = RubricGroup([group.rubric, Rubric([lambda: 0.5])])
    await both.score_rollout(states[0])
    assert states[0]["reward"] == 1.5


async def test_rows_given_by_hand_are_formatted_by_their_environment():
    group = EnvGroup([add_env(system_prompt="Add."), say_env()])
    rows = [{"question": "1+1", "answer": "2", "task": "add"}]
    results = await group.generate(rows, ScriptedModel("2"))
    assert results.state[0]["prompt"] == [{"role": "system", "content": "Add."}, *user("1+1")]
    assert results.reward == [1.0]
    with pytest.raises(ConfigError, match="has no task"):
        await group.generate([{"question": "1+1"}], ScriptedModel("2"))
    with pytest.raises(UnknownName, match="Did you mean 'add'"):
        await group.generate([{"question": "1+1", "task": "ad"}], ScriptedModel("2"))


def test_sampling_arguments_must_agree_or_be_given():
    warm, cold = add_env(sampling_args={"temperature": 1.0}), say_env(sampling_args={"top_p": 0.5})
    with pytest.raises(ConfigError, match="different sampling_args"):
        EnvGroup([warm, cold])
    assert EnvGroup([warm, cold], sampling_args={"top_p": 0.9}).sampling_args == {"top_p": 0.9}
    assert EnvGroup([warm, warm]).sampling_args == {"temperature": 1.0}


def test_names():
    assert EnvGroup([single(), single()]).env_names == ["default-0", "default-1"]
    for names in (["a"], ["a", "a"]):
        with pytest.raises(ConfigError, match="distinct name"):
            EnvGroup([add_env(), say_env()], names)
    with pytest.raises(ConfigError, match="no environments"):
        EnvGroup([])
    with pytest.raises(ConfigError, match="own environments' rubrics"):
        EnvGroup([add_env()]).rubric.add_metric(lambda: 1.0)


def test_an_evaluation_of_few_examples_plays_every_environment():
    many = [{"question": f"{n}+0", "answer": str(n)} for n in range(40)]
    group = EnvGroup([add_env(dataset=many), say_env(), single(env_id="third")])
    found = rt.evaluate(group, ScriptedModel("1"), num_examples=8)
    assert {name: each.num_examples for name, each in found.tasks.items()} == {
        "add": 4,
        "say": 1,
        "third": 3,
    }
