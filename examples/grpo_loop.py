"""GRPO on token trees, the whole algorithm in one file.

    python examples/grpo_loop.py                                   SmolLM2 learns to add
    python examples/grpo_loop.py --model tiny --num-steps 2        seconds, nothing is learned

Read `main` first. It uses rolltree's parts for what is the same in every algorithm: rollouts with
exact tokens, samples as trees, and a forward pass that computes each unique token once. What makes
it GRPO is `advantages` and `loss_of`. `rt.train` adds the run store, resume, evaluation, checks and
metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

import rolltree as rt

CLIP_LOW, CLIP_HIGH = 0.2, 0.2


def advantages(results: Sequence[rt.RolloutResult]) -> list[rt.State]:
    """Give every model call of a rollout `(reward - group mean) / group std`.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2. Failed rollouts have no reward and are
    left out. Returns the states to train on.
    """
    groups: dict[str, list[rt.State]] = {}
    for result in results:
        if result.error is None:
            groups.setdefault(result.request.group_id, []).extend(result.states)
    for states in groups.values():
        rewards = [float(state["reward"]) for state in states]
        mean = fmean(rewards)
        spread = stdev(rewards) if len(rewards) > 1 else 0.0
        for state, reward in zip(states, rewards, strict=True):
            state["advantage"] = (reward - mean) / (spread + 1e-6)
            for step in state["trajectory"]:
                step["advantage"] = state["advantage"]
    return [state for states in groups.values() for state in states]


def samples_of(states: Sequence[rt.State]) -> list[rt.Sample]:
    """Return the rollouts of the step as one tree: what they share is computed once.

    A sample is tokens in depth-first order, and records. Record r says: the logits at position
    `source[r]` sampled the token `target[r]` with logprob `logprob[r]`, and its advantage is
    `advantage[r]`. Its `weight` becomes its share in the loss, so it does not matter how samples
    are packed.
    """
    built = rt.build_samples(states, "tree", group_key=lambda state: 0).samples
    return [
        rt.prune_sample(replace(sample, records=replace(sample.records, weight=weight)))
        for sample, weight in zip(built, token_weights(built), strict=True)
    ]


def token_weights(samples: Sequence[rt.Sample]) -> list[np.ndarray]:
    """Return each record's weight: the mean over calls of the mean over a call's tokens (1/|o|)."""
    keys = [np.stack([s.records.rollout, s.records.call], axis=1) for s in samples]
    _, call, size = np.unique(np.concatenate(keys), axis=0, return_inverse=True, return_counts=True)
    weight = 1.0 / (len(size) * size[call.reshape(-1)])
    return np.split(weight.astype(np.float32), np.cumsum([len(key) for key in keys])[:-1])


def loss_of(logprobs: rt.LogprobModel, samples: Sequence[rt.Sample]) -> torch.Tensor:
    """Return the clipped policy loss of some samples, PPO's equation 7 per token.

    The ratio is to the engine's own logprob of each token when it sampled it.
    """
    forest = rt.collate(samples)
    new = logprobs(forest).logprob
    old, advantage, weight = (
        torch.from_numpy(getattr(forest.records, name))
        for name in ("logprob", "advantage", "weight")
    )
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()


def accumulate(logprobs: rt.LogprobModel, samples: Sequence[rt.Sample], max_tokens: int) -> float:
    """Add the gradient of the whole step to the weights, a pack of samples at a time.

    Returns the loss.
    """
    total = 0.0
    for chosen in rt.pack_samples(samples, max_tokens):
        with logprobs.context():
            loss = loss_of(logprobs, chosen)
            loss.backward()
        total += float(loss.detach())
    return total


async def main(options: argparse.Namespace) -> None:
    """Alternate between sampling with the engine and updating the very weights that it uses."""
    torch.manual_seed(options.seed)
    model, tokenizer = rt.load_model(options.model)
    client = rt.local_client(model, tokenizer, max_context=options.max_context, seed=options.seed)
    environment: Any = rt.load_environment(options.env)
    rollouts = rt.RolloutEngine(environment, client)
    logprobs = rt.LogprobModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    optimizer.param_groups[0]["weight_decay"] = 0.0
    rng = np.random.default_rng(options.seed)
    num_examples = environment.num_examples("train")

    for step in range(1, options.num_steps + 1):
        start = time.perf_counter()
        chosen = rng.choice(num_examples, min(options.groups, num_examples), replace=False)
        requests = rt.build_requests(
            environment,
            "train",
            indices=chosen.tolist(),
            group_size=options.group_size,
            sampling={"temperature": 1.0, "max_tokens": options.max_tokens},
            run_seed=options.seed,
            phase="train",
            train_step=step,
        )
        results = await rollouts.run_all(requests)
        states = advantages(results)
        samples = samples_of(states)
        async with client.engine.paused():  # no token is sampled while the weights change
            loss = accumulate(logprobs, samples, max_tokens=8192)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            client.engine.publish(step)  # drops what the engine computed with the old weights
        print(
            f"step {step:3}  reward {fmean(float(s['reward']) for s in states):.3f}  "
            f"loss {loss:+.4f}  gradient {float(norm):.2f}  "
            f"tokens {sum(sample.num_tokens for sample in samples):,}  "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
    await client.aclose()


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="a model's name or folder")
    parser.add_argument("--env", default="arithmetic", help="an environment's name")
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="tasks per step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per task")
    parser.add_argument("--max-tokens", type=int, default=4, help="per answer")
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
