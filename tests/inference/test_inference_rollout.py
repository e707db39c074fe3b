"""Whole rollouts: clients, sessions and the token tree together, over real HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from inference_templates import TOOLS, user

import rolltree.inference as inference
from rolltree.inference import ChatRenderer, ModelClient, OpenAIClient, RetryPolicy
from rolltree.testing import ByteTokenizer, FaultyClient, HttpFault, ScriptedClient, ScriptedServer
from rolltree.tokens import Trajectory
from rolltree.values.errors import ModelError
from rolltree.values.types import ModelResponse, SamplingParams

RENDERER = ChatRenderer(ByteTokenizer())
PATIENT = RetryPolicy(max_retries=45, first_wait_s=0.001, max_wait_s=0.01)  # more than faults


def countdown(prompt: Any) -> str:
    """Answer with how much was said so far, so that every answer depends on its prompt."""
    text = prompt if isinstance(prompt, str) else str([m["content"] for m in prompt])
    return f"<{sum(text.encode()) % 9973}>"


async def rollout(client: ModelClient, first: str, num_turns: int) -> Trajectory:
    """Talk for some turns and record every call."""
    session = client.session()
    trajectory = Trajectory()
    messages: list[dict[str, Any]] = [user(first)]
    for turn in range(num_turns):
        got = await session.chat(messages, sampling=SamplingParams(max_tokens=20))
        trajectory.append_call(prompt=messages, completion=[got.message], response=got, turn=turn)
        messages = [*messages, got.message, user(f"turn {turn}")]
    return trajectory


def clients(server: ScriptedServer) -> dict[str, ModelClient]:
    return {
        "scripted": ScriptedClient(countdown),
        "by message": OpenAIClient(server.base_url, "scripted"),
        "by token": OpenAIClient(server.base_url, "scripted", renderer=RENDERER),
    }


@pytest.mark.parametrize("name", ["scripted", "by message", "by token"])
async def test_a_rollout_is_one_path_in_the_token_tree(name: str) -> None:
    num_turns = 12
    with ScriptedServer(countdown) as server:
        client = clients(server)[name]
        trajectory = await rollout(client, "start", num_turns)
        await client.aclose()
    tree = trajectory.tree
    assert tree.num_calls == num_turns
    last = trajectory.call_of(num_turns - 1)
    assert last is not None
    # Every token is stored once: the tree holds no more than the longest conversation.
    assert tree.num_tokens == len(tree.path_ids(last))
    for index, step in enumerate(trajectory):
        tokens = step["tokens"]
        assert tokens is not None
        call = trajectory.call_of(index)
        assert call is not None
        assert tokens["prompt_ids"] == tree.prompt_ids(call).tolist()
        assert tokens["prompt_ids"] == RENDERER.render(step["prompt"]).tolist()
        assert RENDERER.decode_answer(tokens["completion_ids"]) == step["completion"][0]["content"]
        assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"])


async def test_all_clients_tell_the_same_story() -> None:
    """Prompts by message and by token have the same ids where the template rewrites nothing."""
    with ScriptedServer(lambda _: "same") as server:
        told = []
        for client in clients(server).values():
            if isinstance(client, ScriptedClient):
                client = ScriptedClient(lambda _: "same")
            trajectory = await rollout(client, "start", 5)
            told.append([dict(step["tokens"] or {}) for step in trajectory])
            await client.aclose()
    assert told[0] == told[1] == told[2]


async def test_many_rollouts_through_faults_lose_and_mix_nothing() -> None:
    faults = [HttpFault(status=429), None, HttpFault(reset=True), None, HttpFault(body="broken")]
    with ScriptedServer(countdown, faults=faults * 9) as server:
        client = OpenAIClient(
            server.base_url, "scripted", renderer=RENDERER, retry=PATIENT, max_connections=8
        )
        rollouts = await asyncio.gather(
            *(rollout(client, f"rollout {number}", 4) for number in range(30))
        )
        await client.aclose()
        assert server.max_concurrent <= 8
        assert server.num_answers == 30 * 4 + 9  # nine answers were spoiled on their way
    for number, trajectory in enumerate(rollouts):
        assert [step["prompt"][0]["content"] for step in trajectory] == [f"rollout {number}"] * 4
        for index, step in enumerate(trajectory):
            expected = countdown(RENDERER.decode(RENDERER.render(step["prompt"])))
            assert step["completion"][0]["content"] == expected, (number, index)


async def test_two_agents_and_a_compaction_share_one_session() -> None:
    session = ScriptedClient(lambda _: "ok").session()

    async def ask(messages: list[dict[str, Any]], tools: Any = None) -> ModelResponse:
        return await session.chat(messages, tools=tools)

    boss = [{"role": "system", "content": "You are the boss."}, user("Plan.")]
    worker = [{"role": "system", "content": "You work."}, user("Do it.")]
    plan = await ask(boss, TOOLS)
    work = [await ask(worker)]
    work.append(await ask([*worker, work[0].message, user("And on.")]))
    back = await ask([*boss, plan.message, user("It is done.")], TOOLS)
    compacted = [boss[0], user("Summary: it was planned and done.")]
    after = await ask(compacted, TOOLS)
    later = await ask([*compacted, after.message, user("Next?")], TOOLS)
    assert plan.extends is None
    assert (work[0].extends, work[1].extends) == (None, work[0].call_id)
    assert back.extends == plan.call_id
    assert (after.extends, later.extends) == (None, after.call_id)


async def test_a_group_shares_its_first_prompt_and_nothing_else() -> None:
    client = ScriptedClient(lambda _: "ok")
    members = [await rollout(client, "same start", 3) for _ in range(4)]
    firsts = [step["tokens"]["prompt_ids"] for step in (m[0] for m in members)]  # type: ignore[index]
    assert all(first == firsts[0] for first in firsts)
    assert len({id(member.tree) for member in members}) == 4


async def test_a_failed_call_leaves_the_session_as_it_was() -> None:
    client = FaultyClient(ScriptedClient(lambda _: "ok"), [None, ModelError("lost"), None])
    session = client.session()
    first = await session.chat([user("a")])
    history = [user("a"), first.message, user("b")]
    with pytest.raises(ModelError, match="lost"):
        await session.chat(history)
    assert (await session.chat(history)).extends == first.call_id


def test_every_public_name_exists() -> None:
    assert all(hasattr(inference, name) for name in inference.__all__)


def test_neither_torch_nor_openai_is_imported() -> None:
    code = (
        "import sys, rolltree.inference, rolltree.testing; "
        "print([m for m in ('torch', 'transformers', 'openai', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
