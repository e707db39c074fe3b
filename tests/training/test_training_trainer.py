import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_kit import (
    FLOAT32,
    Call,
    config,
    difference,
    flat,
    gradient_of,
    group,
    tiny_model,
    trainer,
    tree,
)

from rolltree.training.algorithms import resolve_algorithm
from rolltree.training.batches import build_batch
from rolltree.training.optim import Optimizer
from rolltree.training.sections import ModelSection, learning_rate
from rolltree.values.errors import TokenError, TrainingError


def advantage_weighted_logprob(worker, samples):
    (item,) = build_batch(samples, worker.algorithm, 8192).packs
    with torch.no_grad(), worker.logprobs.context():
        got = worker.logprobs(item.forest).logprob.numpy()
    return float((got * item.forest.records.advantage).sum())


class TestBatch:
    def test_weights_are_the_coefficients(self):
        batch = build_batch([tree(group(3))], resolve_algorithm("dapo"), 1000)
        assert batch.records.weight.sum() == pytest.approx(1.0)
        assert batch.num_skipped == 0

    def test_masked_records_do_not_count(self):
        calls = group(2, turns=1)
        calls[0].weight = 0.0
        batch = build_batch([flat(call) for call in calls], resolve_algorithm("grpo"), 1000)
        assert set(batch.records.rollout.tolist()) == {1}
        assert batch.records.weight.sum() == pytest.approx(1.0)

    def test_flat_groups_are_skipped_after_they_counted(self):
        calls = group(4, turns=1)
        calls[1].advantage = calls[2].advantage = 0.0
        samples = [tree(calls)]
        algorithm = resolve_algorithm("grpo")
        every = build_batch(samples, algorithm, 1000)
        some = build_batch(samples, algorithm, 1000, skip_zero_advantage=True)
        assert some.num_tokens < every.num_tokens
        assert set(some.records.rollout.tolist()) == {0, 3}
        assert some.num_skipped == len(calls[1].completion) + len(calls[2].completion)
        assert some.records.weight.sum() == pytest.approx(0.5)  # two of four rollouts
        model = tiny_model()
        skipping, complete = trainer(model), trainer(model, train={"skip_zero_advantage": False})
        wanted = gradient_of(complete, samples)
        skipping._gradients(some)
        got = torch.cat([p.grad.flatten() for p in skipping.optimizer.parameters])
        assert difference(got, wanted) < FLOAT32

    def test_one_rollout_stays_when_all_are_flat(self):
        calls = group(4, turns=1)
        for call in calls:
            call.advantage = 0.0
        batch = build_batch(
            [tree(calls)], resolve_algorithm("grpo"), 1000, skip_zero_advantage=True
        )
        assert set(batch.records.rollout.tolist()) == {0}

    def test_nothing_to_train(self):
        with pytest.raises(TokenError, match="no loss record"):
            build_batch([], resolve_algorithm("grpo"), 1000)


