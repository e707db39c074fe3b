"""generate, evaluate, run_group: many rollouts through the one engine."""

import asyncio
import json
import time

import pytest
from env_scripts import ROWS, Echo, ScriptedModel, single, user

from rolltree.environments import GenerateResults
from rolltree.environments.rubrics import Rubric, run_inline
from rolltree.samples import build_samples
from rolltree.values.errors import ConfigError, ServerError

MODEL = ScriptedModel("one")


async def test_generate_returns_results_in_the_rows_order():
    model = ScriptedModel(lambda messages: messages[0]["content"].split()[-1])
    env = single()
    results = await env.generate(env.dataset, model, "m")
    assert isinstance(results, GenerateResults)
    assert [state["completion"][0]["content"] for state in results.state] == ["one", "two", "three"]
    assert results.reward == [1.0, 1.0, 1.0]
    assert results.metadata.avg_reward == 1.0
    assert len(results) == 3


async def test_columns():
    results = await single().generate(ROWS, MODEL, "m")
    assert results.answer == ["one", "two", "three"]
    assert results.prompt[1] == user("say two")
    assert results.completion[1] == [{"role": "assistant", "content": "one"}]
    assert results.example_id == [0, 1, 2]
    assert results.task == ["default"] * 3
    assert results.info == [{}, {}, {}]
    assert results.stop_conditions == ["answered"] * 3
    assert results.metrics == {"exact": [1.0, 0.0, 0.0]}
    for column in ("reward", "state", "metadata", "metrics", "prompt"):
        assert results[column] == getattr(results, column)
    with pytest.raises(KeyError, match="Did you mean 'reward'"):
        results["rewards"]


async def test_results_are_shown_in_one_line():
    results = await single().generate(ROWS, MODEL, "m")
    assert repr(results) == (
        "GenerateResults(3 rollouts of 'default' with 'm', avg_reward=0.3333333333333333, "
        "num_failed=0)"
    )


async def test_metadata():
    env = single(env_id="mine", sampling_args={"max_tokens": 9})
    results = await env.generate(
        ROWS, MODEL, "m", {"temperature": 0.5}, rollouts_per_example=2, seed=3
    )
    metadata = results.metadata
    assert metadata.env_id == "mine"
    assert metadata.model == "m"
    assert metadata.sampling_args == {"max_tokens": 9, "temperature": 0.5}
    assert (metadata.num_examples, metadata.rollouts_per_example) == (3, 2)
    assert (metadata.num_rollouts, metadata.num_failed, metadata.num_truncated) == (6, 0, 0)
    assert metadata.avg_reward == pytest.approx(1 / 3)
    assert metadata.avg_metrics == {"exact": pytest.approx(1 / 3)}
    assert metadata.seed == 3
    assert metadata.time_ms > 0
    json.dumps(metadata.sampling_args)


async def test_the_clients_model_is_used_when_none_is_named():
    model = ScriptedModel("one")
    results = await single().generate(ROWS[:1], model)
    assert results.metadata.model == "scripted"
    assert model.calls[0]["model"] == "scripted"


async def test_failed_rollouts_are_counted_and_never_zero():
    def flaky(messages):
        if "two" in messages[0]["content"]:
            return ServerError("500", status=500, retryable=True)
        return messages[0]["content"].split()[-1]

    results = await single().generate(ROWS, ScriptedModel(flaky), "m")
    assert results.reward == [1.0, None, 1.0]
    assert results.metadata.num_failed == 1
    assert results.metadata.avg_reward == 1.0
    assert results.metrics == {"exact": [1.0, None, 1.0]}
    assert results.results[1].error.type == "ServerError"


async def test_when_everything_failed_there_is_no_mean():
    failure = ServerError("500", status=500, retryable=True)
    results = await single().generate(ROWS, ScriptedModel(failure), "m")
    assert results.metadata.avg_reward is None
    assert results.metadata.num_failed == 3


async def test_rollouts_of_one_row_are_a_group():
    replies = iter(["one", "no", "no", "one"])
    model = ScriptedModel(lambda messages: next(replies))
    results = await single().generate(
        ROWS[:1], model, "m", rollouts_per_example=4, max_concurrent=1
    )
    states = results.state
    assert [state["reward"] for state in states] == [1.0, 0.0, 0.0, 1.0]
    assert [state["advantage"] for state in states] == [0.5, -0.5, -0.5, 0.5]
    assert [state["trajectory"][0]["advantage"] for state in states] == [0.5, -0.5, -0.5, 0.5]
    assert len({state["seed"] for state in states}) == 1
    assert len({call["sampling"].seed for call in model.calls}) == 4


async def test_rows_with_one_example_id_are_a_group_too():
    rows = [{"question": "q", "answer": "one", "example_id": 7}] * 2
    rows += [{"question": "q", "answer": "one", "example_id": 8}]
    results = await single().generate(rows, MODEL, "m")
    seeds = [state["seed"] for state in results.state]
    assert seeds[0] == seeds[1] != seeds[2]
    assert results.metadata.num_examples == 2
    assert len({r.request.request_id for r in results.results}) == 3


async def test_run_group():
    inputs = [
        {"prompt": user("a"), "answer": "one", "example_id": 0, "task": "t"},
        {"prompt": user("a"), "answer": "two", "example_id": 0, "task": "t"},
    ]
    states = await single().run_group(inputs, MODEL, "m")
    assert [state["reward"] for state in states] == [1.0, 0.0]
    assert [state["advantage"] for state in states] == [0.5, -0.5]


