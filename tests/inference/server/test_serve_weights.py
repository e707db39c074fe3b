"""Weight updates over HTTP: the served model answers as the new weights do, token by token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import serve_kit
from serve_kit import ADMIN_TOKEN, TOKEN, Served

from rolltree.gateway.serve import ServedModel, create_app
from rolltree.inference import (
    ChatRenderer,
    EndpointPool,
    OpenAIClient,
    RetryPolicy,
    WeightTransfer,
    publish_adapter,
    publish_weights,
    served_version,
)
from rolltree.inference.reachable import check_servers
from rolltree.scale.weights.buckets import TensorSpec, specs_to_data
from rolltree.scale.weights.receive import INDEX, safetensors_files
from rolltree.values.errors import ConfigError, ModelError
from rolltree.values.types import ModelResponse, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
QUESTIONS = ("7 + 5 =", "capital?", "count")


@pytest.fixture(scope="module")
def server(taught: Path) -> Iterator[Served]:
    started = serve_kit.start(str(taught), name="m", token=None)
    assert started.process.stdout is not None
    lines = [started.process.stdout.readline().strip() for _ in range(2)]
    assert [line.split(": ")[0] for line in lines] == ["token", "admin token"]
    started.token, started.admin_token = (line.split(": ")[1] for line in lines)
    yield started
    serve_kit.stop(started)


@pytest.fixture
async def client(server: Served, reference: Any) -> Any:
    made = OpenAIClient(
        server.url,
        "m",
        api_key=server.token,
        admin_key=server.admin_token,
        renderer=ChatRenderer(reference[1]),
        retry=RetryPolicy(max_retries=1, first_wait_s=0.01),
    )
    yield made
    await made.aclose()


def versions_of(response: ModelResponse) -> list[int]:
    assert response.versions is not None
    found: list[int] = response.versions.tolist()
    return found


async def answers(client: OpenAIClient) -> list[str]:
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    found = await asyncio.gather(*(client.chat(each, sampling=GREEDY) for each in asked))
    return [each.text for each in found]


async def test_the_new_weights_answer_and_every_token_says_so(
    client: OpenAIClient, taught: Path, taught_otherwise: Path
) -> None:
    assert await answers(client) == ["12", "Paris, Paris", "one two three four"]
    await publish_weights([client], taught_otherwise, 3)
    assert client.version == 3
    assert await served_version(client.server) == "3"
    assert await answers(client) == ["13", "Rome", "nine"]
    got = await client.chat([{"role": "user", "content": "count"}], sampling=GREEDY)
    assert got.versions is not None
    assert got.versions.tolist() == [3] * 5
    by_message = OpenAIClient(client.server.base_url, "m", api_key=client.server._api_key)
    same = await by_message.chat([{"role": "user", "content": "count"}], sampling=GREEDY)
    await by_message.aclose()
    assert same.versions is not None
    assert same.versions.tolist() == [3] * 5
    await publish_weights([client], taught, 4)
    assert await answers(client) == ["12", "Paris, Paris", "one two three four"]


async def test_a_request_in_flight_goes_on_with_the_new_weights(
    client: OpenAIClient, taught: Path, taught_otherwise: Path, reference: Any
) -> None:
    import torch

    from rolltree.inference.models import load_model

    client.tokens.logprobs_mode = "processed"
    asked = [{"role": "user", "content": "anything but an end"}]
    waiting = [
        asyncio.ensure_future(
            client.chat(asked, sampling=SamplingParams(temperature=3.0, max_tokens=1500, seed=seed))
        )
        for seed in range(32)
    ]
    await asyncio.sleep(0)  # they are sent first: when the next is answered, they have begun
    await client.chat(asked, sampling=SamplingParams(temperature=3.0, max_tokens=2))
    await publish_weights([client], taught_otherwise, 7)
    mixed = [each for each in await asyncio.gather(*waiting) if 7 in versions_of(each)[1:]]
    mixed = [each for each in mixed if 4 in versions_of(each)]
    assert mixed, "every answer was finished before the update came, or began after it"
    models = (reference[0], load_model(str(taught_otherwise))[0])
    for got in mixed[:4]:
        assert got.versions is not None
        assert got.completion_ids is not None
        assert got.prompt_ids is not None
        assert got.logprobs is not None
        assert set(versions_of(got)) == {4, 7}
        assert (np.diff(got.versions) >= 0).all()
        both = torch.tensor([[*got.prompt_ids.tolist(), *got.completion_ids.tolist()]])
        ids = torch.from_numpy(got.completion_ids).long()[:, None]
        for model, version in zip(models, (4, 7), strict=True):
            with torch.no_grad():
                logits = model(input_ids=both).logits[0, len(got.prompt_ids) - 1 : -1]
            chosen = (logits.float() / 3.0).log_softmax(-1).gather(-1, ids)[:, 0]
            off = np.abs(chosen.numpy() - got.logprobs)[got.versions == version]
            assert float(off.mean()) < 1e-4
    await publish_weights([client], taught, 8)


def tensors_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


async def test_weights_that_are_sent_without_a_disk(
    client: OpenAIClient, taught: Path, taught_otherwise: Path
) -> None:
    sent = WeightTransfer([client], bucket_bytes=4096)
    await sent.publish(tensors_in(taught_otherwise).items(), 8)
    assert (client.version, await served_version(client.server)) == (8, "8")
    assert await answers(client) == ["13", "Rome", "nine"]
    got = await client.chat([{"role": "user", "content": "count"}], sampling=GREEDY)
    assert versions_of(got) == [8] * 5
    weights = tensors_in(taught)
    name = next(iter(weights))
    for bad, said in [
        ({key: value for key, value in weights.items() if key != name}, "are missing"),
        ({**weights, name: weights[name][:3]}, "has shape"),
    ]:
        with pytest.raises(ModelError, match=r"1 of 1 servers.*left paused") as caught:
            await sent.publish(bad.items(), 9)
        assert caught.match(f"that were announced do not fit the served model.*{said}")
        await client.server.post("/resume", {}, bytes, at_root=True, as_admin=True)
        assert await answers(client) == ["13", "Rome", "nine"]
    await sent.publish(weights.items(), 9)
    assert await answers(client) == ["12", "Paris, Paris", "one two three four"]
    assert await served_version(client.server) == "9"
    await sent.aclose()


async def test_what_does_not_fit_changes_nothing_and_fails_loudly(
    client: OpenAIClient, taught: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(taught / "model.safetensors")
    name = next(iter(weights))
    bad = {
        "shape": {**weights, name: np.zeros((3, 3), np.float32)},
        "missing": {key: value for key, value in weights.items() if key != name},
        "unknown": {**weights, "extra.weight": np.zeros(3, np.float32)},
    }
    before = await served_version(client.server)
    for kind, tensors in bad.items():
        folder = tmp_path / kind
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=r"1 of 1 servers.*left paused") as caught:
            await publish_weights([client], folder, 99)
        assert "do not fit the served model" in str(caught.value)
        assert await served_version(client.server) == before
        await client.server.post("/resume", {}, bytes, at_root=True, as_admin=True)
    assert await answers(client) == ["12", "Paris, Paris", "one two three four"]
    with pytest.raises(ConfigError, match=r"holds no \*.safetensors"):
        await publish_weights([client], tmp_path, 99)
    with pytest.raises(ConfigError, match="must be >= 0"):
        await publish_weights([client], taught, -1)


async def test_adapters_that_cannot_be_published(client: OpenAIClient, taught: Path) -> None:
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        await publish_adapter([client], taught, 5, name="tuned")
    (taught / "adapter_config.json").write_text("{}")
    before = await served_version(client.server)
    with pytest.raises(ModelError, match="left paused"):  # `rolltree serve` takes whole models
        await publish_adapter([client], taught, 5, name="tuned")
    (taught / "adapter_config.json").unlink()
    await client.server.post("/resume", {}, bytes, at_root=True, as_admin=True)
    assert await served_version(client.server) == before


async def test_one_of_two_servers_is_gone(client: OpenAIClient, taught_otherwise: Path) -> None:
    gone = OpenAIClient("http://127.0.0.1:9/v1", "m", retry=RetryPolicy(max_retries=0))
    with pytest.raises(ModelError, match=r"did not reach 1 of 2 servers.*127\.0\.0\.1:9"):
        await publish_weights([gone, client], taught_otherwise, 12)
    assert (gone.version, client.version) == (0, 12)
    assert await served_version(client.server) == "12"
    assert await answers(client) == ["13", "Rome", "nine"]
    await gone.aclose()


async def test_an_evaluation_is_told_of_weights_that_a_run_left(
    server: Served, client: OpenAIClient, taught: Path
) -> None:
    later = OpenAIClient(server.url, "m", api_key=server.token)
    await publish_weights([client], taught, 7)
    assert await check_servers(client) == []  # it published them itself
    (said,) = await check_servers(EndpointPool([later]))
    assert "serves version '7' of its weights, which a training run published" in said
    assert later.version == 7
    await client.server.post("/pause?mode=keep", {}, bytes, at_root=True, as_admin=True)
    (said,) = await check_servers(later)
    assert "is paused, probably by a trainer that died" in said
    await client.server.post("/resume", {}, bytes, at_root=True, as_admin=True)
    await later.aclose()


async def test_paused_requests_wait_and_are_answered(client: OpenAIClient) -> None:
    post = partial(client.server.post, at_root=True, as_admin=True)
    await post("/pause?mode=keep", {}, bytes)
    await post("/pause?mode=keep", {}, bytes)  # again: nothing changes
    waiting = asyncio.ensure_future(client.chat([{"role": "user", "content": "count"}]))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    assert (await post("/is_paused", None, bytes)).value == b'{"is_paused":true}'
    await post("/resume", {}, bytes)
    assert (await waiting).completion_ids is not None


def test_what_the_weight_endpoints_refuse(server: Served) -> None:
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    inference = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=server.root, headers=inference) as http:
        for path in ("/collective_rpc", "/pause?mode=keep", "/update_weight_version"):
            refused = http.post(path, json={})
            assert refused.status_code == 403
            assert "takes the admin token" in refused.json()["error"]["message"]
        assert http.get("/weight_info").status_code == 200
    with httpx.Client(base_url=server.root, headers=headers) as http:
        for path, body, said in [
            ("/pause", {}, "mode=keep"),
            ("/collective_rpc", {"method": "exec"}, "only methods"),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {}}, "weights_path"),
            ("/update_weight_version", {"new_version": "next"}, "not a whole number"),
            ("/update_weight_version", {"new_version": 3}, "not a whole number"),
            ("/init_weight_transfer_engine", {"init_info": {"port": 1}}, "WeightTransfer"),
            ("/init_weight_transfer_engine", {}, "init_info is not an object"),
            ("/start_weight_update", {}, "/init_weight_transfer_engine first"),
            ("/update_weights", {"update_info": {}}, "/init_weight_transfer_engine first"),
        ]:
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]
    for path in ("/weight_info", "/v1/models"):
        assert httpx.get(server.root + path).status_code == 401
    assert httpx.post(server.root + "/collective_rpc", json={}).status_code == 401
    assert server.token != TOKEN
    assert httpx.get(server.root + "/health").status_code == 200
    assert httpx.get(server.root + "/v2", headers=headers).status_code == 404


@pytest.mark.parametrize("index", [None, '{"weight_map": {"a": "model.safetensors"}}'])
def test_a_reload_of_what_is_not_a_regular_file_is_refused_at_once(
    server: Served, tmp_path: Path, index: str | None
) -> None:
    """A FIFO would be opened forever, with the engine paused."""
    os.mkfifo(tmp_path / "model.safetensors")
    if index is not None:
        (tmp_path / INDEX).write_text(index)
    with httpx.Client(
        base_url=server.root, headers={"Authorization": f"Bearer {server.admin_token}"}
    ) as http:
        kwargs = {"weights_path": str(tmp_path)}
        refused = http.post(
            "/collective_rpc", json={"method": "reload_weights", "kwargs": kwargs}, timeout=20
        )
        assert refused.status_code == 400
        assert "is not a regular file" in refused.json()["error"]["message"]
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=20)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "index",
    [
        "[" * 100_000,
        "[]",
        '{"weight_map": 5}',
        '{"weight_map": {"a": "gone.safetensors", "b": 7}}',
        '{"weight_map": {"a": "gone.safetensors"}}',
        '{"weight_map": {"a": "../../../../../../dev/zero"}}',
        '{"weight_map": {"a": "a\\u0000b"}}',
        None,  # 64 GiB of nothing
    ],
)
def test_an_index_that_names_no_weights_is_refused(tmp_path: Path, index: str | None) -> None:
    if index is None:
        with (tmp_path / INDEX).open("wb") as file:
            file.truncate(2**36)
    else:
        (tmp_path / INDEX).write_text(index)
    with pytest.raises(ConfigError, match="unchanged"):
        safetensors_files(tmp_path)


async def test_a_server_that_is_told_to_stop_ends_a_transfer_that_waits() -> None:
    started = serve_kit.start("tiny", name="m")
    client = OpenAIClient(started.url, "m", api_key=ADMIN_TOKEN, retry=RetryPolicy(max_retries=0))
    sent = WeightTransfer([client], timeout_s=120.0)
    try:
        await sent.open()
        await client.server.post("/start_weight_update", {}, bytes, at_root=True)
        model = load_tiny()
        info = {"tensors": specs_to_data(starmap(TensorSpec.of, model)), "bucket_bytes": 2**20}
        waiting = asyncio.ensure_future(
            client.server.post("/update_weights", {"update_info": info}, bytes, at_root=True)
        )
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done  # nobody sends
        started.process.terminate()
        await asyncio.to_thread(started.process.wait, 20)
        with pytest.raises(ModelError):
            await waiting
    finally:
        await sent.aclose()
        await client.aclose()
        serve_kit.stop(started)


def load_tiny() -> list[tuple[str, Any]]:
    from rolltree.inference.models import load_model

    return list(load_model("tiny")[0].named_parameters())


async def test_a_served_model_without_weight_updates_says_so() -> None:
    engine: Any = None
    renderer: Any = None
    served = ServedModel(engine, renderer, "m")
    app = httpx.ASGITransport(create_app(served, "token"))
    headers = {"Authorization": "Bearer token"}
    async with httpx.AsyncClient(transport=app, base_url="http://app", headers=headers) as http:
        refused = await http.post("/start_weight_update", json={})
    assert refused.status_code == 403
    assert "start it with --admin-key-env" in refused.json()["error"]["message"]
    app = httpx.ASGITransport(create_app(served, "token", admin_token="admin"))
    async with httpx.AsyncClient(transport=app, base_url="http://app") as http:
        headers = {"Authorization": "Bearer admin"}
        answer = await http.post("/start_weight_update", json={}, headers=headers)
    assert answer.status_code == 404
    assert "started without weight transfers" in answer.json()["error"]["message"]
