"""A loss with a per-token input of its own: one row in a table, and whoever records the values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_kit import FLOAT32, difference, gradient_of, states, tiny_model, trainer

from rolltree.samples import build_samples, concat_records
from rolltree.samples.transform import blank_records, take_records
from rolltree.tokens import StepTokens, TokenStream, TokenTree
from rolltree.training import load_train_config
from rolltree.training.feeds import credit_of
from rolltree.training.losses import LOSSES, Loss, LossTerms
from rolltree.values.errors import TokenError, TrainingError
from rolltree.values.types import RolloutRequest, RolloutResult, State

SCOPES = ("step", "turn", "interleave", "tree")


def advised(x, p):
    """Return `-advice * logprob`: an advisor's word on each token is its advantage."""
    return LossTerms(-x.extra["advice"] * x.logprob, torch.zeros_like(x.logprob).bool())


@pytest.fixture(autouse=True)
def _a_loss_with_an_input(monkeypatch):
    monkeypatch.setitem(LOSSES, "advised", Loss(advised, {}, inputs=("advice",)))


def advice(rng, count):
    return {"advice": rng.normal(size=count).astype(np.float32)}


CASE = {"name": "grpo", "loss": "advised", "aggregation": "token"}


def test_the_values_reach_the_loss_the_same_in_every_scope():
    model = tiny_model("llama")
    worker = trainer(model, algorithm=CASE)
    rollouts = states(model=model, streams=advice)
    gradients = {}
    for scope in SCOPES:
        samples = build_samples(rollouts, scope, inputs=("advice",)).samples
        gradients[scope] = gradient_of(worker, samples)
    for scope in SCOPES[1:]:
        assert difference(gradients[scope], gradients["step"]) < FLOAT32, scope
    # The loss is linear in the advice: the values are used, not only carried.
    twice = [
        replace(s, records=replace(s.records, extra={"advice": 2 * s.records.extra["advice"]}))
        for s in build_samples(rollouts, "tree", inputs=("advice",)).samples
    ]
    assert difference(gradient_of(worker, twice), 2 * gradients["step"]) < FLOAT32


def test_tokens_without_an_advantage_train_unless_the_row_says_that_they_cannot(monkeypatch):
    """The loss reads the advice only, so rollouts whose rewards are all equal teach as well."""
    rollouts = states(streams=advice)
    for state in rollouts[1:]:
        for step in state["trajectory"]:
            step["advantage"] = 0.0
    samples = build_samples(rollouts, inputs=("advice",)).samples
    metrics = trainer(tiny_model("llama"), algorithm=CASE).step(samples, 1)
    assert metrics["train/num_skipped_records"] == 0
    assert metrics["train/num_records"] == sum(len(sample.records) for sample in samples)
    says_so = Loss(LOSSES["advised"].fn, {}, inputs=("advice",), only_advantage=True)
    monkeypatch.setitem(LOSSES, "advised", says_so)
    assert trainer(tiny_model(), algorithm=CASE).step(samples, 1)["train/num_skipped_records"] > 0


@pytest.mark.parametrize("loss", [None, "advised"])
def test_dynamic_sampling_asks_the_loss_what_teaches(loss):
    config = load_train_config({"algorithm": {"dynamic_sampling_max": 4, "loss": loss}})
    flat = [result(0.1 + 0.2, index=0), result(0.3, index=1)]
    assert credit_of(flat, config).has_signal is (loss == "advised")


def result(reward, index):
    state = State(reward=reward, trajectory=[{"reward": None, "extras": {}}], error=None)
    request = RolloutRequest(f"g/{index}", "env", {"prompt": "p"}, 0, 0, "g", index)
    return RolloutResult(request, (state,), None)


def test_each_record_has_the_value_of_its_own_token():
    (state,) = states(num_rollouts=1, streams=advice)
    tree = state["trajectory"].tree
    wanted = np.concatenate([tree.stream("advice", call).values for call in range(3)])
    for scope in SCOPES:
        samples = build_samples([state], scope, inputs=("advice",)).samples
        records = concat_records([sample.records for sample in samples])
        order = np.lexsort((records.offset, records.call))
        assert np.array_equal(records.extra["advice"][order], wanted), scope


def test_a_step_without_the_values_is_refused_by_name():
    worker = trainer(tiny_model("llama"), algorithm=CASE)
    for samples in (
        build_samples(states(), inputs=("advice",)).samples,
        build_samples(states(streams=advice)).samples,
    ):
        with pytest.raises(TrainingError, match=r"call 0 of rollout r0 .* without 'advice'"):
            worker.step(samples, 1)


def test_values_of_prompt_tokens_only_give_sampled_tokens_none():
    tree = TokenTree()
    values = TokenStream(np.ones(5, np.float32), start=0)
    tree.insert(list(range(10)), list(range(20)), streams={"advice": values})
    step = {"tokens": StepTokens(tree, 0)}
    for scope in SCOPES:
        (sample,) = build_samples([[step]], scope, inputs=("advice",)).samples
        assert np.isnan(sample.records.extra["advice"]).all()
        assert len(sample.records) == 20


def test_values_that_are_not_one_number_per_token_are_refused():
    wide = states(num_rollouts=1, streams=lambda rng, count: {"advice": np.ones((count, 2))})
    with pytest.raises(TokenError, match="does not have one number per token"):
        build_samples(wide, inputs=("advice",))


def test_records_keep_their_inputs_when_they_are_chosen_and_joined():
    one = replace(blank_records(2), extra={"advice": np.array([1, 2], np.float32)})
    assert take_records(one, np.array([1])).extra["advice"].tolist() == [2.0]
    joined = concat_records([one, blank_records(1)]).extra["advice"]
    assert joined[:2].tolist() == [1.0, 2.0]
    assert np.isnan(joined[2])
