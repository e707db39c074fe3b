"""The official openai package, unmodified, in front of a scripted model."""

from __future__ import annotations

import openai
import pytest

import rolltree as rt
from rolltree.testing import ScriptedClient


def count(messages):
    return f"answer {len(messages)}"


def agent(session, **options):
    return openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, **options
    )


async def converse(client, num_turns, *, stream):
    """Return the conversation of `num_turns`."""
    messages = [{"role": "user", "content": "begin"}]
    for turn in range(num_turns):
        if stream:
            said = ""
            async for chunk in await client.chat.completions.create(
                model="gpt-anything", messages=messages, stream=True
            ):
                said += chunk.choices[0].delta.content or ""
        else:
            answer = await client.chat.completions.create(model="gpt-anything", messages=messages)
            said = answer.choices[0].message.content
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"go on {turn}"},
        ]
    return messages


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_of_ten_turns_is_one_path(stream):
    async with rt.gateway(ScriptedClient(count)) as g, g.session() as s:
        async with agent(s) as client:
            said = await converse(client, 10, stream=stream)
        assert len(s.trajectory) == 10
        assert s.breaks == ()
        last = s.trajectory.call_of(9)
        assert s.trajectory.tree.num_tokens == s.trajectory.tree.path_len(last)
        assert s.trajectory.conversation() == said[:-1]
