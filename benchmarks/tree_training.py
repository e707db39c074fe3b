"""Time and memory of one gradient, computed on a token tree, interleaved rows and single calls.

    python benchmarks/tree_training.py            the table, figures on the last line
    python benchmarks/tree_training.py --check    exit 1 when a bar is missed
    python benchmarks/tree_training.py --json     one JSON object instead of the table
    python benchmarks/tree_training.py --blocks   attention alone: dense, block sizes, windows
    python benchmarks/tree_training.py --models full      only these of `MODELS`

One pass is forward, loss and backward over all samples, without the optimizer. `tree` runs through
rolltree's tree attention (`tree bf16`: with `model.backward_dtype`), the others sample by sample
through the model's own attention (transformers, SDPA), so nothing is padded. The rows take turns;
each one's best wall time and best CPU time count, of one thread. The model is a Llama of 8.3M
parameters in float32; models with other layers run two of the scenes as well, without memory.

Memory is the peak of one pass over what was there before it, in its own process, when each
forward pass may hold 4,096 tokens.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo3Config, Qwen3NextConfig
from verdict import Bar, conclude, make_parser

from rolltree.samples import build_samples
from rolltree.tokens import Trajectory
from rolltree.training import Trainer, load_train_config
from rolltree.training.batches import build_batch
from rolltree.training.layout import Pattern
from rolltree.training.tree_blocks import TreeLayout, forest_attention
from rolltree.values.types import FinishReason, ModelResponse, State

VOCABULARY = 4096
NEW_TOKENS, SAMPLED_TOKENS, REASONING_TOKENS = 40, 60, 30
BUDGET, MEMORY_BUDGET = 8192, 4096
ROWS = {
    "tree": ("tree", "tree", "float32"),
    "tree bf16": ("tree", "tree", "bfloat16"),
    "interleave": ("interleave", "rows", "float32"),
    "step": ("step", "rows", "float32"),
}
"""Name of a row: scope, forward, backward_dtype."""


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 320,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
MODELS: dict[str, Callable[[], Any]] = {
    "full": lambda: LlamaConfig(**SIZES),
    "windowed": lambda: Olmo3Config(
        **SIZES, sliding_window=256, layer_types=["sliding_attention"] * 4 + ["full_attention"]
    ),
    "hybrid": lambda: Qwen3NextConfig(
        **SIZES,
        head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        linear_num_key_heads=5,
        linear_num_value_heads=10,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mlp_only_layers=list(range(5)),
    ),
}
"""What `--models` names -> its configuration. All scenes run on the first."""


WINDOWS = (1024, 256, 64)
"""Sliding windows that `--blocks` times, with the usual size of a block."""


def model(name: str = "full") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[name]()).eval()


def rollout(
    rng: np.random.Generator,
    prompt: Any,
    turns: int,
    stripped: Callable[[int], bool],
    forgets: bool,
) -> State:
    """Play `turns` turns; before a turn where `stripped`, the last answer loses its reasoning.

    One that `forgets` sees the prompt and the latest observation only.
    """
    trajectory = Trajectory()
    context = prompt
    for turn in range(turns):
        answer = rng.integers(0, VOCABULARY, SAMPLED_TOKENS).astype(np.int32)
        trajectory.append_call(
            prompt=[],
            completion=[],
            turn=turn,
            response=ModelResponse(
                message={},
                text="",
                finish_reason=FinishReason.STOP,
                prompt_ids=context,
                completion_ids=answer,
                logprobs=np.full(len(answer), -8.0, np.float32),
                versions=np.zeros(len(answer), np.int32),
                temperature=1.0,
                call_id=0,
            ),
        )
        kept = answer[REASONING_TOKENS:] if stripped(turn) else answer
        new = rng.integers(0, VOCABULARY, NEW_TOKENS).astype(np.int32)
        context = np.concatenate([prompt, new] if forgets else [context, kept, new])
    return State(trajectory=trajectory, advantage=float(rng.normal()))


def scene(
    prompt_tokens: int,
    num: int,
    turns: int,
    stripped: Callable[[int], bool] = lambda turn: False,
    *,
    forgets: bool = False,
) -> list[State]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, prompt_tokens).astype(np.int32)
    return [rollout(rng, prompt, turns, stripped, forgets) for _ in range(num)]


SCENES: dict[str, list[State]] = {
    "reasoning stripped, 8 turns": scene(100, 1, 8, lambda turn: True),
    "reasoning stripped, 16 turns": scene(100, 1, 16, lambda turn: True),
    "reasoning stripped, 32 turns": scene(100, 1, 32, lambda turn: True),
    "broken every 2 turns, 16 turns": scene(100, 1, 16, lambda turn: turn % 2 == 1),
    "group of 8, prompt 512": scene(512, 8, 1),
    "each step on its own, 16 turns": scene(100, 1, 16, forgets=True),
}
SCENES_OF_OTHERS = ("reasoning stripped, 16 turns", "group of 8, prompt 512")
ROWS_OF_OTHERS = ("tree", "step")
LONG = [name for name in SCENES if name.endswith((" 16 turns", " 32 turns"))]


class Pass:
    """One way to compute the gradient of a scene."""

    def __init__(self, states: list[State], row: str, module: Any) -> None:
        scope, forward, backward = ROWS[row]
        config = load_train_config(
            {
                "model": {"backward_dtype": backward},
                "train": {"scope": scope, "forward": forward, "max_mismatch": 1e9},
            }
        )
        self.trainer = Trainer(module, config)
        key = {"group_key": lambda state: 0} if scope == "tree" else {}
        self.samples = build_samples(states, scope, **key).samples
        self.num_tokens = 0
        self.cpu_s, self.wall_s = [], []

    def __call__(self, max_tokens: int = BUDGET) -> Any:
        """Compute the gradient once and return it."""
        self.trainer.optimizer.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        batch = build_batch(self.samples, self.trainer.algorithm, max_tokens)
        self.trainer._gradients(batch)
        self.cpu_s.append(time.process_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)
        self.num_tokens = batch.num_tokens
        return torch.cat([p.grad.flatten() for p in self.trainer.optimizer.parameters])


def peak_mb(states: list[State], row: str, module: Any) -> float:
    """Return what one pass adds to the resident memory at its peak, in its own process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what is freed is given back
        work = Pass(states, row, module)
        before = _status_kb("VmRSS")
        work.trainer._gradients(build_batch(work.samples, work.trainer.algorithm, MEMORY_BUDGET))
        sender.send((_status_kb("VmHWM") - before) / 1000)

    process = context.Process(target=child)
    process.start()
    sender.close()
    used = float(receiver.recv())
    process.join()
    return used


