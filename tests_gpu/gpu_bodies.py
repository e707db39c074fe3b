"""What must hold on a GPU, as functions of a device. `tests/gpu` runs the same ones on a CPU.

Laws are stated against float64 on the CPU: what is checked is no further from it than the plain way
on the same device, times a factor. So they hold for any GPU and for TF32.
"""

from __future__ import annotations

import asyncio
import copy
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests_models.reference import ROUNDED
from torch.nn.attention import flex_attention as flex_module
from training_kit import VOCAB, difference, group, tiny_model, tree
from transformers import AutoModelForCausalLM, MistralConfig

from rolltree.inference.local import LocalEngine
from rolltree.training import Trainer, load_train_config
from rolltree.training.batches import build_batch
from rolltree.training.forward import LogprobModel
from rolltree.training.layout import Pattern, collate
from rolltree.training.models.ranks import Ranks
from rolltree.training.models.shards import whole
from rolltree.training.tree_blocks import forest_attention, tree_layout
from rolltree.values.types import GenerateRequest, SamplingParams

PATTERNS = {"full": Pattern(), "window": Pattern(window=70), "chunk": Pattern(chunk=90)}


@contextmanager
def gradient_on_cpu(device: str) -> Any:
    """Let FlexAttention have a gradient on a CPU: torch has the formulas there, and refuses.

    They are those of its reference implementation, so mask, score changes and log-sums are checked
    here; the compiled kernel is not.
    """
    refuses = flex_module._validate_device
    if device == "cpu":
        flex_module._validate_device = lambda *tensors: None
    try:
        yield
    finally:
        flex_module._validate_device = refuses


def no_further(
    found: Any, plain: Any, exact: Any, slack: float = 8.0, floor: float = ROUNDED
) -> None:
    """Check that `found` is as near to `exact` as `plain` is, up to a factor and rounding.

    `plain` counts where the device's products round more than float32 does, as TF32.
    """
    found, plain, exact = (x.detach().double().cpu() for x in (found, plain, exact))
    error, allowed = difference(found, exact), difference(plain, exact)
    assert error < slack * allowed + floor, (error, allowed)


def two_trees(lengths: tuple[int, int] = (150, 40)) -> Any:
    """Return a forest of two groups, the first longer than two blocks of FlexAttention."""
    first, second = lengths
    return collate([tree(group(3, first, 2, seed=1)), tree(group(2, second, 3, seed=2))])


