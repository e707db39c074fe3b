"""Tests what the probe after a publish finds if a part of SmolLM2 keeps its old weights.

    python benchmarks/publish_probe.py [--lr 1e-5] [--check] [--json]

One step is taken on four short conversations. Then every tensor, every layer and the tied embedding
stay as they were in turn, and each such half update is judged as the publisher judges a server.
The honest distance is the embedded engine's to the trainer.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from typing import Any

import numpy as np
import torch
from verdict import Bar, conclude, make_parser

from rolltree.inference.local import local_client
from rolltree.inference.models import load_model
from rolltree.training import Trainer, load_train_config
from rolltree.training.publishing import Publisher
from rolltree.training.weight_probe import _compare, next_logprobs
from rolltree.values.types import FinishReason, Records, Sample, SampleOrigin

WORDS = ("apple", "stone", "river", "cloud")


def conversation(tokenizer: Any, number: int, word: str) -> Sample:
    """Return a sample whose last twelve tokens are trained."""
    text = (
        f"<|im_start|>user\nReverse {word}.<|im_end|>\n<|im_start|>assistant\n"
        f"The word {word}, reversed, is {word[::-1]}.<|im_end|>"
    )
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    size, num = len(ids), 12
    source = np.arange(size - num - 1, size - 1, dtype=np.int32)
    one, zero = np.ones(num, np.float32), np.zeros(num, np.int32)
    records = Records(
        source=source,
        target=ids[source + 1],
        version=zero,
        rollout=zero + number,
        call=zero,
        offset=np.arange(num, dtype=np.int32),
        logprob=-one,
        temperature=one,
        advantage=one * (1 if number % 2 else -1),
        weight=one,
    )
    origin = SampleOrigin(str(number), (0,), "", 1.0, True, False, None, FinishReason.STOP)
    positions, ends = np.arange(size, dtype=np.int32), np.full(size, size, np.int32)
    return Sample(ids, positions, ends, records, (origin,))


async def measure(lr: float) -> dict[str, Any]:
    """Take the step, and judge each half update."""
    model, tokenizer = load_model("smollm2-135m", "float32")
    samples = [conversation(tokenizer, *each) for each in enumerate(WORDS)]
    config = load_train_config({"optim": {"lr": lr}, "train": {"max_mismatch": 1e9}})
    trainer = Trainer(model, config)
    client = local_client(copy.deepcopy(model), tokenizer, max_batch=8, max_context=64)
    publisher = Publisher(model, object(), client, tolerance=0.01)
    noise = (await publisher.verify(0))["publish/probe_error"]
    await client.aclose()
    old = copy.deepcopy(model)
    publisher.expect(samples)
    trainer.step(samples, 1)
    after = next_logprobs(model, publisher._probe._prompts)
    half, before = copy.deepcopy(model), dict(old.named_parameters())

    def judge(part: str) -> tuple[float, bool]:
        """Return the distance when what has `part` in its name is old, and if that is found."""
        kept = {n: p for n, p in half.named_parameters() if part in n}
        new = {name: tensor.detach().clone() for name, tensor in kept.items()}
        with torch.no_grad():
            for name, tensor in kept.items():
                tensor.copy_(before[name])
            logprobs = next_logprobs(half, publisher._probe._prompts)
            for name, tensor in kept.items():
                tensor.copy_(new[name])
        rng = np.random.default_rng(1)
        ids = np.concatenate(
            [
                [rng.choice(len(row), p=row / row.sum()) for row in np.exp(np.float64(logprobs))]
                for _ in range(3)
            ]
        ).astype(np.int32)
        rows = np.arange(len(ids)) % len(after)
        found = _compare(ids, logprobs[rows, ids], publisher._probe._before, after)
        return found.error, found.why_not(noise, 0.01) is not None

    layers = [f"layers.{n}." for n in range(model.config.num_hidden_layers)]
    tensors = [name for name, _ in half.named_parameters()]
    result: dict[str, Any] = {"honest": noise, "all old": judge("")[0]}
    for kind, parts in (("embedding", ["embed_tokens"]), ("layer", layers), ("tensor", tensors)):
        judged = [judge(part) for part in parts]
        errors = [error for error, _ in judged]
        result[kind] = {
            "found": sum(found for _, found in judged),
            "of": len(parts),
            "smallest": min(errors),
            "median": float(np.median(errors)),
            "missed": [part for part, (_, found) in zip(parts, judged, strict=True) if not found],
        }
    return result


def show(result: dict[str, Any]) -> None:
    print(f"honest distance {result['honest']:.1e}; all old {result['all old']:.1e}")
    for kind in ("embedding", "layer", "tensor"):
        row = result[kind]
        print(
            f"{kind}: {row['found']} of {row['of']} found; smallest {row['smallest']:.1e}, "
            f"median {row['median']:.1e}; missed: {', '.join(row['missed']) or 'none'}"
        )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    result = asyncio.run(measure(options.lr))
    missed = sum(len(result[kind]["missed"]) for kind in ("embedding", "layer"))
    bar = Bar.at_most("layers and embeddings that kept old weights unseen", missed, 0)
    return conclude(options, [bar], result, lambda: show(result))


if __name__ == "__main__":
    sys.exit(main())
