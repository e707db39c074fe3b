"""Tokens per second of the embedded engine beside Hugging Face `generate`: same model and process.

    python benchmarks/engine_tokens.py              the table, figures on the last line
    python benchmarks/engine_tokens.py --check      exit 1 when a bar is missed
    python benchmarks/engine_tokens.py --json       one JSON object instead of the table
    python benchmarks/engine_tokens.py --sizes 1 8  the first rows at other batch sizes, no bars

- `greedy`: 64 different prompts of 37 tokens, 64 new tokens each. Both must say the same.
- `sampled`: the same at temperature 1, with the logprob of every token, as RL needs it.
- `groups`: 8 prompts of 37 tokens, 8 samples of 16 tokens each; the engine computes a prompt once.
- `turns`: 16 conversations of 8 turns, 96 new tokens and 24 sampled ones per turn, greedy;
  `generate` computes the whole history in every turn, the engine what is new.

Both sides run one after the other, several times; figures are CPU time of one thread, best of the
runs, with the wall time of the same run beside it. Everything is float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rolltree.inference.local import LocalEngine
from rolltree.models import load_model
from rolltree.types import GenerateRequest, SamplingParams

BATCH, PROMPT_TOKENS, NEW_TOKENS = 64, 37, 64
GROUPS, GROUP_SIZE, GROUP_TOKENS = 8, 8, 16
CONVERSATIONS, TURNS, TURN_TOKENS, ANSWER_TOKENS = 16, 8, 96, 24
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


def by_engine(engine: LocalEngine, prompts: list[Ids], new_tokens: int, temperature: float) -> Any:
    async def ask() -> list[Ids]:
        sampling = SamplingParams(temperature=temperature, max_tokens=new_tokens)
        requests = [GenerateRequest(prompt, sampling) for prompt in prompts]
        outputs = await asyncio.gather(*map(engine.generate, requests))
        return [output.completion_ids for output in outputs]

    return np.stack(asyncio.run(ask()))


def greedy(answer: Answer, vocabulary: int, batch: int) -> Any:
    return answer(random_prompts(vocabulary, batch, PROMPT_TOKENS), NEW_TOKENS, 0.0)


def sampled(answer: Answer, vocabulary: int, batch: int) -> Any:
    return answer(random_prompts(vocabulary, batch, PROMPT_TOKENS), NEW_TOKENS, 1.0)


def groups(answer: Answer, vocabulary: int, batch: int) -> Any:
    prompts = random_prompts(vocabulary, GROUPS, PROMPT_TOKENS)
    return answer([prompt for prompt in prompts for _ in range(GROUP_SIZE)], GROUP_TOKENS, 1.0)


def turns(answer: Answer, vocabulary: int, batch: int) -> Any:
    history = np.empty((CONVERSATIONS, 0), np.int32)
    for turn in range(TURNS):
        asked = random_prompts(vocabulary, CONVERSATIONS, TURN_TOKENS, seed=turn)
        history = np.concatenate([history, asked], axis=1)
        history = np.concatenate([history, answer(list(history), ANSWER_TOKENS, 0.0)], axis=1)
    return history


ROWS: dict[str, tuple[Callable[[Answer, int, int], Any], int]] = {
    "greedy": (greedy, BATCH * NEW_TOKENS),
    "sampled": (sampled, BATCH * NEW_TOKENS),
    "groups": (groups, GROUPS * GROUP_SIZE * GROUP_TOKENS),
    "turns": (turns, CONVERSATIONS * TURNS * ANSWER_TOKENS),
}
"""What is run, and how many tokens it samples."""


def compare(model: Any, row: str, repeats: int, batch: int) -> dict[str, Any]:
    run, num_tokens = ROWS[row]
    engine = LocalEngine(model, max_batch=batch, max_context=1024)
    sides: dict[str, Answer] = {
        "generate": partial(by_generate, model),
        "engine": partial(by_engine, engine),
    }
    best: dict[str, tuple[float, float]] = {}
    said: dict[str, Any] = {}
    for _ in range(repeats):
        engine.publish(0)  # forget what the last run left in the prefix cache
        for name, answer in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            said[name] = run(answer, model.config.vocab_size, batch)
            cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
            best[name] = min(best.get(name, (cpu_s, wall_s)), (cpu_s, wall_s))
    engine.close()
    exact = row in ("greedy", "turns")
    return {
        "row": row,
        "tokens": num_tokens * batch // BATCH,
        **{f"{name}_cpu_s": cpu_s for name, (cpu_s, _) in best.items()},
        **{f"{name}_wall_s": wall_s for name, (_, wall_s) in best.items()},
        "speed_up": best["generate"][0] / best["engine"][0],
        "equal": float((said["generate"] == said["engine"]).mean()) if exact else None,
    }


def show(result: dict[str, Any]) -> None:
    rates = (
        f"{result['tokens'] / result[f'{side}_{what}_s']:10,.0f}"
        for side in ("generate", "engine")
        for what in ("cpu", "wall")
    )
    equal = "" if result["equal"] is None else f"{result['equal']:.1%}"
    label = f"{result['model']:13} {result['row']:8} {result['batch']:5}"
    print(f"{label} {''.join(rates)} {result['speed_up']:8.2f}x {equal:>8}", flush=True)


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float, float, bool]]:
    found = []
    for result in results:
        what, speed = f"{result['model']}, {result['row']}", result["speed_up"]
        bar = BARS.get((result["model"], result["row"]))
        if bar is not None:
            found.append((f"speed-up, {what}", speed, bar, speed >= bar))
        if result["equal"] is not None:
            found.append((f"equal tokens, {what}", result["equal"], 1.0, result["equal"] == 1.0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[], help="batch sizes, no bars")
    parser.add_argument("--repeats", type=int, default=0, help="runs per side, the best counts")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.json:
        print(f"{'tokens/s':28} {'generate':>19} {'engine':>19}")
        head = f"{'model':13} {'row':8} {'batch':>5}"
        print(f"{head} {'CPU':>10}{'wall':>10}{'CPU':>10}{'wall':>10} {'speed-up':>9} {'equal':>8}")
    results = []
    for name in options.models:
        model, _ = load_model(name)
        for row in ("greedy", "sampled") if options.sizes else options.rows:
            for batch in options.sizes or [BATCH]:
                repeats = options.repeats or {"tiny": 5}.get(name, 1 if row == "turns" else 2)
                shown = CONVERSATIONS if row == "turns" else batch
                result = compare(model, row, repeats, batch)
                results.append({"model": name, "batch": shown, **result})
                if not options.json:
                    show(results[-1])
    found = [] if options.sizes else bars(results)
    if options.json:
        names = ("what", "value", "bar", "met")
        checked = [dict(zip(names, bar, strict=True)) for bar in found]
        print(json.dumps({"results": results, "bars": checked}))
    elif found:
        print()
        for what, value, bar, met in found:
            print(f"{'ok  ' if met else 'MISS'} {what}: {value:.3g} (bar >= {bar})")
        print("figures: " + "; ".join(f"{value:.3g} {what}" for what, value, _, _ in found))
    return 1 if options.check and not all(met for *_, met in found) else 0


if __name__ == "__main__":
    sys.exit(main())
