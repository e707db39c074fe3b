import math

import numpy as np
import pytest
import torch
from training_kit import Call, records_of

from rolltree.training.logprobs import RecordLogprobs
from rolltree.training.metrics import RecordStats, rollout_metrics
from rolltree.training.objective import ObjectiveTerms
from rolltree.values.types import ErrorRecord, RolloutRequest, RolloutResult, State


def records(*behaviour):
    call = Call([1], [2] * len(behaviour), logprob=list(behaviour))
    return records_of([(0, i, call) for i in range(len(behaviour))])


def seen(logprob, entropy=None, clipped=None):
    """What one pack that holds these logprobs reports."""
    count = len(logprob)
    got = RecordLogprobs(torch.tensor(logprob), torch.tensor(entropy or [1.0] * count))
    return got, torch.tensor(clipped or [False] * count)


def terms(clipped, loss=0.0, kl=None):
    return ObjectiveTerms(torch.tensor(loss), clipped, kl)


class TestRecordStats:
    def test_by_hand(self):
        stats = RecordStats(4)
        got, clipped = seen([-1.0, -2.0, -3.0, -4.0], [1.0, 2.0, 3.0, 6.0], [True] + [False] * 3)
        stats.add(slice(0, 4), got, terms(clipped, 0.75))
        metrics = stats.metrics(records(-1.0, -2.5, -3.0, -3.5))
        # trainer minus engine: 0, 0.5, 0, -0.5
        assert metrics["mismatch/mean"] == pytest.approx(0.0)
        assert metrics["train/sampling/sampling_logp_difference/mean"] == pytest.approx(0.25)
        assert metrics["train/sampling/sampling_logp_difference/max"] == pytest.approx(0.5)
        up, down = math.exp(0.5), math.exp(-0.5)
        ratios = [1.0, up, 1.0, down]
        assert metrics["ratio/mean"] == pytest.approx(sum(ratios) / 4)
        assert metrics["ratio/max"] == pytest.approx(up)
        assert metrics["ratio/min"] == pytest.approx(down)
        square = sum(r * r for r in ratios)
        assert metrics["ratio/ess"] == pytest.approx(sum(ratios) ** 2 / (4 * square))
        assert metrics["mismatch_kl/mean"] == pytest.approx((up - 1.5 + down - 0.5) / 4)
        assert metrics["train/entropy"] == pytest.approx(3.0)
        assert metrics["train/clip_ratio/region_mean"] == pytest.approx(0.25)
        assert metrics["train/loss"] == pytest.approx(0.75)
        assert "train/kl" not in metrics

    def test_packs_fill_their_spans_and_losses_add_up(self):
        whole, parts = RecordStats(3), RecordStats(3)
        got, clipped = seen([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0], [False, True, True])
        whole.add(slice(0, 3), got, terms(clipped, 0.5))
        for span in (slice(2, 3), slice(0, 2)):
            part = RecordLogprobs(got.logprob[span], got.entropy[span])
            parts.add(span, part, terms(clipped[span], 0.25))
        behaviour = records(-1.5, -2.0, -2.0)
        assert parts.metrics(behaviour) == pytest.approx(whole.metrics(behaviour))

    def test_kl_is_reported_where_there_is_one(self):
        stats = RecordStats(2, kl=True)
        got, clipped = seen([-1.0, -1.0])
        stats.add(slice(0, 2), got, terms(clipped, kl=torch.tensor([0.1, 0.3])))
        assert stats.metrics(records(-1.0, -1.0))["train/kl"] == pytest.approx(0.2)

    def test_a_correction_is_reported_where_there_is_one(self):
        stats = RecordStats(4, factor=True)
        got, clipped = seen([-1.0] * 4)
        stats.add(slice(0, 4), got, terms(clipped), np.array([0.0, 1.5, 0.5, 0.0], np.float32))
        metrics = stats.metrics(records(-1.0, -1.0, -1.0, -1.0))
        assert metrics["correction/mean"] == pytest.approx(0.5)
        assert metrics["correction/masked_share"] == 0.5

    def test_tokens_without_a_behaviour_logprob_have_no_mismatch(self):
        stats = RecordStats(2)
        got, clipped = seen([-1.0, -2.0])
        stats.add(slice(0, 2), got, terms(clipped, 1.5))
        metrics = stats.metrics(records(math.nan, math.nan))
        assert metrics["train/loss"] == 1.5
        assert not [name for name in metrics if name.startswith(("mismatch", "ratio"))]

    def test_on_policy_everything_is_neutral(self):
        stats = RecordStats(3)
        got, clipped = seen([-1.0, -2.0, -0.5])
        stats.add(slice(0, 3), got, terms(clipped))
        metrics = stats.metrics(records(-1.0, -2.0, -0.5))
        assert metrics["ratio/mean"] == metrics["ratio/ess"] == 1.0
        assert (
            metrics["train/sampling/sampling_logp_difference/max"]
            == metrics["mismatch_kl/mean"]
            == 0.0
        )

    def test_an_enormous_ratio_does_not_overflow(self):
        stats = RecordStats(1)
        got, clipped = seen([-1.0])
        stats.add(slice(0, 1), got, terms(clipped))
        metrics = stats.metrics(records(-1e4))
        assert all(np.isfinite(value) for value in metrics.values())

    def test_gradients_are_let_go(self):
        stats = RecordStats(1)
        logprob = torch.tensor([-1.0], requires_grad=True)
        got = RecordLogprobs(logprob * 2, torch.ones(1))
        stats.add(slice(0, 1), got, terms(torch.ones(1) > 0))
        assert stats.logprob.tolist() == [-2.0]


