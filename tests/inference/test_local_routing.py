"""Routed experts that the embedded engine records are those of a plain pass over the same ids."""

from __future__ import annotations

import asyncio
import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from local_models import VOCAB, ask, new_model, random_prompt, tokenizer
from test_local_engine import engine_of
from test_local_probe import moved
from test_local_rows import QWEN3_NEXT
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolltree.inference.local import local_client
from rolltree.inference.local.routing import ExpertTable, find_routers, record_routing
from rolltree.inference.local.rows import RowMode, RowRunner
from rolltree.inference.local.shell import shell_of
from rolltree.samples.streams import tree_streams
from rolltree.tokens import ROUTED_EXPERTS, recorded_routing
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import SamplingParams

NUM_LAYERS, TOP_K = 3, 2


@functools.cache
def mixture() -> Any:
    """Return a mixture of three layers; the second has no experts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[1],
        decoder_sparse_step=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=258,
        pad_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config).eval()


@torch.no_grad()
def plain_routing(model: Any, path: Any) -> Any:
    """Return the experts `[_T, layers, top_k]` of a pass over a whole path, by torch's hooks."""
    found = np.zeros((len(path), NUM_LAYERS, TOP_K), np.uint8)
    hooks = []
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):

            def note(_module: Any, _args: Any, output: Any, index: int = index) -> None:
                found[:, index] = output[2].numpy()

            hooks.append(layer.mlp.gate.register_forward_hook(note))
    model(torch.from_numpy(np.asarray(path, np.int64))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def check(output: Any, prompt: Any) -> None:
    path = np.concatenate([prompt, output.completion_ids])[:-1]
    assert output.routed_experts.dtype == np.uint8
    assert np.array_equal(output.routed_experts, plain_routing(mixture(), path))


async def test_prompts_and_answers_in_a_batch_and_from_the_prefix_cache() -> None:
    prompts = [random_prompt(n, 3 + 5 * n) for n in range(7)]
    options = {"max_batch": 4, "prefill_chunk": 16}
    async with engine_of(mixture(), record_experts=True, **options) as engine:
        requests = [ask(p, max_tokens=3 + n, seed=n) for n, p in enumerate(prompts)]
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
        for prompt, output in zip(prompts, found, strict=True):
            check(output, prompt)
        longer = [
            np.concatenate([prompt, output.completion_ids, random_prompt(n, 4)])
            for n, (prompt, output) in enumerate(zip(prompts, found, strict=True))
        ]
        longer += [np.concatenate([prompts[6][:20], random_prompt(9, 5)])]
        again = await asyncio.gather(*(engine.generate(ask(p)) for p in longer))
        assert sum(output.num_cached_tokens for output in again) > 0
        for prompt, output in zip(longer, again, strict=True):
            check(output, prompt)
        async with engine.paused():
            engine.publish(1)
        check(await engine.generate(ask(longer[-1])), longer[-1])


@pytest.mark.parametrize(("num_conversations", "hostile"), [(8, False), (8, True), (5, True)])
async def test_as_many_conversations_as_slots_or_fewer(
    num_conversations: int, hostile: bool
) -> None:
    """Slots are swapped and taken over; hostile: forked, cancelled and outdated as well."""
    rng = np.random.default_rng(0)
    num_cached = 0
    async with engine_of(
        mixture(), record_experts=True, max_batch=8, prefill_chunk=16, max_context=256
    ) as engine:

        async def talk(number: int) -> None:
            nonlocal num_cached
            path = np.concatenate([random_prompt(99, 9), random_prompt(number, 1 + number)])
            for turn in range(4):
                sizes = rng.integers(1, 20, 2 if hostile and (number + turn) % 3 == 0 else 1)
                requests = [
                    ask(path, temperature=1.0, seed=8 * number + fork, max_tokens=int(size))
                    for fork, size in enumerate(sizes)
                ]
                found = [asyncio.create_task(engine.generate(request)) for request in requests]
                if hostile and turn % 2:
                    given_up = asyncio.create_task(engine.generate(ask(path[:-1], max_tokens=99)))
                    await found[0]
                    given_up.cancel()
                outputs = await asyncio.gather(*found)
                for output in outputs:
                    check(output, path)
                num_cached += outputs[0].num_cached_tokens
                path = np.concatenate([path, outputs[0].completion_ids, random_prompt(turn, 3)])
                if hostile and number == 1 and turn == 2:
                    async with engine.paused():
                        engine.publish(1)

        async with asyncio.TaskGroup() as group:
            for number in range(num_conversations):
                group.create_task(talk(number))
    assert num_cached > 0


@pytest.mark.parametrize("mode", list(RowMode))
def test_rows_that_run_one_by_one(mode: RowMode) -> None:
    runner = RowRunner(mixture(), mode, num_slots=2)
    table = ExpertTable(mixture(), runner, num_slots=2, capacity=16)
    ids = random_prompt(1, 32).reshape(2, 16)
    with torch.inference_mode():
        for start, count in ((0, 9), (9, 1), (10, 1)):
            two = np.array([start, start]), np.array([count, count])
            runner.forward([0, 1], ids, *two)
    for row in (0, 1):
        assert np.array_equal(table.read(row, 11), plain_routing(mixture(), ids[row, :11]))


async def test_a_session_stores_what_each_call_adds() -> None:
    client = local_client(mixture(), tokenizer(), record_experts=True, max_context=256)
    messages = [{"role": "user", "content": "a b c"}]
    session = client.session()
    trajectory: Any = None
    for turn in range(3):
        sampling = SamplingParams(max_tokens=5, seed=turn)
        answer = await session.chat(messages, sampling=sampling)
        assert answer.routed_experts is None  # it is in the tree
        trajectory = answer.tree
        messages += [answer.message, {"role": "user", "content": "again"}]
    await client.aclose()
    for call in range(3):
        stream = trajectory.stream(ROUTED_EXPERTS, call)
        path = trajectory.path_view(call)
        parent = trajectory.parent(call)
        assert stream.start == (0 if parent is None else trajectory.path_len(parent) - 1)
        assert stream.start + len(stream.values) == len(path) - 1
        expected = plain_routing(mixture(), path[:-1])
        assert np.array_equal(recorded_routing(trajectory, call), expected)
    assert trajectory.parent(2) is not None


async def test_experts_of_new_weights_are_stored_beside_those_of_the_old() -> None:
    model = copy.deepcopy(mixture())
    client = local_client(model, tokenizer(), record_experts=True, max_context=256)
    session, messages = client.session(), [{"role": "user", "content": "a b c"}]
    expected: list[Any] = []
    answer: Any = None
    for turn in range(4):
        if turn == 2:
            async with client.engine.paused():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5).add_(0.05)
                client.engine.publish(1)
        answer = await session.chat(messages, sampling=SamplingParams(max_tokens=5, seed=turn))
        messages += [answer.message, {"role": "user", "content": "again"}]
        expected.append(plain_routing(model, answer.tree.path_view(answer.call)[:-1]))
    await client.aclose()
    tree = answer.tree
    for call, experts in enumerate(expected):
        assert np.array_equal(recorded_routing(tree, call), experts)
    starts = [stream.start for call in range(4) if (stream := tree.stream(ROUTED_EXPERTS, call))]
    assert starts == [0, tree.path_len(0) - 1, 0, tree.path_len(2) - 1]
    assert not np.array_equal(expected[3][: len(expected[1])], expected[1])
    assert np.array_equal(tree_streams(tree)[ROUTED_EXPERTS].values, expected[3])


