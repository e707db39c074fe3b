"""The trainer against the papers, written a second time: plain loops over calls and autograd.

Random rollouts (several agents, rewritten histories, mixed temperatures), every loss and
aggregation, any scope and any token budget.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_kit import FLOAT32, VOCAB, tiny_model

from rolltree.samples import build_samples
from rolltree.tokens import Trajectory
from rolltree.training import Trainer, load_train_config
from rolltree.training.batches import build_batch
from rolltree.training.coefficients import CORRECTIONS
from rolltree.training.losses import LOSSES
from rolltree.values.types import FinishReason, ModelResponse, State

MODEL = tiny_model("llama")
CLIP = {"clip_low": 0.3, "clip_high": 0.6}
BAND = {"correction_low": 0.2, "correction_high": 4.0}


@st.composite
def groups(draw):
    """Rollouts: (advantage, calls as (agent, prompt, answer, logprobs, temperature))."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    shared = rng.integers(0, VOCAB, 5).tolist()
    rollouts = []
    for _ in range(draw(st.integers(1, 3))):
        calls = []
        history = {"a": list(shared), "b": list(shared[:2])}
        for _ in range(draw(st.integers(1, 4))):
            agent = draw(st.sampled_from("aab"))
            context = history[agent]
            answer = rng.integers(0, VOCAB, draw(st.integers(1, 3))).tolist()
            logprobs = (-rng.random(len(answer)) * 5).astype(np.float32).tolist()
            calls.append(
                (agent, list(context), answer, logprobs, draw(st.sampled_from([1.0, 0.6])))
            )
            kept = context[:3] if draw(st.booleans()) else context  # history is rewritten or not
            history[agent] = kept + answer + rng.integers(0, VOCAB, 2).tolist()
        rollouts.append((float(np.float32(rng.normal())), calls))
    return rollouts


def states_of(rollouts):
    states = []
    for index, (advantage, calls) in enumerate(rollouts):
        trajectory = Trajectory()
        for turn, (agent, prompt, answer, logprobs, temperature) in enumerate(calls):
            response = ModelResponse(
                message={},
                text="",
                finish_reason=FinishReason.STOP,
                prompt_ids=np.array(prompt, np.int32),
                completion_ids=np.array(answer, np.int32),
                logprobs=np.array(logprobs, np.float32),
                versions=np.zeros(len(answer), np.int32),
                temperature=temperature,
                call_id=0,
            )
            trajectory.append_call(
                prompt=[], completion=[], response=response, agent=agent, turn=turn
            )
        state = State(trajectory=trajectory, request_id=f"r{index}", advantage=advantage)
        for step in trajectory:
            step["advantage"] = advantage
        states.append(state)
    return states


def token_logprobs(call):
    _, prompt, answer, _, temperature = call
    logits = MODEL(torch.tensor([prompt + answer])).logits[0]
    picked = logits[len(prompt) - 1 : -1] / temperature
    return picked.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]


def clipped(ratio, advantage):
    bounded = ratio.clamp(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
    return -torch.minimum(ratio * advantage, bounded * advantage)


def factor_of(correction, log_ratio):
    """A rollout's factors per call, from its log ratios per call; no gradient."""
    k = [torch.exp(r.detach()) for r in log_ratio]
    every = torch.cat(k)
    low, high = BAND["correction_low"], BAND["correction_high"]
    inside = lambda x: ((x >= low) & (x <= high)).float()  # noqa: E731
    return {
        None: lambda: [torch.ones_like(x) for x in k],
        "token_tis": lambda: [x.clamp(max=high) for x in k],
        "token_mis": lambda: [x * inside(x) for x in k],
        "icepop": lambda: [x * inside(x) for x in k],
        "sequence_tis": lambda: [every.prod().clamp(max=high).expand(len(x)) for x in k],
        "sequence_mis": lambda: [(every.prod() * inside(every.prod())).expand(len(x)) for x in k],
        "geometric_mask": lambda: [
            inside(every.prod() ** (1 / len(every))).expand(len(x)) for x in k
        ],
    }[correction]()


def gmpo_loss(log_ratio, advantage):
    """-A (prod of clipped ratios)^(1/n), the clip one-sided by the sign of A."""
    every = torch.cat(log_ratio)
    low, high = CLIP["clip_low"], CLIP["clip_high"]
    kept = every.clamp(max=high) if advantage >= 0 else every.clamp(min=-low)
    return -advantage * torch.exp(kept.mean())


def reference_gradient(rollouts, loss, aggregation, length, correction=None):
    per_rollout = []  # per rollout a list of calls, each the token losses
    for advantage, calls in rollouts:
        new = [token_logprobs(call) for call in calls]
        engine = [n - torch.tensor(call[3]) for n, call in zip(new, calls, strict=True)]
        factors = factor_of(correction, engine)
        # with a correction the ratio is to the trainer's own logprob at the start, which is now
        log_ratio = [r - r.detach() for r in engine] if correction else engine
        if loss == "gspo":
            ratio = torch.exp(torch.cat(log_ratio).mean())
            losses = [clipped(ratio, torch.tensor(advantage)).expand(len(n)) for n in new]
        elif loss == "gmpo":
            value = gmpo_loss(log_ratio, advantage)
            losses = [value.expand(len(n)) for n in new]
        elif loss == "cross_entropy":
            losses = [-n for n in new]
        elif loss == "ppo_clip":
            losses = [clipped(torch.exp(r), torch.tensor(advantage)) for r in log_ratio]
        elif loss == "cispo":
            weight = [torch.exp(r).detach().clamp(0.7, 1.6) for r in log_ratio]
            losses = [-w * advantage * n for w, n in zip(weight, new, strict=True)]
        else:
            weight = [torch.exp(r).detach().clamp(max=2.0) for r in log_ratio]
            losses = [-w * advantage * n for w, n in zip(weight, new, strict=True)]
        per_rollout.append([f * part for f, part in zip(factors, losses, strict=True)])
    every = torch.cat([part for losses in per_rollout for part in losses])
    total = {
        "token": lambda: every.mean(),
        "call": lambda: torch.stack([p.mean() for ls in per_rollout for p in ls]).mean(),
        "rollout": lambda: torch.stack([torch.cat(ls).mean() for ls in per_rollout]).mean(),
        "fixed_length": lambda: every.sum() / (length * len(rollouts)),
    }[aggregation]()
    MODEL.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in MODEL.parameters()]), float(total.detach())


