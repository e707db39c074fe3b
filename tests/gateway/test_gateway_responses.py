"""OpenAI's responses: the official openai package, unmodified, in front of a scripted model."""

from __future__ import annotations

import asyncio
import itertools
import json

import openai
import pydantic
import pytest
from gateway_kit import calling, is_one_path, openai_agent, paths
from openai.types.responses import Response, ResponseStreamEvent, response_create_params

import rolltree as rt
from rolltree.gateway.journal import read_session
from rolltree.gateway.openai_responses import RESPONSE_FIELDS
from rolltree.inference.chat import ChatRenderer
from rolltree.testing import ByteTokenizer, ScriptedAnswer, ScriptedClient
from rolltree.values.errors import ConnectionFailed
from rolltree.values.types import FinishReason

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
    "strict": True,
}
USER = {"role": "user", "content": "?"}
EVENTS = pydantic.TypeAdapter(ResponseStreamEvent)
ALL = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}


def thinking(answer, **options):
    """Return a model that reasons in tags."""
    renderer = ChatRenderer(ByteTokenizer(), reasoning="think")
    return ScriptedClient(answer, renderer=renderer, **options)


def adder(messages):
    """Call the tool twice after a question, then say what it said; both after some thought."""
    if messages[-1]["role"] == "tool":
        return f"<think>read it</think>It is {messages[-1]['content']}."
    a, b = messages[-1]["content"].split("+")
    calls = calling("add", f'{{"a": {int(a)}, "b": {int(b)}}}')["tool_calls"]
    return {"content": "<think>a sum</think>Let me see.", "tool_calls": calls * 2}


async def whole(client, **request):
    return await client.responses.create(model="gpt-anything", tools=[ADD], **request)


async def helped(client, **request):
    """Return the response that the package's helper puts together."""
    async with client.responses.stream(model="gpt-anything", tools=[ADD], **request) as stream:
        return await stream.get_final_response()


async def streamed(client, **request):
    """Return the response at the end of the events."""
    events = [
        event
        async for event in await client.responses.create(
            model="gpt-anything", tools=[ADD], stream=True, **request
        )
    ]
    return events[-1].response


async def in_a_thread(client, **request):
    """Ask with the package's blocking client."""
    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as agent:
        return await asyncio.to_thread(
            agent.responses.create, model="gpt-anything", tools=[ADD], **request
        )


async def helped_in_a_thread(client, **request):
    def ask(agent):
        with agent.responses.stream(model="gpt-anything", tools=[ADD], **request) as stream:
            return stream.get_final_response()

    with openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as agent:
        return await asyncio.to_thread(ask, agent)


def as_it_came(response):
    return list(response.output)


