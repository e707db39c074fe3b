"""`add_model_response` takes what old environments and tests hand it."""

import copy
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from env_scripts import single, user

import rolltree as rt
from rolltree.environments import MultiTurnEnv
from rolltree.inference.parse import parse_response
from rolltree.samples import build_samples
from rolltree.testing import ScriptedClient
from rolltree.values.errors import BadResponse, TokenError
from rolltree.values.types import OVERLONG_PROMPT, FinishReason, ModelResponse


def chat_dict(**more):
    return {
        "id": "x",
        "choices": [
            {
                "message": {"role": "assistant", "content": "one"},
                "finish_reason": "length",
                **more.pop("choice", {}),
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        **more,
    }


def with_tokens(logprobs=(-0.1, -0.2)):
    return chat_dict(
        prompt_token_ids=[1, 2, 3],
        choice={
            "token_ids": [7, 8],
            "logprobs": {"content": [{"token": "t", "logprob": p} for p in logprobs]},
        },
    )


def as_object(value):
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_object(item) for key, item in value.items()})
    return [as_object(item) for item in value] if isinstance(value, list) else value


async def step_of(response, **settings):
    env = single(**settings)
    state = await env.init_state(env.example("train", 0))
    await env.add_model_response(state, state["prompt"], response)
    return state["trajectory"][0]


@pytest.mark.parametrize("make", [dict, as_object])
async def test_openai_responses_with_token_ids(make):
    response = make(with_tokens())
    step = await step_of(response)
    assert step["completion"] == [{"role": "assistant", "content": "one"}]
    assert step["prompt"] == user("say one")
    assert step["tokens"]["prompt_ids"] == [1, 2, 3]
    assert step["tokens"]["prompt_mask"] == [0, 0, 0]
    assert step["tokens"]["completion_ids"] == [7, 8]
    assert step["tokens"]["completion_mask"] == [1, 1]
    assert step["tokens"]["completion_logprobs"] == pytest.approx([-0.1, -0.2])
    assert step["extras"]["finish_reason"] == "length"
    assert step["response"] is response


@pytest.mark.parametrize("make", [dict, as_object])
async def test_without_ids_there_are_no_tokens(make):
    step = await step_of(make(chat_dict()))
    assert step["tokens"] is None
    assert step["extras"]["num_completion_tokens"] == 2


async def test_real_openai_objects():
    openai_types = pytest.importorskip("openai.types.chat")
    data = chat_dict(object="chat.completion", created=1, model="m")
    data["choices"][0]["index"] = 0
    data["usage"]["total_tokens"] = 7
    response = openai_types.ChatCompletion.model_validate(data)
    step = await step_of(response)
    assert step["completion"] == [{"role": "assistant", "content": "one"}]
    assert step["response"] is response


async def test_mocks_have_no_tokens_they_were_not_given():
    mock = MagicMock()
    mock.choices = [MagicMock()]
    mock.choices[0].message.content = "one"
    mock.choices[0].message.tool_calls = None
    mock.choices[0].finish_reason = "stop"
    step = await step_of(mock)
    assert step["completion"] == [{"role": "assistant", "content": "one"}]
    assert step["tokens"] is None


async def test_mocks_with_tokens():
    mock = MagicMock()
    mock.prompt_token_ids = [1, 2]
    choice = MagicMock()
    choice.message.content = "one"
    choice.message.tool_calls = None
    choice.token_ids = [3]
    choice.logprobs.content = [SimpleNamespace(logprob=-0.5)]
    mock.choices = [choice]
    step = await step_of(mock)
    assert step["tokens"]["completion_ids"] == [3]


@pytest.mark.parametrize("missing", ["prompt_token_ids", "token_ids"])
async def test_without_one_of_the_ids_there_are_no_tokens(missing):
    response = with_tokens()
    response.pop(missing, None)
    response["choices"][0].pop(missing, None)
    assert (await step_of(response))["tokens"] is None


async def test_ids_without_logprobs_are_recorded_as_a_clients_are():
    response = with_tokens()
    response["choices"][0].pop("logprobs")
    tokens = (await step_of(response))["tokens"]
    assert (tokens["completion_ids"], tokens["completion_logprobs"]) == ([7, 8], [])


