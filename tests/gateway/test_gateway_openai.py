"""The official openai package, unmodified, in front of a scripted model."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from gateway_kit import ADD, calling, is_one_path, openai_agent, paths

import rolltree as rt
from rolltree.gateway.fields import read_fields
from rolltree.gateway.openai_chat import CHAT_FIELDS, TEXT_FIELDS
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.request_fields import FIELDS
from rolltree.testing import ScriptedClient
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.web.guard import RequestError


def adder(messages):
    """Call the tool, then say what it said; ten turns are five questions."""
    last = messages[-1]
    if last["role"] == "tool":
        return f"It is {last['content']}."
    a, b = last["content"].split("+")
    return calling("add", f'{{"a": {int(a)}, "b": {int(b)}}}')


async def ask(client, messages, *, stream, **more):
    """Return the assistant's message as an agent would put it into its history."""
    if not stream:
        answer = await client.chat.completions.create(
            model="gpt-anything", messages=messages, **more
        )
        return answer.choices[0].message
    async with client.chat.completions.stream(
        model="gpt-anything", messages=messages, **more
    ) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0].message


async def converse(client, *, stream):
    """Ask five questions that each need a tool: ten calls of the model."""
    messages = []
    for number in range(5):
        messages.append({"role": "user", "content": f"{number}+2"})
        message = await ask(client, messages, stream=stream, tools=[ADD])
        call = message.tool_calls[0]
        # Another spelling of the same arguments, as agents write them that parse what they get.
        arguments = json.dumps(json.loads(call.function.arguments), separators=(",", ":"))
        function = {"name": call.function.name, "arguments": arguments}
        messages.append(
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            }
        )
        total = sum(json.loads(arguments).values())
        result = [{"type": "text", "text": str(total)}]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        message = await ask(client, messages, stream=stream, tools=[ADD])
        assert message.content == f"It is {total}."
        messages.append(message)
    return messages


async def test_a_conversation_of_ten_turns_is_one_path_streamed_and_not():
    found = []
    async with rt.gateway(ScriptedClient(adder)) as g:
        for stream in (False, True):
            async with g.session() as s, openai_agent(s) as client:
                await converse(client, stream=stream)
                assert len(s.trajectory) == 10
                assert is_one_path(s)
                found.append(paths(s))
    assert found[0] == found[1]


async def test_what_the_official_client_reads_of_an_answer():
    renderer = ChatRenderer(ByteTokenizer(), reasoning="think")
    client = ScriptedClient(["<think>hm</think>12"], renderer=renderer)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        answer = await agent.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "7+5"}], logprobs=True
        )
        choice, step = answer.choices[0], s.trajectory[0]
        assert answer.id.startswith("chatcmpl-")
        assert (answer.object, answer.model) == ("chat.completion", "gpt-4o")
        assert (choice.message.content, choice.finish_reason) == ("12", "stop")
        assert choice.message.reasoning_content == "hm"
        assert answer.usage.prompt_tokens == len(step["tokens"]["prompt_ids"])
        assert answer.usage.completion_tokens == len(step["tokens"]["completion_ids"])
        values = [each.logprob for each in choice.logprobs.content]
        assert values == pytest.approx(step["tokens"]["completion_logprobs"])


async def test_the_chunks_of_a_stream():
    client = ScriptedClient(["one two"], token_delay_s=0.001)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        stream = await agent.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "?"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one two"
    assert len(chunks) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("one two") + 1