def attention_and_its_gradient(
    device: str,
    pattern: Pattern,
    *,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """FlexAttention over a forest against the blocks: forward, and the gradient of every input."""
    torch.manual_seed(0)
    forest = two_trees()
    inputs = [torch.randn(1, num, forest.num_tokens, 16) for num in (4, 2, 2)]
    if sinks:
        inputs.append(torch.tensor([1.0, -1.0, 3.0, 0.5]))
    given = torch.randn(1, forest.num_tokens, 4, 16)

    def run(where: str, kind: torch.dtype, *, flex: bool) -> list[Any]:
        leaves = [x.to(where, kind).requires_grad_() for x in inputs]
        layout = tree_layout(forest, where, flex=flex)
        extras = {"pattern": pattern, "softcap": softcap, "sinks": leaves[3] if sinks else None}
        out = forest_attention(*leaves[:3], layout, 0.5, **extras)
        return [out, *torch.autograd.grad(out, leaves, given.to(where, kind))]

    exact = run("cpu", torch.float64, flex=False)
    plain = run(device, dtype, flex=False)
    with gradient_on_cpu(device):
        found = run(device, dtype, flex=True)
    floor = ROUNDED if dtype == torch.float32 else 2e-2
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.dtype == dtype
        no_further(one, other, truth, floor=floor)


def make_model(kind: str) -> Any:
    """Return a tiny model with weights away from their start; `windowed` has a sliding window."""
    if kind != "windowed":
        model = tiny_model(kind)
    else:
        config = MistralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            sliding_window=40,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    return model


def logprob_gradient(model: Any, forward: str, forest: Any, device: str) -> Any:
    """Return the logprobs of a forest's records and the gradient of a weighted sum of them."""
    run = LogprobModel(model, forward)
    parameters = list(model.parameters())
    with run.context():
        found = run(forest).logprob
        weights = torch.linspace(-1.0, 1.0, len(found), device=found.device, dtype=found.dtype)
        gradients = torch.autograd.grad((found * weights).sum(), parameters)
    return torch.cat([found.detach(), *(g.flatten() for g in gradients)])


def gradient_of_a_model(device: str, kind: str) -> None:
    """A model trained on a tree by FlexAttention has the gradient that the blocks give."""
    model, forest = make_model(kind), two_trees((60, 30))
    exact = logprob_gradient(copy.deepcopy(model).double(), "tree", forest, "cpu")
    model.to(device)
    plain = logprob_gradient(model, "tree", forest, device)
    with gradient_on_cpu(device):
        found = logprob_gradient(model, "tree_flex", forest, device)
    no_further(found, plain, exact)


def trained(device: str, forward: str, steps: int = 1, ranks: Any = None, **model: Any) -> Any:
    """Train a tiny model for some steps; return the gradient of the next one, as one vector."""
    module = tiny_model().to(device)
    sections = {
        "model": {"device": device, **model},
        "optim": {"lr": 1e-3},
        "train": {"max_mismatch": 1e9, "scope": "tree", "tree_attention": forward},
    }
    trainer = Trainer(module, load_train_config(sections), ranks)
    samples = [tree(group(4, 20, 2, seed=seed)) for seed in (0, 1)]
    for step in range(steps):
        trainer.step(samples, step)
    batch = build_batch(samples, trainer.algorithm, 4096)
    trainer._gradients(batch)
    gradient = [whole(p.grad).flatten().float().cpu() for p in trainer.optimizer.parameters]
    return torch.cat(gradient)


def bf16_beside_float32(device: str, forward: str = "segments") -> None:
    """A gradient computed in bfloat16 points where that of float32 points."""
    exact = trained(device, forward, 0)
    found = trained(device, forward, 0, compute_dtype="bfloat16")
    cosine = float(torch.nn.functional.cosine_similarity(found, exact, dim=0))
    assert cosine > 0.99, cosine
    assert difference(found, exact) < 0.1
    assert not torch.equal(found, exact)  # it did run in bfloat16


@contextmanager
def one_rank(device: str) -> Any:
    """Yield the ranks of a group of one: nccl on a GPU, gloo on a CPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(device)
    finally:
        dist.destroy_process_group()


def sharded_on_one_rank(device: str) -> None:
    """A module sharded over a single rank trains as one that is not sharded."""
    alone = trained(device, "segments", 2)
    with one_rank(device) as ranks:
        sharded = trained(device, "segments", 2, ranks)
    assert difference(sharded, alone) < 1e-3


def engine_beside_the_model(device: str, num: int = 6, new_tokens: int = 12) -> None:
    """Logprobs of the embedded engine are the model's own, after new weights too."""
    model = tiny_model("llama").to(device)
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 5 + i, np.int32) for i in range(num)]
    engine = LocalEngine(model, max_batch=num, max_context=64)

    async def ask() -> list[Any]:
        sampling = SamplingParams(temperature=1.0, max_tokens=new_tokens)
        requests = [GenerateRequest(prompt, sampling) for prompt in prompts]
        return await asyncio.gather(*map(engine.generate, requests))

    async def ask_twice() -> None:
        compare(await ask())
        async with engine.paused():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            engine.publish(1)
        compare(await ask())

    def compare(outputs: list[Any]) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            said = np.concatenate([prompt, output.completion_ids])
            ids = torch.from_numpy(said.astype(np.int64))[None]
            exact = copy.deepcopy(model).cpu().double()
            with torch.no_grad():
                logits = exact(ids).logits[0, len(prompt) - 1 : -1]
            truth = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            gap = np.abs(truth.numpy() - output.logprobs).max()
            assert gap < (1e-4 if device == "cpu" else 5e-3), gap  # products in TF32 round more

    try:
        asyncio.run(ask_twice())
    finally:
        engine.close()


def captures(device: str, backend: Any, lengths: tuple[tuple[int, int], ...]) -> None:
    """Attention over forests of several lengths, compiled by `backend`, without a graph break."""
    compiled = torch.compile(flex_module.flex_attention, backend=backend, fullgraph=True)
    with gradient_on_cpu(device):
        for size in lengths:
            forest = two_trees(size)
            shapes = [(1, num, forest.num_tokens, 16) for num in (4, 2, 2)]
            inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
            layout = tree_layout(forest, device, flex=True)
            out = compiled(
                *inputs,
                block_mask=layout.flex_mask(Pattern(window=70)),
                scale=0.5,
                enable_gqa=True,
            )
            wanted = forest_attention(
                *inputs, tree_layout(forest, device), 0.5, pattern=Pattern(window=70)
            )
            assert difference(out.detach().transpose(1, 2), wanted.detach()) < 1e-3
            out.sum().backward()
            assert all(bool(x.grad.isfinite().all()) for x in inputs)
