"""Time of one gradient on a GPU: on a token tree, by blocks and by FlexAttention, against rows.

    python benchmarks/gpu/tree_step.py            the table, figures on the last line
    python benchmarks/gpu/tree_step.py --check    exit 1 when a bar is missed
    python benchmarks/gpu/tree_step.py --json     one JSON object instead of the table

One pass is forward, loss and backward over all samples, without the optimizer: of a Llama of
SmolLM2's shape, random weights, in bfloat16 over float32 masters. `tree flex` and `tree` train one
token tree, `step` one row per call. Each takes its turn, the device is waited for, and the median
of the rounds counts. `--device cpu` with a small `--layers` tries the script without a GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from tree_training import VOCABULARY, scene
from verdict import Bar, conclude, make_parser

from rolltree.samples import build_samples
from rolltree.training import Trainer, load_train_config
from rolltree.training.batches import build_batch

ROWS = {
    "tree flex": ("tree", "flex"),
    "tree": ("tree", "segments"),
    "step": ("step", "segments"),
}
"""Name of a row: scope, tree_attention."""
SHARE = 0.8


def make_model(layers: int, device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval().to(device)


def finish(device: str) -> None:
    """Wait for what the device still computes."""
    if device != "cpu":
        torch.cuda.synchronize()


class Pass:
    """One way to compute the gradient of a rollout."""

    def __init__(self, states: list[Any], row: str, model: Any, options: Any) -> None:
        scope, attention = ROWS[row]
        sections = {
            "model": {"device": options.device, "compute_dtype": options.dtype},
            "train": {"scope": scope, "max_mismatch": 1e9, "tree_attention": attention},
        }
        if scope != "tree":
            sections["train"]["forward"] = "rows"
        self.device, self.budget = options.device, options.budget
        self.trainer = Trainer(model, load_train_config(sections))
        key = {"group_key": lambda state: 0} if scope == "tree" else {}
        self.samples = build_samples(states, scope, **key).samples
        self.num_tokens = 0

    def __call__(self) -> tuple[float, Any]:
        """Return the seconds of one gradient, and the gradient."""
        self.trainer.optimizer.zero_grad()
        finish(self.device)
        began = time.perf_counter()
        batch = build_batch(self.samples, self.trainer.algorithm, self.budget)
        self.trainer._gradients(batch)
        finish(self.device)
        seconds = time.perf_counter() - began
        self.num_tokens = batch.num_tokens
        return seconds, torch.cat([p.grad.flatten() for p in self.trainer.optimizer.parameters])


def measure(options: Any) -> list[dict[str, Any]]:
    """Return one result per number of turns."""
    results = []
    model = make_model(options.layers, options.device)
    for turns in options.turns:
        states = scene(100, 1, turns, lambda turn: True)
        names = [name for name in ROWS if name != "tree flex" or options.device != "cpu"]
        passes = {name: Pass(states, name, model, options) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        gradients = {}
        for number in range(options.rounds + 2):  # the first two compile and warm up
            for name, work in passes.items():
                spent, gradients[name] = work()
                if number >= 2:
                    seconds[name].append(spent)
        wanted = gradients["step"]
        results.append(
            {
                "turns": turns,
                "rows": {
                    name: {
                        "tokens": work.num_tokens,
                        "wall_s": median(seconds[name]),
                        "error": float((gradients[name] - wanted).norm() / wanted.norm()),
                    }
                    for name, work in passes.items()
                },
            }
        )
    return results


def bars(results: list[dict[str, Any]]) -> list[Bar]:
    found = []
    for result in results:
        rows, turns = result["rows"], result["turns"]
        best = min(row["wall_s"] for name, row in rows.items() if name != "step")
        tokens = rows["step"]["tokens"] / rows["tree"]["tokens"]
        share = rows["step"]["wall_s"] / best / tokens
        found.append(Bar.at_least(f"speed-up over token ratio, {turns} turns", share, SHARE))
        error = max(row["error"] for row in rows.values())
        found.append(Bar.below(f"gradient difference, {turns} turns", error, 5e-2))
    return found


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'turns':>5} {'row':10} {'tokens':>8} {'ms':>8} {'times step':>10} {'error':>8}")
    for result in results:
        for name, row in result["rows"].items():
            faster = result["rows"]["step"]["wall_s"] / row["wall_s"]
            print(
                f"{result['turns']:5} {name:10} {row['tokens']:8,} {1e3 * row['wall_s']:8.1f} "
                f"{faster:10.2f} {row['error']:8.1e}"
            )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--turns", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of one forward pass")
    options = parser.parse_args()
    results = measure(options)
    return conclude(options, bars(results), results, lambda: show(results))


if __name__ == "__main__":
    sys.exit(main())
