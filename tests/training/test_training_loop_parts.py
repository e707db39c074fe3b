"""The loop as a user can observe it: order, policies, saving, what is told and stored."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from loop_kit import make_config, start
from training_kit import LetterSource

from rolltree.store import Run, summarize
from rolltree.training import Checkpoints, Silent, build_parts, open_run, run_training
from rolltree.values.errors import ConfigError, TrainingError
from rolltree.values.types import RolloutResult


class WatchedEngine:
    """An engine that writes down when it is paused and told, and what the weights were."""

    def __init__(self, engine, model):
        self.engine, self.model, self.seen = engine, model, []

    def fingerprint(self):
        return float(sum(p.detach().double().abs().sum() for p in self.model.parameters()))

    @property
    def version(self):
        return self.engine.version

    @asynccontextmanager
    async def paused(self):
        async with self.engine.paused():
            self.seen.append(("pause", self.fingerprint()))
            yield
            self.seen.append(("go", self.fingerprint()))

    def publish(self, version):
        self.seen.append(("publish", version))
        self.engine.publish(version)


def test_weights_change_only_while_the_engine_is_paused(model, tmp_path):
    config = make_config(model, tmp_path / "run", train={"num_steps": 2})

    parts = build_parts(config)
    watched = WatchedEngine(parts.engine, parts.model)
    start(config, parts=replace(parts, engine=watched))
    seen = watched.seen
    assert [kind for kind, _ in seen] == ["pause", "publish", "go"] * 3
    assert [value for kind, value in seen if kind == "publish"] == [0, 1, 2]
    pauses = [value for kind, value in seen if kind == "pause"]
    goes = [value for kind, value in seen if kind == "go"]
    assert pauses[0] == goes[0]
    assert pauses[1:] == goes[:-1]  # nothing moved while it was sampling
    assert pauses[1] != goes[1]
    assert pauses[2] != goes[2]


def test_an_engine_with_other_weights_is_noticed(model, tmp_path):
    config = make_config(model, tmp_path / "run")
    parts, others = build_parts(config), build_parts(config)
    with torch.no_grad():
        for parameter in others.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    other = replace(parts, client=others.client, engine=others.engine)
    with open_run(config) as run, pytest.raises(TrainingError, match="serves other weights"):
        asyncio.run(run_training(config, other, source=LetterSource(), run=run))


class TestAlgorithmsThroughTheLoop:
    @pytest.mark.parametrize(
        "algorithm",
        [
            {"name": "dr_grpo", "fixed_length": 4},
            {"name": "dapo"},
            {"name": "gspo"},
            {"name": "cispo"},
            {"name": "rloo"},
            {"name": "reinforce", "group_size": 1, "groups_per_step": 4},
            {"credit": "monte_carlo", "discount": 0.9},
            {"kl_coef": 0.1, "kl": "k2"},
        ],
        ids=lambda a: "-".join(map(str, a.values())),
    )
    def test_each_trains_and_stays_on_policy(self, model, tmp_path, algorithm):
        config = make_config(model, tmp_path / "run", algorithm=algorithm, train={"num_steps": 2})
        report = start(config)
        for step in report.metrics:
            assert step["train/sampling/sampling_logp_difference/max"] < 1e-3
            assert np.isfinite(step["train/loss"])
            assert step["train/grad_norm"] > 0
        if algorithm.get("kl_coef"):
            assert report.metrics[0]["train/kl"] == pytest.approx(0, abs=1e-5)
            assert report.metrics[1]["train/kl"] > 0

    def test_several_updates_measure_the_first(self, model, tmp_path):
        section = {"updates_per_step": 3, "num_steps": 1}
        (several,) = start(make_config(model, tmp_path / "run", train=section)).metrics
        (once,) = start(make_config(model, tmp_path / "once", train={"num_steps": 1})).metrics
        assert several["train/loss"] == pytest.approx(once["train/loss"], abs=1e-5)
        assert several["train/sampling/sampling_logp_difference/mean"] < 1e-4
        assert several["train/grad_norm"] != pytest.approx(once["train/grad_norm"], rel=1e-3)


class Truncated(LetterSource):
    """Every second member of a group is cut by its turn limit."""

    async def run_request(self, request, client):
        (state,) = await super().run_request(request, client)
        if request.index_in_group == 1:
            state["truncated"], state["truncation_reason"] = True, "max_steps"
        return [state]


class TestPolicies:
    @pytest.mark.parametrize(
        ("algorithm", "untrained"),
        [({"truncation": "keep"}, 0.0), ({"truncation": "drop"}, 1 / 3)],
    )
    def test_truncated_rollouts(self, model, tmp_path, algorithm, untrained):
        config = make_config(model, tmp_path / "run", algorithm=algorithm, train={"num_steps": 1})
        (step,) = start(config, Truncated()).metrics
        assert step["credit/truncated_share"] == pytest.approx(1 / 3)
        assert step["credit/untrained_share"] == pytest.approx(untrained)

    def test_masked_rollouts_count_in_the_baseline_and_train_nothing(self, model, tmp_path):
        records = {}
        for mode in ("keep", "mask"):
            config = make_config(
                model,
                tmp_path / mode,
                algorithm={"truncation": mode},
                train={"num_steps": 1, "skip_zero_advantage": False},
            )
            (step,) = start(config, Truncated()).metrics
            records[mode] = step["train/num_records"]
        assert records["mask"] < records["keep"]

    def test_long_paths_are_cut_and_counted(self, model, tmp_path):
        config = make_config(
            model,
            tmp_path / "run",
            train={"num_steps": 1, "max_seq_len": 40, "skip_zero_advantage": False},
        )
        (step,) = start(config).metrics
        assert step["samples/skipped_tokens"] > 0
        assert step["credit/truncated_share"] == 1.0

    def test_agents_of_one_episode_train_together(self, model, tmp_path):
        class Two(LetterSource):
            async def run_request(self, request, client):
                (first,) = await super().run_request(request, client)
                (second,) = await super().run_request(request, client)
                second["reward"] = 1.0 - second["reward"]
                return [first, second]

        config = make_config(
            model, tmp_path / "run", train={"num_steps": 2, "skip_zero_advantage": False}
        )
        report = start(config, Two())
        with Run.open(tmp_path / "run", "r") as run:
            assert run.num_rollouts(train_step=1) == 12
        source = Two()
        assert len(start(config, source).metrics) == 2
        assert source.played == []
        assert report.metrics[0]["credit/untrained_share"] == 0.0

    def test_a_reward_that_is_missing_is_counted_and_teaches_nothing(self, model, tmp_path):
        class Unscored(LetterSource):
            async def run_request(self, request, client):
                (state,) = await super().run_request(request, client)
                state["reward"] = None
                return [state]

        config = make_config(model, tmp_path / "run", train={"num_steps": 1})
        (row,) = start(config, Unscored()).metrics
        assert row["credit/unusable_share"] == 1
        with Run.open(tmp_path / "run", "r") as run:
            notices = [event.data["message"] for event in run.events("notice")]
        assert any("has the reward None" in notice for notice in notices)

    def test_a_source_that_samples_greedily_is_refused(self, model, tmp_path):
        source = LetterSource()
        source.sampling_args = {"temperature": 0}
        with pytest.raises(ConfigError, match="full distribution"):
            start(make_config(model, tmp_path / "run"), source)


class TestSaving:
    def test_the_last_step_is_always_saved_and_old_ones_go(self, model, tmp_path):
        config = make_config(
            model, tmp_path / "run", train={"num_steps": 5}, checkpoint={"every": 2, "keep": 2}
        )
        report = start(config)
        assert report.model_path is None
        root = tmp_path / "run" / "checkpoints"
        assert sorted(p.name for p in root.iterdir()) == ["latest", "step-000004", "step-000005"]
        assert Checkpoints(root).latest().name == "step-000005"
        with Run.open(tmp_path / "run", "r") as run:
            assert [event.step for event in run.events("checkpoint")] == [2, 4, 5]

    def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(self, model, tmp_path):
        config = make_config(model, tmp_path / "run")
        start(config)
        torn = tmp_path / "run" / "checkpoints" / "step-000004" / "model.safetensors"
        torn.write_bytes(torn.read_bytes()[:100])
        source = LetterSource()
        report = start(config, source)
        assert len(report.metrics) == 4
        assert source.played == []  # steps 3 and 4 are trained again from stored rollouts
        with Run.open(tmp_path / "run", "r") as run:
            (notice,) = (event.data["message"] for event in run.events("notice"))
        assert "step-000004 is torn or damaged" in notice
        assert "continues from step-000002" in notice

    def test_without_any_checkpoint_the_stored_rollouts_are_enough(self, model, tmp_path):
        config = make_config(model, tmp_path / "run")
        first = start(config)
        (tmp_path / "run" / "checkpoints" / "latest").unlink()
        source = LetterSource()
        again = start(config, source)
        assert source.played == []
        for one, other in zip(first.metrics, again.metrics, strict=True):
            assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)


class TestSchedule:
    def test_the_rate_follows_the_schedule_also_after_a_resume(self, model, tmp_path):
        section = {"schedule": "linear", "warmup_steps": 1, "lr": 1e-3}
        whole = make_config(model, tmp_path / "run", optim=section)
        start(whole)
        (tmp_path / "run" / "checkpoints" / "latest").write_text("step-000002\n")
        rates = [step["train/learning_rate"] for step in start(whole).metrics]
        assert rates == pytest.approx([5e-4, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])

    def test_on_policy_nothing_lags(self, model, tmp_path):
        report = start(make_config(model, tmp_path / "run"))
        assert [step["train/lag_mean"] for step in report.metrics] == [0.0] * 4


class TestTelling:
    def test_a_reporter_hears_everything_in_order(self, model, tmp_path):
        heard = []

        class Listener(Silent):
            def on_start(self, start):
                heard.append(("start", start.first_step, start.num_steps, start.num_parameters))

            def on_rollouts(self, step, num_done, num_total):
                heard.append(("rollouts", step, num_done, num_total))

            def on_step(self, step, metrics):
                heard.append(("step", step, metrics["policy/version"]))

            def on_end(self, report):
                heard.append(("end", len(report.metrics)))

        config = make_config(model, tmp_path / "run", train={"num_steps": 2})
        start(config, reporter=Listener())
        assert heard[0][:3] == ("start", 1, 2)
        assert heard[0][3] > 10_000
        for step in (1, 2):
            done = [entry[2] for entry in heard if entry[:2] == ("rollouts", step)]
            assert (done[0], done[-1]) == (0, 6)
            assert done == sorted(set(done))
        assert [entry for entry in heard if entry[0] == "step"] == [("step", 1, 1), ("step", 2, 2)]
        assert heard[-1] == ("end", 2)

    def test_a_reporter_that_fails_at_the_end_is_a_notice(self, model, tmp_path):
        class Plots(Silent):
            def on_end(self, report):
                raise ValueError("no such figure")

        config = make_config(model, tmp_path / "run", train={"num_steps": 1})
        for _ in range(2):  # the same command again has the same reporter
            assert len(start(config, reporter=Plots()).metrics) == 1
        with Run.open(tmp_path / "run", "r") as run:
            told = [event.data["message"] for event in run.events("notice")]
        assert any("on_end failed (ValueError: no such figure)" in message for message in told)

    def test_every_metric_is_stored_as_it_is_reported(self, model, tmp_path):
        report = start(make_config(model, tmp_path / "run", train={"num_steps": 1}))
        (step,) = report.metrics
        assert all(isinstance(value, int | float) for value in step.values())
        assert step["time/step"] >= step["time/train_s"] > 0
        with Run.open(tmp_path / "run", "r") as run:
            assert [row.metrics for row in run.steps()] == [step]

    def test_stored_rollouts_decode_to_what_was_trained(self, model, tmp_path):
        from rolltree.rollouts.decode import decode_results

        start(make_config(model, tmp_path / "run", train={"num_steps": 1}))
        with Run.open(tmp_path / "run", "r") as run:
            results = list(decode_results(run.rollouts(phase="train")))
        assert all(isinstance(result, RolloutResult) for result in results)
        for result in results:
            trajectory = result.states[0]["trajectory"]
            tree = trajectory.tree
            assert [tree.versions(call).tolist() for call in range(2)] == [
                [0] * tree.num_sampled(call) for call in range(2)
            ]
            assert np.isfinite(tree.logprobs(0)).all()


def test_a_run_that_ends_with_less_than_it_began_is_done(model, tmp_path):
    """Killed in the evaluation at its end, and continued without one."""
    config = make_config(model, tmp_path / "run", eval={"after": True}, train={"num_steps": 1})

    async def die(phase, step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(config, evaluate=die)
    config = make_config(model, tmp_path / "run", train={"num_steps": 2})
    start(config)
    with Run.open(tmp_path / "run", "r") as run:
        assert summarize(run).state == "done"
        assert run.config["train"]["num_steps"] == 2
    start(config)  # there is nothing left to do
    with Run.open(tmp_path / "run", "r") as run:
        assert summarize(run).state == "done"