_M_MMAP_THRESHOLD = -3


def _status_kb(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def run(
    kind: str,
    name: str,
    module: Any,
    repeats: int,
    memory: dict[str, float],
    names: Iterable[str] = ROWS,
) -> dict[str, Any]:
    passes = {row: Pass(SCENES[name], row, module) for row in names}
    gradients = {}
    for _ in range(repeats):
        for row, work in passes.items():
            gradients[row] = work()
    rows: dict[str, Any] = {}
    for row, work in passes.items():
        error = gradients[row] - gradients["step"]
        rows[row] = {
            "tokens": work.num_tokens,
            "cpu_s": min(work.cpu_s),
            "wall_s": min(work.wall_s),
            "peak_mb": memory.get(row),
            "error": float(error.norm() / gradients["step"].norm()),
        }
        for what in ("tokens", "cpu_s", "wall_s"):
            rows[row][f"{what}_ratio"] = rows[row][what] / rows["tree"][what]
    return {"model": kind, "scene": name, "rows": rows}


def bars(results: list[dict[str, Any]]) -> list[Bar]:
    rows = {result["scene"]: result["rows"] for result in results if result["model"] == "full"}
    found = []
    for result in results:
        if result["model"] != "full":
            what = f"{result['model']}, {result['scene']}"
            step, error = result["rows"]["step"], result["rows"]["tree"]["error"]
            share = step["cpu_s_ratio"] / step["tokens_ratio"]
            found.append(Bar.below(f"gradient error, {what}", error, 1e-5))
            found.append(Bar.at_least(f"CPU speed-up over token ratio, {what}", share, 0.6))
    for name, row in rows.items():
        error = max(row["tree"]["error"], row["interleave"]["error"])
        found.append(Bar.below(f"gradient error, {name}", error, 1e-5))
        error = row["tree bf16"]["error"]
        found.append(Bar.below(f"gradient error with bf16, {name}", error, 1e-2))
        share = row["tree"]["peak_mb"] / row["step"]["peak_mb"]
        found.append(Bar.below(f"peak memory over step's, {name}", share, 1))
    for name in (name for name in LONG if name in rows):
        step = rows[name]["step"]
        share = step["wall_s_ratio"] / step["tokens_ratio"]
        found.append(Bar.at_least(f"wall speed-up over token ratio, {name}", share, 0.7))
    if longest := rows.get("reasoning stripped, 32 turns"):
        speed = longest["step"]["wall_s_ratio"]
        found.append(Bar.at_least("wall speed-up over step, 32 turns", speed, 5))
    return found


def forest(prefix: int, groups: int, question: int, rollouts: int, answer: int) -> Any:
    """Return `subtree_end` of `groups` groups on one prefix."""
    size = question + rollouts * answer
    end = np.full(prefix + groups * size, prefix + groups * size, np.int32)
    for group in range(groups):
        first = prefix + group * size
        end[first : first + question] = first + size
        leaves = first + question + answer * np.arange(1, rollouts + 1)
        end[first + question : first + size] = np.repeat(leaves, answer)
    return end


def depth_of(end: Any) -> Any:
    """Return how many tokens each token of a forest in depth-first order comes after."""
    starts, stops = np.zeros(len(end) + 1, np.int32), np.zeros(len(end) + 1, np.int32)
    starts[1:] = np.arange(1, len(end) + 1)
    np.add.at(stops, end, 1)
    return (starts - np.cumsum(stops))[:-1].astype(np.int32)


def time_blocks() -> None:
    """Print one layer's attention, forward and backward: 9 query and 3 key heads of width 64."""
    scenes = {
        "8 groups of 8 on a prefix of 60": forest(60, 8, 15, 8, 12),
        "group of 8, prompt 512": forest(512, 1, 1, 8, 128),
        "prefix 1,024, 16 branches": forest(1024, 1, 1, 16, 128),
        "prefix 3,072, 8 branches": forest(3072, 1, 1, 8, 128),
        "one path of 1,024": np.full(1024, 1024, np.int32),
    }
    print(f"{'CPU ms, one layer':32} {'tokens':>6} {'dense':>6} {'causal':>6}", end="")
    print("".join(f"{size:>7}" for size in (32, 64, 128, 256)), end="")
    print("".join(f"  w={window:>4}" for window in WINDOWS))
    for name, end in scenes.items():
        count = len(end)
        shapes = [(1, heads, count, 64) for heads in (9, 3, 3)]
        query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
        index = np.arange(count)
        seen = torch.from_numpy((index[:, None] >= index) & (index[:, None] < end[None, :]))

        def timed(attend: Callable[[], torch.Tensor]) -> float:
            best = float("inf")
            for _ in range(4):
                start = time.process_time()
                attend().sum().backward()
                best = min(best, time.process_time() - start)
            return 1e3 * best

        def dense(q: Any = query, k: Any = key, v: Any = value, m: Any = seen) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True)

        def causal(q: Any = query, k: Any = key, v: Any = value) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        print(f"{name:32} {count:6,} {timed(dense):6.0f} {timed(causal):6.0f}", end="")
        for size in (32, 64, 128, 256):
            layout = TreeLayout(end, depth_of(end), max_block=size)
            ours = partial(forest_attention, query, key, value, layout, 0.125)
            print(f"{timed(ours):7.0f}", end="", flush=True)
        layout = TreeLayout(end, depth_of(end))
        for window in WINDOWS:
            near = partial(forest_attention, query, key, value, layout, 0.125)
            print(
                f"{timed(partial(near, pattern=Pattern(window=window))):9.0f}", end="", flush=True
            )
        print()


