"""Tokens per second of the embedded engine, compared with Hugging Face `generate` and with vLLM.

    python benchmarks/engine_tokens.py              the table, figures on the last line
    python benchmarks/engine_tokens.py --check      exit 1 when a bar is missed
    python benchmarks/engine_tokens.py --json       one JSON object instead of the table
    python benchmarks/engine_tokens.py --sizes 1 8  the first rows at other batch sizes, no bars
    python benchmarks/engine_tokens.py --steps      one decode step of 64, with and without the copy

- `greedy`: 64 different prompts of 37 tokens, 64 new tokens each. Both must say the same.
- `sampled`: the same at temperature 1, with the logprob of every token, as RL needs it.
- `groups`: 8 prompts of 37 tokens, 8 samples of 16 tokens each; the engine computes a prompt once.
- `turns`: 16 conversations of 8 turns, 96 new and 24 sampled tokens per turn, greedy; `generate`
  computes the whole history in every turn, the engine what is new. (With 4 conversations of
  SmolLM2 instead of 16 decoding dominates: 2.2 times instead of 3.1.)

`generate` and the engine run one after the other in this process, several times; figures are CPU
time, best of the runs, with the wall time of the same run next to it. Below `sampled` is what
the batch-invariant mode makes of it. Where vLLM is installed (`make .venv-vllm/.vllm`) it gets the
same prompts in its own process, `enforce_eager`, with as many threads. All is float32. The engine
runs as in `rolltree eval` (`pack_weights`), with `--shared` as in training: nothing is copied.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verdict import Bar, conclude, make_parser

BATCH, PROMPT_TOKENS, NEW_TOKENS = 64, 37, 64
GROUPS, GROUP_SIZE, GROUP_TOKENS = 8, 8, 16
TURNS, TURN_TOKENS, ANSWER_TOKENS = 8, 96, 24
BARS = {
    ("tiny", "sampled"): 1.3,
    ("tiny", "turns"): 3.0,
    ("smollm2-135m", "sampled"): 1.15,
    ("smollm2-135m", "turns"): 3.0,
}
Ids = np.ndarray[Any, np.dtype[np.int32]]
Answer = Callable[[list[Ids], int, float], Any]
"""From prompts, a number of new tokens and a temperature to new ids `[prompts, tokens]`."""


def random_prompts(vocabulary: int, num: int, length: int, seed: int = 0) -> list[Ids]:
    return list(np.random.default_rng(seed).integers(3, vocabulary, (num, length), np.int32))


VLLM = Path(__file__).parents[1] / ".venv-vllm/bin/python"
VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@torch.inference_mode()
def by_generate(model: Any, prompts: list[Ids], new_tokens: int, temperature: float) -> Any:
    ids = torch.from_numpy(np.stack(prompts)).long()
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=temperature > 0,
        top_k=None,
        output_logits=temperature > 0,
        return_dict_in_generate=True,
    )
    answers = found.sequences[:, ids.shape[1] :]
    for step, logits in enumerate(found.logits or ()):  # what the engine gives with every token
        logits.log_softmax(-1).gather(-1, answers[:, step, None])
    return answers.numpy()


def by_engine(engine: Any, prompts: list[Ids], new_tokens: int, temperature: float) -> Any:
    from rolltree.values.types import GenerateRequest, SamplingParams

    async def ask() -> list[Ids]:
        sampling = SamplingParams(temperature=temperature, max_tokens=new_tokens)
        requests = [GenerateRequest(prompt, sampling) for prompt in prompts]
        outputs = await asyncio.gather(*map(engine.generate, requests))
        return [output.completion_ids for output in outputs]

    return np.stack(asyncio.run(ask()))


def by_vllm(llm: Any, prompts: list[Ids], new_tokens: int, temperature: float) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=temperature,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=0 if temperature > 0 else None,
    )
    asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return np.array([output.outputs[0].token_ids for output in outputs], np.int32)


def greedy(answer: Answer, vocabulary: int, batch: int) -> Any:
    return answer(random_prompts(vocabulary, batch, PROMPT_TOKENS), NEW_TOKENS, 0.0)


def sampled(answer: Answer, vocabulary: int, batch: int) -> Any:
    return answer(random_prompts(vocabulary, batch, PROMPT_TOKENS), NEW_TOKENS, 1.0)


def groups(answer: Answer, vocabulary: int, batch: int) -> Any:
    prompts = random_prompts(vocabulary, GROUPS, PROMPT_TOKENS)
    return answer([prompt for prompt in prompts for _ in range(GROUP_SIZE)], GROUP_TOKENS, 1.0)


def turns(answer: Answer, vocabulary: int, batch: int) -> Any:
    history = np.empty((batch, 0), np.int32)
    for turn in range(TURNS):
        asked = random_prompts(vocabulary, batch, TURN_TOKENS, seed=turn)
        history = np.concatenate([history, asked], axis=1)
        history = np.concatenate([history, answer(list(history), ANSWER_TOKENS, 0.0)], axis=1)
    return history


ROWS: dict[str, tuple[Callable[[Answer, int, int], Any], int]] = {
    "greedy": (greedy, NEW_TOKENS),
    "sampled": (sampled, NEW_TOKENS),
    "groups": (groups, GROUP_TOKENS),
    "turns": (turns, TURNS * ANSWER_TOKENS),
}
"""The cases, and how many tokens each samples per row of the batch."""


def batch_of(row: str) -> int:
    """Return the rows of the batch, if no other size is given."""
    return BATCH if row != "turns" else 16


async def forget_prefixes(engine: Any) -> None:
    """Empty the prefix cache."""
    async with engine.paused():
        engine.publish(0)


def timed(run: Callable[[], Any]) -> tuple[Any, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    said = run()
    return said, time.process_time() - cpu, time.perf_counter() - wall


def compare(
    model: Any, row: str, repeats: int, batch: int, *, invariant: bool, shared: bool
) -> dict[str, Any]:
    from rolltree.inference.local import LocalEngine

    run, num_tokens = ROWS[row]
    engines = {
        "engine": LocalEngine(model, max_batch=batch, max_context=1024, pack_weights=not shared)
    }
    if invariant:
        engines["invariant"] = LocalEngine(
            model, max_batch=batch, max_context=1024, batch_invariant=True
        )
    sides: dict[str, Answer] = {"generate": partial(by_generate, model)}
    sides |= {name: partial(by_engine, engine) for name, engine in engines.items()}
    best: dict[str, tuple[float, float]] = {}
    said: dict[str, Any] = {}
    for _ in range(repeats):
        for name, answer in sides.items():
            if name in engines:
                asyncio.run(forget_prefixes(engines[name]))
            vocabulary = model.config.vocab_size
            said[name], *times = timed(partial(run, answer, vocabulary, batch))
            best[name] = min(best.get(name, (times[0], times[1])), (times[0], times[1]))
    for engine in engines.values():
        engine.close()
    exact = row in ("greedy", "turns")
    return {
        "row": row,
        "tokens": num_tokens * batch,
        **{f"{name}_cpu_s": cpu_s for name, (cpu_s, _) in best.items()},
        **{f"{name}_wall_s": wall_s for name, (_, wall_s) in best.items()},
        "speed_up": best["generate"][0] / best["engine"][0],
        "equal": float((said["generate"] == said["engine"]).mean()) if exact else None,
    }


def decode_steps(model: Any, count: int) -> dict[str, float]:
    """Return milliseconds (CPU, best of `count`) of a step of 64 rows, by how weights are kept."""
    from rolltree.inference.local.probe import choose_route

    route = choose_route(model, 1024)
    makes = {"shared": {}, "packed copy": {"packed": True}, "batch-invariant": {"invariant": True}}
    runners = {name: route.runner(model, BATCH, 1024, **options) for name, options in makes.items()}
    ids = np.stack(random_prompts(model.config.vocab_size, BATCH, 1024))
    one, best = np.ones(BATCH, np.int64), dict.fromkeys(runners, float("inf"))
    with torch.inference_mode():
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + count):
            for name, runner in runners.items():
                run = partial(runner.forward, list(range(BATCH)), ids, position * one, one)
                best[name] = min(best[name], timed(run)[1] * 1000)
    return best


def vllm_side(folder: str, name: str, vocabulary: int, options: argparse.Namespace) -> None:
    """Print the times of some rows as JSON; runs in vLLM's own environment."""
    from vllm import LLM

    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=BATCH)
    found, answer = {}, partial(by_vllm, llm)
    for row in options.rows:
        run, _ = ROWS[row]
        times = []
        for _ in range(options.repeats):
            llm.reset_prefix_cache()
            times.append(timed(partial(run, answer, vocabulary, batch_of(row)))[1:])
        found[row] = min(times)
    print("\n" + json.dumps(found))


