"""Requests that change how the embedded engine renders a prompt and samples its answer."""

from __future__ import annotations

import math

import anthropic
import openai
import pytest
from gateway_kit import is_one_path, openai_agent

import rolltree as rt
from chat_templates import LEADING
from rolltree.inference import ChatRenderer
from rolltree.testing import ScriptedClient

SHORT = {"model": "m", "max_tokens": 4}
USER = {"role": "user", "content": "7 + 5?"}


@pytest.fixture
async def tiny():
    """Return a function that makes a client of the tiny model; all are closed at the end."""
    made = []

    def make(template=None, **options):
        model, tokenizer = rt.load_model("tiny")
        if template is not None:
            options["renderer"] = ChatRenderer(tokenizer, template)
        made.append(rt.local_client(model, tokenizer, **options))
        return made[-1]

    yield make
    for client in made:
        await client.aclose()


def anthropic_agent(session):
    return anthropic.AsyncAnthropic(
        base_url=session.root_url, api_key=session.api_key, max_retries=0, timeout=300.0
    )


# -- late system messages ------------------------------------------------------------------------


async def test_late_instructions_keep_their_place_where_the_template_refuses_them(tiny):
    """Claude Code's requests, with a template in the manner of Qwen3.5's."""
    history = [USER]
    async with (
        rt.gateway(tiny(LEADING)) as g,
        g.session() as s,
        anthropic_agent(s) as agent,
    ):
        for more in ([{"role": "system", "content": "Be kind."}, USER], [USER], [USER]):
            reply = await agent.messages.create(
                **SHORT,
                system="Be brief.",
                messages=history,
                extra_body={"messages": history},
            )
            said = "".join(block.text for block in reply.content if block.type == "text")
            history = [*history, {"role": "assistant", "content": said}, *more]
        assert is_one_path(s)
        assert s.notes.keys() == {"messages.system"}
        shown = s.trajectory[2]["tokens"]["prompt_ids"]
        text = g.client.renderer.decode(shown)
    assert "<|im_start|>user\n<system-reminder>\nBe kind.\n</system-reminder><|im_end|>" in text
    assert s.state["error"] is None


# -- the likeliest tokens ------------------------------------------------------------------------


def check_likeliest(entries, number, *, greedy=True):
    """Check entries of chat's logprobs: ordered, with the sampled token first if greedy."""
    assert entries
    for entry in entries:
        likeliest = entry.top_logprobs
        assert len(likeliest) == number
        values = [each.logprob for each in likeliest]
        assert values == sorted(values, reverse=True)
        assert values[0] <= 0
        if greedy:
            assert (likeliest[0].token, values[0]) == (entry.token, entry.logprob)


async def test_the_likeliest_tokens_at_each_place_in_the_form_of_each_protocol(tiny, tmp_path):
    asked = {"model": "m", "temperature": 0, "seed": 1}
    chat = {**asked, "messages": [USER], "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    async with (
        rt.gateway(tiny(), directory=tmp_path) as g,
        g.session() as s,
        openai_agent(s) as agent,
    ):
        whole = await agent.chat.completions.create(**chat)
        check_likeliest(whole.choices[0].logprobs.content, 3)
        found = []
        async for chunk in await agent.chat.completions.create(**chat, stream=True):
            for choice in chunk.choices:
                found += choice.logprobs.content if choice.logprobs else []
        check_likeliest(found, 3)
        once = whole.choices[0].logprobs.content
        assert [each.token for each in found] == [each.token for each in once]
        text = await agent.completions.create(**asked, prompt="ab", max_tokens=3, logprobs=2)
        logprobs = text.choices[0].logprobs
        for token, value, likeliest in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        ):
            assert likeliest[token] == value == max(likeliest.values())
        said = {**asked, "input": "7 + 5?", "max_output_tokens": 16, "top_logprobs": 2}
        del said["seed"]
        include = ["message.output_text.logprobs"]
        reply = await agent.responses.create(**said, include=include)
        (part,) = reply.output[-1].content
        check_likeliest(part.logprobs, 2)
        assert "".join(each.token for each in part.logprobs) == part.text
        async for event in await agent.responses.create(**said, include=include, stream=True):
            if event.type == "response.output_text.done":
                check_likeliest(event.logprobs, 2)
        # Nothing of it is stored, and the distribution is the model's own.
        assert s.changed_sampling == {}
        assert all("top_logprobs" not in step["response"].info for step in s.trajectory)
        for odd in (21, -1, "3", 2.5):
            with pytest.raises(openai.BadRequestError, match="top_logprobs"):
                await agent.chat.completions.create(**{**chat, "top_logprobs": odd})
        with pytest.raises(openai.BadRequestError, match="logprobs: true"):
            await agent.chat.completions.create(**{**chat, "logprobs": False})


async def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_sampled_from(tiny):
    masked = {"structured_outputs": {"regex": "[ab]{3}"}}
    async with rt.gateway(tiny()) as g, g.session() as s, openai_agent(s) as agent:
        reply = await agent.completions.create(
            model="m", prompt="ab", max_tokens=9, logprobs=5, extra_body=masked
        )
        other = await agent.completions.create(model="m", prompt="ab", max_tokens=3, logprobs=1)
    logprobs = reply.choices[0].logprobs
    for likeliest in logprobs.top_logprobs[:3]:
        assert likeliest.keys() == {"a", "b"}  # no others can be sampled
        assert abs(sum(map(math.exp, likeliest.values())) - 1) < 1e-5
    assert other.choices[0].logprobs.top_logprobs is None


async def test_a_model_behind_a_server_gives_no_others_than_the_sampled(tiny):
    async with (
        rt.gateway(ScriptedClient(["yes"])) as g,
        g.session() as s,
        openai_agent(s) as agent,
    ):
        with pytest.raises(openai.BadRequestError, match="top_logprobs = 3 cannot be obeyed"):
            await agent.chat.completions.create(
                model="m", messages=[USER], logprobs=True, top_logprobs=3
            )