def outputs_of(items):
    """Return the results of the calls among items, as an agent's tools give them."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(sum(json.loads(item.arguments).values())),
        }
        for item in items
        if item.type == "function_call"
    ]


async def converse(client, ask, *, by_id=False, sent_back=as_it_came, **request):
    """Ask five questions that each need a tool: ten calls of the model."""
    history, earlier = [], None

    async def say(*items):
        nonlocal history, earlier
        history = list(items) if by_id else [*history, *items]
        more = {"previous_response_id": earlier.id} if by_id and earlier else {}
        earlier = await ask(client, input=history, instructions="Add.", **more, **request)
        if not by_id:
            history += sent_back(earlier)
        return earlier

    for number in range(5):
        response = await say({"role": "user", "content": f"{number}+2"})
        calls = outputs_of(response.output)
        assert [call["output"] for call in calls] == [str(number + 2)] * 2
        response = await say(*calls)
        assert response.output_text == f"It is {number + 2}."


# -- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("by_id", [False, True])
async def test_ten_turns_are_one_path_however_they_are_asked(by_id):
    found = []
    async with rt.gateway(thinking(adder)) as g:
        for ask in (whole, streamed, helped, in_a_thread, helped_in_a_thread):
            async with g.session() as s, openai_agent(s) as client:
                await converse(client, ask, by_id=by_id)
                assert len(s.trajectory) == 10
                assert is_one_path(s)
                found.append(paths(s))
    assert all(each == found[0] for each in found)


def without_reasoning(response):
    return [item for item in response.output if item.type != "reasoning"]


def without_ids(response):
    """Return the items as an agent writes them that keeps nothing but what was said."""
    kept = []
    for item in response.output:
        if item.type == "message":
            kept.append({"role": "assistant", "content": item.content[0].text})
        elif item.type == "function_call":
            arguments = json.dumps(json.loads(item.arguments), separators=(",", ":"))
            names = {"type": "function_call", "call_id": item.call_id, "name": item.name}
            kept.append({**names, "arguments": arguments})
    return kept


def encrypted_only(response):
    dumped = [item.to_dict() for item in response.output]
    for item in dumped:
        item.pop("content", None)
    return [
        original.to_dict() if original.type == "message" else item
        for original, item in zip(response.output, dumped, strict=True)
    ]


def references(response):
    return [{"type": "item_reference", "id": item.id} for item in response.output]


def in_another_order(response):
    """Return the calls before the text, of which some agents split what they stream."""
    items = [item.to_dict() for item in response.output]
    for item in items:
        item.pop("id")
    return sorted(items, key=lambda item: item["type"] == "message")


@pytest.mark.parametrize(
    "sent_back",
    [without_reasoning, without_ids, encrypted_only, references, in_another_order],
)
async def test_a_history_that_was_changed_in_form_still_continues(sent_back):
    async with rt.gateway(thinking(adder)) as g, g.session() as s, openai_agent(s) as client:
        include = ["reasoning.encrypted_content"]
        await converse(client, whole, sent_back=sent_back, include=include)
        assert len(s.trajectory) == 10
        assert is_one_path(s)


async def test_each_output_may_stand_behind_its_call():
    async with rt.gateway(thinking(adder)) as g, g.session() as s, openai_agent(s) as client:
        question = {"role": "user", "content": "1+2"}
        first = await whole(client, input=[question])
        calls = [item for item in first.output if item.type == "function_call"]
        said = [item for item in first.output if item.type != "function_call"]
        for call in calls:
            said += [call, *outputs_of([call])]
        await whole(client, input=[question, *said])
        assert is_one_path(s)


@pytest.mark.parametrize("sent_back", [as_it_came, without_ids])
async def test_two_answers_in_a_row_stay_two(sent_back):
    client = ScriptedClient(["one", "two", "three"])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        history = [{"role": "user", "content": "?"}]
        for _ in range(3):
            history += sent_back(await whole(agent, input=history))
        assert is_one_path(s)
    said = client.calls[-1].messages[1:]
    assert [(each["role"], each["content"]) for each in said] == [
        ("assistant", "one"),
        ("assistant", "two"),
    ]


async def test_a_turn_lasts_until_its_calls_are_answered():
    client = ScriptedClient(["ok"])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        said = {"role": "assistant", "content": "a"}
        calls = [
            {"type": "function_call", "call_id": each, "name": "add", "arguments": "{}"}
            for each in "12"
        ]
        outputs = [
            {"type": "function_call_output", "call_id": each, "output": each} for each in "12"
        ]
        more = {"role": "assistant", "content": "b"}
        await whole(agent, input=[USER, said, calls[0], more, calls[1], *outputs, more])
    _, turn, *results, last = client.calls[0].messages
    assert (turn["content"], [call["id"] for call in turn["tool_calls"]]) == ("ab", ["1", "2"])
    assert [result["role"] for result in results] == ["tool", "tool"]
    assert last == {"role": "assistant", "content": "b"}


async def test_two_responses_may_continue_one():
    client = ScriptedClient(lambda messages: "ok")
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        first = await whole(agent, input="a")
        for text in ("b", "c"):
            await whole(agent, input=text, previous_response_id=first.id)
        known = s.trajectory[0]["response"].call_id
    assert [call.prompt.extends for call in client.calls] == [None, known, known]


async def test_instructions_are_those_of_their_own_response():
    client = ScriptedClient(lambda messages: "ok")
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        own = {"role": "developer", "content": "mine"}
        user = {"role": "user", "content": "a"}
        first = await whole(agent, input=[own, user], instructions="Be brief.")
        await whole(agent, input="b", previous_response_id=first.id, instructions="Be long.")
        await whole(agent, input="b", previous_response_id=first.id)
        plain = await whole(agent, input=[own, user])
        await whole(agent, input="b", previous_response_id=plain.id)
        found = [
            [each["content"] for each in call.messages if each["role"] == "system"]
            for call in client.calls
        ]
    assert found == [["Be brief.", "mine"], ["Be long.", "mine"], ["mine"], ["mine"], ["mine"]]


async def test_a_gateway_that_is_started_again_knows_its_responses(tmp_path):
    given = []
    async with rt.gateway(thinking(adder), directory=tmp_path) as g:
        s = g.session("one")
        async with openai_agent(s) as client:
            for number in range(3):
                metadata = {"number": f"{number}", "text": "long " * 300}
                request = {"metadata": metadata, "temperature": number / 4}
                given.append(
                    await whole(client, input=f"{number}+2", instructions="Add.", **request)
                )
        key = s.api_key
    async with rt.gateway(thinking(adder), directory=tmp_path) as g:
        s = g.sessions["one"]
        async with openai_agent(s, api_key=key) as client:
            for response in given:
                assert await client.responses.retrieve(response.id) == response
            outputs = outputs_of(given[-1].output)
            await whole(
                client, input=outputs, previous_response_id=given[-1].id, instructions="Add."
            )
        assert s.trajectory[3]["response"].extends == s.trajectory[2]["response"].call_id
        await s.aclose()


async def test_the_options_of_every_call_are_in_the_journal(tmp_path):
    async with rt.gateway(ScriptedClient(lambda text: "ok"), directory=tmp_path) as g:
        s = g.session("one")
        async with openai_agent(s) as client:
            for prompt, logprobs in (("a", None), ("b", 1)):
                await client.completions.create(model="m", prompt=prompt, logprobs=logprobs)
    kept = read_session(tmp_path / "one.calls").calls
    assert [call.options for call, _ in kept] == [{}, {"logprobs": True}]


# -- answers -------------------------------------------------------------------------------------


async def test_what_a_response_says():
    request = {
        "instructions": "Add.",
        "metadata": {"a": "b"},
        "max_output_tokens": 500,
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "me",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
        "store": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "stream_options": None,
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
    }
    client = thinking(adder)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        response = await whole(agent, input="1+2", **request)
        assert await agent.responses.retrieve(response.id) == response
        step = s.trajectory[0]
        assert s.changed_sampling == {0: {"top_p": 0.9}}
    Response.model_validate(response.to_dict(), strict=True)
    assert response.id.startswith("resp_")
    assert (response.status, response.model) == ("completed", "gpt-anything")
    assert (response.error, response.incomplete_details) == (None, None)
    for name in ("instructions", "metadata", "max_output_tokens", "temperature", "top_p", "user"):
        assert getattr(response, name) == request[name]
    assert (response.prompt_cache_key, response.max_tool_calls) == ("k", 3)
    assert (response.reasoning.effort, response.text.verbosity) == ("low", "low")
    assert [tool.to_dict() for tool in response.tools] == [ADD]
    reasoning, message, *calls = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == (
        "reasoning",
        [],
        "a sum",
    )
    assert reasoning.encrypted_content
    assert (message.content[0].text, message.role) == ("Let me see.", "assistant")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("add", {"a": 1, "b": 2})
    ] * 2
    assert len({item.id for item in response.output}) == 4
    assert {item.status for item in response.output} == {"completed"}
    usage, ids = response.usage, step["tokens"]
    assert usage.input_tokens == len(ids["prompt_ids"])
    assert usage.output_tokens == len(ids["completion_ids"])
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    # A token is a byte.
    assert usage.output_tokens_details.reasoning_tokens == len("<think>a sum")
    asked = client.calls[0]
    assert asked.sampling.max_tokens == 500
    assert dict(asked.sampling.extra) == {}
    assert asked.tools[0] == {
        "type": "function",
        "function": {name: value for name, value in ADD.items() if name != "type"},
    }


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_an_answer_that_was_cut_is_incomplete(ask):
    async with (
        rt.gateway(ScriptedClient(["123456"])) as g,
        g.session() as s,
        openai_agent(s) as client,
    ):
        response = await ask(client, input="?", max_output_tokens=3)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "123"


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_filtered_answer_is_incomplete(ask):
    client = ScriptedClient([ScriptedAnswer("12", finish_reason=FinishReason.CONTENT_FILTER)])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        response = await ask(agent, input="?")
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "content_filter"


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("answer", ["", "<think>hm</think>"])
async def test_an_empty_answer_is_an_item_and_continues(ask, answer):
    async with rt.gateway(thinking([answer, "ok"])) as g, g.session() as s:
        async with openai_agent(s) as client:
            history = [{"role": "user", "content": "?"}]
            response = await ask(client, input=history)
            assert response.output[-1].content[0].text == ""
            history += [*without_reasoning(response), {"role": "user", "content": "Well?"}]
            await ask(client, input=history)
        assert is_one_path(s)


async def test_a_summary_that_was_asked_for_is_the_reasoning():
    async with rt.gateway(thinking(adder)) as g, g.session() as s, openai_agent(s) as client:
        await converse(client, helped, reasoning={"summary": "auto"})
        assert is_one_path(s)
        response = await whole(client, input="1+2", reasoning={"summary": "detailed"})
    (part,) = response.output[0].summary
    assert (part.text, response.output[0].content) == ("a sum", None)


async def test_reasoning_comes_back_to_the_model_in_whatever_form_it_was_sent():
    client = thinking(lambda messages: "ok")
    said = [
        {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
    ]
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        for parts in said:
            reasoning = {"id": "rs_1", "type": "reasoning", "summary": [], **parts}
            answer = {"role": "assistant", "content": "12"}
            user = {"role": "user", "content": "?"}
            await whole(agent, input=[user, reasoning, answer, user])
    for call in client.calls:
        assert call.messages[1] == {
            "role": "assistant",
            "content": "12",
            "reasoning_content": "hm",
        }


async def test_encrypted_reasoning_is_that_of_the_answer_it_came_from():
    client = thinking(adder)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        question = {"role": "user", "content": "1+2"}
        first = await whole(agent, input=[question], include=["reasoning.encrypted_content"])
        history = [question, *encrypted_only(first), *outputs_of(first.output)]
        await whole(agent, input=history)
    assert client.calls[-1].messages[1]["reasoning_content"] == "a sum"


async def test_what_the_upstream_is_asked_for():
    client = ScriptedClient(lambda messages: "{}")
    schema = {"type": "object", "properties": {}}
    form = {"name": "reply", "schema": schema, "strict": True}
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        chosen = {"type": "function", "name": "add"}
        await whole(agent, input="?", tool_choice=chosen, parallel_tool_calls=False)
        await whole(agent, input="?", tool_choice="required")
        await whole(agent, input="?", tool_choice=ALL)
        await whole(agent, input="?", tool_choice="none")
        await whole(agent, input="?", text={"format": {"type": "json_schema", **form}})
        await whole(agent, input="?", text={"format": {"type": "json_object"}})
        await whole(agent, input="?", text={"format": {"type": "text"}})
    function = {"type": "function", "function": {"name": "add"}}
    assert [dict(call.sampling.extra) for call in client.calls] == [
        {"tool_choice": function, "parallel_tool_calls": False},
        {"tool_choice": "required"},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [function]},
            }
        },
        {},
        {"response_format": {"type": "json_schema", "json_schema": form}},
        {"response_format": {"type": "json_object"}},
        {},
    ]
    assert [len(call.tools) for call in client.calls] == [1, 1, 1, 0, 1, 1, 1]


async def test_the_package_parses_a_structured_answer():
    class Sum(pydantic.BaseModel):
        total: int

    client = ScriptedClient(lambda messages: '{"total": 3}')
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        response = await agent.responses.parse(model="m", input="1+2", text_format=Sum)
        assert response.output_parsed == Sum(total=3)
        # What the package parsed is not sent back with the rest.
        user = {"role": "user", "content": "?"}
        history = [{"role": "user", "content": "1+2"}, *response.output, user]
        await agent.responses.create(model="m", input=history)
        assert is_one_path(s)


async def test_the_tokens_of_an_input_are_counted():
    async with rt.gateway(ScriptedClient(["ok"])) as g, g.session() as s, openai_agent(s) as client:
        counted = await client.responses.input_tokens.count(model="m", input="?", tools=[ADD])
        response = await whole(client, input="?")
    assert counted.input_tokens == response.usage.input_tokens


# -- events --------------------------------------------------------------------------------------


OPEN_FIELDS = {"store", "presence_penalty", "frequency_penalty", "error"}
"""What the open specification asks for, and the package's models do not have."""
RESPONSE_KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
    *("metadata", "safety_identifier", "prompt_cache_key"),
}
"""What every response object has, by the open specification."""
NULLABLE = {
    *("completed_at", "incomplete_details", "previous_response_id", "instructions", "error"),
    *("user", "usage", "max_output_tokens", "max_tool_calls", "safety_identifier"),
    "prompt_cache_key",
}