def step(sampled, prompt, finish="stop"):
    return {
        "extras": {
            "num_completion_tokens": sampled,
            "num_prompt_tokens": prompt,
            "finish_reason": finish,
        }
    }


def result(index, reward, steps, error=None, group="g", task="t", **state):
    request = RolloutRequest(
        f"r{index}", "env", {"prompt": "p", "example_id": 0, "task": task}, 0, 0, group, index
    )
    made = State(reward=reward, trajectory=steps, error=error, **state)
    return RolloutResult(request, (made,), error)


ERROR = ErrorRecord("ServerError", "500", "", "model")


def grouped(rewards):
    """Return a result for every reward of every group."""
    pairs = [(group, reward) for group, each in rewards.items() for reward in each]
    return [result(at, reward, [], group=group) for at, (group, reward) in enumerate(pairs)]


class TestRolloutMetrics:
    def test_by_hand(self):
        metrics = rollout_metrics(
            [
                result(0, 1.0, [step(3, 10), step(5, 20, "length")], metrics={"found": 1.0}),
                result(1, 0.0, [step(4, 10)], truncated=True, metrics={"found": 0.0}),
                result(2, None, [step(0, 10)], error=ERROR),
                result(3, 0.5, [step(4, 10)], metrics={"found": 1.0, "note": "text"}),
            ]
        )
        assert metrics["reward/mean"] == pytest.approx(0.5)
        assert metrics["reward/std"] == pytest.approx(math.sqrt(1 / 6))
        assert metrics["reward/max"] == 1.0
        assert metrics["metrics/found"] == pytest.approx(2 / 3)
        assert "metrics/note" not in metrics
        assert metrics["rollout/num_calls"] == pytest.approx(5 / 4)
        assert metrics["train/completions/mean_length"] == pytest.approx(4.0)
        assert metrics["train/completions/min_length"] == 0.0
        assert metrics["train/completions/max_length"] == 8.0
        assert metrics["rollout/total_sampled_tokens"] == 16.0
        assert metrics["rollout/prompt_tokens"] == pytest.approx(15.0)
        assert metrics["rollout/length_cut_share"] == pytest.approx(0.2)
        assert metrics["is_truncated/mean"] == 0.25
        assert metrics["error/mean"] == 0.25
        assert metrics["error/ServerError"] == 1.0

    def test_each_environment_of_a_group_has_its_own(self):
        played = [
            result(0, 1.0, [], group="g", metrics={"found": 1.0}, task="a"),
            result(1, 0.0, [], group="h", metrics={"found": 0.0}, task="a/hard/7"),
            result(2, 0.5, [], group="i", task="a/b"),
            result(3, None, [], group="i", error=ERROR, task="a/b/own"),
        ]
        assert not [name for name in rollout_metrics(played) if name.startswith("env/")]
        metrics = rollout_metrics(played, ["a", "a/b", "never"])
        found = {name: value for name, value in metrics.items() if name.startswith("env/")}
        assert metrics["reward/mean"] == found["env/a/reward/mean"] == 0.5
        assert found["env/a/metrics/found"] == 0.5
        assert found["env/a/reward/low"] < 0.5 < found["env/a/reward/high"]
        assert (found["env/a/num_rollouts"], found["env/a/b/num_rollouts"]) == (2.0, 2.0)
        assert (found["env/a/error/mean"], found["env/a/b/error/mean"]) == (0.0, 0.5)
        assert not [name for name in found if "never" in name]

    def test_the_rewards_interval_takes_the_group_as_the_unit(self):
        """Groups of means 1, 2, 3 (the example of `estimate`)."""
        metrics = rollout_metrics(grouped({"a": [0.5, 1.5], "b": [2.0, 2.0], "c": [3.0, 3.0]}))
        assert metrics["reward/low"] == pytest.approx(-0.484, abs=1e-3)
        assert metrics["reward/high"] == pytest.approx(4.484, abs=1e-3)
        alone = rollout_metrics([result(0, 0.25, [])])
        assert (alone["reward/low"], alone["reward/high"]) == (0.0, 1.0)  # one group says nothing
        assert "reward/low" not in rollout_metrics([result(0, 7.0, [])])  # which has no bounds

    def test_the_interval_is_that_of_the_mean_when_groups_lost_episodes(self):
        """With mean c = 13/6 of N = 6 in G = 3 groups, a group's value is c + G n (m - c) / N.

        These are 1, 2.0833 and 3.4167: s = 1.2105, and t(2) s / sqrt(3) = 3.007.
        """
        rewards = {"a": [0.5, 1.5], "b": [2.0], "c": [3.0, 3.0, 3.0]}
        metrics = rollout_metrics(grouped(rewards))
        assert metrics["reward/low"] == pytest.approx(13 / 6 - 3.007, abs=1e-3)
        assert metrics["reward/high"] == pytest.approx(13 / 6 + 3.007, abs=1e-3)
        shares = rollout_metrics(grouped({"a": [1.0], "b": [0.0] * 7, "c": [0.0] * 8}))
        assert 0.0 <= shares["reward/low"] < shares["reward/mean"] == 1 / 16 < shares["reward/high"]

    def test_timings_are_means(self):
        timing = [{"generation_ms": 10.0, "scoring_ms": 1.0}, {"generation_ms": 30.0}]
        metrics = rollout_metrics([result(i, 1.0, [], timing=t) for i, t in enumerate(timing)])
        assert metrics["rollout/generation_ms"] == 20.0
        assert metrics["rollout/scoring_ms"] == 0.5

    def test_no_reward_is_no_metric_not_a_zero(self):
        metrics = rollout_metrics([result(0, None, [], error=ERROR)])
        assert "reward/mean" not in metrics
        assert metrics["error/mean"] == 1.0

    def test_a_request_that_made_no_state_counts_as_failed(self):
        empty = RolloutResult(result(0, None, []).request, (), ERROR)
        metrics = rollout_metrics([empty])
        assert metrics["error/mean"] == 1.0
        assert metrics["rollout/num_calls"] == 0.0

    def test_everything_is_a_number(self):
        metrics = rollout_metrics([result(0, 1, [step(1, 1)], metrics={"flag": True})])
        assert metrics["metrics/flag"] == 1.0
        assert all(isinstance(value, float) for value in metrics.values())
        assert metrics["memory/peak_rss_bytes"] > 1e6
