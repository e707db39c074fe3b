"""Calls that a newcomer writes: they work, or the error says what to type. Under both names."""

import asyncio
import importlib

import pytest
from env_scripts import ROWS, ScriptedModel, a_request, exact, user

import rolltree as rt
from rolltree.agents.protocols import SingleAgentProtocol
from rolltree.environments import ProtocolEnvironment
from rolltree.evaluation import evaluate_async
from rolltree.rollouts import RolloutEngine
from rolltree.values.errors import ConfigError, PromptTooLong

TOOL = {"type": "function", "function": {"name": "rows", "parameters": {}}}
OTHER = {"type": "function", "function": {"name": "envs", "parameters": {}}}


@pytest.fixture(params=["rolltree", "rolltree.verifiers"])
def names(request):
    """The classes of one import name."""
    if request.param == "rolltree":
        return rt
    return importlib.import_module("rolltree.verifiers.environments")


async def generated(env, model, **settings):
    """Play with rolltree's `generate`, which no environment of ours overrides."""
    return await rt.Environment.generate(env, env.get_dataset(), model, **settings)


# setup_state


def without_return(names, made):
    class Forgetful(names.SingleTurnEnv):
        async def setup_state(self, state, **kwargs):
            state["ready"] = True
            return made

    return Forgetful(dataset=ROWS[:1])


async def test_setup_state_may_return_nothing(names):
    results = await generated(without_return(names, None), ScriptedModel("one"))
    assert results.state[0]["error"] is None
    assert results.state[0]["ready"]

    class Plain(names.SingleTurnEnv):
        def setup_state(self, state, **kwargs):
            state["ready"] = True

    results = await generated(Plain(dataset=ROWS[:1]), ScriptedModel("one"))
    assert results.state[0]["ready"]


async def test_what_setup_state_returned_is_named():
    results = await generated(without_return(rt, [1]), ScriptedModel("one"))
    assert results.state[0]["error"].type == "ConfigError"
    assert "setup_state returned a list" in results.state[0]["error"].message


async def test_setup_state_of_a_protocol_may_return_nothing():
    class Forgetful(ProtocolEnvironment):
        async def setup_state(self, state):
            state["ready"] = True

    env = Forgetful(SingleAgentProtocol(rt.Agent), dataset=ROWS[:1], rubric=exact)
    results = await generated(env, ScriptedModel("one"))
    assert results.metadata.avg_reward == 1.0


# rows and rubrics


@pytest.mark.parametrize("rows", [["7 + 5 ="], [{"question": "q"}, "7 + 5 ="], ("7 + 5 =",), [1]])
def test_rows_that_are_no_dicts_are_named(names, rows):
    with pytest.raises(ConfigError, match=r'not a dict of columns.*\{"question"'):
        names.SingleTurnEnv(dataset=rows)


ASK_NOTHING = [{"question": 3}, {"question": None}, {"question": ["7 + 5 ="]}, {"question": b"q"}]
NO_MESSAGES = [{"prompt": 3.5}, {"prompt": ["hi"]}, {"prompt": {"role": "user", "content": "hi"}}]


def refused(kind, row):
    with pytest.raises(ConfigError, match=r"row 0 .*(int|None|list|str|bytes|float|dict)"):
        kind(dataset=[row]).get_dataset()[0]
    with pytest.raises(ConfigError, match=r"row 0 .*(int|None|list|str|bytes|float|dict)"):
        kind(dataset=[row], message_type="completion").get_dataset()[0]


@pytest.mark.parametrize("row", ASK_NOTHING)
def test_a_question_that_is_no_text_is_named(names, row):
    refused(names.SingleTurnEnv, row)


@pytest.mark.parametrize("row", NO_MESSAGES)
def test_a_prompt_that_is_no_messages_is_named(row):  # verifiers takes any
    refused(rt.SingleTurnEnv, row)


async def always(completion) -> float:
    return 1.0


@pytest.mark.parametrize("given", [always, [always], (always, exact)])
async def test_functions_are_a_rubric(names, given):
    env = names.SingleTurnEnv(dataset=ROWS[:1], rubric=given)
    results = await generated(env, ScriptedModel("one"))
    assert results.state[0]["reward"] == (len(given) if isinstance(given, tuple) else 1.0)
    assert rt.Rubric(always).get_reward_func_names() == ["always"]


@pytest.mark.parametrize("given", [rt.Rubric, "exact", 3, [rt.Rubric()], {"exact": exact}])
def test_what_is_no_rubric_is_named(names, given):
    with pytest.raises(ConfigError, match="cannot score a rollout"):
        names.SingleTurnEnv(dataset=ROWS, rubric=given)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5_000])
async def test_what_is_not_json_is_named(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "q"}\n' + text)
    with pytest.raises(ConfigError, match=r"line 2 is not valid JSON"):
        rt.SingleTurnEnv(dataset=tmp_path / "rows.jsonl")
    env = rt.SingleTurnEnv(dataset=[{"question": "q", "info": text}], rubric=exact)
    state = (await generated(env, ScriptedModel("one"))).state[0]
    assert state["error"].type == "ConfigError"
    assert "info of example 0" in state["error"].message


# environments