def check_response(response, status):
    """Check that a response object has all fields, and those of its status."""
    assert response.keys() >= RESPONSE_KEYS
    assert {key for key in RESPONSE_KEYS if response[key] is None} <= NULLABLE
    assert response["status"] == status
    assert (response["completed_at"] is not None) == (status == "completed")
    assert (response["incomplete_details"] is not None) == (status == "incomplete")
    assert (response["error"] is not None) == (status == "failed")
    assert (response["usage"] is not None) == (status in ("completed", "incomplete"))
    assert response["reasoning"].keys() >= {"effort", "summary"}
    for tool in response["tools"]:
        assert tool.keys() >= {"type", "name", "description", "parameters", "strict"}
    for item in response["output"]:
        assert item["id"]
        assert item["status"] in ("completed", "incomplete")


async def test_every_response_has_all_fields_of_the_open_specification():
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    async with rt.gateway(thinking(["12", "123456", "12", "12"])) as g:
        async with g.session() as s, openai_agent(s) as agent:
            ask = agent.responses.with_raw_response
            made = json.loads((await ask.create(model="m", input="?", tools=tools)).text)
            check_response(made, "completed")
            assert made["completed_at"] >= made["created_at"]
            assert json.loads((await ask.retrieve(made["id"])).text) == made
            cut = json.loads((await ask.create(model="m", input="?", max_output_tokens=3)).text)
            check_response(cut, "incomplete")
            assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
            shaped = await ask.create(model="m", input="?", text={"format": schema})
            form = json.loads(shaped.text)["text"]["format"]
            assert form == {**schema, "description": None, "strict": False}
            events = await events_of(agent)
        for event in events[:2]:
            check_response(event["response"], "in_progress")
        assert events[-1]["type"] == "response.completed"
        check_response(events[-1]["response"], "completed")
        settings = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
        async with g.session(sampling={"frequency_penalty": 0.25}) as s, openai_agent(s) as agent:
            events = await events_of(agent, extra_body={"presence_penalty": 0.5})
            assert s.changed_sampling == {0: settings}
        assert {name: events[-1]["response"][name] for name in settings} == settings


