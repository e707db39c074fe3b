"""LoRA adapters published to a real vLLM server while it runs."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from vllm_kit import off_by, vllm_server

from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.inference.models.made import CHAT_TEMPLATE
from rolltree.scale.weights.publish import publish_adapter, served_version
from rolltree.values.types import SamplingParams

HELLO = [{"role": "user", "content": "What is 7 + 5?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
RANK, ALPHA = 4, 8
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    flags = ("--enable-lora", "--max-lora-rank", "8")
    where = tmp_path_factory.mktemp("vllm")
    with vllm_server(folder, where, *flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as url:
        yield url


def adapted(model, folder, seed):
    """Write an adapter of the query projections; return the model with it merged in."""
    merged, tensors = copy.deepcopy(model), {}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for index, layer in enumerate(merged.model.layers):
            weight = layer.self_attn.q_proj.weight
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.05
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.05
            stem = f"base_model.model.model.layers.{index}.self_attn.q_proj"
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = down, up
            weight += up @ down * (ALPHA / RANK)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


async def test_an_adapter_is_published_and_replaced(url, loaded, tmp_path):
    renderer = ChatRenderer(loaded[1], CHAT_TEMPLATE)
    client = OpenAIClient(f"{url}/v1", "tuned", renderer=renderer, logprobs_mode="processed")
    models = [adapted(loaded[0], tmp_path / str(seed), seed) for seed in (0, 1)]
    try:
        for version, model in enumerate(models, start=1):
            await publish_adapter([client], tmp_path / str(version - 1), version, name="tuned")
            assert client.version == version
            assert await served_version(client.server) == str(version)
            answer = await client.chat(HELLO, sampling=GREEDY)
            assert set(answer.versions) == {version}
            others = [loaded[0], *(other for other in models if other is not model)]
            assert off_by(model, answer) < 1e-4
            assert all(off_by(other, answer) > 1e-3 for other in others)
    finally:
        await client.aclose()
