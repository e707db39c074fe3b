"""What a step stores of each token is what the model said and the loss used."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loop_kit import make_config, start
from training_kit import LetterSource, states, tiny_model, trainer

from rolltree.rollouts.decode import decode_results
from rolltree.samples import TruncationEffect, build_samples
from rolltree.store import Run
from rolltree.training.advantages import CreditReport
from rolltree.training.batches import mask_stale
from rolltree.training.token_record import TokenRecord

ARRAYS = ("num_sampled", "advantage", "weight", "logprob", "entropy")


def record_of(made, *, step=1, samples=None, scope="tree", model=None, **sections):
    """Train one step on states and return the rows by request."""
    worker = trainer(model or tiny_model(), **sections)
    results = [SimpleNamespace(request=SimpleNamespace(request_id=s["request_id"]), states=(s,))
               for s in made]  # fmt: skip
    given = [np.array([step["advantage"] or 0.0 for step in s["trajectory"]]) for s in made]
    places = tuple((index, 0) for index in range(len(made)))
    record = TokenRecord(results, CreditReport(tuple(made), tuple(given), places=places))
    samples = build_samples(made, scope).samples if samples is None else samples
    metrics = worker.step(samples, step, on_batch=record.add)
    return {row.request_id: row for row in record.rows(step)}, metrics


@torch.no_grad()
def plain(model, state):
    """Return logprob and entropy of a state's sampled tokens, each call on its own, in float64."""
    logprobs, entropies = [], []
    for step in state["trajectory"]:
        tokens = step["tokens"]
        prompt, answer = list(tokens["prompt_ids"]), list(tokens["completion_ids"])
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        scores = (logits / 0.8).log_softmax(-1)
        logprobs += scores[torch.arange(len(answer)), torch.tensor(answer)].tolist()
        entropies += (-(scores.exp() * scores).sum(-1)).tolist()
    return np.array(logprobs), np.array(entropies)


@pytest.mark.parametrize("scope", ["step", "turn", "interleave", "tree"])
def test_every_scope_records_what_the_model_says_of_each_call_alone(scope):
    model = tiny_model()
    made = states(model=model)
    rows, _ = record_of(made, scope=scope, model=model)  # the weights move after the pass
    fresh = tiny_model()
    for state in made:
        row = rows[state["request_id"]]
        counts = [len(step["tokens"]["completion_ids"]) for step in state["trajectory"]]
        assert row.num_sampled.tolist() == counts
        logprob, entropy = plain(fresh, state)
        np.testing.assert_allclose(row.logprob, logprob, atol=2e-5)
        np.testing.assert_allclose(row.entropy, entropy, atol=2e-5)
        np.testing.assert_array_equal(row.advantage, np.float32(state["advantage"]))
    total = sum(row.num_tokens for row in rows.values())
    assert sum(row.weight.sum() for row in rows.values()) == pytest.approx(1.0)
    assert total == sum(len(row.weight) for row in rows.values())


def test_small_packs_and_mini_batches_end_at_the_same_places():
    made = states(num_rollouts=5, model=tiny_model())
    whole, _ = record_of(made)
    cut, _ = record_of(made, train={"max_tokens": 40})
    parts, _ = record_of(made, train={"minibatches": 2, "updates_per_step": 4}, optim={"lr": 1e-12})
    for name, row in whole.items():
        for other in (cut[name], parts[name]):
            np.testing.assert_allclose(other.logprob, row.logprob, atol=2e-5)
            np.testing.assert_allclose(other.entropy, row.entropy, atol=2e-5)
            np.testing.assert_array_equal(other.advantage, row.advantage)
        np.testing.assert_allclose(cut[name].weight, row.weight, rtol=1e-6)


def test_the_reference_and_the_correction():
    made = states(model=tiny_model())
    algorithm = {"name": "grpo", "kl_coef": 0.1, "correction": "token_tis"}
    rows, metrics = record_of(made, algorithm=algorithm)
    without, _ = record_of(made)
    ratios = []
    for state in made:
        row = rows[state["request_id"]]
        np.testing.assert_allclose(row.reference, row.logprob, atol=1e-6)  # of the same weights
        engine = np.concatenate(
            [step["tokens"]["completion_logprobs"] for step in state["trajectory"]]
        )
        ratio = np.minimum(np.exp(row.logprob - engine), 2.0)
        plain_weight = without[state["request_id"]].weight
        np.testing.assert_allclose(row.weight / plain_weight, ratio, rtol=1e-4)
        ratios += ratio.tolist()
        assert row.kl is None
    assert np.mean(ratios) == pytest.approx(metrics["correction/mean"], rel=1e-4)


def test_the_kl_over_the_whole_vocabulary():
    made = states(model=tiny_model())
    rows, _ = record_of(made, algorithm={"name": "grpo", "kl_coef": 0.1, "kl": "full"})
    for row in rows.values():
        assert row.reference is None
        np.testing.assert_allclose(row.kl, 0.0, atol=1e-5)


