"""What finished code of verifiers 0.1.8 relies on: states, names, errors and messages as there."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from rolltree.environments import Environment
from rolltree.testing import ScriptedClient
from rolltree.values.errors import record_error
from rolltree.values.types import FinishReason, ModelResponse
from rolltree.verifiers import verifiers as vf
from rolltree.verifiers.helpers import parse_response_messages, parse_response_tokens

ROWS = [{"question": "1 + 1 =", "answer": "2"}]
STEP = {
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "completion": [{"role": "assistant", "content": "2"}],
    "response": None,
    "tokens": None,
    "reward": None,
    "advantage": None,
    "extras": {},
}


def single(**settings):
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(), **settings)


@pytest.mark.parametrize("kind", [vf.State, dict])
async def test_a_state_made_by_hand_can_be_completed(kind):
    state = kind(prompt=STEP["prompt"], trajectory=[STEP], timing={"start_time": 0.0})
    state["timing"].update(generation_ms=0.0, scoring_ms=0.0, total_ms=0.0)
    assert await single().is_completed(state)
    assert state["completion"] == STEP["completion"]
    assert state["stop_condition"] == "max_turns_reached"
    assert (state["terminated"], state["truncated"]) == (True, False)
    cut = kind(state, max_turns=1)
    for key in ("terminated", "truncated", "is_completed"):
        del cut[key]
    env = type(
        "Env", (vf.MultiTurnEnv,), {"env_response": None, "__abstractmethods__": frozenset()}
    )
    assert await env(dataset=ROWS, max_turns=1).is_completed(cut)
    assert cut["truncation_reason"] == "max_steps"


def test_names_are_where_they_were():
    import rolltree.verifiers.verifiers.utils.message_utils as messages
    from rolltree.verifiers.verifiers.envs.sandbox_env import (
        AdvancedConfigs,
        AsyncSandboxClient,
        CreateSandboxRequest,
    )

    openai = pytest.importorskip("openai.types.chat")
    assert messages.ChatCompletionMessage is openai.ChatCompletionMessage
    assert vf.ChatCompletionMessageParam is openai.ChatCompletionMessageParam
    assert vf.utils.tool_utils.convert_func_to_oai_tool
    assert vf.envs.tool_env.ToolEnv is vf.ToolEnv
    assert vf.envs.environment.vf is vf
    assert callable(AsyncSandboxClient)
    assert callable(CreateSandboxRequest)
    assert AdvancedConfigs(start_as_root=True).start_as_root


def test_the_hosted_client_can_be_replaced_in_its_module(monkeypatch):
    monkeypatch.setenv("ROLLTREE_SANDBOX", "hosted")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    where = "rolltree.verifiers.verifiers.envs.sandbox_env"
    with patch(f"{where}.AsyncSandboxClient") as client, patch(f"{where}.CreateSandboxRequest"):
        env = vf.SandboxEnv(dataset=ROWS)
    assert env.sandbox_client is client.return_value


def test_advanced_settings_are_refused_on_this_machine(monkeypatch):
    monkeypatch.setenv("ROLLTREE_SANDBOX", "local")
    from rolltree.verifiers.verifiers.envs.sandbox_env import AdvancedConfigs

    with pytest.raises(ValueError, match="no advanced settings"):
        vf.SandboxEnv(dataset=ROWS, advanced_configs=AdvancedConfigs(start_as_root=True))


def test_two_different_parsers_are_warned_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("verifiers"), "propagate", True)
    vf.SingleTurnEnv(dataset=ROWS, parser=vf.MaybeThinkParser(), rubric=vf.Rubric())
    assert "The parser and rubric parser are different." in caplog.text
    caplog.clear()
    single()
    assert not caplog.text


def test_messages_have_no_place_in_a_text_prompt():
    with pytest.raises(ValueError, match="not supported for completion tasks"):
        single(message_type="completion", system_prompt="Be brief.")


def test_a_group_that_lost_its_rubrics_takes_no_function():
    group = vf.RubricGroup([vf.Rubric()])
    group.rubrics = []
    with pytest.raises(AssertionError, match="must have at least one rubric"):
        group.add_reward_func(lambda completion: 1.0)


def test_functions_of_both_kinds_are_listed_apart():
    def one(completion): ...

    def all_(completions): ...

    rubric = vf.Rubric([one, all_], [0.25, 0.5])
    assert rubric._get_individual_reward_func_names() == ["one"]
    assert rubric._get_individual_reward_weights() == [0.25]
    assert rubric._get_group_reward_funcs() == [all_]
    assert rubric._get_group_reward_weights() == [0.5]


def chat_response(**choice):
    said = SimpleNamespace(content="hi", tool_calls=None)
    choices = [SimpleNamespace(message=said, finish_reason="stop", **choice)]
    return SimpleNamespace(id="1", choices=choices, prompt_token_ids=[1, 2])


async def test_tokens_are_the_servers_numbers():
    content = [SimpleNamespace(logprob=-0.1), SimpleNamespace(logprob=-0.3)]
    response = chat_response(token_ids=[3, 4], logprobs=SimpleNamespace(content=content))
    tokens = await parse_response_tokens(response, "chat")
    assert tokens["completion_logprobs"] == [-0.1, -0.3]
    assert (tokens["prompt_ids"], tokens["completion_ids"]) == ([1, 2], [3, 4])
    empty = chat_response(token_ids=[], logprobs=SimpleNamespace(content=[]))
    assert (await parse_response_tokens(empty, "chat"))["completion_ids"] == []
    assert await parse_response_tokens(chat_response(logprobs=None), "chat") is None
    ours = ModelResponse({"role": "assistant", "content": "hi"}, "hi", FinishReason.STOP)
    assert await parse_response_tokens(ours, "chat") is None


@pytest.mark.parametrize("response", [None, SimpleNamespace(), chat_response()])
@pytest.mark.parametrize("parse", [parse_response_tokens, parse_response_messages])
async def test_what_is_no_response_of_its_type_is_an_assertion_error(parse, response):
    with pytest.raises(AssertionError):
        await parse(response, "completion")


@pytest.mark.parametrize("response", [None, SimpleNamespace(id="1"), chat_response()])
async def test_a_step_of_what_is_no_response_is_an_assertion_error(response):
    if response is not None and hasattr(response, "choices"):
        response.choices *= 2  # tokens of two answers do not make a step
    state = vf.State(prompt=STEP["prompt"], trajectory=[])
    with pytest.raises(AssertionError) as raised:
        await single().add_model_response(state, STEP["prompt"], response)
    assert record_error(raised.value, "model").kind == "infrastructure"
    assert state["trajectory"] == []


async def test_a_server_that_sends_no_answer_fails_the_rollout_as_a_server():
    class Empty(vf.SingleTurnEnv):
        async def get_model_response(self, client, model, prompt, **settings):
            return SimpleNamespace(id="1", choices=[])

    env = Empty(dataset=ROWS, rubric=vf.Rubric())
    results = await Environment.generate(env, env.dataset, ScriptedClient("x"))
    assert results.state[0]["error"].kind == "infrastructure"


async def test_a_response_without_choices_says_nothing():
    nothing = SimpleNamespace(choices=[])
    assert await parse_response_messages(nothing, "completion") == ""
    assert await parse_response_messages(nothing, "chat") == [{"role": "assistant", "content": ""}]


def test_keys_of_inputs_are_asked_for_as_there():
    assert vf.RolloutInput.__required_keys__ == {"prompt", "example_id", "task"}
    assert vf.RolloutInput.__optional_keys__ == {"answer", "info"}
    assert vf.types.RolloutTiming.__required_keys__ == frozenset()


class Answering(vf.SingleTurnEnv):
    """Answers without a model."""

    async def get_model_response(self, client, model, prompt, **settings):
        assert client is None
        self.seen = settings["sampling_args"]
        return ModelResponse({"role": "assistant", "content": "2"}, "2", FinishReason.STOP)


def answering(**settings):
    return Answering(dataset=ROWS, rubric=vf.Rubric([right]), **settings)


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


async def test_an_environment_that_answers_itself_needs_no_client():
    env = answering()
    assert (await env.generate(env.get_eval_inputs(), None, "none"))["reward"] == [1.0]
    state = await env.rollout(env.get_eval_inputs()[0], None, "none")
    assert state["client"] is None
    assert state["completion"][-1]["content"] == "2"
    with pytest.raises(AttributeError, match="client is None"):
        await single().generate(ROWS, None, "none")


@pytest.mark.parametrize("given", [{}, {"extra_body": {"b": 2}}])
async def test_the_callers_extra_body_replaces_the_environments(given):
    env = answering(sampling_args={"extra_body": {"a": 1}, "top_p": 0.5})
    await env.generate(env.get_eval_inputs(), None, "none", given)
    assert env.seen["extra_body"] == given.get("extra_body", {"a": 1})
    assert env.seen["top_p"] == 0.5
    await env.rollout(env.get_eval_inputs()[0], None, "none", given)
    assert env.seen == given


class Sum(vf.StatefulToolEnv):
    async def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "b": 5}


def plus(a: int, b: int) -> int:
    return a + b


async def test_a_tool_environment_answers_lists_of_messages_only():
    env = vf.ToolEnv(dataset=ROWS, tools=[plus])
    for messages in ("text", tuple(STEP["prompt"])):
        with pytest.raises(AssertionError):
            await env.env_response(messages, vf.State())
    assert await env.env_response(STEP["completion"], vf.State()) == []


async def test_tools_that_the_constructor_was_given_can_be_removed_and_completed():
    env = Sum(dataset=ROWS, tools=[plus])
    function = {"name": "plus", "arguments": '{"a": 1}'}
    messages = [{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]
    (answer,) = await env.env_response(messages, vf.State())
    assert answer["content"] == "6"
    env.remove_tool(plus)
    assert (env.tools, env.oai_tools, env.tool_map) == ([], [], {})


@pytest.mark.parametrize("nested", [False, True])
async def test_a_group_keeps_the_metrics_that_an_environment_gave(nested):
    group = vf.RubricGroup([vf.Rubric([right]), vf.Rubric([right], [0.5])])
    group = vf.RubricGroup([group]) if nested else group
    timing = {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}
    given = {"prompt": STEP["prompt"], "completion": STEP["completion"], "answer": "2"}
    state = vf.State(given, task="t", trajectory=[], timing=timing, metrics={"lines": 3.0})
    await group.score_group([state], nullcontext())
    assert state["metrics"] == {"lines": 3.0, "right": 2.0}
    assert state["reward"] == 1.5
    await group.score_rollout(state, nullcontext())
    assert state["metrics"] == {"right": 2.0}


async def test_a_tool_error_names_the_function_as_there():
    def add(a: int, b: int) -> int:
        return a + b

    env = vf.ToolEnv(dataset=ROWS, tools=[add])
    message = await env.call_tool("add", [1, 2], "id")
    where = "verifiers.utils.async_utils.maybe_await()"
    assert message["content"] == f"{where} argument after ** must be a mapping, not list"
