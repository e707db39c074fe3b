"""The official anthropic package, unmodified, in front of a scripted model."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import get_type_hints

import anthropic
import httpx
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params
from gateway_kit import is_one_path
from hypothesis import given
from hypothesis import strategies as st

import rolltree as rt
from rolltree.gateway import SessionLimits, wire
from rolltree.gateway.anthropic_messages import FIELDS, read_messages, write_message
from rolltree.gateway.calls import AgentAnswer, AnswerHead
from rolltree.gateway.messages import assistant, tool_call
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.message_index import MessageIndex
from rolltree.testing import ScriptedClient
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.errors import CallTimeout, ConnectionFailed, PromptTooLong, ServerError
from rolltree.values.types import FinishReason, ModelResponse

USER = [{"role": "user", "content": "begin"}]
TOOLS = [
    {
        "name": "add",
        "description": "Adds numbers.",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
]
NUM_TURNS = 10


def called(arguments, said=""):
    return {"content": said, "tool_calls": [tool_call("", "add", arguments)]}


def plays(messages):
    """Two turns with a call (the same one in both) and one without, and so on."""
    number = sum(message["role"] == "assistant" for message in messages)
    if number % 3 == 2:
        return f"said {number}"
    return called({"b": [1.5, "é"], "a": number // 3}, f"step {number}")


def reasons(messages):
    """The same with reasoning, and calls as the renderer below reads them."""
    number = sum(message["role"] == "assistant" for message in messages)
    call = f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'
    return f"<think>thought {number}</think>said {number}" + (call if number % 3 < 2 else "")


def thinker(script, **options):
    renderer = ChatRenderer(ByteTokenizer(), reasoning="think", tool_parser="hermes")
    return ScriptedClient(script, renderer=renderer, **options)


# A client reads all certificates otherwise, which takes longer than a call.
SSL = ssl.create_default_context()
TRANSPORTS = {
    anthropic.Anthropic: anthropic.DefaultHttpxClient,
    anthropic.AsyncAnthropic: anthropic.DefaultAsyncHttpxClient,
}


def agent(session, kind=anthropic.AsyncAnthropic, **options):
    options = {"api_key": session.api_key, "max_retries": 0, **options}
    return kind(base_url=session.root_url, http_client=TRANSPORTS[kind](verify=SSL), **options)


# -- ways to ask ---------------------------------------------------------------------------------


async def whole(session, **request):
    async with agent(session) as client:
        return await client.messages.create(**request)


async def helped(session, **request):
    async with agent(session) as client, client.messages.stream(**request) as stream:
        return await stream.get_final_message()


async def by_event(session, **request):
    """Add the raw events up, as a program without the helper does."""
    blocks, texts, message = [], [], None
    async with agent(session) as client:
        async for event in await client.messages.create(**request, stream=True):
            if event.type == "message_start":
                message = event.message
            elif event.type == "content_block_start":
                assert event.index == len(blocks)
                blocks.append(event.content_block)
                texts.append("")
            elif event.type == "content_block_delta":
                delta = event.delta
                if delta.type == "signature_delta":
                    blocks[event.index].signature = delta.signature
                else:
                    texts[event.index] += getattr(
                        delta, "partial_json" if delta.type[0] == "i" else delta.type[:-6]
                    )
            elif event.type == "message_delta":
                message.stop_reason = event.delta.stop_reason
    for block, text in zip(blocks, texts, strict=True):
        name = "input" if block.type == "tool_use" else block.type
        setattr(block, name, json.loads(text) if name == "input" else text)
    message.content = blocks
    return message


def _sync_whole(session, request):
    with agent(session, anthropic.Anthropic) as client:
        return client.messages.create(**request)


def _sync_helped(session, request):
    with agent(session, anthropic.Anthropic) as client, client.messages.stream(**request) as stream:
        return stream.get_final_message()


async def sync(session, **request):
    return await asyncio.to_thread(_sync_whole, session, request)


async def sync_helped(session, **request):
    return await asyncio.to_thread(_sync_helped, session, request)


WAYS = [whole, helped, by_event, sync, sync_helped]


def as_answered(message):
    return [{"role": "assistant", "content": message.content}]


async def converse(session, ask=whole, back=as_answered, num_turns=NUM_TURNS, **request):
    """Play `num_turns`; `back` says how the agent sends an answer back."""
    request = {"model": "claude-any", "max_tokens": 300, "tools": TOOLS, **request}
    messages = list(USER)
    for turn in range(num_turns):
        answer = await ask(session, messages=messages, **request)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"sum {turn}"}
            for call in calls
        ]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn")
        messages += [*back(answer), {"role": "user", "content": results or f"go on {turn}"}]
    return messages


def check_one_path(session, num_calls=NUM_TURNS):
    steps = session.trajectory
    assert len(steps) == num_calls
    assert session.breaks == ()
    assert steps.tree.num_tokens == steps.tree.path_len(steps.call_of(num_calls - 1))


def ids_of(session):
    return [
        (step["response"].prompt_ids.tolist(), step["response"].completion_ids.tolist())
        for step in session.trajectory
    ]


# -- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [plays, reasons])
async def test_ten_turns_are_one_path_however_they_are_asked_for(script):
    make = thinker if script is reasons else ScriptedClient
    found = []
    async with rt.gateway(make(script)) as g:
        for way in WAYS:
            async with g.session() as s:
                await converse(s, way, thinking={"type": "adaptive"}, system="Add.")
                check_one_path(s)
                found.append(ids_of(s))
    assert all(each == found[0] for each in found[1:])


def without_thinking(message):
    blocks = [block for block in message.content if block.type != "thinking"]
    return [{"role": "assistant", "content": blocks}]


def redacted(message):
    blocks = [
        {"type": "redacted_thinking", "data": "xyz"} if block.type == "thinking" else block
        for block in message.content
    ]
    return [{"role": "assistant", "content": blocks}]


def dumped(message):
    return [{"role": "assistant", "content": [block.model_dump() for block in message.content]}]


def reserialised(message):
    blocks = json.loads(json.dumps(dumped(message)[0]["content"], sort_keys=True, indent=2))
    return [{"role": "assistant", "content": blocks}]


def split(message):
    """Text in several blocks, with space around it and marks of the cache."""
    blocks = []
    for block in message.content:
        if block.type == "text":
            parts = [f" {block.text[:3]}", block.text[3:], " "]
            mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "citations": None}
            blocks += [{"type": "text", "text": part, **mark} for part in parts]
        else:
            blocks.append(block)
    return [{"role": "assistant", "content": blocks}]


def one_message_a_block(message):
    return [{"role": "assistant", "content": [block]} for block in message.content]


def as_text(message):
    """A string where there is only text."""
    blocks = [block for block in message.content if block.type != "thinking"]
    is_text = len(blocks) == 1 and blocks[0].type == "text"
    return [{"role": "assistant", "content": blocks[0].text if is_text else blocks}]


def with_direct_caller(message):
    blocks = dumped(message)[0]["content"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["caller"] = {"type": "direct"}
    return [{"role": "assistant", "content": blocks}]


@pytest.mark.parametrize(
    "back",
    [
        without_thinking,
        redacted,
        dumped,
        reserialised,
        split,
        one_message_a_block,
        as_text,
        with_direct_caller,
    ],
)
async def test_rewritten_histories_still_continue(back):
    async with rt.gateway(thinker(reasons)) as g, g.session() as s:
        await converse(s, back=back, thinking={"type": "enabled", "budget_tokens": 1024})
        check_one_path(s)


async def test_what_truly_differs_is_a_break():
    def edited(message):
        return [{"role": "assistant", "content": "something else"}]

    async with rt.gateway(ScriptedClient(lambda messages: "said")) as g, g.session() as s:
        await converse(s, back=edited, num_turns=2)
        assert len(s.breaks) == 1


async def test_calls_have_ids_of_their_own_and_the_model_sees_the_ones_it_made():
    async with rt.gateway(ScriptedClient(plays)) as g, g.session() as s:
        messages = await converse(s, num_turns=5)
    turns = [turn for turn in messages if isinstance(turn["content"], list)]
    blocks = [block for turn in turns for block in turn["content"]]
    uses = [block.id for block in blocks if getattr(block, "type", "") == "tool_use"]
    assert len(uses) == len(set(uses)) == 4
    last = s.trajectory[4]["prompt"]
    made = [call["id"] for message in last for call in message.get("tool_calls", ())]
    answered = [message["tool_call_id"] for message in last if message["role"] == "tool"]
    assert made == answered
    assert not any(call_id.startswith("toolu_") for call_id in made)


async def test_results_text_and_failures_of_tools_reach_the_model():
    client = ScriptedClient(plays)
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": i, "name": "add", "input": {}}
                                          for i in ("x", "y", "z")]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "x"},
                {"type": "tool_result", "tool_use_id": "y", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "z",
                    "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Hurry."}]},
    ]  # fmt: skip
    async with rt.gateway(client) as g, g.session() as s:
        system = [{"type": "text", "text": "One."}, {"type": "text", "text": " Two."}]
        await whole(s, model="m", max_tokens=9, messages=history, system=system, tools=TOOLS)
    asked = client.calls[0]
    calls = [tool_call(name, "add", "{}") for name in ("x", "y", "z")]
    assert asked.messages == [
        {"role": "system", "content": "One. Two."},
        {"role": "user", "content": "ab"},
        assistant("", calls),
        {"role": "tool", "content": "", "tool_call_id": "x"},
        {"role": "tool", "content": "error", "tool_call_id": "y"},
        {"role": "tool", "content": "12", "tool_call_id": "z"},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "Hurry."},
    ]
    tool = TOOLS[0]
    function = {"name": "add", "description": "Adds numbers.", "parameters": tool["input_schema"]}
    assert asked.tools == ({"type": "function", "function": function},)


async def test_sub_agents_are_told_apart_by_the_url():
    async with rt.gateway(ScriptedClient(plays)) as g, g.session() as s:
        async with agent(s) as client:
            other = client.with_options(base_url=f"{s.root_url}/agents/helper")
            await other.messages.create(model="m", max_tokens=99, messages=USER)
        assert [step["extras"]["agent"] for step in s.trajectory] == ["helper"]


# -- answers -------------------------------------------------------------------------------------


async def test_streamed_events_come_in_the_official_order():
    async with rt.gateway(thinker(reasons)) as g, g.session() as s:
        request = {"model": "claude-x", "max_tokens": 200, "messages": USER, "tools": TOOLS}
        events = []
        async with agent(s) as client:
            stream = await client.messages.create(
                **request, thinking={"type": "adaptive"}, stream=True
            )
            async for event in stream:
                name = event.type
                if name == "content_block_start":
                    name = f"start {event.index} {event.content_block.type}"
                elif name == "content_block_delta":
                    name = f"delta {event.index} {event.delta.type}"
                elif name == "content_block_stop":
                    name = f"stop {event.index}"
                if not events or name != events[-1]:
                    events.append(name)
                if event.type == "message_delta":
                    counted = event
    assert events == [
        "message_start",
        "start 0 thinking",
        "delta 0 thinking_delta",
        "delta 0 signature_delta",
        "stop 0",
        "start 1 text",
        "delta 1 text_delta",
        "stop 1",
        "start 2 tool_use",
        "delta 2 input_json_delta",
        "stop 2",
        "message_delta",
        "message_stop",
    ]
    response = s.trajectory[0]["response"]
    assert counted.usage.output_tokens == response.num_completion_tokens
    assert counted.usage.input_tokens == response.num_prompt_tokens
    assert counted.delta.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("thinking", "shown"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, "thought 0"),
        ({"type": "adaptive", "display": "summarized"}, "thought 0"),
        ({"type": "adaptive", "display": "omitted"}, ""),
        ({"type": "disabled"}, None),
        (None, None),
    ],
)
async def test_thinking_is_shown_as_it_was_asked_for(thinking, shown):
    request = {"model": "m", "max_tokens": 200, "messages": USER, "tools": TOOLS}
    if thinking is not None:
        request["thinking"] = thinking
    answers = []
    async with rt.gateway(thinker(reasons)) as g:
        for way in WAYS:
            async with g.session() as s:
                answer = await way(s, **request)
                said = s.trajectory[0]["response"].message
                assert said["reasoning_content"] == "thought 0"
            kinds = [block.type for block in answer.content]
            assert kinds == [*(["thinking"] if shown is not None else []), "text", "tool_use"]
            if shown is not None:
                assert answer.content[0].thinking == shown
                assert answer.content[0].signature
            answers.append([block.model_dump(exclude={"id", "signature"}, exclude_none=True)
                            for block in answer.content])  # fmt: skip
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize(
    ("said", "request_", "reason", "stop", "text"),
    [
        ("all of it", {}, "end_turn", None, "all of it"),
        ("all of it", {"max_tokens": 3}, "max_tokens", None, "all"),
        ("one.two.three", {"stop_sequences": ["thr", ".t"]}, "stop_sequence", ".t", "one"),
        (called({"a": 1}), {"tools": TOOLS}, "tool_use", None, None),
        ("", {}, "end_turn", None, ""),
    ],
)
async def test_why_an_answer_ended(way, said, request_, reason, stop, text):
    async with rt.gateway(ScriptedClient([said])) as g, g.session() as s:
        request = {"model": "m", "max_tokens": 200, "messages": USER, **request_}
        answer = await way(s, **request)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)
    assert answer.content[0].type == ("tool_use" if text is None else "text")
    assert text is None or [block.text for block in answer.content] == [text]


async def test_the_sessions_own_stop_strings_are_not_reported():
    async with (
        rt.gateway(ScriptedClient(["a;b"])) as g,
        g.session(sampling={"stop": [";"]}) as s,
    ):
        answer = await whole(s, model="m", max_tokens=9, messages=USER)
    assert (answer.content[0].text, answer.stop_reason) == ("a", "end_turn")


async def test_settings_reach_the_model_and_mark_the_call():
    client = ScriptedClient(plays)
    async with rt.gateway(client) as g, g.session() as s:
        await whole(
            s,
            model="m",
            max_tokens=7,
            messages=USER,
            stop_sequences=["x"],
            tools=TOOLS,
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            output_config={
                "effort": "low",
                "format": {"type": "json_schema", "schema": {"type": "object"}},
            },
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
        )
        named = {"type": "tool", "name": "add"}
        await whole(
            s, model="m", max_tokens=7, messages=USER, tools=TOOLS, tool_choice=named,
            output_config={"effort": "high"},
        )  # fmt: skip
        none = {"type": "none"}
        await whole(s, model="m", max_tokens=7, messages=USER, tools=TOOLS, tool_choice=none)
        changed, notes = s.changed_sampling, s.notes
    first, second, third = (call.sampling for call in client.calls)
    assert (first.temperature, first.top_p, first.top_k) == (0.5, 0.9, 3)
    assert (first.max_tokens, first.stop) == (7, ("x",))
    assert first.extra == {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert second.extra == {"tool_choice": {"type": "function", "function": {"name": "add"}}}
    assert third.extra == {}
    assert client.calls[2].tools == ()
    # The prompt is rendered here, so the wish reaches nobody; a forced call can be a single one.
    assert notes.keys() == {"reasoning_effort"}
    assert changed[0].keys() >= {"top_p", "top_k"}


async def test_the_effort_of_one_message_is_noted():
    # Claude Code sends it with its newest message, and drops it from the history.
    told = {"role": "system", "content": "Hurry.", "output_config": {"effort": "medium"}}
    client = ScriptedClient(["Yes.", "Done."])
    async with rt.gateway(client) as g, g.session() as s:
        first = await whole(s, model="m", max_tokens=7, messages=[*USER, told])
        later = [{**told, "output_config": None}, {"role": "assistant", "content": first.content}]
        await whole(s, model="m", max_tokens=7, messages=[*USER, *later, *USER])
        assert is_one_path(s)
        assert s.notes.keys() == {"messages.output_config"}
        bad = {**told, "output_config": {"task_budget": {"type": "tokens", "total": 9}}}
        with pytest.raises(anthropic.BadRequestError, match="task_budget"):
            await whole(s, model="m", max_tokens=7, messages=[*USER, bad])


async def test_tokens_are_counted_as_the_prompt_has_them():
    async with rt.gateway(ScriptedClient(plays)) as g, g.session() as s, agent(s) as client:
        prompt = {"model": "m", "messages": USER, "tools": TOOLS, "system": "Add."}
        counted = await client.messages.count_tokens(**prompt)
        assert len(s.trajectory) == 0
        answer = await client.messages.create(max_tokens=9, **prompt)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_models_are_listed_for_both_official_clients():
    async with rt.gateway(ScriptedClient(plays, model="mine")) as g, g.session() as s:
        async with agent(s) as client:
            found = [model async for model in client.models.list()]
            named = await client.models.retrieve("claude-any")
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key) as client:
            listed = [model.id async for model in client.models.list()]
    assert [(m.id, m.type, m.display_name) for m in found] == [("mine", "model", "mine")]
    assert abs(found[0].created_at.timestamp() - s.opened_s) <= 1
    assert named.id == "claude-any"
    assert listed == ["mine"]


async def test_a_silent_stream_is_kept_alive_by_pings(monkeypatch):
    monkeypatch.setattr(wire, "PING_S", 0.01)
    async with rt.gateway(ScriptedClient(["late"], delay_s=0.2)) as g, g.session() as s:
        body = {"model": "m", "max_tokens": 9, "messages": USER, "stream": True}
        async with httpx.AsyncClient() as client:
            headers = {"x-api-key": s.api_key}
            answer = await client.post(f"{s.base_url}/messages", json=body, headers=headers)
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in answer.text
    async with rt.gateway(ScriptedClient(["late"], delay_s=0.2)) as g, g.session() as s:
        answer = await helped(s, model="m", max_tokens=9, messages=USER)
        assert answer.content[0].text == "late"


# -- arguments that are not a JSON object ----------------------------------------------------------


def answered(message):
    reason = FinishReason.TOOL_CALLS
    return AgentAnswer(
        AnswerHead("0" * 24, "m", 0), message, reason, ModelResponse(message, "", reason)
    )


def asked(messages):
    return read_messages({"model": "m", "messages": messages}, None)


@given(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(["", "[1]", '{"a": 1', '{"INVALID_JSON": "x"}', '{"INVALID_JSON": 1}']),
        st.dictionaries(
            st.text(max_size=3),
            st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
        ).map(json.dumps),
    )
)
def test_whatever_a_model_writes_as_arguments_comes_back_as_the_same_call(arguments):
    message = assistant("", [tool_call("made", "add", arguments)])
    body = write_message(asked(USER), [answered(message)])
    use = body["content"][0]
    assert isinstance(use["input"], dict)
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "1"}
    history = [
        *USER,
        {"role": "assistant", "content": json.loads(json.dumps(body["content"]))},
        {"role": "user", "content": [result]},
    ]
    index = MessageIndex()
    index.add(asked(USER).prompt, message, 7)
    found = index.find(asked(history).prompt)
    assert found is not None
    assert (found.call, found.num_old) == (7, 2)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        message_create_params.MessageCreateParamsBase,
        message_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_params.MessageCreateParamsBase,
    ],
)
def test_every_field_of_the_official_client_is_in_the_table(params):
    names = get_type_hints(params, include_extras=False).keys()
    assert names >= {"messages", "model", "tools"}
    assert names - FIELDS.keys() == set()


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


def said(**fields):
    return {"messages": [{"role": "assistant", "content": [fields]}, *USER]}


def tool(**fields):
    return {"tools": [TOOLS[0], {**TOOLS[0], **fields}]}


IMAGE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
REFUSED = {
    "image": (block(type="image", source=IMAGE), "messages[0].content[0]"),
    "document": (
        block(type="document", source={"type": "text", "media_type": "text/plain", "data": "x"}),
        "messages[0].content[0]",
    ),
    "search_result": (
        block(type="search_result", source="x", title="x", content=[]),
        "messages[0].content[0]",
    ),
    "container_upload": (block(type="container_upload", file_id="f"), "messages[0].content[0]"),
    "image in a result": (
        block(type="tool_result", tool_use_id="x", content=[{"type": "image", "source": IMAGE}]),
        "messages[0].content[0].content[0]",
    ),
    "toolset": (
        block(type="tool_result", tool_use_id="x", toolset_name="browser"),
        "messages[0].content[0].toolset_name",
    ),
    "server_tool_use": (
        said(type="server_tool_use", id="x", name="web_search", input={}),
        "messages[0].content[0]",
    ),
    "web_search_tool_result": (
        said(type="web_search_tool_result", tool_use_id="x", content=[]),
        "messages[0].content[0]",
    ),
    "mcp_tool_use": (
        said(type="mcp_tool_use", id="x", name="x", server_name="x", input={}),
        "messages[0].content[0]",
    ),
    "caller": (
        said(type="tool_use", id="x", name="x", input={}, caller={"type": "code_execution"}),
        "messages[0].content[0].caller",
    ),
    "input": (said(type="tool_use", id="x", name="x", input=[]), "messages[0].content[0].input"),
    "block without a type": (block(text="x"), "messages[0].content[0]"),
    "text that is not text": (block(type="text", text=1), "messages[0].content[0].text"),
    "content": ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "field of a turn": (
        {"messages": [{"role": "user", "content": "x", "name": "ann"}]},
        "messages[0].name",
    ),
    "message": ({"messages": ["hi"]}, "messages[0]"),
    "no messages": ({"messages": []}, "messages"),
    "allowed_callers": (
        tool(allowed_callers=["code_execution_20250825"]),
        "tools[1].allowed_callers",
    ),
    "tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    "tools": ({"tools": {}}, "tools"),
    "tool_choice": ({"tool_choice": {"type": "some"}}, "tool_choice"),
    "thread": ({"thread": {"type": "create"}}, "thread"),
    "compaction": ({"compaction": {"type": "summarize"}}, "compaction"),
    "thinking": ({"thinking": {"type": "always"}}, "thinking.type"),
    "display": ({"thinking": {"type": "adaptive", "display": "updates"}}, "thinking.display"),
    "output format": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "cleared tool uses": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
    ),
    "cleared thinking": (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        "context_management.edits[0]",
    ),
    "n": ({"n": 2}, "n"),
    "misspelled": ({"max_token": 3}, "max_token"),
    "system": ({"system": [{"type": "image", "source": IMAGE}]}, "system[0]"),
    "model": ({"model": 3}, "model"),
    "stream": ({"stream": "yes"}, "stream"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_obeyed_is_refused_by_name(name):
    extra, param = REFUSED[name]
    async with rt.gateway(ScriptedClient(plays)) as g, g.session() as s:
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as caught:
                async with agent(s) as client:
                    await client.messages.create(
                        model="m", max_tokens=9, messages=USER, stream=stream, extra_body=extra
                    )
            body = caught.value.body
            assert body["type"] == "error"
            assert caught.value.type == "invalid_request_error"
            assert body["error"]["details"]["param"] == param
            assert param.split(".")[-1] in body["error"]["message"]
        assert len(s.trajectory) == 0


async def test_a_wrong_key_is_an_authentication_error():
    async with rt.gateway(ScriptedClient(plays)) as g, g.session() as s, g.session() as other:
        for key in ("wrong", other.api_key):
            async with agent(s, api_key=key) as client:
                for ask in (client.messages.create, client.messages.count_tokens):
                    limit = {} if ask == client.messages.count_tokens else {"max_tokens": 9}
                    with pytest.raises(anthropic.AuthenticationError) as caught:
                        await ask(model="m", messages=USER, **limit)
                    assert caught.value.type == "authentication_error"


@pytest.mark.parametrize(
    ("error", "expected", "kind"),
    [
        (PromptTooLong("9 tokens, 5 fit"), anthropic.BadRequestError, "invalid_request_error"),
        (CallTimeout("slow"), anthropic.GatewayTimeoutError, "timeout_error"),
        (ConnectionFailed("gone"), anthropic.ServiceUnavailableError, "overloaded_error"),
        (
            ServerError("broken", status=500, retryable=True),
            anthropic.InternalServerError,
            "api_error",
        ),
    ],
)
async def test_failures_of_the_model_are_the_official_exceptions(error, expected, kind):
    def fails(messages):
        raise error

    async with rt.gateway(ScriptedClient(fails)) as g, g.session() as s:
        for way in (whole, helped):
            with pytest.raises(expected) as caught:
                await way(s, model="m", max_tokens=9, messages=USER)
            assert caught.value.type == kind
    if isinstance(error, PromptTooLong):
        assert caught.value.api_message == "prompt is too long: 9 tokens, 5 fit"
        assert caught.value.error_code == "context_length_exceeded"


async def test_a_session_at_its_limit_refuses():
    limits = SessionLimits(max_calls=1)
    async with rt.gateway(ScriptedClient(plays)) as g, g.session(limits=limits) as s:
        await whole(s, model="m", max_tokens=9, messages=USER)
        with pytest.raises(anthropic.PermissionDeniedError) as caught:
            await whole(s, model="m", max_tokens=9, messages=USER)
    assert caught.value.type == "permission_error"


class Breaking(ScriptedClient):
    async def respond(self, call, memory):
        await super().respond(call, memory)
        raise ConnectionFailed("the server is gone")


async def test_a_failure_in_the_middle_of_a_stream_is_an_event():
    heard = []

    async def listen(session):
        request = {"model": "m", "max_tokens": 99, "messages": USER}
        async with agent(session) as client, client.messages.stream(**request) as stream:
            async for new in stream.text_stream:
                heard.append(new)

    async with rt.gateway(Breaking(["some words"], token_delay_s=0.01)) as g, g.session() as s:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await listen(s)
        assert caught.value.type == "overloaded_error"
        assert len(s.trajectory) == 0
    assert heard
    assert "some words".startswith("".join(heard))


# -- a coding agent's requests -------------------------------------------------------------------


def coding_request(turn, messages):
    """What Claude Code sends beside its history; the mark of the cache moves from turn to turn."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={turn:05x};"
    tools = [
        {
            "name": f"Tool{number}",
            "description": "Does something. " * 20,
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
        }
        for number in range(100)
    ]
    last = dict(messages[-1])
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    last["content"] = [*last["content"][:-1], {**last["content"][-1], **cached}]
    return {
        "model": "claude-opus-4-6",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are a coding agent.", **cached},
            {"type": "text", "text": "\nBe brief.", **cached},
        ],
        "messages": [*messages[:-1], last],
        "tools": tools,
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "service_tier": "auto",
        "speed": "standard",
        "cache_control": {"type": "ephemeral"},
        "diagnostics": {"previous_message_id": None},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
    }


