"""Several optimizer updates on the rollouts of one step: what moves and what stays fixed."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_kit import (
    FLOAT32,
    config,
    difference,
    flat,
    gradient_of,
    group,
    states,
    tiny_model,
    trainer,
    tree,
)

from rolltree.samples import build_samples
from rolltree.training.algorithms import resolve_algorithm
from rolltree.training.batches import build_batch, split_rollouts
from rolltree.values.errors import ConfigError

SMOOTH = {"lr": 0.1, "eps": 1.0}
"""AdamW without its sign: a gradient that is all rounding moves nothing."""


def keys(samples):
    return sorted(
        (int(r), int(c), int(o))
        for s in samples
        for r, c, o in zip(s.records.rollout, s.records.call, s.records.offset, strict=True)
    )


class TestMinibatches:
    @pytest.mark.parametrize("scope", ["step", "turn", "interleave", "tree"])
    def test_they_are_whole_rollouts_in_order_in_every_scope(self, scope):
        key = {"group_key": lambda state: 0} if scope == "tree" else {}
        samples = build_samples(states(5), scope, **key).samples
        parts = split_rollouts(samples, 2)
        held = [sorted({rollout for rollout, _, _ in keys(part)}) for part in parts]
        assert held == [[0, 1, 2], [3, 4]]
        assert sorted(keys(parts[0]) + keys(parts[1])) == keys(samples)

    @given(st.integers(1, 6), st.integers(1, 9))
    @settings(max_examples=20, deadline=None)
    def test_nothing_is_lost_and_nothing_twice(self, num_rollouts, num_parts):
        samples = [tree(group(num_rollouts))]
        parts = split_rollouts(samples, num_parts)
        assert len(parts) == min(num_parts, num_rollouts)
        assert sorted(key for part in parts for key in keys(part)) == keys(samples)

    def test_masked_rollouts_make_no_part_of_their_own(self):
        """Parts of the rollouts that train: a part without any would end the run."""
        (sample,) = samples = [tree(group(4))]
        weight = np.where(sample.records.rollout < 3, np.float32(0), sample.records.weight)
        masked = [replace(sample, records=replace(sample.records, weight=weight))]
        assert [{r for r, _, _ in keys(part)} for part in split_rollouts(masked, 2)] == [{3}]
        assert len(split_rollouts(samples, 2)) == 2

    def test_a_part_computes_only_its_own_tokens(self):
        calls = group(4, prefix=6, turns=1)
        whole = build_batch([tree(calls)], resolve_algorithm("grpo"), 1000)
        parts = [
            build_batch(part, resolve_algorithm("grpo"), 1000)
            for part in split_rollouts([tree(calls)], 2)
        ]
        for part, expected in zip(parts, (calls[:2], calls[2:]), strict=True):
            alone = build_batch([tree(expected)], resolve_algorithm("grpo"), 1000)
            assert part.num_tokens == alone.num_tokens < whole.num_tokens
            assert part.records.weight.sum() == pytest.approx(1.0)

    def test_each_update_is_a_step_on_its_part(self):
        """Two mini-batches by the trainer, and the same two by hand."""
        calls = group(4, turns=1)
        sections = {"optim": SMOOTH, "algorithm": {"name": "reinforce"}}
        model, twin = tiny_model(), tiny_model()
        split = {"updates_per_step": 2, "minibatches": 2, "num_steps": 1}
        metrics = trainer(model, train=split, **sections).step([tree(calls)], 1)
        by_hand = trainer(twin, train={"num_steps": 2}, **sections)
        first = by_hand.step([flat(call) for call in calls[:2]], 1)
        by_hand.step([flat(call) for call in calls[2:]], 2)
        for left, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(left, right, atol=FLOAT32)
        assert metrics["train/num_records"] == sum(len(call.completion) for call in calls)
        assert metrics["train/loss"] == pytest.approx(first["train/loss"], abs=FLOAT32)

    def test_several_passes_go_round(self):
        calls = group(4, turns=1)
        sections = {"optim": SMOOTH, "algorithm": {"name": "reinforce"}}
        model, twin = tiny_model(), tiny_model()
        split = {"updates_per_step": 4, "minibatches": 2, "num_steps": 1}
        trainer(model, train=split, **sections).step([tree(calls)], 1)
        by_hand = trainer(twin, train={"num_steps": 4}, **sections)
        for step, part in enumerate((calls[:2], calls[2:], calls[:2], calls[2:]), 1):
            by_hand.step([tree(part)], step)
        for left, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(left, right, atol=FLOAT32)

    def test_a_number_that_trains_some_rollouts_more_is_refused(self):
        with pytest.raises(ConfigError, match="multiple of 2"):
            config(train={"minibatches": 2, "updates_per_step": 3})


def recording(worker):
    """Let a trainer keep the `FixedTerms` that each of its updates used."""
    seen = []
    inner = worker._gradients

    def gradients(batch, start=None):
        seen.append(start)
        return inner(batch, start)

    worker._gradients = gradients
    return seen


class TestProximal:
    OPTIONS = {"name": "grpo", "correction": "token_tis"}
    WARM = {"optim": {"lr": 3e-3}}

    def test_it_is_the_trainers_logprob_before_the_first_update(self):
        model = tiny_model()
        before = copy.deepcopy(model)
        worker = trainer(model, algorithm=self.OPTIONS, train={"updates_per_step": 3}, **self.WARM)
        samples = [tree(group())]
        seen = recording(worker)
        worker.step(samples, 1)
        assert len(seen) == 3
        assert seen[0] is seen[1] is seen[2]
        frozen = trainer(before)
        batch = build_batch(samples, worker.algorithm, 8192)
        expected = frozen._measure(frozen.logprobs, batch)
        np.testing.assert_allclose(seen[0].old, expected, atol=FLOAT32)
        factor = np.minimum(np.exp(expected - batch.records.logprob), 2.0)
        np.testing.assert_allclose(seen[0].factor, factor, rtol=1e-4)
        moved = worker._measure(worker.logprobs, batch)
        assert np.abs(moved - expected).max() > 0.01

    def test_every_minibatch_starts_before_the_first_update_of_all(self):
        model = tiny_model()
        before = copy.deepcopy(model)
        split = {"updates_per_step": 2, "minibatches": 2}
        worker = trainer(model, algorithm=self.OPTIONS, train=split, **self.WARM)
        samples = [tree(group(4))]
        seen = recording(worker)
        worker.step(samples, 1)
        frozen = trainer(before)
        for part, start in zip(split_rollouts(samples, 2), seen, strict=True):
            batch = build_batch(part, worker.algorithm, 8192)
            expected = frozen._measure(frozen.logprobs, batch)
            np.testing.assert_allclose(start.old, expected, atol=FLOAT32)

    def test_the_second_update_is_clipped_against_it_by_hand(self):
        """PPO's second epoch: the ratio is to the first epoch's logprobs, not to the engine's."""
        model = tiny_model("llama")
        options = {"updates_per_step": 2}
        worker = trainer(model, algorithm=self.OPTIONS, train=options, optim={"lr": 0.01})
        call = group(1, turns=1)[0]
        call.advantage = 1.0
        samples = [flat(call)]
        batch = build_batch(samples, worker.algorithm, 8192)
        start = worker._fixed_terms(batch, 2)
        worker._gradients(batch, start)
        worker.optimizer.clip()
        worker.optimizer.step(0.01)
        worker._gradients(batch, start)
        got = torch.cat([p.grad.flatten() for p in worker.optimizer.parameters])
        model.zero_grad()
        ids = torch.tensor([call.prompt + call.completion])
        size = len(call.completion)
        logits = model(ids).logits[0, -size - 1 : -1].log_softmax(-1)
        logprob = logits[torch.arange(size), torch.tensor(call.completion)]
        ratio = torch.exp(logprob - torch.from_numpy(start.old))
        terms = torch.minimum(ratio, ratio.clamp(0.8, 1.2))
        loss = -(terms * torch.from_numpy(start.factor)).mean()
        loss.backward()
        wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert bool((ratio > 1.2).any())  # else nothing is clipped
        if float(wanted.norm()) == 0:
            assert float(got.norm()) == 0
        else:
            assert difference(got, wanted) < 1e-4

    @pytest.mark.parametrize("correction", ["sequence_tis", "geometric_mask", "icepop"])
    def test_one_update_needs_no_pass_of_its_own_unless_rollouts_span_packs(self, correction):
        bounds = {"correction_high": 1e9} | (
            {} if correction == "sequence_tis" else {"correction_low": 0.0}
        )
        worker = trainer(algorithm={"name": "grpo", "correction": correction, **bounds})
        measured = []
        inner = worker._measure
        worker._measure = lambda *args: measured.append(1) or inner(*args)
        built = build_samples(states(4), "tree").samples
        whole = gradient_of(worker, built)
        assert not measured
        longest = max(sample.num_tokens for sample in built)
        small = trainer(
            worker.model,
            algorithm={"name": "grpo", "correction": correction, **bounds},
            train={"max_tokens": longest},
        )
        inner_small = small._measure
        small._measure = lambda *args: measured.append(1) or inner_small(*args)
        assert difference(gradient_of(small, built), whole) < FLOAT32
        assert bool(measured) == (correction != "icepop")