async def events_of(client, **request):
    """Return the events as they came, each of them checked against the package's models."""
    async with client.responses.with_streaming_response.create(
        model="m", input="1+2", tools=[ADD], stream=True, **request
    ) as raw:
        lines = [line async for line in raw.iter_lines() if line]
    events = []
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        events.append(json.loads(data.removeprefix("data: ")))
        parsed = EVENTS.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {parsed.type}" == f"event: {events[-1]['type']}"
        assert set(unknown_fields(parsed)) <= OPEN_FIELDS
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def unknown_fields(value):
    """Yield the fields that the package's models do not have."""
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from unknown_fields(each)


def without_repeats(names):
    """Return the names without those that equal the one before: deltas come one by one."""
    return [name for name, _ in itertools.groupby(names)]


def part_events(part, text):
    return [
        "response.output_item.added",
        f"response.{part}.added",
        f"response.{text}.delta",
        f"response.{text}.done",
        f"response.{part}.done",
        "response.output_item.done",
    ]


CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def accumulated(events):
    """Put the output items together, from what was added, said and done."""
    items, done = [], []
    for event in events:
        kind = event["type"].removeprefix("response.")
        index = event.get("output_index", 0)
        if kind == "output_item.added":
            assert index == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind in ("content_part.added", "reasoning_summary_part.added"):
            parts = parts_of(items[index])
            assert len(parts) == event.get("content_index", event.get("summary_index"))
            parts.append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind.endswith("text.delta"):
            parts_of(items[index])[0]["text"] += event["delta"]
        elif kind.endswith("text.done"):
            assert parts_of(items[index])[0]["text"] == event["text"]
        elif kind == "function_call_arguments.done":
            assert items[index]["arguments"] == event["arguments"]
        elif kind in ("content_part.done", "reasoning_summary_part.done"):
            assert parts_of(items[index]) == [event["part"]]
        elif kind == "output_item.done":
            assert items[index] | {"status": ""} == event["item"] | {"status": ""}
            done.append(event["item"])
        if "item_id" in event:
            assert event["item_id"] == items[index]["id"]
    return done