def test_what_is_not_trained_has_no_weight_and_no_logprob():
    made = states(num_rollouts=4, model=tiny_model())
    for step in made[1]["trajectory"]:
        step["advantage"] = 0.0  # nothing to learn: it counts and is not computed
    kept = TruncationEffect("keep", False, None, 1.0)
    masked = TruncationEffect("mask", True, "max_steps", 1.0)
    samples = build_samples(made, truncation=[kept, kept, masked, kept]).samples
    rows, metrics = record_of(made, samples=samples)
    flat, cut = rows["r1"], rows["r2"]
    assert (flat.advantage == 0).all()
    assert (flat.weight > 0).all()
    assert np.isnan(flat.logprob).all()
    assert np.isnan(flat.entropy).all()
    assert (cut.weight == 0).all()
    assert (cut.advantage == np.float32(made[2]["advantage"])).all()
    assert np.isnan(cut.logprob).all()
    assert metrics["train/num_skipped_records"] == flat.num_tokens
    assert not np.isnan(rows["r0"].logprob).any()


def test_stale_tokens_and_what_a_length_limit_cuts_off():
    made = states(num_rollouts=2, model=tiny_model())
    fresh = build_samples(made[:1]).samples
    stale, _ = mask_stale(build_samples(made[1:]).samples, 6, max_lag=5)
    renumbered = [replace(s, records=replace(s.records, rollout=s.records.rollout + 1))
                  for s in stale]  # fmt: skip
    rows, _ = record_of(made, samples=[*fresh, *renumbered])
    assert (rows["r0"].weight > 0).all()
    assert (rows["r1"].weight == 0).all()
    short = build_samples(made, "tree", max_seq_len=18).samples
    rows, _ = record_of(made, samples=short)
    for row in rows.values():
        at = np.isnan(row.logprob)
        assert at.any()
        np.testing.assert_array_equal(row.weight == 0, at)
        assert not at[: row.num_sampled[0]].any()  # the first call is inside


# -- whole runs ----------------------------------------------------------------------------------


def stored(folder):
    with Run.open(folder, "r") as run:
        return {
            (row.step, row.request_id, row.trajectory_index): [
                getattr(row, name).tobytes() for name in ARRAYS
            ]
            for row in run.trained()
        }


def test_a_run_stores_what_it_trained(model, tmp_path):
    source = LetterSource(fail=["train/000001/0001.02"])
    config = make_config(model, tmp_path / "run")
    report = start(config, source)
    with Run.open(tmp_path / "run", "r") as run:
        results = {r.request.request_id: r for r in decode_results(run.rollouts())}
        assert {row.step for row in run.trained()} == {1, 2, 3, 4}
        for step in report.metrics:
            number = int(step["policy/version"])
            rows = list(run.trained(step=number))
            mismatch, count = 0.0, 0
            for row in rows:
                (state,) = results[row.request_id].states
                engine = np.concatenate(
                    [each["tokens"]["completion_logprobs"] for each in state["trajectory"]]
                ).astype(np.float32)
                known = ~np.isnan(row.logprob)
                mismatch += np.abs(row.logprob - engine)[known].sum()
                count += known.sum()
            assert mismatch / count == pytest.approx(
                step["train/sampling/sampling_logp_difference/mean"], rel=1e-3
            )
            assert count == step["train/num_records"]
        failed = {row.request_id for row in run.rollouts(status="error")}
        trained = [row.request_id for row in run.trained()]
        assert len(trained) == len(set(trained)) == run.num_rollouts(phase="train") - len(failed)
        assert failed.isdisjoint(trained)


def test_a_run_that_was_stopped_stores_the_same(model, tmp_path):
    once = make_config(model, tmp_path / "once", engine={"batch_invariant": True})
    start(once)
    for num_steps in (3, 4):  # the checkpoint is at step 2: step 3 is taken twice
        config = make_config(
            model,
            tmp_path / "twice",
            engine={"batch_invariant": True},
            train={"num_steps": num_steps},
        )
        start(config)
    assert len(stored(tmp_path / "once")) == 24
    assert stored(tmp_path / "once") == stored(tmp_path / "twice")


def test_nothing_is_stored_without_the_setting_which_may_change(model, tmp_path):
    off = {"record_tokens": False, "num_steps": 2}
    start(make_config(model, tmp_path / "run", train=off))
    assert stored(tmp_path / "run") == {}
    start(make_config(model, tmp_path / "run", train={"num_steps": 3}))
    assert {step for step, _, _ in stored(tmp_path / "run")} == {3}


def test_asynchronous_steps(model, tmp_path):
    config = make_config(model, tmp_path / "run", train={"async_steps": 1})
    report = start(config)
    with Run.open(tmp_path / "run", "r") as run:
        for number, step in enumerate(report.metrics, start=1):
            rows = list(run.trained(step=number))
            assert sum((~np.isnan(row.logprob)).sum() for row in rows) == step["train/num_records"]