class TestReference:
    def test_a_teacher_is_frozen_and_its_kl_falls(self):
        student, teacher = tiny_model("llama", 0), tiny_model("llama", 1)
        before = copy.deepcopy(teacher.state_dict())
        worker = trainer(student, teacher, algorithm={"name": "distill"}, optim={"lr": 3e-3})
        samples = [tree(group(6, turns=2, length=8))]
        full = trainer(student, teacher, algorithm={"name": "distill", "kl": "full"})
        batch = build_batch(samples, full.algorithm, 8192)
        kl = full._gradients(batch).metrics(batch.records)["train/kl"]
        for step in range(1, 15):
            worker.step(samples, step)
        after = full._gradients(batch).metrics(batch.records)["train/kl"]
        assert after < kl
        assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())

    def test_the_full_kl_brings_the_student_to_the_teacher(self):
        student, teacher = tiny_model("llama", 0), tiny_model("llama", 1)
        worker = trainer(
            student, teacher, algorithm={"name": "distill", "kl": "full"}, optim={"lr": 1e-2}
        )
        samples = [tree(group(6, turns=2, length=8))]
        first = worker.step(samples, 1)["train/kl"]
        for step in range(2, 20):
            last = worker.step(samples, step)["train/kl"]
        assert last < 0.5 * first

    def test_a_model_by_name(self):
        from rolltree.inference.models import load_model

        model, _ = load_model("tiny")
        section = {"name": "distill", "reference": "tiny"}
        worker = trainer(model, algorithm=section)
        assert worker.reference.model is not model
        assert not any(p.requires_grad for p in worker.reference.model.parameters())

    @pytest.mark.parametrize("kl", ["k2", "k3", "reward", "full"])
    def test_padding_of_the_teachers_vocabulary_changes_nothing(self, kl):
        samples = [tree(group(3))]
        algorithm = {"name": "grpo", "kl": kl, "kl_coef": 0.5}

        def found(teacher):
            worker = trainer(tiny_model("llama", 0), teacher, algorithm=algorithm)
            return gradient_of(worker, samples)

        exact, padded = tiny_model("llama", 1), tiny_model("llama", 1)
        padded.resize_token_embeddings(64, mean_resizing=False)
        with torch.no_grad():  # whatever the padding says
            padded.get_output_embeddings().weight[61:] = 3.0
        assert difference(found(padded), found(exact)) < FLOAT32

    @pytest.mark.parametrize("kl", ["k3", "full"])
    def test_a_call_with_an_id_that_only_the_student_has_is_masked(self, kl):
        student = tiny_model("llama", 0)
        student.resize_token_embeddings(64, mean_resizing=False)
        algorithm = {"name": "grpo", "kl": kl, "kl_coef": 0.5}
        worker = trainer(student, tiny_model("llama", 1), algorithm=algorithm)
        calls = group(3, turns=1)
        calls[1].completion[0] = 62
        metrics = worker.step([tree(calls)], 1)
        assert metrics["masked/vocabulary"] == 1
        assert metrics["train/kl"] > 0

    @pytest.mark.parametrize(
        ("reference", "algorithm", "message"),
        [
            (None, {"name": "distill"}, "Set algorithm.reference"),
            ("other", {"name": "grpo"}, "it would do nothing"),
            ("wider", {"name": "distill"}, "vocabulary of 61 tokens and the reference one of 80"),
        ],
    )
    def test_mistakes_are_named(self, reference, algorithm, message):
        module = {None: None, "other": tiny_model(), "wider": tiny_model(vocab_size=80)}[reference]
        with pytest.raises(ConfigError, match=message):
            trainer(tiny_model(), module, algorithm=algorithm)

    def test_a_reference_without_a_kl_is_refused(self):
        with pytest.raises(ConfigError, match=r"algorithm.kl_coef is 0"):
            config(algorithm={"reference": "tiny"})
