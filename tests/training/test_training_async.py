"""The asynchronous loop on the embedded engine: bounds, versions, failures, and a real kill."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from loop_kit import make_config, start
from training_kit import LetterSource

from rolltree.insight.page.pages import group_page, rollout_page
from rolltree.records import read_run
from rolltree.rollouts import RolloutEngine
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training
from rolltree.training.metrics import RecordStats
from rolltree.training.no_signal_warning import NoSignalWarning
from rolltree.training.stream_feed import LEDGER, StreamFeed
from rolltree.values.errors import ConfigError, TrainingError


def config_of(model, path, *, steps=6, ahead=1, **sections):
    train = {"num_steps": steps, "async_steps": ahead, **sections.pop("train", {})}
    return make_config(model, path, train=train, **sections)


def ledger(run):
    return {event.step: event.data for event in run.events(LEDGER)}


class TestBounds:
    def test_it_learns_and_stays_within_the_lag(self, model, tmp_path):
        config = config_of(
            model,
            tmp_path / "run",
            steps=18,
            algorithm={"group_size": 6},
            optim={"lr": 2e-2},
        )
        report = start(config)
        rewards = [step["reward/mean"] for step in report.metrics]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25
        assert all(0 <= step["train/lag_mean"] <= 1 for step in report.metrics)
        assert max(step["async/lag_max"] for step in report.metrics) >= 1  # it did run ahead
        for step in report.metrics:  # a group that was overtaken is older, and masked
            assert (step["async/lag_max"] > 1) == (step["async/num_stale_tokens"] > 0)
        for step in report.metrics:  # of what the current weights sampled
            assert step.get("train/sampling/sampling_logp_difference/mean", 0.0) < 1e-4

    @pytest.mark.parametrize("error", [0.0, 0.5])
    def test_without_a_current_token_the_engine_answers_a_probe(
        self, model, tmp_path, monkeypatch, error
    ):
        """Then `max_mismatch` has nothing to compare, and an engine that is off must be found."""
        metrics, notices = RecordStats.metrics, []
        monkeypatch.setattr(RecordStats, "metrics", lambda s, records, _: metrics(s, records, -5))
        config = config_of(model, tmp_path / "run", steps=3)
        parts = build_parts(config)
        generate = parts.client.generate

        async def off(request, **options):
            answer = await generate(request, **options)
            return replace(answer, logprobs=answer.logprobs - np.float32(error))

        monkeypatch.setattr(parts.client, "generate", off)

        class Note(Silent):
            def on_notice(self, message):
                notices.append(message)

        if error:
            with pytest.raises(TrainingError, match=r"differ from the trainer's by 0\.5"):
                start(config, parts=parts, reporter=Note())
        else:
            report = start(config, parts=parts, reporter=Note())
            assert all(step["publish/probe_error"] < 1e-4 for step in report.metrics)
        assert sum("step 1 trains none" in notice for notice in notices) == 1

    def test_every_group_trains_once_and_its_tokens_know_their_version(self, model, tmp_path):
        start(config_of(model, tmp_path / "run"))
        with Run.open(tmp_path / "run", "r") as run:
            steps = ledger(run)
            rows = {row.request_id: row for row in run.rollouts(phase="train", blobs=False)}
        assert sorted(steps) == [1, 2, 3, 4, 5, 6]
        groups = [group for data in steps.values() for group in data["groups"]]
        assert len(groups) == len(set(groups)) == 12
        ahead = 0
        for step, data in steps.items():
            for group in data["groups"]:
                members = [row for row in rows.values() if row.group_id == group]
                assert len(members) == 3
                for row in members:
                    assert 0 <= row.min_version <= row.max_version <= step - 1
                    ahead += row.max_version < step - 1
        assert ahead

    @pytest.mark.parametrize("ahead", [1, 2])
    def test_no_more_is_started_than_the_bound(self, model, tmp_path, ahead):
        """started <= (version + 1 + async_steps) * groups_per_step, at every start."""
        seen = []

        class Watched(LetterSource):
            async def run_request(self, request, client):
                group = request.group_id
                if group not in self.groups:
                    self.groups.append(group)
                    seen.append((len(self.groups), self.engine.version))
                return await super().run_request(request, client)

        config = config_of(model, tmp_path / "run", ahead=ahead)
        parts = build_parts(config)
        source = Watched()
        source.groups, source.engine = [], parts.engine
        start(config, source, parts=parts)
        assert all(started <= (version + 1 + ahead) * 2 for started, version in seen)
        assert any(started > (version + 1) * 2 for started, version in seen)

    def test_a_slow_episode_delays_nobody_and_its_old_tokens_are_masked(self, model, tmp_path):
        """One group waits in its environment while four steps train without it."""
        release = asyncio.Event()

        class Slow(LetterSource):
            async def run_request(self, request, client):
                if request.group_id == "train/000001/g00":
                    client = Waiting(client, release)
                return await super().run_request(request, client)

        class Waiting:
            """A client whose second call waits for `release`: the first turn is old by then."""

            def __init__(self, inner, release):
                self.inner, self.release, self.calls = inner, release, 0

            def session(self):
                self.inner = self.inner.session()
                return self

            async def chat(self, *args, **options):
                self.calls += 1
                if self.calls == 2:
                    await self.release.wait()
                return await self.inner.chat(*args, **options)

        class Release(Silent):
            def on_step(self, step, metrics):
                if step == 4:
                    release.set()

        config = config_of(model, tmp_path / "run", steps=8, train={"skip_zero_advantage": False})
        report = start(config, Slow(), reporter=Release())
        with Run.open(tmp_path / "run", "r") as run:
            at = next(s for s, d in ledger(run).items() if "train/000001/g00" in d["groups"])
            rows = list(run.rollouts(group_id="train/000001/g00", blobs=False))
        assert at >= 5
        assert all(row.min_version == 0 and row.max_version >= 4 for row in rows)  # one rollout
        step = report.metrics[at - 1]
        assert step["async/lag_max"] == at - 1
        assert step["async/num_stale_tokens"] == pytest.approx(
            3 * 4, abs=11
        )  # the first turns: up to 4 tokens each
        assert 0 < step["async/stale_share"] < 1
        # `reward/mean` of a step is over what it trained, not over what was played for it.
        means = {"trained_step": [], "train_step": []}
        with read_run(tmp_path / "run") as data:
            rows = list(data.rollouts(phase="train").rows())
        for name, found in means.items():
            for number in range(1, 9):
                rewards = [row["reward"] for row in rows if row[name] == number]
                found.append(np.mean(rewards))
        wanted = [step["reward/mean"] for step in report.metrics]
        assert means["trained_step"] == pytest.approx(wanted)
        assert means["train_step"] != pytest.approx(wanted)
        with Run.open(tmp_path / "run", "r") as run:
            page = rollout_page(run, phase="train", trained=at)
            assert {row["group_id"] for row in page["rows"]} == set(ledger(run)[at]["groups"])
            assert page["total"] == len(page["rows"]) == 6
            groups = group_page(run, phase="train", trained=at)["rows"]
            assert {row["group_id"] for row in groups} == set(ledger(run)[at]["groups"])
            assert rollout_page(run, trained=99)["total"] == 0


class TestWeights:
    def test_no_engine_step_runs_while_the_optimizer_writes(self, model, tmp_path, monkeypatch):
        """Both sides report entry and exit; an overlap would be a torn read."""
        inside = {"engine": 0, "optimizer": 0, "gradient": 0}
        seen = Counter()
        lock = threading.Lock()

        def watched(owner, name, who):
            original = getattr(owner, name)

            def call(*args, **options):
                with lock:
                    inside[who] += 1
                    for other, count in inside.items():
                        seen[frozenset((who, other))] += other != who and count > 0
                try:
                    return original(*args, **options)
                finally:
                    with lock:
                        inside[who] -= 1

            monkeypatch.setattr(owner, name, call)

        from rolltree.inference.local.runner import ModelRunner
        from rolltree.training.optim import Optimizer
        from rolltree.training.trainer import Trainer

        watched(ModelRunner, "forward", "engine")
        watched(Optimizer, "step", "optimizer")
        watched(Trainer, "_gradients", "gradient")
        section = {"updates_per_step": 2}
        start(config_of(model, tmp_path / "run", steps=8, train=section))
        assert seen[frozenset(("engine", "optimizer"))] == 0
        assert seen[frozenset(("engine", "gradient"))] > 0  # they do overlap

    def test_a_step_that_fails_leaves_the_engine_running_and_nothing_published(
        self, model, tmp_path, monkeypatch
    ):
        from rolltree.training.optim import Optimizer

        original, calls = Optimizer.step, []

        def fail_third(self, lr):
            calls.append(lr)
            if len(calls) == 3:
                raise RuntimeError("the disk is on fire")
            original(self, lr)

        monkeypatch.setattr(Optimizer, "step", fail_third)

        async def main():
            config = config_of(model, tmp_path / "run")
            parts = build_parts(config)
            with open_run(config) as run, pytest.raises(RuntimeError, match="on fire"):
                await run_training(config, parts, source=LetterSource(), run=run)
            assert parts.engine.version == 2
            answer = await parts.client.chat([{"role": "user", "content": "x"}])
            await parts.client.aclose()
            return answer

        assert len(asyncio.run(main()).completion_ids)
        with Run.open(tmp_path / "run", "r") as run:
            assert all(row.max_version <= 2 for row in run.rollouts(blobs=False))


class TestFailing:
    def test_a_whole_step_of_failures_stops_and_can_be_repeated(self, model, tmp_path):
        class Down(LetterSource):
            async def run_request(self, request, client):
                if request.train_step >= 3:
                    self.fail.add(request.request_id)
                return await super().run_request(request, client)

        config = config_of(model, tmp_path / "run", steps=4)
        with pytest.raises(TrainingError, match=r"all 6 rollouts of step 3 failed"):
            start(config, Down())
        report = start(config)
        assert len(report.metrics) == 4
        with Run.open(tmp_path / "run", "r") as run:
            groups = [group for data in ledger(run).values() for group in data["groups"]]
        assert len(groups) == len(set(groups)) == 8

    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            ({"train": {"max_lag": 1}}, "train.max_lag is 1, but in the synchronous loop"),
            ({"train": {"async_steps": -1}}, "train.async_steps"),
            (
                {"train": {"async_steps": 1}, "model": {"backward_dtype": "bfloat16"}},
                "process-wide",
            ),
        ],
    )
    def test_settings_that_cannot_be(self, sections, message):
        with pytest.raises(ConfigError, match=message):
            load_train_config(sections)


class TestResume:
    def test_steps_after_the_checkpoint_are_trained_again_from_the_ledger(self, model, tmp_path):
        config = config_of(model, tmp_path / "run", checkpoint={"every": 100})

        class Stop(Silent):
            def on_step(self, step, metrics):
                if step == 4:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            start(config, reporter=Stop())
        with Run.open(tmp_path / "run", "r") as run:
            before, was = [row.metrics for row in run.steps()], ledger(run)
            stored = {row.request_id for row in run.rollouts(blobs=False)}
        source = LetterSource()
        report = start(config, source)
        assert not stored & set(source.played)
        for old, new in zip(before, report.metrics[:4], strict=True):
            for name in ("train/loss", "reward/mean", "train/grad_norm", "train/lag_mean"):
                assert new[name] == pytest.approx(old[name], rel=1e-3, abs=1e-5), name
        with Run.open(tmp_path / "run", "r") as run:
            assert {step: ledger(run)[step] for step in was} == was

    @pytest.mark.parametrize("group", ["g00", "g07"], ids=["not-stored", "not-planned"])
    async def test_a_ledger_without_its_rollouts_is_said(self, tmp_path, group):
        config = load_train_config(groups_per_step=2, async_steps=1)
        with Run.create(tmp_path / "run") as run:
            run.add_event(LEDGER, {"groups": [f"train/000001/{group}"], "dropped": {}}, step=1)
            feed = StreamFeed(
                config,
                RolloutEngine(LetterSource(), ScriptedClient(["x"])),
                run,
                warning=NoSignalWarning(print),
                notify=print,
                on_progress=print,
            )
            with pytest.raises(TrainingError, match="does not hold all of its rollouts"):
                await feed.next(1)
