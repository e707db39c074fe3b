"""LoRA on a mixture of SmolLM2's size: the exported model against the engine that sampled.

    python benchmarks/mixture_lora.py [--steps 3] [--kind qwen3_moe] [--check] [--json]

A model of random weights with SmolLM2's tokenizer trains adapters on its attention and experts with
the embedded engine on the CPU. Then the engine samples once more, and plain transformers reads the
exported model and computes the same logprobs.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree.inference.models import load_model
from rolltree.training import build_parts, load_train_config, open_run, run_training
from rolltree.values.types import GenerateRequest, SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "deepseek_v3": {
        "num_key_value_heads": 9,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
SHARED = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "moe_intermediate_size": 288,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "max_position_embeddings": 2048,
    "initializer_range": 0.04,  # logits that say something
    "tie_word_embeddings": True,
}


def make(kind: str, folder: Path) -> int:
    """Write a random model with SmolLM2's tokenizer; return its number of parameters."""
    _, tokenizer = load_model("smollm2-135m", "float32")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        **SHARED,
        **KINDS[kind],
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


async def measure(kind: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train, export, and compare."""
    size = make(kind, folder / "model")
    config = load_train_config(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"name": str(folder / "model"), "lora_rank": 8},
            "optim": {"lr": 1e-3},
            "algorithm": {"groups_per_step": 2, "group_size": 4},
            "train": {"num_steps": steps},
            "sampling": {"max_tokens": 16, "temperature": 1.0},
            "engine": {"max_context": 512},
            "eval": {"before": False, "after": False},
        }
    )

    def early_letters(completion: Any) -> float:
        text = completion[-1]["content"]
        return sum(letter < "n" for letter in text) / max(len(text), 1)

    rows = [{"question": f"What is {n} + 5?"} for n in range(8)]
    env = rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([early_letters]))
    parts = build_parts(config)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40_000, 32, dtype=np.int32) for _ in range(4)]
    try:
        with open_run(config) as run:
            report = await run_training(config, parts, source=env, run=run)
        answers = [
            await parts.client.generate(
                GenerateRequest(prompt, SamplingParams(max_tokens=32, seed=number))
            )
            for number, prompt in enumerate(prompts)
        ]
    finally:
        await parts.aclose()
    trained = sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    exported, first = (
        AutoModelForCausalLM.from_pretrained(path).eval()
        for path in (folder / "run" / "model", folder / "model")
    )
    found = {
        name: np.concatenate(
            [away(model, prompt, each) for prompt, each in zip(prompts, answers, strict=True)]
        )
        for name, model in (("exported", exported), ("untrained", first))
    }
    return {
        "kind": kind,
        "parameters": size,
        "trained": trained,
        "steps": [
            {
                name: step[name]
                for name in ("train/sampling/sampling_logp_difference/mean", "publish/probe_error")
            }
            for step in report.metrics
        ],
        **{name: {"mean": float(d.mean()), "max": float(d.max())} for name, d in found.items()},
    }


def show(result: dict[str, Any]) -> None:
    size, trained = result["parameters"] / 1e6, result["trained"] / 1e6
    print(f"{result['kind']}: {size:.0f}M parameters, adapters of {trained:.1f}M")
    for number, step in enumerate(result["steps"], 1):
        print(f"  step {number}: ", "  ".join(f"{k} {v:.1e}" for k, v in step.items()))
    for name in ("exported", "untrained"):
        mean, most = result[name]["mean"], result[name]["max"]
        print(f"  {name} model to engine: {mean:.1e} on average, {most:.1e} at most")


@torch.no_grad()
def away(model: Any, prompt: Any, answer: Any) -> Any:
    """Return how far a model's logprobs of sampled tokens are from the engine's, `[_C]`."""
    ids = torch.from_numpy(np.concatenate([prompt, answer.completion_ids])).long()[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return np.abs(own - answer.logprobs)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kind", choices=sorted(KINDS), default="qwen3_moe")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = asyncio.run(measure(options.kind, options.steps, Path(place)))
    what = "largest difference of logprobs, exported model to engine"
    bar = Bar.at_most(what, result["exported"]["max"], 1e-5)
    return conclude(options, [bar], result, lambda: show(result))


if __name__ == "__main__":
    sys.exit(main())
