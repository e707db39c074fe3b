"""`add_model_response` takes what old environments and tests hand it."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from env_scripts import single, user

from rolltree.errors import BadResponse, TokenError
from rolltree.inference.parse import parse_response
from rolltree.types import OVERLONG_PROMPT, FinishReason, ModelResponse


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
    ("given", "reason"),
    [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH), (None, FinishReason.STOP)],
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
