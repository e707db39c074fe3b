"""Two agents from npm in front of a real small model, which answers as it can."""

from __future__ import annotations

import pytest
from agents_kit import causes, check_recorded, continues

import rolltree as rt


@pytest.fixture
def client():
    return rt.local_client(*rt.load_model("smollm2-135m"), max_context=8192)


def session_of(g):
    return g.session(sampling={"temperature": 1.0, "max_tokens": 24}, seed=0)


async def test_vercel_ai_sdk_with_a_real_model(client, vercel):
    async with rt.gateway(client) as g, session_of(g) as s:
        said = await vercel(s, "messages", "streamed")
        assert said["answer"] == s.trajectory[0]["completion"][0]["content"]
        assert said["steps"] == len(s.trajectory) == 1
        check_recorded(s)


async def test_opencode_with_a_real_model(client, opencode):
    async with rt.gateway(client) as g, session_of(g) as s:
        said = await opencode(s)
        # The title of its session, and the task. Its system prompt has some two thousand tokens.
        assert continues(s) == [None, None]
        assert any(step["completion"][0]["content"] in said for step in s.trajectory)
        assert max(len(step["tokens"]["prompt_ids"]) for step in s.trajectory) > 2000
        assert causes(s) == []
        check_recorded(s)
