"""Tiny models and naive sample builders for the tests of the training room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rolltree.tokens import Trajectory
from rolltree.training import Trainer, load_train_config
from rolltree.training.batches import build_batch
from rolltree.values.types import (
    ErrorRecord,
    FinishReason,
    ModelResponse,
    Records,
    Sample,
    SampleOrigin,
    State,
)

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def tiny_model(kind: str = "qwen3", seed: int = 0, **changes):
    torch.manual_seed(seed)
    sizes = {**SIZES, **changes}
    if kind == "llama":
        config = LlamaConfig(tie_word_embeddings=False, **sizes)
    elif kind == "mixture":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = Qwen3MoeConfig(head_dim=8, tie_word_embeddings=True, **experts, **sizes)
    else:
        config = Qwen3Config(head_dim=8, tie_word_embeddings=True, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


@dataclass
class Call:
    prompt: list[int]
    completion: list[int]
    rollout: int = 0
    call: int = 0
    advantage: float = 1.0
    temperature: float = 1.0
    logprob: list[float] = field(default_factory=list)
    weight: float = 1.0

    def __post_init__(self) -> None:
        self.logprob = self.logprob or [-1.0 - 0.1 * i for i in range(len(self.completion))]


def records_of(entries: Sequence[tuple[int, int, Call]]) -> Records:
    """(source, offset in completion, call) -> records."""
    ints = {name: [] for name in ("source", "target", "version", "rollout", "call", "offset")}
    floats = {name: [] for name in ("logprob", "temperature", "advantage", "weight")}
    for source, offset, call in entries:
        ints["source"].append(source)
        ints["target"].append(call.completion[offset])
        ints["version"].append(0)
        ints["rollout"].append(call.rollout)
        ints["call"].append(call.call)
        ints["offset"].append(offset)
        floats["logprob"].append(call.logprob[offset])
        floats["temperature"].append(call.temperature)
        floats["advantage"].append(call.advantage)
        floats["weight"].append(call.weight)
    return Records(
        **{name: np.array(values, np.int32) for name, values in ints.items()},
        **{name: np.array(values, np.float32) for name, values in floats.items()},
    )


def origin(call: Call) -> SampleOrigin:
    return SampleOrigin(f"r{call.rollout}", (call.call,), "", 1.0, True, False, None, "stop")


def flat(call: Call) -> Sample:
    ids = np.array(call.prompt + call.completion, np.int32)
    first = len(call.prompt) - 1
    return Sample(
        ids=ids,
        positions=np.arange(len(ids), dtype=np.int32),
        subtree_end=np.full(len(ids), len(ids), np.int32),
        records=records_of([(first + i, i, call) for i in range(len(call.completion))]),
        origins=(origin(call),),
    )


def tree(calls: Sequence[Call]) -> Sample:
    """One token per node: the slowest, most obvious radix tree."""
    root: dict = {}
    for call in calls:
        node = root
        for token in call.prompt + call.completion:
            node = node.setdefault(token, {})
    ids: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    index: dict[int, int] = {}

    def walk(node: dict, depth: int) -> None:
        for token, child in node.items():
            at = len(ids)
            index[id(child)] = at
            ids.append(token)
            positions.append(depth)
            ends.append(-1)
            walk(child, depth + 1)
            ends[at] = len(ids)

    walk(root, 0)
    entries = []
    for call in calls:
        node, path = root, []
        for token in call.prompt + call.completion:
            node = node[token]
            path.append(index[id(node)])
        first = len(call.prompt) - 1
        entries += [(path[first + i], i, call) for i in range(len(call.completion))]
    arrays = [np.array(values, np.int32) for values in (ids, positions, ends)]
    return Sample(*arrays, records=records_of(entries), origins=tuple(origin(c) for c in calls))


def group(
    num: int = 4, prefix: int = 20, turns: int = 2, seed: int = 0, length: int = 4
) -> list[Call]:
    """A GRPO group of multi-turn rollouts over one prompt, the second turn extending the first."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, prefix).tolist()
    feedback = rng.integers(0, VOCAB, 5).tolist()
    calls = []
    for rollout in range(num):
        context = list(prompt)
        for turn in range(turns):
            answer = rng.integers(0, VOCAB, int(rng.integers(1, length + 1))).tolist()
            logprob = (-rng.random(len(answer)) * 4).tolist()
            advantage = float(np.float32(rng.normal()))
            calls.append(Call(list(context), answer, rollout, turn, advantage, 1.0, logprob))
            context += answer + feedback
    return calls


QUIET = {"train": {"max_mismatch": 1e9}}


def config(**sections):
    return load_train_config({**QUIET, **sections})


def trainer(module=None, reference=None, **sections):
    sections["train"] = {**QUIET["train"], **sections.get("train", {})}
    return Trainer(module or tiny_model(), load_train_config(sections), reference=reference)