def parts_of(item):
    return item["content"] if item.get("content") is not None else item["summary"]


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_the_events_of_a_stream_in_order(summary):
    client = thinking(adder, token_delay_s=0.0001)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        events = await events_of(agent, reasoning={"summary": summary}, include=[])
        last = events[-1]["response"]
        kept = await agent.responses.retrieve(last["id"])
    reasoning = (
        part_events("content_part", "reasoning_text")
        if summary is None
        else part_events("reasoning_summary_part", "reasoning_summary_text")
    )
    assert without_repeats([event["type"] for event in events]) == [
        "response.created",
        "response.in_progress",
        *reasoning,
        *part_events("content_part", "output_text"),
        *CALL_EVENTS,
        *CALL_EVENTS,
        "response.completed",
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 3
    assert accumulated(events) == last["output"]
    assert kept.to_dict() == last
    for event in events[:2]:
        told = {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
        assert event["response"] == {**last, **told}


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ("", 9),
        ("12", 9),
        ("123456", 3),
        ("<think>hm</think>", 99),
        ("<think>hm</think>12", 99),
        ("<think>hm, let me", 9),
        ("<think>a</think>" + '<tool_call>{"name": "add", "arguments": {}}</tool_call>', 999),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', 999),
        ('<tool_call>{"name": "add", "argum', 20),
        ("grüß 🙂 dich", 999),
    ],
)
@pytest.mark.parametrize("delay_s", [0.0, 0.0001])
async def test_a_stream_adds_up_to_the_answer(answer, tokens, delay_s):
    client = thinking([answer], token_delay_s=delay_s)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        events = await events_of(agent, max_output_tokens=tokens)
        async with g.session() as other, openai_agent(other) as second:
            said = await second.responses.create(
                model="m", input="1+2", tools=[ADD], max_output_tokens=tokens
            )
        assert paths(s) == paths(other)
    last = events[-1]["response"]
    assert accumulated(events) == last["output"]
    ids = (last["id"].removeprefix("resp_"), said.id.removeprefix("resp_"))
    assert json.loads(said.to_json()) == json.loads(json.dumps(last).replace(*ids)) | {
        "created_at": said.created_at,
        "completed_at": said.completed_at,
    }