@pytest.mark.parametrize("kind", ["llama4_text", "gpt_oss", "mixtral", "jamba", "qwen3_next"])
async def test_other_ways_to_choose_experts(kind: str) -> None:
    """transformers' `base_model` is the whole model for Llama 4; the last two run row by row."""
    own: dict[str, Any] = {
        "llama4_text": {"num_local_experts": 4, "interleave_moe_layer_step": 2, "head_dim": 8},
        "jamba": {
            "num_experts": 4,
            "expert_layer_period": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        "qwen3_next": QWEN3_NEXT,
    }
    model = moved(kind, **{"num_local_experts": 4, "num_experts_per_tok": 2, **own.get(kind, {})})
    async with engine_of(model, record_experts=True, max_batch=2, max_context=64) as engine:
        prompts = [random_prompt(n, 9 + n) % 98 + 2 for n in range(3)]
        found = await asyncio.gather(*(engine.generate(ask(prompt)) for prompt in prompts))
    shell = shell_of(model)
    for prompt, output in zip(prompts, found, strict=True):
        path = np.concatenate([prompt, output.completion_ids])[:-1]
        with torch.no_grad(), record_routing(find_routers(shell)) as recorder:
            shell(torch.from_numpy(path.astype(np.int64))[None], use_cache=False)
        assert np.array_equal(output.routed_experts, recorder.take())


async def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedSetting, match="no router was found in Qwen3ForCausalLM"):
        async with engine_of(new_model(), record_experts=True):
            pass
