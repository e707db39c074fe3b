"""Requests that change how the embedded engine renders a prompt and samples its answer."""

from __future__ import annotations

import math

import anthropic
import openai
import pytest
from gateway_kit import ADD, is_one_path, openai_agent

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


# -- how the prompt is rendered ------------------------------------------------------------------

# The reasoning is opened in the prompt, or closed there (Qwen3.5's manner).
THINKING = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


async def test_names_for_the_template_change_the_prompt_and_histories_continue(tiny, tmp_path):
    client, history = tiny(THINKING), [USER]
    chat = {"model": "m", "max_tokens": 5}
    async with rt.gateway(client, directory=tmp_path) as g:
        s = g.session("a")
        key = s.api_key
        async with openai_agent(s) as agent:
            for more in (NO_THINKING, {}, NO_THINKING):
                reply = await agent.chat.completions.create(
                    **chat, messages=history, extra_body=more
                )
                message = reply.choices[0].message
                # Without reasoning in the prompt the answer is content, and else reasoning.
                assert bool(message.content) == bool(more)
                history = [*history, {"role": "assistant", "content": message.content}, USER]
            assert is_one_path(s)
            assert s.notes == {} == s.changed_sampling
            texts = [client.renderer.decode(step["tokens"]["prompt_ids"]) for step in s.trajectory]
        assert [text.endswith("</think>\n\n") for text in texts] == [True, False, True]
    # A gateway that was started again continues them, too.
    async with rt.gateway(client, directory=tmp_path) as g:
        s = g.sessions["a"]
        async with openai_agent(s, api_key=key) as agent:
            await agent.chat.completions.create(**chat, messages=history, extra_body=NO_THINKING)
        assert is_one_path(s)


async def test_a_name_that_the_template_does_not_read_is_noted_and_its_own_are_refused(tiny):
    async with rt.gateway(tiny()) as g, g.session() as s, openai_agent(s) as agent:
        asked = {"model": "m", "max_tokens": 3, "messages": [USER]}
        unread = {"chat_template_kwargs": {"thinking_budget": 3}}
        await agent.chat.completions.create(**asked, extra_body=unread)
        assert s.notes.keys() == {"chat_template_kwargs.thinking_budget"}
        for odd in ({"messages": []}, [1]):
            with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
                await agent.chat.completions.create(
                    **asked, extra_body={"chat_template_kwargs": odd}
                )


# -- an answer that continues the final message --------------------------------------------------


def begun(text):
    return {"role": "assistant", "content": text}


CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("template", [None, THINKING, LEADING], ids=["made", "thinking", "leading"])
async def test_an_answer_continues_the_final_message_by_ids(tiny, template):
    client = tiny(template)
    chat = {"model": "m", "max_tokens": 6, "extra_body": CONTINUE}
    history = [USER]
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        for start in ("The sum", " is {", "12 "):
            reply = await agent.chat.completions.create(
                **chat, messages=[*history, begun(start)], seed=3
            )
            said = reply.choices[0].message.content
            assert said
            assert not said.startswith(start)
            text = client.renderer.decode(s.trajectory[-1]["tokens"]["prompt_ids"])
            assert text.endswith(start)
            assert text.count("<|im_start|>assistant") == len(history) // 2 + 1
            if template == THINKING:
                assert text.endswith(f"</think>\n\n{start}")
            whole = start + said
            history = [*history, begun(whole), USER]
        assert is_one_path(s)
        assert s.changed_sampling == {}
        streamed = await agent.chat.completions.create(
            **chat, messages=[USER, begun("The sum")], seed=3, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in streamed]
        assert "".join(parts) == s.trajectory[0]["completion"][0]["content"]


async def test_a_cut_answer_goes_on_from_its_own_tokens(tiny):
    async with rt.gateway(tiny()) as g, g.session() as s, openai_agent(s) as agent:
        first = await agent.chat.completions.create(model="m", max_tokens=3, messages=[USER])
        assert first.choices[0].finish_reason == "length"
        cut = begun(first.choices[0].message.content)
        await agent.chat.completions.create(
            model="m", max_tokens=3, messages=[USER, cut], extra_body=CONTINUE
        )
        tokens = [step["tokens"] for step in s.trajectory]
        assert tokens[1]["prompt_ids"] == tokens[0]["prompt_ids"] + tokens[0]["completion_ids"]
        assert is_one_path(s)


async def test_prefill_in_anthropics_protocol(tiny):
    client, history = tiny(), [USER]
    async with rt.gateway(client) as g, g.session() as s, anthropic_agent(s) as agent:
        for stream in (False, True):
            asked = {**SHORT, "messages": [*history, begun('{"a": ')]}
            if stream:
                async with agent.messages.stream(**asked) as events:
                    reply = await events.get_final_message()
            else:
                reply = await agent.messages.create(**asked)
            (block,) = reply.content
            assert not block.text.startswith("{")
            text = client.renderer.decode(s.trajectory[-1]["tokens"]["prompt_ids"])
            assert text.endswith('assistant\n{"a": ')
            history = [*history, begun('{"a": ' + block.text), USER]
        assert is_one_path(s)


@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        ([USER], CONTINUE, "not an assistant's text"),
        ([USER], {"add_generation_prompt": False}, "add_generation_prompt"),
        ([USER, begun("a")], {**CONTINUE, "response_format": {"type": "json_object"}}, "form"),
        ([USER, begun("a")], {"continue_final_message": "yes"}, "continue_final_message"),
    ],
)
async def test_what_cannot_be_continued_is_refused(tiny, messages, more, said):
    async with rt.gateway(tiny()) as g, g.session() as s, openai_agent(s) as agent:
        with pytest.raises(openai.BadRequestError, match=said):
            await agent.chat.completions.create(model="m", messages=messages, extra_body=more)


async def test_a_begun_call_is_read_with_its_beginning(tiny):
    """The prompt has the mark and the name, the answer the rest of the call."""
    client = ScriptedClient(['{"a": 2, "b": 3}}\n</tool_call>'])
    start = 'Let me add. <tool_call>\n{"name": "add", "arguments": '
    async with rt.gateway(client) as g, g.session() as s, openai_agent(s) as agent:
        reply = await agent.chat.completions.create(
            model="m", messages=[USER, begun(start)], tools=[ADD], extra_body=CONTINUE
        )
    message = reply.choices[0].message
    assert not message.content
    assert message.tool_calls[0].function.arguments == '{"a": 2, "b": 3}'
    assert reply.choices[0].finish_reason == "tool_calls"