class Breaking(ScriptedClient):
    """Says its answer, and fails before its end token."""

    async def respond(self, call, memory):
        await super().respond(call, memory)
        raise ConnectionFailed("the upstream left")


async def test_a_stream_that_breaks_ends_in_an_error_and_a_failed_response():
    renderer = ChatRenderer(ByteTokenizer(), reasoning="think")
    answer = "<think>a thought</think>an answer"
    client = Breaking(lambda messages: answer, renderer=renderer, token_delay_s=0.001)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        events = await events_of(agent)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2]["code"] == "upstream_unavailable"
        assert "the upstream left" in events[-2]["message"]
        told = {name: events[-2][name] for name in ("code", "message", "param")}
        assert events[-2]["error"] == {"type": "server_error", **told}
        response = events[-1]["response"]
        check_response(response, "failed")
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        reasoning, message = response["output"]
        assert (reasoning["status"], message["status"]) == ("completed", "incomplete")
        assert message["content"][0]["text"] == "an answer"
        assert len(s.trajectory) == 0
        with pytest.raises(openai.InternalServerError):
            await whole(agent, input="1+2")


# -- what is refused -----------------------------------------------------------------------------


def test_every_field_of_the_official_request_is_in_the_table():
    kinds = (
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    )
    official = set().union(*(kind.__annotations__ for kind in kinds)) | set(
        response_create_params.ResponseCreateParamsBase.__annotations__
    )
    # Clients of release 3.57 send the first; older ones do not know it. Codex sends the second,
    # and the open specification has the others.
    more = {"background_options", "client_metadata", "presence_penalty", "frequency_penalty"}
    assert RESPONSE_FIELDS.keys() == official | more


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (None, None),
        ({}, None),
        ({"completion_window": "soonest", "continuation_id": "mine"}, None),
        ({"completion_window": "2h"}, "background_options.completion_window"),
        ({"priority": 1}, "background_options.priority"),
        ("soon", "background_options"),
    ],
)
async def test_options_of_the_background_are_taken_if_they_ask_for_none(options, param):
    async with rt.gateway(thinking(adder)) as g, g.session() as s, openai_agent(s) as agent:
        asking = whole(agent, input="1+2", extra_body={"background_options": options})
        if param is None:
            assert (await asking).status == "completed"
        else:
            with pytest.raises(openai.BadRequestError) as caught:
                await asking
            assert caught.value.param == param