async def test_lengths_that_contradict_each_other_are_an_error():
    with pytest.raises(TokenError):
        await step_of(with_tokens(logprobs=(-0.1,)))


async def test_tool_calls_and_reasoning_are_kept():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"content": None, "tool_calls": [call], "reasoning_content": "hm"}
    response = as_object({"choices": [{"message": message, "finish_reason": "tool_calls"}]})
    step = await step_of(response)
    assert step["completion"] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    ]
    assert step["extras"]["finish_reason"] == "tool_calls"


async def test_completion_responses():
    response = {
        "choices": [
            {
                "text": " one",
                "finish_reason": "stop",
                "prompt_token_ids": [1],
                "token_ids": [2, 3],
                "logprobs": {"token_logprobs": [-0.1, -0.2]},
            }
        ]
    }
    step = await step_of(response, message_type="completion", dataset=[{"prompt": "say"}])
    assert step["completion"] == " one"
    assert step["tokens"]["completion_ids"] == [2, 3]


@pytest.mark.parametrize("response", [None, {}, {"choices": []}, 7, MagicMock(choices=None)])
async def test_what_is_no_response(response):
    with pytest.raises(BadResponse, match="no choices"):
        await step_of(response)


async def test_a_completion_without_text():
    with pytest.raises(BadResponse, match="no text"):
        parse_response({"choices": [{"message": {}}]}, "completion")


@pytest.mark.parametrize(
    "response",
    [ModelResponse.overlong_prompt(), {"id": OVERLONG_PROMPT}, SimpleNamespace(id=OVERLONG_PROMPT)],
)
async def test_an_overlong_prompt_adds_no_step(response):
    env = single()
    state = await env.init_state(env.example("train", 0))
    await env.add_model_response(state, state["prompt"], response)
    assert state["prompt_too_long"] is True
    assert state["trajectory"] == []


@pytest.mark.parametrize(
    ("given", "reason"), [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)]
)
def test_finish_reasons(given, reason):
    response = {"choices": [{"message": {"content": ""}, "finish_reason": given}]}
    assert parse_response(response, "chat").finish_reason is reason


def a_response(**more):
    fields = {
        "message": {"role": "assistant", "content": "one"},
        "text": "one",
        "finish_reason": FinishReason.STOP,
        "prompt_ids": np.array([1], np.int32),
        "completion_ids": np.array([2], np.int32),
        "logprobs": np.array([-0.5], np.float32),
        "versions": None,
        "temperature": 1.0,
        "call_id": 5,
        "num_prompt_tokens": 1,
        "num_completion_tokens": 1,
    }
    return ModelResponse(**{**fields, **more})


def test_a_record_passes_through():
    response = a_response()
    assert parse_response(response, "chat") is response


def test_call_ids_are_unique():
    ids = [parse_response(chat_dict(), "chat").call_id for _ in range(3)]
    assert len(set(ids)) == 3


def test_a_response_reads_like_openais():
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call], "reasoning_content": "r"}
    response = a_response(message=message)
    spoken = response.choices[0].message
    assert (spoken.content, spoken.reasoning_content) == ("x", "r")
    assert spoken.tool_calls[0].function.name == "f"
    assert response.usage.total_tokens == 2
    assert response.choices[0].text == "one"
    assert response.choices[0].token_ids == [2]
    assert response.choices[0].logprobs.content[0].logprob == -0.5
    assert response.choices[0].logprobs.token_logprobs == [-0.5]
    assert response.prompt_token_ids == [1]


def test_a_dumped_response_can_be_parsed_again():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call], "reasoning_content": "r"}
    response = a_response(message=message, id="chatcmpl-1", model="m")
    parsed = parse_response(json.loads(json.dumps(response.model_dump())), "chat")
    again = replace(parsed, call_id=response.call_id, versions=None, text=response.text)
    assert again == response


def test_an_overlong_prompt_is_an_empty_response():
    response = ModelResponse.overlong_prompt()
    assert response.id == "overlong-prompt"
    assert (response.choices[0].message.content, response.choices[0].finish_reason) == (
        "",
        "length",
    )
    assert response.usage.total_tokens == 0


def samples_of(state):
    state["advantage"] = 1.0
    return build_samples([state]).samples