def show(results: list[dict[str, Any]]) -> None:
    print(
        f"{'model':8} {'scene':32} {'row':11} {'tokens':>7} {'CPU s':>7} {'wall s':>7} {'MB':>5} "
        f"{'tokens x':>8} {'CPU x':>6} {'wall x':>6} {'error':>8}"
    )
    for result in results:
        for name, row in result["rows"].items():
            peak = f"{row['peak_mb']:5.0f}" if row["peak_mb"] else " " * 5
            print(
                f"{result['model']:8} {result['scene']:32} {name:11} {row['tokens']:7,} "
                f"{row['cpu_s']:7.2f} "
                f"{row['wall_s']:7.2f} {peak} {row['tokens_ratio']:8.2f} "
                f"{row['cpu_s_ratio']:6.2f} {row['wall_s_ratio']:6.2f} {row['error']:8.1e}"
            )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=2, help="runs per scope, the best counts")
    parser.add_argument("--blocks", action="store_true", help="attention alone, by block size")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.blocks:
        time_blocks()
        return 0
    results = []
    if "full" in options.models:
        module = model()
        memory = {  # first: later this process holds memory that a copy of it could use again
            name: {row: peak_mb(states, row, module) for row in ("tree", "step")}
            for name, states in SCENES.items()
            if name in options.scenes
        }
        results = [run("full", name, module, options.repeats, memory[name]) for name in memory]
    for kind in options.models:
        if kind != "full":
            module = model(kind)
            for name in set(SCENES_OF_OTHERS) & set(options.scenes):
                results.append(run(kind, name, module, options.repeats, {}, ROWS_OF_OTHERS))
    return conclude(options, bars(results), results, lambda: show(results))


if __name__ == "__main__":
    sys.exit(main())
