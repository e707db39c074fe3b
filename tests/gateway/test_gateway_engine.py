"""Requests that change how the embedded engine renders a prompt and samples its answer."""

from __future__ import annotations

import anthropic
import pytest
from gateway_kit import is_one_path

import rolltree as rt
from chat_templates import LEADING
from rolltree.inference import ChatRenderer

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