async def test_each_tool_call_of_a_stream_has_its_own_chunk():
    """As from OpenAI: llama-index reads only the first call of a chunk."""
    calls = [{"function": {"name": "add", "arguments": f'{{"a": {a}, "b": 2}}'}} for a in (1, 3)]
    client = ScriptedClient([{"content": "Both.", "tool_calls": calls}])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        messages = [{"role": "user", "content": "1+2, 3+2"}]
        stream = await agent.chat.completions.create(
            model="m", messages=messages, tools=[ADD], stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "Both."
    found = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert [[call.index for call in each] for each in found] == [[0], [1]]
    assert [json.loads(each[0].function.arguments)["a"] for each in found] == [1, 3]


async def test_several_answers_are_calls_of_their_own():
    client = ScriptedClient(["first", "second", "third"])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        answer = await agent.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}], n=3
        )
        assert {choice.message.content for choice in answer.choices} == {"first", "second", "third"}
        assert len(s.trajectory) == 3


async def test_text_completions_continue_their_text():
    client = ScriptedClient(["one", "two"])
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        first = await agent.completions.create(model="m", prompt="count: ", max_tokens=50)
        text = f"count: {first.choices[0].text}, "
        chunks = await agent.completions.create(model="m", prompt=text, max_tokens=50, stream=True)
        said = "".join([chunk.choices[0].text async for chunk in chunks])
        assert (first.choices[0].text, said) == ("one", "two")
        assert first.object == "text_completion"
        assert [step["prompt"] for step in s.trajectory] == ["count: ", text]


async def test_ids_as_a_prompt():
    client = ScriptedClient(lambda prompt: prompt.upper())
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        answer = await agent.completions.create(model="m", prompt=list(b"abc"), max_tokens=9)
        assert answer.choices[0].text == "ABC"
        assert s.trajectory[0]["tokens"]["prompt_ids"] == list(b"abc")


async def test_a_session_returns_the_ids_that_it_records():
    client, ids = ScriptedClient(lambda prompt: "one"), {"return_token_ids": True}
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        several = await agent.completions.create(
            model="m", prompt=["a", "b"], n=2, max_tokens=9, extra_body=ids
        )
        prompts = [choice.prompt_token_ids for choice in several.choices]
        assert prompts == [[97], [97], [98], [98]]
        assert [step["tokens"]["prompt_ids"] for step in s.trajectory] == prompts
        assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (2, 16)
        chunks = await agent.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "?"}], stream=True, extra_body=ids
        )
        choices = [chunk.choices[0] async for chunk in chunks]
        sampled = s.trajectory[-1]["tokens"]["completion_ids"]
        assert [i for choice in choices for i in choice.token_ids] == sampled
        chunks = await agent.completions.create(
            model="m", prompt=["a", "b"], stream=True, extra_body=ids
        )
        streamed = {0: ([], []), 1: ([], [])}
        async for chunk in chunks:
            choice = chunk.choices[0]
            streamed[choice.index][0].extend(getattr(choice, "prompt_token_ids", None) or ())
            streamed[choice.index][1].extend(choice.token_ids)
        assert [prompt for prompt, _ in streamed.values()] == [[97], [98]]
        assert all(completion == sampled for _, completion in streamed.values())


