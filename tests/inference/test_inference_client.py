from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.inference import (
    EndpointPool,
    ModelClient,
    OpenAIClient,
    OpenAISDKClient,
    as_client,
    sampling_from_args,
)
from rolltree.inference.client import policy_version
from rolltree.inference.deadline import Clock, RolloutClient
from rolltree.testing import FaultyClient, ScriptedClient
from rolltree.values.errors import ConfigError
from rolltree.values.types import SamplingParams


def test_every_client_has_the_interface() -> None:
    clients = [
        ScriptedClient(["a"]),
        ScriptedClient(["a"]).session(),
        FaultyClient(ScriptedClient(["a"]), []),
        OpenAIClient("http://127.0.0.1:1/v1", "m"),
        OpenAIClient("http://127.0.0.1:1/v1", "m").session(),
        as_client(SimpleNamespace(chat=SimpleNamespace(completions=None)), "m"),
    ]
    for client in clients:
        assert isinstance(client, ModelClient)
        assert as_client(client) is client


def test_an_openai_like_object_is_wrapped() -> None:
    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace()))
    wrapped = as_client(client, "small")
    assert isinstance(wrapped, OpenAISDKClient)
    assert wrapped.model == "small"


def test_a_blocking_openai_client_is_refused() -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(ConfigError, match="AsyncOpenAI"):
        as_client(openai.OpenAI(api_key="x"))


@pytest.mark.parametrize("thing", [None, "gpt", 3, object()])
def test_other_things_are_refused(thing: object) -> None:
    with pytest.raises(ConfigError, match="is not a model client"):
        as_client(thing)


def test_fields_are_mapped_and_the_rest_is_kept() -> None:
    args = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "stop": "\n",
        "seed": 3,
        "presence_penalty": 0.1,
        "logit_bias": None,
        "extra_body": {"top_k": 20, "stop_token_ids": [5, 6], "min_p": 0.05},
    }
    before = {**args, "extra_body": dict(args["extra_body"])}
    sampling = sampling_from_args(args)
    assert args == before
    assert sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        max_tokens=7,
        stop=("\n",),
        stop_token_ids=(5, 6),
        seed=3,
        extra={"presence_penalty": 0.1, "extra_body": {"min_p": 0.05}},
    )


def test_nothing_given_is_the_default() -> None:
    assert sampling_from_args({}) == SamplingParams()
    assert sampling_from_args({"max_tokens": None, "stop": None}) == SamplingParams()


@pytest.mark.parametrize("name", ["top_k", "stop_token_ids"])
def test_none_in_extra_body_is_not_given(name: str) -> None:
    assert sampling_from_args({"extra_body": {name: None}}) == SamplingParams()
    given = {name: 3 if name == "top_k" else [3]}
    both = sampling_from_args({**given, "extra_body": {name: None}})
    assert both == sampling_from_args(given)


def test_newer_name_of_max_tokens_and_vllms_off_value() -> None:
    assert sampling_from_args({"max_completion_tokens": 9}).max_tokens == 9
    assert sampling_from_args({"top_k": -1}).top_k == 0
    assert sampling_from_args({"stop": ["a", "b"]}).stop == ("a", "b")
    assert sampling_from_args({"n": 1}).extra == {}


@pytest.mark.parametrize(
    "args",
    [
        {"temperature": -0.1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -2},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"stop": [""]},
        {"stop": [3]},
        {"n": 2},
        {"extra_body": [1]},
        {"seed": "x"},
    ],
)
def test_values_that_mean_nothing_are_refused(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        sampling_from_args(args)


@given(
    st.dictionaries(st.sampled_from(["min_p", "user", "logprobs", "x"]), st.integers(), max_size=4),
    st.floats(0.0, 2.0),
)
def test_unknown_fields_are_never_lost(extra: dict[str, int], temperature: float) -> None:
    sampling = sampling_from_args({**extra, "temperature": temperature})
    assert sampling.extra == extra
    assert sampling.temperature == temperature


def test_the_policy_version_is_that_of_the_client_behind() -> None:
    clients = [OpenAIClient(f"http://host{n}/v1", "m") for n in range(2)]
    clients[0].version, clients[1].version = 5, 4
    timed = RolloutClient(clients[0], Clock())
    assert policy_version(timed) == policy_version(timed.session()) == 5
    pool = EndpointPool(clients)
    assert policy_version(pool) == policy_version(RolloutClient(pool, Clock()).session()) == 4
    assert policy_version(ScriptedClient(["a"], version=7).session()) == 7
    assert policy_version(None) == policy_version(MagicMock()) == 0


async def test_a_call_takes_sampling_arguments_as_a_dict() -> None:
    client = ScriptedClient(lambda messages: "one two three")
    messages = [{"role": "user", "content": "?"}]
    asked = {"max_completion_tokens": 3, "temperature": 0.5}
    response = await client.chat(messages, sampling=asked)
    assert len(response.completion_ids) == 3
    assert response.temperature == 0.5
    with pytest.raises(ConfigError, match=r"generate takes a GenerateRequest, not \[1, 2\]"):
        await client.generate([1, 2])
