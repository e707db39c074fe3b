"""vLLM's own server on the GPU that the trainer uses, in vLLM's environment (`make test-gpu`).

nccl refuses two processes on one GPU, so weights go by disk, or by gloo through CPU memory.
"""

import os
from pathlib import Path

import pytest
from vllm_kit import changed_copy, off_by, train_two_steps, vllm_server

from rolltree.inference import ChatRenderer, OpenAIClient, WeightTransfer
from rolltree.inference.models import load_model
from rolltree.inference.models.made import CHAT_TEMPLATE
from rolltree.values.types import SamplingParams

HELLO = [{"role": "user", "content": "What is 7 + 5?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
CLOSE = 1e-2
"""Bound on the mean difference of logprobs. Products in TF32 round more than on a CPU, and other
weights are off by 0.1 and more."""
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder():
    name = os.environ.get("ROLLTREE_TEST_MODEL", "")
    if not (Path(name) / "model.safetensors").is_file():
        pytest.fail("ROLLTREE_TEST_MODEL names no model folder. Run `make test-gpu`.")
    return Path(name)


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("vllm")
    with vllm_server(folder, place, "--gpu-memory-utilization", "0.4") as url:
        yield url


async def test_weights_on_the_gpu_are_sent_to_a_server_on_the_same_gpu(url, folder, device):
    model, tokenizer = load_model(str(folder), "float32")
    renderer = ChatRenderer(tokenizer, CHAT_TEMPLATE)
    client = OpenAIClient(f"{url}/v1", "m", renderer=renderer, logprobs_mode="processed")
    transfer = WeightTransfer([client], backend="gloo")
    other = changed_copy(model)
    try:
        before = await client.chat(HELLO, sampling=GREEDY)
        assert off_by(model, before) < CLOSE < off_by(other, before)
        on_gpu = other.to(device)
        await transfer.publish(on_gpu.named_parameters(), 1)
        after = await client.chat(HELLO, sampling=GREEDY)
        assert set(after.versions) == {1}
        assert off_by(on_gpu.cpu(), after) < CLOSE < off_by(model, after)
        await transfer.publish(model.named_parameters(), 2)
    finally:
        await transfer.aclose()
        await client.aclose()


async def test_training_beside_the_server(url, folder, tmp_path, device):
    engine = {"kind": "servers", "urls": [f"{url}/v1"], "served_model": "m", "publish": "disk"}
    run = tmp_path / "run"
    report = await train_two_steps(folder, run, engine, ahead=1, model={"device": device})
    assert len(report.metrics) == 2
    assert all(step["publish/probe_error"] < CLOSE for step in report.metrics)
