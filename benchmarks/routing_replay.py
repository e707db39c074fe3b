"""How far trainer and engine disagree on a mixture's logprobs, with replayed experts and without.

    python benchmarks/routing_replay.py            # a table
    python benchmarks/routing_replay.py --check    # exit 1 when a bar is missed
    python benchmarks/routing_replay.py --json     # one JSON object instead of the table

Tiny mixtures with random weights: one routed by softmax as Qwen3-MoE, one by groups, sigmoid and
bias as DeepSeek-V3. The embedded engine samples two turns per rollout and records the experts; the
trainer reads them as one tree. What differs between the two: nothing; nothing, in three turns of as
many conversations as the engine has slots, which move between them; noise on the trainer's router
weights, as after an update that the engine has not got; or the engine's bfloat16. With bfloat16 the
rest of the model rounds too, and replay cannot undo that.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig
from verdict import Bar, conclude, make_parser

from rolltree.inference.local import LocalEngine
from rolltree.inference.local.routing import find_routers, record_routing
from rolltree.samples import build_samples
from rolltree.tokens import Trajectory
from rolltree.training.forward import LogprobModel
from rolltree.training.layout import collate
from rolltree.training.models.routing import Replay
from rolltree.values.types import GenerateRequest, ModelResponse, SamplingParams, State

VOCABULARY, NUM_EXPERTS, TOP_K = 512, 32, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "initializer_range": 0.12,
}
MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
GROUPS = {"n_routed_experts": NUM_EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
MODELS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        num_experts=NUM_EXPERTS, head_dim=16, num_key_value_heads=2, **SIZES
    ),
    "deepseek_v3": DeepseekV3Config(first_k_dense_replace=1, **GROUPS, **MLA, **SIZES),
}
NOISES = {
    "nothing": 0.0,
    "no free slot": 0.0,
    "router +-0.3 %": 0.003,
    "router +-3 %": 0.03,
    "engine bfloat16": 0.0,
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[kind]).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.02 * torch.randn_like(buffer))
    return model


@torch.no_grad()
def perturb(model: Any, noise: float) -> None:
    """Add normal noise to the routers' weights, relative to their spread."""
    torch.manual_seed(1)
    for router in find_routers(model).each:
        weight = router.module.weight
        weight.add_(noise * weight.std() * torch.randn_like(weight))


Call = tuple[np.ndarray, np.ndarray]
"""The ids of a call but the last, and the experts that the engine recorded for them."""


