"""Streams of several answers, with logprobs in every chunk, and with the size of the prompt."""

import asyncio

import anthropic
import openai
import pytest
from gateway_kit import Lingering, openai_agent

import rolltree as rt
from rolltree.gateway import SessionLimits
from rolltree.testing import ScriptedClient
from wait_kit import until

ASKED = [{"role": "user", "content": "7 + 5 ="}]


@pytest.fixture
async def tiny():
    client = rt.local_client(*rt.load_model("tiny"))
    yield client
    await client.aclose()


def choices_of(chunks):
    """Return the text, the logprobs and the finish reason of each choice of a stream."""
    found = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text, entries, reasons = found.setdefault(choice.index, ([], [], []))
            delta = getattr(choice, "delta", None)
            said = choice.text if delta is None else delta.content
            text.append(said or "")
            entries.append((said, choice.logprobs))
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return {index: ("".join(text), rest, reasons) for index, (text, rest, reasons) in found.items()}


async def stream_of(asking):
    return [chunk async for chunk in await asking]


async def test_several_answers_of_a_chat_are_streamed_side_by_side(tiny):
    asked = {"model": "m", "messages": ASKED, "n": 3, "max_tokens": 9}
    async with rt.gateway(tiny) as g:
        async with g.session(seed=5) as s, openai_agent(s) as agent:
            usage = {"include_usage": True}
            chunks = await stream_of(
                agent.chat.completions.create(**asked, stream=True, stream_options=usage)
            )
            assert len(s.trajectory) == 3
        async with g.session(seed=5) as other, openai_agent(other) as agent:
            whole = await agent.chat.completions.create(**asked)
    choices = choices_of(chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        text, _, reasons = choices[choice.index]
        assert (text, reasons) == (choice.message.content, [choice.finish_reason])
    assert len({text for text, _, _ in choices.values()}) > 1
    first = [chunk.choices[0].index for chunk in chunks[:6]]
    assert len(set(first)) > 1, "the answers come one after the other"
    counts = (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)
    assert counts == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


async def test_a_batch_of_prompts_is_streamed(tiny):
    asked = {"model": "m", "prompt": ["7 + 5 =", "8 + 5 ="], "n": 2, "max_tokens": 5}
    async with rt.gateway(tiny) as g:
        async with g.session(seed=5) as s, openai_agent(s) as agent:
            chunks = await stream_of(agent.completions.create(**asked, stream=True))
            prompts = sorted(step["prompt"] for step in s.trajectory)
        async with g.session(seed=5) as other, openai_agent(other) as agent:
            whole = await agent.completions.create(**asked)
    assert prompts == ["7 + 5 ="] * 2 + ["8 + 5 ="] * 2
    choices = choices_of(chunks)
    assert choices.keys() == {0, 1, 2, 3}
    for choice in whole.choices:
        assert choices[choice.index][0] == choice.text


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_every_chunk_has_the_logprobs_of_its_tokens(tiny, kind, n):
    async with rt.gateway(tiny) as g, g.session(seed=1) as s, openai_agent(s) as agent:
        more = {"model": "m", "n": n, "max_tokens": 9, "stream": True}
        if kind == "chat":
            asking = agent.chat.completions.create(messages=ASKED, logprobs=True, **more)
        else:
            asking = agent.completions.create(prompt="7 + 5 =", logprobs=1, **more)
        choices = choices_of(await stream_of(asking))
        recorded = [list(step["tokens"]["completion_logprobs"]) for step in s.trajectory]
    assert choices.keys() == set(range(n))
    streamed = []
    for _, entries, _ in choices.values():
        values = []
        for said, logprobs in entries:
            assert logprobs is not None or not said
            if logprobs is not None:
                per_token = (
                    [entry.logprob for entry in logprobs.content or ()]
                    if kind == "chat"
                    else logprobs.token_logprobs
                )
                values.append(per_token)
        # The last token ends the answer, so it comes with its end.
        assert all(len(each) == 1 for each in values[:-1])
        streamed.append(pytest.approx([value for each in values for value in each]))
    assert len(streamed) == len(recorded)
    assert all(any(each == values for values in recorded) for each in streamed)


async def test_the_deltas_of_a_response_have_the_logprobs_of_their_text(tiny):
    asked = {"model": "m", "input": "7 + 5 =", "max_output_tokens": 16, "stream": True}
    include = ["message.output_text.logprobs"]
    async with rt.gateway(tiny) as g, g.session(seed=1) as s, openai_agent(s) as agent:
        events = await stream_of(agent.responses.create(**asked, include=include))
        plain = await stream_of(agent.responses.create(**asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert len(deltas) > 5
    for event in deltas:
        spelled = [each.token for each in event.logprobs]
        assert "\ufffd" in spelled or "".join(spelled) == event.delta
    values = [each.logprob for event in deltas for each in event.logprobs]
    assert values == [each.logprob for each in done.logprobs]
    assert all(getattr(event, "logprobs", []) == [] for event in plain)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_offsets_of_tokens_in_the_text_of_a_completion(tiny, stream):
    asked = {"model": "m", "prompt": "7 + 5 =", "max_tokens": 9, "logprobs": 1, "n": 2}
    async with rt.gateway(tiny) as g, g.session(seed=1) as s, openai_agent(s) as agent:
        asking = agent.completions.create(**asked, stream=stream)
        bodies = await stream_of(asking) if stream else [await asking]
    found = {}
    for choice in (choice for body in bodies for choice in body.choices):
        text, tokens, offsets = found.setdefault(choice.index, ([], [], []))
        text.append(choice.text)
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
    assert found.keys() == {0, 1}
    for text, tokens, offsets in found.values():
        assert len(tokens) == len(offsets) == 9
        assert offsets[0] == 0
        said = "".join(text)
        starts = zip(tokens, offsets, strict=True)
        # Tokens that are parts of a character begin where it does.
        assert all(said[at:].startswith(token) for token, at in starts if token != "\ufffd")


async def test_a_stream_without_logprobs_has_a_chunk_for_new_text_only():
    client = ScriptedClient(["12!"], token_delay_s=0.001)
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        asking = agent.chat.completions.create(model="m", messages=ASKED, stream=True)
        chunks = await stream_of(asking)
    assert [chunk.choices[0].logprobs for chunk in chunks] == [None] * len(chunks)
    assert all(chunk.choices[0].delta.content for chunk in chunks[:-1])


async def test_hanging_up_ends_all_answers_of_a_stream():
    client = Lingering(ScriptedClient(["x"]))
    client.may_end.set()
    async with rt.gateway(client) as g, g.session() as s:
        async with openai_agent(s) as agent:
            asking = agent.chat.completions.create(model="m", messages=ASKED, stream=True, n=3)
            task = asyncio.ensure_future(asking)
            await until(lambda: s.num_in_flight == 3)
            task.cancel()
            await asyncio.wait((task,))
        await until(lambda: s.num_cancelled == 3)
        assert len(s.trajectory) == 0


async def test_a_limit_refuses_a_stream_of_more_answers():
    client = ScriptedClient(lambda messages: "x")
    limits = SessionLimits(max_calls=2)
    async with (
        rt.gateway(client, limits=limits) as g,
        g.session() as s,
        openai_agent(s) as agent,
    ):
        with pytest.raises(openai.PermissionDeniedError):
            await agent.chat.completions.create(model="m", messages=ASKED, stream=True, n=3)


@pytest.mark.parametrize("scripted", [False, True])
async def test_a_message_starts_with_the_size_of_its_prompt(tiny, scripted):
    client = ScriptedClient(["twelve"], token_delay_s=0.001) if scripted else tiny
    async with rt.gateway(client) as g, g.session() as s:
        async with anthropic.AsyncAnthropic(base_url=s.root_url, api_key=s.api_key) as agent:
            asked = {"model": "m", "max_tokens": 9, "messages": ASKED}
            events = [event async for event in await agent.messages.create(**asked, stream=True)]
        size = len(s.trajectory[0]["tokens"]["prompt_ids"])
    assert events[0].type == "message_start"
    assert events[0].message.usage.input_tokens == size > 0
    usage = next(event.usage for event in events if event.type == "message_delta")
    assert usage.input_tokens + usage.cache_read_input_tokens == size