def load_environment():
    return rt.SingleTurnEnv(dataset=ROWS, rubric=exact)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (load_environment, r"the function 'load_environment'.*Call it: load_environment\(\.\.\.\)"),
        (rt.SingleTurnEnv, r"the class 'SingleTurnEnv'.*Call it"),
        ({"id": "x"}, "is a dict"),
    ],
)
async def test_what_makes_an_environment_is_none(given, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        RolloutEngine(given, ScriptedModel())
    with pytest.raises(ConfigError, match=told):
        await evaluate_async(given, ScriptedModel())
    if isinstance(given, dict):
        return  # rt.train takes it as the section of that name
    with pytest.raises(ConfigError, match=told):
        await asyncio.to_thread(
            rt.train, environment=given, model="tiny", num_steps=1, run_dir=tmp_path / "run"
        )


async def test_a_name_is_told_to_be_loaded():
    with pytest.raises(ConfigError, match=r"load_environment\('arithmetic'\)"):
        await evaluate_async("arithmetic", ScriptedModel())


# a prompt that is too long


def last_word(completion):
    return float(completion[-1]["content"] == "one")


async def last_word_async(completion):
    return last_word(completion)


def of_group(completions):
    return [last_word(completion) for completion in completions]


@pytest.mark.parametrize("func", [last_word, last_word_async, of_group])
async def test_a_prompt_that_is_too_long_is_told_as_the_cause(func):
    model = ScriptedModel(PromptTooLong("9,000 tokens, 4,096 fit"))
    env = rt.SingleTurnEnv(dataset=ROWS[:1], rubric=rt.Rubric([func]))
    (state,) = (await generated(env, model)).state
    error = state["error"]
    assert (error.type, error.phase, state["reward"]) == ("PromptTooLong", "scoring", None)
    for part in ("context window", "9,000 tokens", func.__name__, "IndexError"):
        assert part in error.message
    assert "last_word" in error.traceback
    assert state["stop_condition"] == "prompt_too_long"


async def test_a_rollout_that_ended_before_its_first_call_says_so():
    class Over(rt.SingleTurnEnv):
        @rt.stop(priority=9)
        async def over(self, state):
            return True

    env = Over(dataset=ROWS[:1], rubric=rt.Rubric([last_word]))
    error = (await generated(env, ScriptedModel("one"))).state[0]["error"]
    assert error.type == "IndexError"
    assert "ended before its first model call (over)" in error.message


async def test_a_function_that_copes_with_an_empty_completion_scores_it():
    model = ScriptedModel(PromptTooLong("too long"))
    (state,) = (await generated(rt.SingleTurnEnv(dataset=ROWS[:1], rubric=exact), model)).state
    assert (state["reward"], state["error"]) == (0.0, None)


# as verifiers words it


async def test_init_state_takes_the_input_alone(names):
    env = names.SingleTurnEnv(dataset=ROWS)
    state = await env.init_state({"prompt": user("hi"), "example_id": 0})
    assert (state["task"], state["client"], state["trajectory"]) == ("default", None, [])


async def test_the_rollout_of_spec_1(names):
    class Spec(names.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return user("more")

        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input)
            state = await self.setup_state(state)
            while not await self.is_completed(state):
                prompt = await self.get_prompt_messages(state)
                response = await self.get_model_response(
                    client,
                    model,
                    prompt,
                    oai_tools=state["oai_tools"],
                    sampling_args=sampling_args,
                    message_type=self.message_type,
                )
                await self.add_model_response(state, prompt, response)
            return state

    env = Spec(dataset=ROWS, rubric=always, max_turns=2)
    assert (await evaluate_async(env, ScriptedModel("a", "b"))).reward.mean == 1.0
    results = await env.generate(env.get_dataset(), ScriptedModel("a", "b"), "m")
    states = results.state if names is rt else results["state"]
    assert [len(state["trajectory"]) for state in states] == [2, 2, 2]


async def test_generate_scores_if_asked(names):
    env = names.SingleTurnEnv(dataset=ROWS, rubric=always)
    for scored, reward in ((True, 1.0), (False, None)):
        results = await env.generate(
            env.get_dataset(), client=ScriptedModel("a"), model="m", score_rollouts=scored
        )
        states = results.state if names is rt else results["state"]
        assert [state["reward"] for state in states] == [reward] * 3


async def test_a_rows_tools_win(names):
    rows = [{**ROWS[0], "info": {"oai_tools": [TOOL]}}, ROWS[1]]
    env = names.SingleTurnEnv(dataset=rows, oai_tools=[OTHER])
    model = ScriptedModel("a")
    await generated(env, model, max_concurrent=1)
    assert [call["tools"] for call in model.calls] == [[TOOL], [OTHER]]
    bare = names.SingleTurnEnv(dataset=rows)
    states = [await bare.init_state(row) for row in rows]
    assert [state["oai_tools"] or [] for state in states] == [[TOOL], []]
    assert a_request(rt.SingleTurnEnv(dataset=rows)).input["info"] == {"oai_tools": [TOOL]}


# settings of the wrong kind


async def test_a_second_function_is_not_taken_for_weights(names):
    with pytest.raises(ConfigError, match=r"weights.*as a list: Rubric\(\[first, second\]\)"):
        rt.Rubric(always, exact)
    with pytest.raises(ConfigError, match="weights"):
        rt.Rubric([always], weights=2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_examples": "3"}, "num_examples is '3'"),
        ({"num_examples": 1.5}, "num_examples is 1.5"),
        ({"num_examples": None}, "num_examples is None"),
        ({"rollouts_per_example": "3"}, "rollouts_per_example is '3'"),
        ({"sampling": 5}, "sampling is 5"),
        ({"sampling": ["max_tokens"]}, r"sampling is \['max_tokens'\]"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"max_concurrent": "8"}, "max_concurrent is '8'"),
        ({"max_concurrent": 0}, "max_concurrent is 0"),
    ],
)
async def test_settings_of_an_evaluation_of_another_kind_are_named(settings, told):
    with pytest.raises(ConfigError, match=told):
        await evaluate_async(load_environment(), ScriptedModel("a"), **settings)


def test_an_environment_needs_no_loading():
    with pytest.raises(ConfigError, match="SingleTurnEnv already"):
        rt.load_environment(load_environment())
    with pytest.raises(ConfigError, match="name or a path"):
        rt.load_environment(3)