class OwnClient(MultiTurnEnv):
    """An override that asks a model itself, and returns what that said as it is."""

    def __init__(self, response, **settings):
        super().__init__(max_turns=1, dataset=[{"prompt": "say one", "answer": ""}], **settings)
        self.response = response

    async def env_response(self, messages, state):
        return []

    async def get_model_response(self, *args, **kwargs):
        return self.response


@pytest.mark.parametrize("make", [dict, as_object])
async def test_an_override_is_recorded_with_the_temperature_and_version_of_its_call(make):
    client = ScriptedClient(["unused"], version=7)
    env = OwnClient(make(with_tokens()), sampling_args={"temperature": 0.3})
    own = await env.rollout(env.example("train", 0), client, "m")
    given = await env.rollout(env.example("train", 0), client, "m", {"temperature": 0.5})
    for state, temperature in ((own, 0.3), (given, 0.5)):
        (step,) = state["trajectory"]
        assert step["extras"]["temperature"] == temperature
        assert step["extras"]["policy_version_min"] == 7
        (sample,) = samples_of(state)
        records = sample.records
        assert records.temperature.tolist() == pytest.approx([temperature] * 2)
        assert records.version.tolist() == [7, 7]


async def test_without_a_loop_the_state_says_the_temperature():
    env = single()
    state = await env.init_state(env.example("train", 0), sampling_args={"temperature": 0.25})
    await env.add_model_response(state, state["prompt"], with_tokens())
    assert state["trajectory"][0]["extras"]["temperature"] == 0.25


@pytest.mark.parametrize("reason", ["cosmic_ray", ""])
async def test_an_unknown_finish_reason_is_as_bad_as_a_clients(reason):
    response = chat_dict(choice={"finish_reason": reason})
    with pytest.raises(BadResponse, match="finish_reason"):
        await step_of(response)
    env = OwnClient(response)
    state = await env.rollout(env.example("train", 0), ScriptedClient(["unused"]), "m")
    assert (state["error"].type, state["error"].phase) == ("BadResponse", "model")


@pytest.mark.parametrize("huge", [2**31, 2**63, 2**70, -1])
async def test_ids_of_no_vocabulary_are_token_errors(huge):
    response = with_tokens()
    response["choices"][0]["token_ids"] = [7, huge]
    with pytest.raises(TokenError):
        await step_of(response)


@pytest.mark.parametrize(
    "content", [[{"token": "token_id:x", "logprob": -0.1}], [{"token": "a", "logprob": "b"}] * 2]
)
async def test_ids_and_logprobs_that_are_no_numbers_are_token_errors(content):
    response = with_tokens()
    response["choices"][0]["logprobs"]["content"] = content
    if len(content) == 1:
        del response["choices"][0]["token_ids"]
    with pytest.raises(TokenError):
        await step_of(response)