def beside_vllm(name: str, vocabulary: int, options: Any) -> dict[str, list[float]]:
    """Return CPU and wall seconds per row, of vLLM on the same prompts."""
    from rolltree.inference.models import resolve_model

    repeats = options.repeats or (2 if name == "tiny" else 1)
    command = [VLLM, __file__, "--vllm", resolve_model(name), name, vocabulary]
    found = subprocess.run(
        [*map(str, command), "--rows", *options.rows, "--repeats", str(repeats)],
        env={**os.environ, **VLLM_ENV, "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise SystemExit(f"vLLM failed on {name}:\n{found.stderr[-2000:]}")
    times: dict[str, list[float]] = json.loads(found.stdout.splitlines()[-1])
    return times


def show(result: dict[str, Any]) -> None:
    rates = (
        f"{result['tokens'] / result[f'{side}_{what}_s']:10,.0f}"
        for side in ("generate", "engine")
        for what in ("cpu", "wall")
    )
    equal = "" if result["equal"] is None else f"{result['equal']:.1%}"
    label = f"{result['model']:13} {result['row']:8} {result['batch']:5}"
    print(f"{label} {''.join(rates)} {result['speed_up']:8.2f}x {equal:>8}", flush=True)
    for side, words in (("invariant", "batch-invariant mode"), ("vllm", "vLLM")):
        if f"{side}_cpu_s" in result:
            cpu, wall = (result["tokens"] / result[f"{side}_{what}_s"] for what in ("cpu", "wall"))
            share = result["engine_cpu_s"] / result[f"{side}_cpu_s"]
            print(f"{'':15}{words:32} {cpu:21,.0f}{wall:10,.0f} {share:8.2f}x of the engine")


def bars(results: list[dict[str, Any]]) -> list[Bar]:
    found = []
    for result in results:
        what, speed = f"{result['model']}, {result['row']}", result["speed_up"]
        bar = BARS.get((result["model"], result["row"]))
        if bar is not None:
            found.append(Bar.at_least(f"speed-up, {what}", speed, bar))
        if result["equal"] is not None:
            found.append(Bar.at_least(f"equal tokens, {what}", result["equal"], 1.0))
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[], help="batch sizes, no bars")
    parser.add_argument("--repeats", type=int, default=0, help="runs per side, the best counts")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--shared", action="store_true", help="the engine copies no weights")
    parser.add_argument("--steps", action="store_true", help="time single decode steps, no bars")
    parser.add_argument("--vllm", nargs=3, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.vllm:
        folder, name, vocabulary = options.vllm
        vllm_side(folder, name, int(vocabulary), options)
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    from rolltree.inference.models import load_model

    if options.steps:
        for name in options.models:
            steps = decode_steps(load_model(name)[0], 100 if name == "tiny" else 8)
            print(name, ", ".join(f"{kept} {ms:.1f} ms" for kept, ms in steps.items()), flush=True)
        return 0
    with_vllm = VLLM.exists() and not options.sizes
    if not options.json:
        if not with_vllm:
            print("no vLLM in this table: .venv-vllm is missing (make .venv-vllm/.vllm)")
        print(f"{'tokens/s':28} {'generate':>19} {'engine':>19}")
        head = f"{'model':13} {'row':8} {'batch':>5}"
        print(f"{head} {'CPU':>10}{'wall':>10}{'CPU':>10}{'wall':>10} {'speed-up':>9} {'equal':>8}")
    results = []
    for name in options.models:
        model, _ = load_model(name)
        vllm = beside_vllm(name, model.config.vocab_size, options) if with_vllm else {}
        for row in ("greedy", "sampled") if options.sizes else options.rows:
            for batch in options.sizes or [batch_of(row)]:
                repeats = options.repeats or {"tiny": 7}.get(name, 1)
                invariant = name == "tiny" and row == "sampled" and not options.sizes
                result = compare(
                    model, row, repeats, batch, invariant=invariant, shared=options.shared
                )
                if row in vllm:
                    result["vllm_cpu_s"], result["vllm_wall_s"] = vllm[row]
                results.append({"model": name, "batch": batch, **result})
                if not options.json:
                    show(results[-1])
    return conclude(options, [] if options.sizes else bars(results), results)


if __name__ == "__main__":
    sys.exit(main())