async def test_a_response_repeats_the_settings_that_were_obeyed():
    sampling = {"temperature": 0.25, "top_p": 0.75, "max_tokens": 40}
    asked = {"temperature": 0.5, "top_p": 1.0}
    async with (
        rt.gateway(thinking(adder)) as g,
        openai_agent(g.session("a", sampling=sampling)) as a,
    ):
        response = await whole(a, input="1+2", max_output_tokens=500, **asked)
        less = await whole(a, input="1+2", max_output_tokens=30)
    obeyed = (response.temperature, response.top_p, response.max_output_tokens)
    assert obeyed == (0.25, 0.75, 40)
    assert less.max_output_tokens == 30


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}


def user(part):
    return {"input": [USER, {"role": "user", "content": [part]}]}


def item(kind, **fields):
    return {"input": [USER, {"type": kind, **fields}]}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.pictures"]}, "include"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"instructions": ["a"]}, "instructions"),
        ({"model": 1}, "model"),
        ({"stop": "a"}, "stop"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        (
            {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
            "prompt_cache_options.comparison_response_id",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget"),
        ({"reasoning": "low"}, "reasoning"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "grammar": "a"}}}, "text.format.grammar"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        ({"text": {"style": "terse"}}, "text.style"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "mcp", "server_label": "a"}],
                }
            },
            "tool_choice",
        ),
        ({"tools": [ADD, {"type": "custom"}]}, "tools[1].name"),
        ({"tools": [ADD, {"type": "namespace", "tools": []}]}, "tools[1].name"),
        ({"tools": [ADD, {"type": "namespace", "name": "a", "tools": ADD}]}, "tools[1].tools"),
        ({"tools": [ADD, {"name": "add"}]}, "tools[1]"),
        ({"tools": [{**ADD, "async": True}]}, "tools[0].async"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": {}}, "tools"),
        (user(IMAGE), "input[1].content[0]"),
        (user({"type": "input_file", "file_id": "file_1"}), "input[1].content[0]"),
        (user({"type": "input_audio", "input_audio": {}}), "input[1].content[0]"),
        (item("function_call_output", call_id="1", output=[IMAGE]), "input[1].output[0]"),
        (item("function_call_output", output="1"), "input[1].call_id"),
        (item("function_call", call_id="1", name="add"), "input[1].arguments"),
        (item("custom_tool_call", call_id="1", name="add"), "input[1].input"),
        *(
            (item(kind, id="1"), "input[1]")
            for kind in (
                "web_search_call",
                "file_search_call",
                "computer_call",
                "computer_call_output",
                "code_interpreter_call",
                "image_generation_call",
                "mcp_call",
                "mcp_list_tools",
                "local_shell_call",
                "compaction",
                "additional_tools",
            )
        ),
        (item("reasoning", summary=[], encrypted_content="gAAAA"), "input[1].encrypted_content"),
        (item("reasoning", summary="hm"), "input[1].summary"),
        (item("reasoning", summary=[{"type": "text", "text": "hm"}]), "input[1].summary"),
        ({"input": [{"role": "tool", "content": "1"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "?", "audio": "a"}]}, "input[0].audio"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": ["?"]}, "input[0]"),
        ({"input": [{}, USER]}, "input[0].id"),
        ({"input": [{"type": ["message"]}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 1}, "input"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(request_, param):
    async with rt.gateway(ScriptedClient(["ok"])) as g, g.session() as s:
        async with openai_agent(s) as client:
            body = {"input": "?", **request_}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", extra_body=body)
        assert caught.value.param == param
        assert len(s.trajectory) == 0


async def test_defaults_that_clients_send_along_are_taken():
    defaults = {
        "background": False,
        "truncation": "disabled",
        "top_logprobs": 0,
        "context_management": [],
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "safety_identifier": "me",
        "conversation": None,
        "reasoning": {"effort": None, "summary": None, "context": "auto", "mode": "standard"},
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tools": [{**ADD, "defer_loading": False, "allowed_callers": ["direct"]}],
        "tool_choice": "auto",
    }
    client = ScriptedClient(["ok"])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": "2", "status": None}
        part = {"type": "input_text", "text": "?", "prompt_cache_breakpoint": {"mode": "explicit"}}
        history = [
            {"type": "message", "role": "user", "content": [part], "status": "completed"},
            {**call, "id": None, "caller": {"type": "direct"}, "async": False},
            output,
        ]
        response = await agent.responses.create(model="m", input=history, extra_body=defaults)
    Response.model_validate(response.to_dict(), strict=True)
    assert dict(client.calls[0].sampling.extra) == {}
    assert [each["role"] for each in client.calls[0].messages] == ["user", "assistant", "tool"]


async def test_responses_are_those_of_their_session():
    async with (
        rt.gateway(ScriptedClient(lambda messages: "ok")) as g,
        g.session() as s,
        g.session() as other,
        openai_agent(s) as client,
        openai_agent(other) as second,
    ):
        response = await whole(client, input="?")
        chat = await client.chat.completions.create(model="m", messages=[USER])
        made_up = "resp_" + chat.id.removeprefix("chatcmpl-")
        for agent, response_id in (
            (second, response.id),
            (client, made_up),
            (client, chat.id),
            (client, "resp_1"),
        ):
            with pytest.raises(openai.NotFoundError):
                await agent.responses.retrieve(response_id)
            with pytest.raises(openai.NotFoundError):
                await whole(agent, input="?", previous_response_id=response_id)
        reference = {"type": "item_reference", "id": response.output[0].id}
        with pytest.raises(openai.NotFoundError):
            await whole(second, input=[USER, reference])
        assert len(other.trajectory) == 0


async def test_what_is_kept_is_neither_deleted_nor_streamed_again():
    async with rt.gateway(ScriptedClient(["ok"])) as g, g.session() as s, openai_agent(s) as client:
        response = await whole(client, input="?")
        for refused in (
            client.responses.delete(response.id),
            client.responses.cancel(response.id),
            client.responses.compact(model="m", input="?"),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await refused
            assert caught.value.status_code == 405
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.retrieve(response.id, stream=True)
        assert caught.value.param == "stream"
        assert await client.responses.retrieve(response.id) == response


async def test_the_input_of_a_response_is_listed_page_by_page():
    async with rt.gateway(thinking(adder)) as g, g.session() as s, openai_agent(s) as agent:
        asked = {"instructions": "Be brief.", "tools": [ADD], "model": "m"}
        first = await agent.responses.create(input="2+3", **asked)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            for call in calls
        ]
        last = await agent.responses.create(input=outputs, previous_response_id=first.id, **asked)
        page = await agent.responses.input_items.list(last.id, order="asc")
        kinds = [item.type for item in page.data]
        assert kinds == [
            *("message", "reasoning", "message", "function_call", "function_call"),
            *("function_call_output", "function_call_output"),
        ]
        assert page.data[0].content[0].text == "2+3"
        assert [item.call_id for item in page.data[3:]] == 2 * [call.call_id for call in calls]
        assert page.has_more is False
        # The default is the newest first; pages follow each other.
        newest = [item.id async for item in agent.responses.input_items.list(last.id, limit=2)]
        assert newest == [item.id for item in reversed(page.data)]
        assert (await agent.responses.input_items.list(first.id)).data[0].role == "user"
        for wrong, named in [({"limit": 0}, "limit"), ({"order": "up"}, "order")]:
            with pytest.raises(openai.BadRequestError, match=named):
                await agent.responses.input_items.list(last.id, **wrong)
        with pytest.raises(openai.NotFoundError):
            await agent.responses.input_items.list("resp_" + "0" * 24)
        # Sent back, they are what was said, not items of the answer that they were input of.
        again = [item.to_dict() for item in page.data]
        await agent.responses.create(input=again, **asked)
        assert is_one_path_but_last(s)


def is_one_path_but_last(session):
    """Whether the last call's prompt is the one before's: the same history in other words."""
    tree = session.trajectory.tree
    prompts = [step["response"].prompt_ids.tolist() for step in session.trajectory]
    return prompts[-1] == prompts[-2] and tree.num_calls == len(prompts)
