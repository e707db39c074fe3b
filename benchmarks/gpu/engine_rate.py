"""Sampled tokens per second on a GPU: the embedded engine, Hugging Face `generate`, and vLLM.

    python benchmarks/gpu/engine_rate.py            the table, figures on the last line
    python benchmarks/gpu/engine_rate.py --check    exit 1 when a bar is missed
    python benchmarks/gpu/engine_rate.py --json     one JSON object instead of the table

Prompts of 37 tokens, 128 new tokens each, temperature 1, with the logprob of every token, in
bfloat16, at several batch sizes. The sides take turns, the best of the runs counts. vLLM runs in
its own process where `.venv-vllm-gpu` exists (`make test-gpu` makes it), with CUDA graphs, which
the embedded engine does not have. `--device cpu --model tiny` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch
from engine_tokens import PROMPT_TOKENS, by_engine, by_vllm, random_prompts
from verdict import Bar, conclude, make_parser

VLLM = ROOT / ".venv-vllm-gpu/bin/python"
OVER_GENERATE = 1.0


@torch.inference_mode()
def by_generate(model: Any, prompts: list[Any], new_tokens: int, temperature: float) -> None:
    """Sample with `generate`, and compute the logprobs that the engine gives with every token."""
    ids = torch.stack([torch.from_numpy(prompt).long() for prompt in prompts]).to(model.device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=True,
        temperature=temperature,
        top_k=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    answers = found.sequences[:, ids.shape[1] :]
    for step, logits in enumerate(found.logits):
        logits.float().log_softmax(-1).gather(-1, answers[:, step, None])
    answers.cpu()


def best_of(run: Callable[[], Any], repeats: int) -> float:
    """Return the least seconds of a run; the first one warms up. Answers arrive on the CPU."""
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def vllm_side(folder: str, vocabulary: int, options: argparse.Namespace) -> None:
    """Print seconds per batch size as JSON; runs in vLLM's own environment."""
    from vllm import LLM

    llm = LLM(folder, dtype=options.dtype, max_model_len=1024, max_num_seqs=max(options.sizes))
    found = {}
    for size in options.sizes:
        prompts = random_prompts(vocabulary, size, PROMPT_TOKENS)
        run = partial(by_vllm, llm, prompts, options.tokens, 1.0)
        found[str(size)] = best_of(run, options.repeats)
    print("\n" + json.dumps(found))


def beside_vllm(vocabulary: int, options: argparse.Namespace) -> dict[str, float]:
    """Return vLLM's seconds per batch size on the same prompts."""
    from rolltree.inference.models import resolve_model

    command = [VLLM, __file__, "--vllm", resolve_model(options.model), vocabulary]
    command += ["--sizes", *options.sizes, "--tokens", options.tokens, "--dtype", options.dtype]
    found = subprocess.run(
        [*map(str, command), "--repeats", str(options.repeats)],
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise SystemExit(f"vLLM failed:\n{found.stderr[-2000:]}")
    times: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return times


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return tokens per second of each side, one row per batch size."""
    from rolltree.inference.local import LocalEngine
    from rolltree.inference.models import load_model

    model, _ = load_model(options.model, options.dtype, device=options.device)
    vocabulary = model.config.vocab_size
    rows = []
    for size in options.sizes:
        prompts = random_prompts(vocabulary, size, PROMPT_TOKENS)
        with torch.inference_mode():
            generate = best_of(
                partial(by_generate, model, prompts, options.tokens, 1.0), options.repeats
            )
        engine = LocalEngine(model, max_batch=size, max_context=1024)
        own = best_of(partial(by_engine, engine, prompts, options.tokens, 1.0), options.repeats)
        engine.close()
        num_tokens = size * options.tokens
        rows.append({"batch": size, "generate": num_tokens / generate, "engine": num_tokens / own})
    if VLLM.exists():
        del model, engine
        torch.cuda.empty_cache()
        times = beside_vllm(vocabulary, options)
        for row in rows:
            row["vllm"] = row["batch"] * options.tokens / times[str(row["batch"])]
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    return [
        Bar.at_least(
            f"times generate, batch {row['batch']}", row["engine"] / row["generate"], OVER_GENERATE
        )
        for row in rows
    ]


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'tokens/s, batch':>15} {'generate':>10} {'engine':>10} {'vLLM':>10}")
    for row in rows:
        vllm = f"{row['vllm']:10,.0f}" if "vllm" in row else f"{'not there':>10}"
        print(f"{row['batch']:15} {row['generate']:10,.0f} {row['engine']:10,.0f} {vllm}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm", nargs=2, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.vllm:
        vllm_side(options.vllm[0], int(options.vllm[1]), options)
        return 0
    rows = measure(options)
    return conclude(options, bars(rows), rows, lambda: show(rows))


if __name__ == "__main__":
    sys.exit(main())
