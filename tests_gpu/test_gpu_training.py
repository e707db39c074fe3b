"""Training on a GPU: FlexAttention's kernels, bfloat16, and FSDP2 over nccl."""

import gpu_bodies as bodies
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", bodies.PATTERNS)
def test_flex_attention_and_its_gradient(device, name, softcap, sinks, dtype):
    pattern = bodies.PATTERNS[name]
    bodies.attention_and_its_gradient(device, pattern, softcap=softcap, sinks=sinks, dtype=dtype)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "windowed"])
def test_the_gradient_of_a_model_by_flex_attention(device, kind):
    bodies.gradient_of_a_model(device, kind)


def test_new_lengths_do_not_compile_forever(device):
    torch._dynamo.reset()
    bodies.captures(device, "inductor", ((150, 40), (160, 44), (200, 50), (170, 60), (230, 30)))


@pytest.mark.parametrize("attention", ["segments", "flex"])
def test_training_in_bfloat16(device, attention):
    bodies.bf16_beside_float32(device, attention)


def test_a_module_sharded_over_one_rank_of_nccl(device):
    bodies.sharded_on_one_rank(device)
