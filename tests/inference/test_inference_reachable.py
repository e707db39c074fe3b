"""Servers before an evaluation: none that answers is an error within seconds."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from rolltree.evaluation import evaluate_async
from rolltree.inference import EndpointPool, OpenAIClient, publish_weights
from rolltree.inference.reachable import check_servers
from rolltree.testing import ScriptedClient, ScriptedServer
from rolltree.values.errors import ConnectionFailed, PublishFailed, ServerError


@pytest.fixture
def nobody() -> Any:
    """A port that is taken, and on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/v1"


async def test_a_server_that_never_answered_is_refused(nobody: str) -> None:
    client = OpenAIClient(nobody, "m")
    with pytest.raises(ConnectionFailed, match=r"no server has answered .*nothing was sampled"):
        await check_servers(client, limit_s=0.5)
    await client.aclose()


async def test_one_server_of_a_pool_is_enough(nobody: str) -> None:
    with ScriptedServer(["12"]) as server:
        pool = EndpointPool.of([nobody, server.base_url], "scripted")
        assert await check_servers(pool, limit_s=0.5) == []
        assert pool.version == 0
        await pool.aclose()


async def test_clients_without_a_server_are_not_asked() -> None:
    assert await check_servers(ScriptedClient(["12"])) == []


async def test_an_evaluation_asks_first_and_not_when_all_is_stored(
    nobody: str, monkeypatch: Any, tmp_path: Any
) -> None:
    from rolltree import Rubric, SingleTurnEnv
    from rolltree.inference import reachable
    from rolltree.store import Run

    async def impatient(parts: Any, limit_s: float) -> None:
        await wait_for_one(parts, 0.1)

    wait_for_one = reachable._wait_for_one
    monkeypatch.setattr(reachable, "_wait_for_one", impatient)
    env = SingleTurnEnv(eval_dataset=[{"question": "?", "answer": ""}], rubric=Rubric([]))
    with Run.create(tmp_path / "run", config={}, kind="eval") as run:
        with ScriptedServer(["12"]) as server:
            client = OpenAIClient(server.base_url, "scripted")
            assert (await evaluate_async(env, client, run=run)).num_failed == 0
            await client.aclose()
        dead = OpenAIClient(nobody, "scripted")
        assert (await evaluate_async(env, dead, run=run)).num_failed == 0  # stored
        with pytest.raises(ConnectionFailed):
            await evaluate_async(env, dead, run=run, phase="again")
        assert run.num_rollouts(phase="again") == 0
        await dead.aclose()


async def test_a_vllm_without_its_development_mode_is_told_what_to_set(tmp_path: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with ScriptedServer(["12"]) as server:  # it has no /pause either
        client = OpenAIClient(server.base_url, "scripted")
        with pytest.raises(PublishFailed, match="Start vLLM with VLLM_SERVER_DEV_MODE=1") as caught:
            await publish_weights([client], tmp_path, 1)
        assert "Change the request" not in str(caught.value)
        assert "has no /pause (404)" in str(caught.value)
        await client.aclose()


async def test_advice_is_about_what_is_wrong() -> None:
    with ScriptedServer(["12"], api_key="right") as server:
        wrong = OpenAIClient(server.base_url, "scripted", api_key="wrong")
        with pytest.raises(ServerError, match="Check the API key"):
            await wrong.chat([{"role": "user", "content": "?"}])
        await wrong.aclose()
        other = OpenAIClient(server.base_url, "gpt-9", api_key="right")
        with pytest.raises(ServerError, match="Check the model's name"):
            await other.chat([{"role": "user", "content": "?"}])
        await other.aclose()