async def play(
    engine: LocalEngine, num_rollouts: int, num_turns: int, calls: list[Call]
) -> list[State]:
    """Sample groups of 4 rollouts that begin with one prompt; add what each call recorded."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 24).astype(np.int32) for _ in range(num_rollouts // 4)]

    async def rollout(index: int) -> State:
        trajectory, path, before = Trajectory(), prompts[index // 4], None
        for turn in range(num_turns):
            # Answers of different lengths: conversations come back in another order.
            most = 48 - (7 * index + 5 * turn) % 33
            sampling = SamplingParams(max_tokens=most, seed=num_turns * index + turn)
            output = await engine.generate(GenerateRequest(path, sampling))
            response = ModelResponse(
                message={},
                text="",
                finish_reason=output.finish_reason,
                prompt_ids=path,
                completion_ids=output.completion_ids,
                logprobs=output.logprobs,
                versions=output.versions,
                extends=before,
                routed_experts=output.routed_experts,
            )
            trajectory.append_call(prompt=[], completion=[], response=response)
            path = np.concatenate([path, output.completion_ids])
            calls.append((path[:-1], output.routed_experts))
            path = np.concatenate([path, np.arange(9, dtype=np.int32)])
            before = response.call_id
        return State(trajectory=trajectory, reward=1.0, example_id=index // 4)

    return list(await asyncio.gather(*(rollout(index) for index in range(num_rollouts))))


@torch.no_grad()
def wrong_calls(model: Any, calls: list[Call]) -> float:
    """Return the share of calls with recorded experts that are not those of their own ids.

    The tree takes the experts of a shared prefix from one call, so the mismatch does not show it.
    """
    wrong = 0
    with record_routing(find_routers(model)) as recorder:
        layers = [router.layer for router in recorder.routers.each]
        for ids, experts in calls:
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
            own = np.sort(recorder.take()[:, layers])
            # A rounding error may swap two experts of one token.
            wrong += float((own == np.sort(experts[:, layers])).all((1, 2)).mean()) < 0.95
    return wrong / len(calls)


def measure(kind: str, what: str, num_rollouts: int) -> dict[str, Any]:
    """Return the sizes of trainer minus engine logprob, and how often the routers disagree."""
    trained = make_model(kind)
    served = copy.deepcopy(trained)
    if what == "engine bfloat16":
        served = served.to(torch.bfloat16)
    perturb(trained, NOISES[what])

    is_full = what == "no free slot"
    calls: list[Call] = []

    async def sample() -> list[State]:
        num_slots = num_rollouts if is_full else 16
        engine = LocalEngine(served, max_batch=num_slots, max_context=256, record_experts=True)
        try:
            return await play(engine, num_rollouts, 3 if is_full else 2, calls)
        finally:
            await engine.aclose()

    states = asyncio.run(sample())
    forest = collate(build_samples(states, "tree", group_key=lambda s: s["example_id"]).samples)
    reader, found = LogprobModel(trained), dict[str, Any]()
    for name, replay in (("own", None), ("replayed", Replay(trained))):
        reader.replay = replay
        with torch.no_grad(), record_routing(find_routers(trained)) as recorder, reader.context():
            logprob = reader(forest).logprob.numpy()
            if replay is None:
                chosen = recorder.take()
        size = np.abs(logprob - forest.records.logprob)
        found[name] = {
            "mean": float(size.mean()),
            "p99": float(np.quantile(size, 0.99)),
            "max": float(size.max()),
        }
    recorded_experts = forest.routed_experts
    assert recorded_experts is not None
    known = recorded_experts[:, -1, 0] >= 0
    layers = [router.layer for router in find_routers(trained).each]
    same = np.sort(chosen[known][:, layers]) == np.sort(recorded_experts[known][:, layers])
    return {
        "model": kind,
        "differs": what,
        "other_experts": 1 - float(same.all(-1).mean()),
        "num_records": len(forest.records),
        "wrong_calls": wrong_calls(served, calls) if is_full else 0.0,
        **found,
    }


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("own mean", "p99", "max", "replayed mean", "p99", "max")
    print(f"{'model':12} {'differs':16} {'other experts':>14}", *(f"{c:>13}" for c in columns))
    for row in rows:
        sizes = [row[name][key] for name in ("own", "replayed") for key in ("mean", "p99", "max")]
        print(
            f"{row['model']:12} {row['differs']:16} {100 * row['other_experts']:12.2f} %",
            *(f"{size:13.2e}" for size in sizes),
        )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=32, help="a multiple of 4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(kind, what, options.rollouts) for kind in MODELS for what in NOISES]
    bars = []
    for row in rows:
        name, ratio = (
            f"{row['model']}, {row['differs']}",
            row["replayed"]["mean"] / row["own"]["mean"],
        )
        if row["differs"] == "no free slot":
            share = row["wrong_calls"]
            bars.append(Bar.at_most(f"calls with another's experts ({row['model']})", share, 0.0))
        if row["differs"] in ("nothing", "no free slot"):
            bars.append(Bar.at_most(f"mean mismatch ({name})", row["replayed"]["mean"], 2e-5))
        elif row["differs"] == "engine bfloat16":
            bars.append(Bar.below(f"of the mismatch is left by replay ({name})", ratio, 1.0))
        else:
            bars.append(Bar.at_most(f"of the mismatch is left by replay ({name})", ratio, 0.5))
    return conclude(options, bars, rows, lambda: show(rows))


if __name__ == "__main__":
    sys.exit(main())