def calls_a_tool(messages):
    number = sum(message["role"] == "assistant" for message in messages)
    call = f'<tool_call>{{"name": "Tool7", "arguments": {{"path": "/{number}"}}}}</tool_call>'
    return f"<think>thought {number}</think>\n\nLooking.\n{call}"


async def test_a_coding_agents_requests_are_one_path():
    client = thinker(calls_a_tool)
    async with rt.gateway(client) as g, g.session() as s:
        messages = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>x</system-reminder>"},
                    {"type": "text", "text": "Fix it."},
                ],
            }
        ]
        async with agent(s) as official:
            for turn in range(4):
                request = coding_request(turn, messages)
                headers = {"x-app": "cli", "anthropic-dangerous-direct-browser-access": "true"}
                async with official.beta.messages.stream(
                    **request, extra_headers=headers
                ) as stream:
                    answer = await stream.get_final_message()
                (use,) = [block for block in answer.content if block.type == "tool_use"]
                result = {"type": "tool_result", "tool_use_id": use.id, "content": f"file {turn}"}
                messages += [
                    {"role": "assistant", "content": answer.content},
                    {"role": "user", "content": [result]},
                ]
        check_one_path(s, 4)
        assert s.changed_sampling == {}
    first = client.calls[0]
    assert "cch=" in request["system"][0]["text"]
    assert first.messages[0]["content"] == "You are a coding agent.\nBe brief."
    assert len(first.tools) == 100
    assert "cch=" not in client.renderer.decode(s.trajectory[0]["response"].prompt_ids)