@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(
    groups(),
    st.sampled_from([None, *CORRECTIONS]),
    st.sampled_from(["token", "call", "rollout", "fixed_length"]),
    st.sampled_from(["step", "turn", "interleave", "tree", "group tree"]),
    st.sampled_from([40, 8192]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_loss_and_gradient_are_the_papers(
    loss, rollouts, correction, aggregation, scope, max_tokens
):
    length = 9
    algorithm = {"name": "grpo", "loss": loss, "aggregation": aggregation}
    if LOSSES[loss].supervised:
        correction = None
    if LOSSES[loss].rollout_term and correction and not CORRECTIONS[correction].over_rollout:
        correction = None  # a token's factor scales its own gradient there, not the rollout's
    if correction:
        bounds = {key: BAND[key] for key in BAND if key in CORRECTIONS[correction].defaults}
        algorithm |= {"correction": correction, **bounds}
    if aggregation == "fixed_length":
        algorithm["fixed_length"] = length
    if "clip_low" in LOSSES[loss].defaults:
        algorithm |= CLIP
    config = load_train_config({"algorithm": algorithm})
    trainer = Trainer(MODEL, config)
    key = {"group_key": lambda state: 0} if scope == "group tree" else {}
    samples = build_samples(states_of(rollouts), scope.split()[-1], **key).samples
    wanted, value = reference_gradient(rollouts, loss, aggregation, length, correction)
    trainer.optimizer.zero_grad()
    batch = build_batch(samples, trainer.algorithm, max_tokens)
    assert all(item.forest.num_tokens <= max_tokens for item in batch.packs)
    stats = trainer._gradients(batch)
    got = torch.cat([p.grad.flatten() for p in trainer.optimizer.parameters])
    if loss in ("ppo_clip", "gspo", "gmpo", "cross_entropy"):
        assert stats.loss == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert float((got - wanted).norm()) <= FLOAT32 * float(wanted.norm()) + 1e-6


@given(groups(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_sampled_token_has_exactly_one_record(rollouts, shared):
    key = {"group_key": lambda state: 0} if shared else {}
    samples = build_samples(states_of(rollouts), "tree", **key).samples
    config = load_train_config({"algorithm": {"aggregation": "token"}})
    batch = build_batch(samples, config.algorithm.resolve(), 60)
    got = sorted(
        zip(
            batch.records.rollout.tolist(),
            batch.records.call.tolist(),
            batch.records.offset.tolist(),
            batch.records.target.tolist(),
            strict=True,
        )
    )
    wanted = sorted(
        (rollout, call, offset, token)
        for rollout, (_, calls) in enumerate(rollouts)
        for call, parts in enumerate(calls)
        for offset, token in enumerate(parts[2])
    )
    assert got == wanted
    assert batch.records.weight.sum() == pytest.approx(1.0, abs=1e-5)


@given(groups())
@settings(max_examples=20, deadline=None)
def test_a_trained_tokens_logprob_is_the_plain_models(rollouts):
    """The forward pass alone, token by token, whatever the tree looks like."""
    trainer = Trainer(MODEL, load_train_config({}))
    samples = build_samples(states_of(rollouts), "tree", group_key=lambda state: 0).samples
    (item,) = build_batch(samples, trainer.algorithm, 8192).packs
    with torch.no_grad(), trainer.logprobs.context():
        got = trainer.logprobs(item.forest).logprob.tolist()
    records = item.forest.records
    with torch.no_grad():
        expected = {
            (rollout, call): token_logprobs(parts).tolist()
            for rollout, (_, calls) in enumerate(rollouts)
            for call, parts in enumerate(calls)
        }
    for index, value in enumerate(got):
        key = (int(records.rollout[index]), int(records.call[index]))
        assert value == pytest.approx(expected[key][int(records.offset[index])], abs=2e-5)