class Spec1(MultiTurnEnv):
    """`add_model_response` as verifiers documents it."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "again"}]

    async def add_model_response(self, state, prompt_messages, response):
        if response is not None and response.id == "overlong-prompt":
            state["prompt_too_long"] = True
            return
        completion_messages = await rt.parse_response_messages(response, self.message_type)
        tokens = await rt.parse_response_tokens(response, self.message_type)
        trajectory_step = rt.TrajectoryStep(
            prompt=prompt_messages,
            completion=completion_messages,
            response=response,
            tokens=tokens,
            reward=None,
            advantage=None,
            extras={},
        )
        state["trajectory"].append(trajectory_step)


async def test_the_example_of_spec_1_trains():
    env = Spec1(max_turns=2, dataset=[{"prompt": user("say one"), "answer": ""}])
    client = ScriptedClient(["one", "two"])
    state = await env.rollout(env.example("train", 0), client, "m")
    assert [step["completion"][0]["content"] for step in state["trajectory"]] == ["one", "two"]
    (sample,) = samples_of(state)
    first, second = (step["tokens"]["completion_ids"] for step in state["trajectory"])
    assert sample.records.target.tolist() == [*first, *second]
    assert np.all(sample.records.logprob < 0)
    assert len(rt.process_trajectories_for_training([state])) == 2


async def test_what_a_client_said_reads_like_openais_in_every_step():
    env = MultiTurnEnvWithTwoTurns()
    state = await env.rollout(env.example("train", 0), ScriptedClient(["one", "two"]), "m")
    for step, text in zip(state["trajectory"], ("one", "two"), strict=True):
        choice = step["response"].choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert choice.token_ids == step["tokens"]["completion_ids"]
        assert step["response"].prompt_token_ids == step["tokens"]["prompt_ids"]
        assert len(choice.logprobs.content) == step["response"].usage.completion_tokens


class MultiTurnEnvWithTwoTurns(Spec1):
    add_model_response = MultiTurnEnv.add_model_response

    def __init__(self):
        super().__init__(max_turns=2, dataset=[{"prompt": user("say one"), "answer": ""}])


@pytest.mark.parametrize("read", [False, True])
async def test_a_finished_state_can_be_copied_and_pickled(read):
    env = MultiTurnEnvWithTwoTurns()
    client = ScriptedClient(["one", "two"])
    state = await env.rollout(env.example("train", 0), client, "m")
    if read:
        assert [dict(step) for step in state["trajectory"]]
    copied = copy.deepcopy(state)
    assert copied["client"] is state["client"]
    assert copied["trajectory"].tree is not state["trajectory"].tree
    back = pickle.loads(pickle.dumps(state))
    assert (type(back), back["client"]) == (rt.State, None)
    for twin in (copied, back):
        assert twin["trajectory"] == state["trajectory"]
        assert twin["completion"] == state["completion"]
        assert twin["trajectory"][1]["response"] == state["trajectory"][1]["response"]
        (made,), (given,) = samples_of(twin), samples_of(state)
        assert made.records.target.tolist() == given.records.target.tolist()
        assert made.ids.tolist() == given.ids.tolist()
    copied["trajectory"][0]["prompt"][0]["content"] = "changed"
    assert state["trajectory"][0]["prompt"] == user("say one")


async def test_a_call_is_inserted_once():
    responses = []

    class Kept(MultiTurnEnvWithTwoTurns):
        async def get_model_response(self, *args, **kwargs):
            responses.append(await super().get_model_response(*args, **kwargs))
            return responses[-1]

    env = Kept()
    state = await env.rollout(env.example("train", 0), ScriptedClient(["one", "two"]), "m")
    tree = state["trajectory"].tree
    assert [response.tree is tree for response in responses] == [True, True]
    assert tree.num_calls == 2
    assert [tree.turn(call) for call in range(2)] == [0, 1]
    assert responses[1].prompt_ids.tolist() == state["trajectory"][1]["tokens"]["prompt_ids"]


async def test_a_changed_record_is_recorded_as_changed():
    class Masked(MultiTurnEnvWithTwoTurns):
        async def get_model_response(self, *args, **kwargs):
            response = await super().get_model_response(*args, **kwargs)
            return replace(response, logprobs=response.logprobs - 1)

    env = Masked()
    state = await env.rollout(env.example("train", 0), ScriptedClient(["one", "two"]), "m")
    plain = MultiTurnEnvWithTwoTurns()
    other = await plain.rollout(env.example("train", 0), ScriptedClient(["one", "two"]), "m")
    for step, before in zip(state["trajectory"], other["trajectory"], strict=True):
        changed, given = (s["tokens"]["completion_logprobs"] for s in (step, before))
        assert changed == pytest.approx([value - 1 for value in given])


@pytest.mark.parametrize("turn", [0, 1])
async def test_answers_that_are_not_recorded_do_not_train(turn):
    class BestOfTwo(MultiTurnEnvWithTwoTurns):
        async def get_model_response(self, client, model, prompt, **settings):
            if (len(prompt) > 1) == bool(turn):
                await super().get_model_response(client, model, prompt, **settings)
            return await super().get_model_response(client, model, prompt, **settings)

    said = ["worse", "one", "two"] if turn == 0 else ["one", "worse", "two"]
    states = []
    for env, script in ((BestOfTwo(), said), (MultiTurnEnvWithTwoTurns(), ["one", "two"])):
        states.append(await env.rollout(env.example("train", 0), ScriptedClient(script), "m"))
    (made,), (plain,) = map(samples_of, states)
    assert made.ids.tolist() == plain.ids.tolist()
    assert made.records.target.tolist() == plain.records.target.tolist()
    assert made.records.logprob.tolist() == plain.records.logprob.tolist()
