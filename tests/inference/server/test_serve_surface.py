"""OpenAI's `responses` and Anthropic's `messages` of `rolltree serve`, by their own packages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve_kit import ADD, TOKEN, Served

from rolltree.inference import OpenAIClient
from rolltree.values.types import SamplingParams

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

FUNCTION: dict[str, Any] = ADD["function"]  # type: ignore[assignment]
# Newer releases of the package do not take it as an argument.
GREEDY = {"temperature": 0}
TOOL = {"type": "function", **FUNCTION}
CLAUDES = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


@pytest.fixture
def agent(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key=TOKEN, max_retries=0) as made:
        yield made


@pytest.fixture
def claude(served: Served) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=served.root, api_key=TOKEN, max_retries=0) as made:
        yield made


def test_a_response_whole_and_streamed(agent: Any) -> None:
    asked = {"model": "taught", "input": "7 + 5 =", "temperature": 0, "max_output_tokens": 20}
    whole = agent.responses.create(**asked)
    with agent.responses.stream(**asked) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_response()
    assert whole.output_text == streamed.output_text == "12"
    assert (whole.status, whole.usage.output_tokens, whole.store) == ("completed", 3, False)
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    assert kinds.count("response.output_text.delta") == 2
    assert kinds[-1] == "response.completed"
    cut = agent.responses.create(**{**asked, "input": "count", "max_output_tokens": 4})
    assert (cut.status, cut.output_text) == ("incomplete", "one ")
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_of_a_response_and_its_output(agent: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "taught", "tools": [TOOL], "temperature": 0}
    question: list[Any] = [{"role": "user", "content": "2 and 3?"}]
    # As agents do that keep the history themselves.
    asked |= {"include": ["reasoning.encrypted_content"], "store": False}
    if stream:
        with agent.responses.stream(input=question, **asked) as events:
            answer = events.get_final_response()
    else:
        answer = agent.responses.create(input=question, **asked)
    (call,) = answer.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        *("function_call", "add"),
        {"a": 2, "b": 3},
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    last = agent.responses.create(input=[*question, *answer.output, output], **asked)
    assert last.output_text == "It is 5."


def test_a_message_whole_and_streamed(claude: Any) -> None:
    asked: dict[str, Any] = {"model": "taught", "max_tokens": 20}
    asked["messages"] = [{"role": "user", "content": "7 + 5 ="}]
    whole = claude.messages.create(**asked, extra_body=GREEDY)
    with claude.messages.stream(**asked, extra_body=GREEDY) as events:
        texts = list(events.text_stream)
        streamed = events.get_final_message()
    assert texts == ["1", "2"]
    assert [block.text for block in whole.content] == [block.text for block in streamed.content]
    assert whole.content[0].text == "12"
    assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 3)
    assert streamed.usage.output_tokens == 3
    counted = claude.messages.count_tokens(model="taught", messages=asked["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    asked["messages"] = [{"role": "user", "content": "count"}]
    stopped = claude.messages.create(**asked, stop_sequences=[" three"], extra_body=GREEDY)
    assert stopped.content[0].text == "one two"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_of_a_message_and_its_result(claude: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "taught", "max_tokens": 90, "tools": [CLAUDES]}
    messages: list[Any] = [{"role": "user", "content": "2 and 3?"}]
    if stream:
        with claude.messages.stream(messages=messages, extra_body=GREEDY, **asked) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(messages=messages, extra_body=GREEDY, **asked)
    (call,) = answer.content
    assert (answer.stop_reason, call.name, call.input) == ("tool_use", "add", {"a": 2, "b": 3})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(messages=messages, extra_body=GREEDY, **asked)
    assert last.content[0].text == "It is 5."


def test_the_same_prompt_in_three_protocols_is_the_same_to_the_model(
    agent: Any, claude: Any
) -> None:
    messages = [{"role": "user", "content": "capital?"}]
    chat = agent.chat.completions.create(model="taught", messages=messages, temperature=0)
    response = agent.responses.create(model="taught", input=messages, temperature=0)
    message = claude.messages.create(
        model="taught", messages=messages, max_tokens=30, extra_body=GREEDY
    )
    usage = message.usage
    assert chat.choices[0].message.content == response.output_text == message.content[0].text
    assert chat.usage.prompt_tokens == response.usage.input_tokens
    assert chat.usage.prompt_tokens == usage.input_tokens + usage.cache_read_input_tokens
    counted = agent.responses.input_tokens.count(model="taught", input=messages)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_what_is_refused_and_in_which_form(agent: Any, claude: Any, served: Served) -> None:
    for fields, named in (
        ({"model": "gpt-9"}, "'gpt-9' does not exist"),
        ({"previous_response_id": "resp_" + "0" * 24}, "keeps no answers"),
    ):
        with pytest.raises(openai.NotFoundError, match=named):
            agent.responses.create(**{"model": "taught", "input": "a", **fields})
    odd = {"type": "json_schema", "name": "odd", "schema": {"type": "odd"}}
    with pytest.raises(openai.BadRequestError, match="response_format cannot be compiled"):
        agent.responses.create(model="taught", input="a", text={"format": odd})
    wish = agent.responses.create(model="taught", input="a", reasoning={"effort": "low"})
    assert wish.status in ("completed", "incomplete")
    for stream in (False, True):  # before the stream begins
        with pytest.raises(openai.BadRequestError, match="max_context") as caught:
            agent.responses.create(model="taught", input="a" * 5000, stream=stream)
        assert caught.value.code == "context_length_exceeded"
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(anthropic.NotFoundError, match="'claude-9' does not exist"):
        claude.messages.create(model="claude-9", max_tokens=3, messages=messages)
    with pytest.raises(anthropic.BadRequestError, match=r"tool_choice.*'sub'"):
        claude.messages.create(
            model="taught",
            max_tokens=3,
            messages=messages,
            tools=[CLAUDES],
            tool_choice={"type": "tool", "name": "sub"},
        )
    with (
        anthropic.Anthropic(base_url=served.root, api_key="wrong", max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError, match="bearer token"),
    ):
        other.messages.create(model="taught", max_tokens=3, messages=messages)


def test_models_in_both_forms(agent: Any, claude: Any) -> None:
    assert agent.models.retrieve("taught").max_model_len == 2048
    assert claude.models.retrieve("taught").display_name == "taught"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        agent.models.retrieve("gpt-9")


async def test_a_training_clients_ids_and_logprobs_are_exact_while_others_ask(
    served: Served,
) -> None:
    """Calls of every protocol share the engine's batch, and each token keeps its own logprob."""
    client = OpenAIClient(served.url, "taught", api_key=TOKEN, token_ids="vllm")
    sampling = SamplingParams(temperature=1.0, max_tokens=30, seed=3)
    messages = [{"role": "user", "content": "count"}]
    alone = await client.session().chat(messages, sampling=sampling)
    async with (
        openai.AsyncOpenAI(base_url=served.url, api_key=TOKEN) as agent,
        anthropic.AsyncAnthropic(base_url=served.root, api_key=TOKEN) as claude,
    ):
        together, response, message = await asyncio.gather(
            client.session().chat(messages, sampling=sampling),
            agent.responses.create(model="taught", input="count", temperature=0),
            claude.messages.create(
                model="taught", messages=messages, max_tokens=40, extra_body=GREEDY
            ),
        )
    await client.aclose()
    assert response.output_text == message.content[0].text == "one two three four"
    assert alone.prompt_ids is not None
    assert alone.completion_ids is not None
    assert together.prompt_ids is not None
    assert together.completion_ids is not None
    assert together.prompt_ids.tolist() == alone.prompt_ids.tolist()
    assert together.completion_ids.tolist() == alone.completion_ids.tolist()
    assert together.logprobs is not None
    assert alone.logprobs is not None
    assert together.versions is not None
    np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-4)
    assert together.versions.tolist() == [0] * len(together.versions)