def gradient_of(worker, samples):
    """The gradient of one step, before clipping."""
    batch = build_batch(samples, worker.algorithm, worker.config.train.max_tokens)
    worker._gradients(batch)
    gradient = torch.cat([p.grad.flatten() for p in worker.optimizer.parameters])
    worker.optimizer.zero_grad()
    return gradient


FLOAT32 = 5e-5
"""Bound on the relative difference of two float32 results. How much they round depends on the CPU;
what breaks a law of training differs by 1e-2 and more."""


def difference(left, right):
    return float((left - right).norm() / right.norm())


ROUNDED = 2.0**13 * 2.0**-24
"""`ROUNDED` of `tests_models/reference.py`, which a script in this folder cannot import."""


def check_exact(ours, exact):
    """Check that a float32 gradient is that in float64, up to rounding."""
    assert difference(ours.double(), exact) < ROUNDED


def engine_logprobs(model, context, answer, noise):
    """The model's own logprobs at temperature 0.8, a little off, as another engine's are."""
    ids = torch.from_numpy(np.concatenate([context, answer]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = (model(ids).logits[0, len(context) - 1 : -1] / 0.8).log_softmax(-1)
    own = logprobs[torch.arange(len(answer)), torch.from_numpy(answer).long()].numpy()
    return (own + noise).astype(np.float32)


def states(num_rollouts=4, seed=0, rewrite=True, model=None, streams=None):
    """Rollouts of three turns whose history is rewritten before the third: every scope differs.

    Behaviour logprobs are near those of `model`, or anything without one. `streams(rng, count)`
    gives the streams of a call with `count` sampled tokens.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 60, 12).astype(np.int32)
    made = []
    for rollout in range(num_rollouts):
        trajectory = Trajectory()
        context = prompt
        for turn in range(3):
            count = int(rng.integers(1, 5))
            answer = rng.integers(1, 60, count).astype(np.int32)
            logprobs = (-rng.random(count) * 3).astype(np.float32)
            if model is not None:
                logprobs = engine_logprobs(model, context, answer, 0.3 * rng.normal(size=count))
            trajectory.append_call(
                prompt=[],
                completion=[],
                turn=turn // 2,
                streams=None if streams is None else streams(rng, count),
                response=ModelResponse(
                    message={},
                    text="",
                    finish_reason=FinishReason.STOP,
                    prompt_ids=context,
                    completion_ids=answer,
                    logprobs=logprobs,
                    versions=np.zeros(count, np.int32),
                    temperature=0.8,
                    call_id=1000 * rollout + turn,
                ),
            )
            extra = rng.integers(1, 60, 3).astype(np.int32)
            kept = context[:6] if turn == 1 and rewrite else context
            context = np.concatenate([kept, answer, extra])
        state = State(trajectory=trajectory, reward=1.0, request_id=f"r{rollout}")
        advantage = float(rng.normal())
        state["advantage"] = advantage
        for step in trajectory:
            step["advantage"] = advantage
        made.append(state)
    return made


class LetterSource:
    """Some turns; the reward is the share of sampled bytes in the lower half of the alphabet.

    Dense, so a random model learns it in a few steps. `fail` names request ids that fail.
    """

    env_id = "letters"

    def __init__(
        self,
        num_train: int = 6,
        fail: Sequence[str] = (),
        num_turns: int = 2,
        apart: bool = False,
    ) -> None:
        self.num_train, self.fail, self.num_turns = num_train, set(fail), num_turns
        self.apart = apart  # each turn in a trajectory of its own
        self.played: list[str] = []
        self.versions: list[int] = []

    def num_examples(self, split: str) -> int:
        return self.num_train if split == "train" else 3

    def example(self, split: str, index: int) -> dict:
        prompt = [{"role": "user", "content": f"{split} {index}"}]
        return {"prompt": prompt, "example_id": index, "task": "letters"}

    async def before_turn(self, request, turn):
        """Wait for something, in the sources of some tests."""

    async def run_request(self, request, client):
        self.played.append(request.request_id)
        trajectory = Trajectory()
        state = State(input=dict(request.input), trajectory=trajectory, error=None, reward=None)
        if request.request_id in self.fail:
            state["error"] = ErrorRecord("Boom", "it broke", "", "environment")
            return [state]
        session, states = client.session(), [state]
        messages = list(request.input["prompt"])
        good = total = 0
        for turn in range(self.num_turns):
            if self.apart and turn:
                session, trajectory = client.session(), Trajectory()
                states.append(State(state) | {"trajectory": trajectory})
            await self.before_turn(request, turn)
            sampling = replace(request.sampling, seed=request.sampling_seed + turn)
            answer = await session.chat(messages, sampling=sampling)
            trajectory.append_call(
                prompt=list(messages), completion=[answer.message], response=answer, turn=turn
            )
            self.versions += answer.versions.tolist()
            good += int((answer.completion_ids < 64).sum())
            total += len(answer.completion_ids)
            messages += [answer.message, {"role": "user", "content": "again"}]
        for each in states:
            each |= {"reward": good / total, "metrics": {"num_bytes": float(total)}}
        return states