async def test_models():
    async with rt.gateway(ScriptedClient(["x"])) as g, g.session() as s, openai_agent(s) as agent:
        assert [model.id async for model in await agent.models.list()] == ["scripted"]
        assert (await agent.models.retrieve("gpt-4o")).id == "gpt-4o"


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "messages[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"extra_body": {"guided_magic": 1}}, "guided_magic"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_by_name(fields, named):
    async with rt.gateway(ScriptedClient(["x"])) as g, g.session() as s, openai_agent(s) as agent:
        asked = {"model": "m", "messages": [{"role": "user", "content": "?"}], **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.chat.completions.create(**asked)
        assert caught.value.param == named
        assert len(s.trajectory) == 0


@pytest.mark.parametrize("part", [{}, {"type": "text"}, {"type": "text", "text": 5}])
async def test_a_text_without_text_is_not_called_a_picture(part):
    async with rt.gateway(ScriptedClient(["x"])) as g, g.session() as s, openai_agent(s) as agent:
        with pytest.raises(openai.BadRequestError, match=r"content\[0\] has no text in 'text'"):
            await agent.chat.completions.create(
                model="m", messages=[{"role": "user", "content": [part]}]
            )


@pytest.mark.parametrize(
    ("field", "value"), [("best_of", True), ("echo", 0), ("presence_penalty", False)]
)
def test_true_is_not_one_and_zero_is_not_false(field, value):
    """A number field that is `false` was dropped as if it were 0, and `best_of: true` was 1."""
    if TEXT_FIELDS[field].use == "only":
        with pytest.raises(RequestError, match=f"{field} = {value} cannot be obeyed"):
            read_fields({field: value}, TEXT_FIELDS)
    else:
        # The model's server refuses it.
        assert read_fields({field: value}, TEXT_FIELDS)[1].extra == {field: value}


def test_what_only_some_servers_do_is_left_to_them_and_defaults_are_not_sent():
    asked = {"guided_json": {"type": "object"}, "ignore_eos": True, "use_beam_search": False}
    defaults = {"length_penalty": 1, "echo": False, "user": "me", "skip_special_tokens": True}
    extra = read_fields({**asked, **defaults}, CHAT_FIELDS)[1].extra
    assert extra == {"guided_json": {"type": "object"}, "ignore_eos": True}
    own = {"messages", "prompt", "model", "tools"}
    assert (CHAT_FIELDS.keys() | TEXT_FIELDS.keys()) - own <= FIELDS.keys()


async def test_what_the_engine_does_not_do_is_refused_by_the_engine():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    model, tokenizer = rt.load_model("tiny")
    client = rt.local_client(model, tokenizer)
    try:
        async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
            with pytest.raises(openai.BadRequestError, match="ignore_eos"):
                await agent.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "?"}],
                    extra_body={"ignore_eos": True},
                )
    finally:
        await client.aclose()


async def test_the_embedded_engine_streams_the_ids_that_it_gives_whole():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    model, tokenizer = rt.load_model("tiny")
    client = rt.local_client(model, tokenizer)
    found, said = [], []
    try:
        async with rt.gateway(client) as g:
            for stream in (False, True):
                async with g.session(seed=5) as s, openai_agent(s) as agent:
                    messages = []
                    for turn in range(3):
                        messages.append({"role": "user", "content": f"turn {turn}"})
                        asked = {"model": "m", "messages": messages, "max_tokens": 12}
                        if stream:
                            chunks = await agent.chat.completions.create(**asked, stream=True)
                            parts = [chunk.choices[0].delta.content async for chunk in chunks]
                            content = "".join(part or "" for part in parts)
                        else:
                            answer = await agent.chat.completions.create(**asked)
                            content = answer.choices[0].message.content
                        messages.append({"role": "assistant", "content": content})
                    assert is_one_path(s)
                    found.append(paths(s))
                    said.append(messages)
    finally:
        await client.aclose()
    assert found[0] == found[1]
    assert said[0] == said[1]


async def test_hanging_up_takes_the_request_out_of_the_engine():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    model, tokenizer = rt.load_model("tiny")
    client = rt.local_client(model, tokenizer, max_context=4096)
    try:
        async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
            asked = {"model": "m", "messages": [{"role": "user", "content": "go on"}]}
            # Without an end, so that nothing but the client's leaving ends it.
            bias = {"logit_bias": {str(end): -100 for end in client.engine.eos_token_ids}}
            stream = await agent.chat.completions.create(**asked, **bias, stream=True)
            await anext(aiter(stream))
            async with client.engine.paused(), asyncio.timeout(60):
                # Nothing is sampled meanwhile: the request can only end by being taken out.
                await stream.close()
                while not s.num_cancelled:  # noqa: ASYNC110  (a connection's end)
                    await asyncio.sleep(0.005)
                assert not client.engine._in_flight
            assert (s.num_cancelled, len(s.trajectory)) == (1, 0)
            answer = await agent.chat.completions.create(**asked, max_tokens=3)
            assert answer.usage.completion_tokens == 3
    finally:
        await client.aclose()