def test_an_answer_continues_the_final_message(agent: Any, claude: Any) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So: "}]
    asked = {"model": "taught", "messages": history, "temperature": 0, "max_tokens": 5}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    more["return_token_ids"] = True
    whole = agent.chat.completions.create(**asked, extra_body=more)
    said = whole.choices[0].message.content
    chunks = agent.chat.completions.create(**asked, extra_body=more, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == said
    body = {"model": "taught", "messages": history, "return_token_strs": True, **more}
    del body["return_token_ids"]
    listed = agent.post("../tokenize", body=body, cast_to=object)
    assert whole.prompt_token_ids == listed["tokens"]
    assert "".join(listed["token_strs"]).endswith("<|im_start|>assistant\nSo: ")
    del asked["temperature"]
    reply = claude.messages.create(**asked, extra_body={"temperature": 0})
    assert "".join(block.text for block in reply.content) == said


def test_names_for_the_template_are_given_to_it(agent: Any) -> None:
    asked = {"model": "taught", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    for odd, named in (({"messages": []}, "messages"), (7, "chat_template_kwargs")):
        with pytest.raises(openai.BadRequestError, match=named):
            agent.chat.completions.create(**asked, extra_body={"chat_template_kwargs": odd})
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    assert agent.chat.completions.create(**asked, extra_body=told).choices[0].message.role


def test_answers_are_held_to_a_form(agent: Any, claude: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["up", "no"]}}}
    asked = {"model": "taught", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
    several = agent.chat.completions.create(**asked, response_format=form, n=3)
    assert {each.message.content for each in several.choices} <= {'"up"', '"no"'}
    chunks = agent.chat.completions.create(**asked, response_format=form, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) in ('"up"', '"no"')
    text = agent.completions.create(
        model="taught", prompt="a", max_tokens=9, extra_body={"guided_regex": "[ab]{4}"}
    )
    assert set(text.choices[0].text) <= {"a", "b"}
    called = claude.messages.create(
        **{**asked, "max_tokens": 300}, tools=[CLAUDES], tool_choice={"type": "any"}
    )
    assert called.stop_reason in ("tool_use", "max_tokens")