@pytest.mark.parametrize("example_id", ["gsm8k-17", None, 5])
async def test_run_group_is_one_group_whatever_the_id(example_id):
    inputs = [
        {"prompt": user("a"), "answer": answer, "example_id": example_id, "task": "t"}
        for answer in ("one", "two")
    ]
    states = await single().run_group(inputs, MODEL, "m")
    assert [state["advantage"] for state in states] == [0.5, -0.5]


async def test_a_group_is_of_one_task():
    rows = [{"prompt": user("a"), "answer": "", "example_id": 0, "task": task} for task in "ab"]
    with pytest.raises(ConfigError, match=r"of the tasks 'a', 'b'.*one group per task"):
        await single().run_group(rows, MODEL, "m")
    rows[1] |= {"task": "a", "example_id": 1}
    states = await single().run_group(rows, MODEL, "m")
    assert len({state["seed"] for state in states}) == 1


async def test_group_rewards():
    @run_inline
    def first_only(states):
        return [float(index == 0) for index in range(len(states))]

    env = single(rubric=Rubric([first_only]))
    results = await env.generate(ROWS[:2], MODEL, "m", rollouts_per_example=3)
    assert results.reward == [1.0, 0.0, 0.0] * 2


async def test_scoring_can_be_left_out():
    results = await single().generate(ROWS, MODEL, "m", score_rollouts=False)
    assert results.reward == [None] * 3
    assert results.metadata.avg_reward is None
    assert results.metadata.num_failed == 0
    assert results.state[0]["metrics"] is None


async def test_the_same_seed_gives_the_same_seeds():
    seeds = []
    for seed in (1, 1, 2):
        model = ScriptedModel("one")
        results = await single().generate(ROWS, model, "m", seed=seed)
        seeds.append([state["seed"] for state in results.state])
        seeds[-1] += [call["sampling"].seed for call in model.calls]
    assert seeds[0] == seeds[1] != seeds[2]
    assert not set(seeds[0]) & set(seeds[2])


async def test_concurrency_is_bounded():
    running = most = 0

    class Counting(Echo):
        async def env_response(self, messages, state):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return user("again")

    env = Counting(max_turns=3)
    await env.generate(ROWS * 4, ScriptedModel("no"), "m", max_concurrent=5)
    assert most == 5


async def test_progress_is_reported():
    seen = []
    await single().generate(ROWS, MODEL, "m", on_progress=seen.append)
    assert [progress.num_done for progress in seen] == [1, 2, 3]


async def test_evaluate_takes_evaluation_rows():
    env = single(eval_dataset=[{"question": str(i), "answer": "one"} for i in range(5)])
    results = await env.evaluate(MODEL, "m", num_examples=4, rollouts_per_example=2)
    assert results.example_id == [0, 0, 1, 1, 2, 2, 3, 3]
    assert results.metadata.num_examples == 4
    assert (await env.evaluate(MODEL, "m")).metadata.num_rollouts == 5
    assert (await single().evaluate(MODEL, "m", num_examples=1)).answer == ["one"]


async def test_evaluate_takes_generates_settings():
    results = await single().evaluate(MODEL, "m", score_rollouts=False, max_concurrent=1)
    assert results.reward == [None] * 3
    with pytest.raises(TypeError, match="num_rollouts"):
        await single().evaluate(MODEL, "m", num_rollouts=2)


async def test_time_limits_are_passed_on():
    class Hangs(Echo):
        async def env_response(self, messages, state):
            await asyncio.sleep(0.05)
            return user("again")

    results = await Hangs().generate(ROWS[:1], ScriptedModel("no"), "m", time_limit_s=0.02)
    assert results.state[0]["truncation_reason"] == "time_limit"
    assert results.metadata.num_truncated == 1


def test_without_an_event_loop():
    env = single()
    assert env.evaluate_sync(MODEL, "m").reward == [1.0, 0.0, 0.0]
    assert env.generate_sync(ROWS[:1], MODEL, "m").reward == [1.0]
    group = env.run_group_sync([env.example("train", 0)] * 2, MODEL, "m")
    assert [state["reward"] for state in group] == [1.0, 1.0]


async def test_sync_forms_inside_a_running_loop():
    assert single().evaluate_sync(MODEL, "m", num_examples=1).reward == [1.0]


async def test_inputs_that_are_no_rows():
    with pytest.raises(ConfigError, match="no rows"):
        await single().generate([], MODEL, "m")
    with pytest.raises(ConfigError, match="model client"):
        await single().generate(ROWS, object(), "m")


async def test_a_failure_before_the_state_still_gives_a_state():
    class Broken(Echo):
        async def init_state(self, input, **kwargs):
            raise OSError("disk")

    results = await Broken().generate(ROWS, MODEL, "m")
    assert [state["error"].type for state in results.state] == ["OSError"] * 3
    assert results.answer == ["one", "two", "three"]
    assert results.metadata.avg_reward is None


async def test_results_can_be_trained_on():
    env = Echo(max_turns=2)
    results = await env.generate(ROWS[:1], ScriptedModel("no", "one"), "m", rollouts_per_example=2)
    batch = build_samples(results.state, "step")
    assert len(batch.samples) == 4
    sampled = sum(
        len(step["tokens"]["completion_ids"]) for s in results.state for step in s["trajectory"]
    )
    assert sum(len(sample.records) for sample in batch.samples) == sampled


async def test_many_rollouts_are_cheap():
    @run_inline
    def nothing(completion):
        return 0.0

    env = Echo(max_turns=4, rubric=Rubric([nothing]))
    model = ScriptedModel("no")
    rows = [{"question": "q", "answer": "a", "example_id": i} for i in range(500)]
    began = time.process_time()
    results = await env.generate(rows, model, "m", max_concurrent=64)
    assert time.process_time() - began < 4.0  # 0.3 s on an idle core
    assert results.metadata.num_truncated == 500
    assert len(model.calls) == 2000
