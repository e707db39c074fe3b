"""The same rollouts give the same gradient in every scope, for every part that can be chosen.

Two halves. Each part alone runs through the trainer itself. Then every combination of loss,
aggregation, correction and KL, rows that are added later included: a gradient is d loss / d record
times d record / d parameter, and the second factor is the same for all combinations, so it is
computed once per scope.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from training_kit import FLOAT32, difference, gradient_of, states, tiny_model, trainer

from rolltree.samples import TruncationPolicy, build_samples
from rolltree.training import forward
from rolltree.training.algorithms import ALGORITHMS, resolve_algorithm
from rolltree.training.batches import build_batch
from rolltree.training.coefficients import AGGREGATIONS, CORRECTIONS
from rolltree.training.forward import LogprobModel
from rolltree.training.logprobs import RecordLogprobs, gather_logprobs
from rolltree.training.losses import KLS, LOSSES
from rolltree.training.objective import fixed_terms_of, objective, rollout_ratios

SCOPES = ("step", "turn", "interleave", "tree")
WIDE = {"clip_low": 0.9, "clip_high": 3.0}
TIGHT = {"clip_low": 0.07, "clip_high": 0.07, "ratio_cap": 1.1}
"""Clips that some tokens and rollouts are beyond when logprobs have moved by up to 0.2."""
BAND = {"correction_low": 0.5, "correction_high": 1.6}
"""Bounds that some of these slightly off-policy tokens and rollouts are beyond."""


def in_scope(rollouts, scope):
    key = {"group_key": lambda state: 0} if scope == "tree" else {}
    return build_samples(rollouts, scope, **key).samples


def shifted(model):
    """A reference that is not the model itself: else a KL has no gradient."""
    twin = tiny_model("llama")
    with torch.no_grad():
        for parameter, own in zip(twin.parameters(), model.parameters(), strict=True):
            parameter.copy_(own * 1.05)
    return twin


def correction_case(name):
    row = CORRECTIONS[name]
    return {"correction": name} | {key: BAND[key] for key in BAND if key in row.defaults}


CASES = [
    *({"name": name} for name in sorted(ALGORITHMS) if name not in ("dr_grpo", "zero")),
    {"name": "dr_grpo", "fixed_length": 7},
    {"name": "grpo", "aggregation": "token", "dual_clip": 1.5},
    {"name": "gspo", "aggregation": "call", **WIDE},
    {"name": "gmpo", "aggregation": "token", **WIDE},
    {"name": "cispo", "aggregation": "rollout"},
    *({"name": "grpo", "kl_coef": 0.3, "kl": name} for name in sorted(KLS)),
    *({"name": "grpo"} | correction_case(name) for name in sorted(CORRECTIONS)),
    {"name": "gspo", **WIDE, **correction_case("sequence_tis"), "kl_coef": 0.2, "kl": "reward"},
    {"name": "reinforce", "entropy_coef": 0.2},
    {"name": "sft", "aggregation": "call", "kl_coef": 0.2, "kl": "full"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_each_part_through_the_trainer(case, monkeypatch):
    model = tiny_model("llama")
    uses_kl = "kl_coef" in case or ALGORITHMS[case["name"]].teaches
    worker = trainer(model, shifted(model) if uses_kl else None, algorithm=case)
    rollouts = states(model=model)
    gradients, sizes = {}, {}
    for scope in SCOPES:
        built = in_scope(rollouts, scope)
        sizes[scope] = sum(len(sample.ids) for sample in built)
        gradients[scope] = gradient_of(worker, built)
    assert sizes["tree"] < sizes["interleave"] < sizes["step"]
    assert float(gradients["step"].norm()) > 1e-3
    for scope in SCOPES[1:]:
        assert difference(gradients[scope], gradients["step"]) < FLOAT32, scope
    longest = max(len(sample.ids) for sample in in_scope(rollouts, "interleave"))
    small = trainer(
        model,
        shifted(model) if uses_kl else None,
        algorithm=case,
        train={"max_tokens": longest},
    )
    monkeypatch.setattr(forward, "gather_logprobs", partial(gather_logprobs, chunk_rows=3))
    built = in_scope(rollouts, "tree")
    assert len(build_batch(built, small.algorithm, longest).packs) > 1
    assert difference(gradient_of(small, built), gradients["step"]) < FLOAT32


class Scope:
    """The records of one scope, what the models say of them, and its derivative by parameter."""

    def __init__(self, samples, model, reference):
        algorithm = resolve_algorithm("dapo")
        (pack,) = build_batch(samples, algorithm, 8192).packs
        self.samples, self.forest = samples, pack.forest
        run, frozen = LogprobModel(model), LogprobModel(reference)
        parameters = list(model.parameters())
        with run.context():
            got = run(pack.forest, entropy_gradient=True, teacher=frozen)
            columns = (got.logprob, got.entropy, got.kl)
            self.jacobian = torch.stack(
                [
                    torch.cat(
                        [
                            part.flatten()
                            for part in torch.autograd.grad(
                                value, parameters, retain_graph=True, materialize_grads=True
                            )
                        ]
                    )
                    for column in columns
                    for value in column
                ]
            )
        self.got = [column.detach() for column in columns]
        with torch.no_grad(), frozen.context():
            self.reference = frozen(pack.forest).logprob
        records = pack.forest.records
        moved = 0.2 * np.sin(7.0 * records.rollout + 3.0 * records.call + records.offset)
        self.before = (self.got[0].numpy() + moved).astype(np.float32)
        self.records = {}

    def records_for(self, algorithm):
        key = (algorithm.aggregation, algorithm.over_rollout)
        if key not in self.records:
            (pack,) = build_batch(self.samples, algorithm, 8192).packs
            assert np.array_equal(pack.forest.ids, self.forest.ids)
            self.records[key] = pack.forest.records
        return self.records[key]

    def gradient(self, algorithm):
        """What `Trainer` computes for one pack, with the model's part taken from the Jacobian.

        As if an update had moved the logprobs since the start of the batch.
        """
        records = self.records_for(algorithm)
        leaves = [column.clone().requires_grad_() for column in self.got]
        now = self.got[0].numpy()
        start = fixed_terms_of(algorithm, records, self.before, self.reference.numpy())
        total = objective(
            algorithm,
            records.weight,
            start,
            RecordLogprobs(*leaves),
            ratios=rollout_ratios(algorithm, records, start, now),
            reference=self.reference,
        ).total
        return torch.cat(torch.autograd.grad(total, leaves, materialize_grads=True)) @ self.jacobian


def combinations():
    kinds = itertools.product(LOSSES, AGGREGATIONS, (None, *CORRECTIONS), (None, *KLS))
    for loss, aggregation, correction, kl in kinds:
        in_reward = kl is not None and KLS[kl].in_reward
        if LOSSES[loss].supervised and (correction or in_reward):
            continue  # refused, see test_training_losses.py
        options = {key: TIGHT[key] for key in TIGHT if key in LOSSES[loss].defaults}
        if correction:
            options |= correction_case(correction)
            options.pop("correction")
        yield {
            "name": "reinforce",
            "loss": loss,
            "aggregation": aggregation,
            "correction": correction,
            "kl": kl,
            "kl_coef": 0.3 if kl else 0.0,
            "entropy_coef": 0.1 if kl == "k3" else 0.0,
            "fixed_length": 7 if aggregation == "fixed_length" else None,
            "parameters": options,
        }


def test_every_combination_of_parts():
    model = tiny_model("llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    reference = tiny_model("llama", 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    rollouts = states(4, model=model)
    scopes = {name: Scope(in_scope(rollouts, name), model, reference) for name in SCOPES}
    seen, distinct = 0, set()
    for options in combinations():
        algorithm = resolve_algorithm(**options)
        wanted = scopes["step"].gradient(algorithm)
        assert float(wanted.norm()) > 1e-3, options
        for name in SCOPES[1:]:
            assert difference(scopes[name].gradient(algorithm), wanted) < FLOAT32, (name, options)
        seen += 1
        distinct.add(round(float(wanted.norm()), 5))
    assert seen == 4 * ((len(LOSSES) - 1) * (len(CORRECTIONS) + 1) * (len(KLS) + 1) + len(KLS))
    assert len(distinct) > 0.7 * seen  # the parts do differ


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
def test_masked_completions_have_no_gradient_in_any_scope(name):
    """TRL's setting: as if the author had masked every token of the rollouts that were cut."""
    model = tiny_model("llama")
    worker = trainer(model, algorithm={"name": name})
    rollouts = states(model=model)
    by_hand = states(model=model)
    for state, other in list(zip(rollouts, by_hand, strict=True))[::2]:
        state["trajectory"][-1]["extras"]["finish_reason"] = "length"
        for step in other["trajectory"]:
            step["tokens"]["completion_mask"][:] = [0] * len(step["tokens"]["completion_mask"])
    policy = TruncationPolicy(mask_truncated_completions=True)
    plain = gradient_of(worker, build_samples(rollouts, "step").samples)
    expected = gradient_of(worker, build_samples(by_hand, "step").samples)
    assert difference(expected, plain) > 1e-2
    for scope in SCOPES:
        batch = build_samples(rollouts, scope, truncation=policy)
        assert difference(gradient_of(worker, batch.samples), expected) < FLOAT32
        assert batch.report["num_masked_completions"] == len(rollouts[::2])