class TestStep:
    def test_it_changes_the_module_itself_towards_the_advantages(self):
        model = tiny_model()
        worker = trainer(model, optim={"lr": 1e-2}, algorithm={"name": "reinforce"})
        parameter = model.model.layers[0].mlp.up_proj.weight
        address, before = parameter.data_ptr(), parameter.clone()
        samples = [tree(group())]
        gain = advantage_weighted_logprob(worker, samples)
        for step in range(1, 6):
            worker.step(samples, step)
        assert parameter.data_ptr() == address
        assert not torch.equal(parameter, before)
        assert advantage_weighted_logprob(worker, samples) > gain + 0.5

    def test_the_update_is_adamw_by_hand(self):
        model = tiny_model()
        worker = trainer(
            model, optim={"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 1e9, "eps": 1e-12}
        )
        samples = [tree(group())]
        gradient = gradient_of(worker, samples)
        matrix = model.model.layers[0].mlp.up_proj.weight
        vector = model.model.norm.weight
        before = {id(p): p.detach().clone() for p in model.parameters()}
        worker.step(samples, 1)
        at = 0
        for parameter in worker.optimizer.parameters:
            part = gradient[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
            if parameter is matrix or parameter is vector:
                decay = 0.1 * 0.01 if parameter is matrix else 0.0
                # first step: both moments are bias-corrected to g and g^2
                wanted = before[id(parameter)] * (1 - decay) - 0.01 * part.sign()
                moved = part.abs() > 1e-8
                assert torch.allclose(parameter[moved], wanted[moved], atol=1e-5)

    def test_no_gradient_still_lets_the_momentum_run_out(self):
        model = tiny_model()
        worker = trainer(model, optim={"lr": 0.01})
        moving, still = [tree(group(seed=1))], [tree(group(seed=2))]
        for call_weight in (still[0].records.advantage,):
            call_weight[:] = 0.0
        worker.step(moving, 1)
        before = model.model.norm.weight.clone()
        metrics = worker.step(still, 2)
        assert metrics["train/grad_norm"] == 0.0
        assert not torch.equal(model.model.norm.weight, before)

    def test_clipping_scales_to_the_largest_norm(self):
        worker = trainer(optim={"max_grad_norm": 0.5})
        batch = build_batch([tree(group())], worker.algorithm, 8192)
        worker._gradients(batch)
        norm = worker.optimizer.clip()
        assert norm > 0.5
        gradients = [p.grad for p in worker.optimizer.parameters]
        assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(0.5, rel=1e-4)

    def test_metrics_say_what_happened(self):
        model = tiny_model()
        worker = trainer(model)
        calls = group()
        metrics = worker.step([tree(calls)], 1)
        assert metrics["train/num_records"] == sum(len(call.completion) for call in calls)
        assert (
            metrics["train/sampling/sampling_logp_difference/max"]
            >= metrics["train/sampling/sampling_logp_difference/mean"]
            > 0
        )
        assert 0 < metrics["ratio/ess"] <= 1
        assert metrics["ratio/min"] <= metrics["ratio/mean"] <= metrics["ratio/max"]
        assert 0 < metrics["train/entropy"] < math.log(61)
        assert metrics["train/lag_mean"] == 0

    def test_the_engines_own_logprobs_give_no_mismatch(self):
        model = tiny_model()
        call = Call([3, 4, 5], [6, 7])
        logits = model(torch.tensor([[3, 4, 5, 6]])).logits[0, 2:].log_softmax(-1)
        call.logprob = logits[[0, 1], [6, 7]].tolist()
        metrics = trainer(model).step([flat(call)], 1)
        assert metrics["train/sampling/sampling_logp_difference/max"] < FLOAT32
        assert metrics["ratio/ess"] == pytest.approx(1, abs=1e-4)

    def test_several_updates_on_the_same_rollouts(self):
        model = tiny_model()
        once = trainer(model, train={"updates_per_step": 3, "num_steps": 2}, optim={"lr": 1e-3})
        once.step([tree(group())], 1)
        twin = tiny_model()
        by_hand = trainer(twin, train={"num_steps": 6}, optim={"lr": 1e-3})
        for step in (1, 2, 3):
            by_hand.step([tree(group())], step)
        for left, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(left, right, atol=1e-5)

    def test_gradient_checkpointing_changes_nothing(self):
        samples = [tree(group())]
        plain = gradient_of(trainer(tiny_model()), samples)
        saving = trainer(tiny_model(), train={"gradient_checkpointing": True})
        assert difference(gradient_of(saving, samples), plain) < FLOAT32

    def test_cheap_backward_passes_stay_close(self):
        samples = [tree(group(8, 60))]
        plain = gradient_of(trainer(tiny_model(hidden_size=128)), samples)
        cheap = trainer(tiny_model(hidden_size=128), model={"backward_dtype": "bfloat16"})
        before = torch.backends.mkldnn.matmul.fp32_precision
        assert difference(gradient_of(cheap, samples), plain) < 2e-2
        assert torch.backends.mkldnn.matmul.fp32_precision == before
        with pytest.raises(ValueError, match="only on a CPU"):
            ModelSection(backward_dtype="bfloat16", device="cuda")

    def test_the_reference_of_the_kl_stays_as_it_was(self):
        worker = trainer(algorithm={"kl_coef": 0.5}, optim={"lr": 1e-2})
        samples = [tree(group())]
        first = worker.step(samples, 1)
        assert first["train/kl"] == pytest.approx(0, abs=1e-5)
        assert worker.step(samples, 2)["train/kl"] > 1e-4


class TestGuards:
    def test_a_disagreement_with_the_engine_stops_the_run(self):
        worker = trainer(train={"max_mismatch": 0.1})
        before = worker.model.model.norm.weight.clone()
        with pytest.raises(TrainingError, match="disagree on the logprobs"):
            worker.step([tree(group())], 1)
        assert torch.equal(worker.model.model.norm.weight, before)

    def test_a_non_finite_loss_names_its_rollout_and_changes_nothing(self):
        worker = trainer()
        samples = [flat(call) for call in group(3, turns=1)]
        huge = replace(samples[1].records, logprob=np.full_like(samples[1].records.logprob, -1e4))
        huge.advantage[:] = -1.0
        samples[1] = replace(samples[1], records=huge)  # exp(1e4) overflows
        before = worker.model.model.norm.weight.clone()
        with pytest.raises(TrainingError, match=r"the sample of rollouts r1\b"):
            worker.step(samples, 1)
        assert torch.equal(worker.model.model.norm.weight, before)

    def test_broken_weights_are_not_blamed_on_one_sample_only(self):
        model = tiny_model()
        worker = trainer(model)
        with torch.no_grad():
            model.model.norm.weight[0] = math.nan
        with pytest.raises(TrainingError, match="not finite"):
            worker.step([tree(group())], 1)

    def test_half_precision_master_weights_are_refused(self):
        with pytest.raises(TrainingError, match="must be float32"):
            trainer(tiny_model().to(torch.bfloat16))

    def test_a_frozen_model_is_refused(self):
        with pytest.raises(TrainingError, match="nothing trains"):
            trainer(tiny_model().requires_grad_(False))


class TestOptimizer:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, [1.0, 1.0, 1.0, 1.0, 1.0]),
            ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
            ({"schedule": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2]),
            ({"schedule": "linear", "warmup_steps": 1}, [0.5, 1.0, 0.75, 0.5, 0.25]),
            ({"schedule": "cosine"}, [1.0, 0.904508, 0.654508, 0.345492, 0.095492]),
        ],
    )
    def test_schedules_by_hand(self, options, expected):
        section = config(optim={"lr": 2.0, **options}).optim
        got = [learning_rate(section, update, 5) for update in range(5)]
        assert got == pytest.approx([2 * share for share in expected], abs=1e-5)

    @given(st.integers(0, 30), st.integers(1, 20), st.integers(0, 8))
    @settings(max_examples=50, deadline=None)
    def test_rates_stay_within_bounds(self, update, total, warmup):
        for schedule in ("constant", "linear", "cosine"):
            section = config(optim={"lr": 1.0, "schedule": schedule, "warmup_steps": warmup}).optim
            assert 0 <= learning_rate(section, update, total) <= 1

    def test_state_round_trips(self):
        model, twin = tiny_model(), tiny_model()
        section = config(optim={"lr": 0.01}).optim
        left, right = Optimizer(model, section), Optimizer(twin, section)
        for optimizer, module in ((left, model), (right, twin)):
            torch.manual_seed(0)
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(0.01)
        fresh = Optimizer(twin, section)
        for name, value in fresh.tensors().items():
            value.copy_(left.tensors()[name])
        for optimizer, module in ((left, model), (fresh, twin)):
            torch.manual_seed(1)
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(0.01)
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, two)

    def test_state_before_the_first_step_is_what_adamw_starts_with(self):
        models = [tiny_model(), tiny_model()]
        optimizers = [Optimizer(model, config(optim={"lr": 0.01}).optim) for model in models]
        assert all(not value.any() for value in optimizers[0].tensors().values())
        for optimizer, model in zip(optimizers, models, strict=True):
            torch.manual_seed(0)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(0.01)
        for one, two in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one, two)
