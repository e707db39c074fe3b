import asyncio
import contextlib
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from loop_kit import curve, make_config, start
from training_kit import LetterSource

from rolltree.inference.models import load_model
from rolltree.records import audit
from rolltree.store import Run, to_plain
from rolltree.tokens import Trajectory
from rolltree.training import Silent, build_parts, run_training, step_requests
from rolltree.values.errors import ConfigError, TokenError, TrainingError
from rolltree.values.types import FinishReason, ModelResponse, State


class Recorder(Silent):
    def __init__(self):
        self.seen = []

    def on_start(self, start):
        self.seen.append(("start", start.first_step, len(start.history)))
        self.evaluated_steps = start.evaluated_steps

    def on_step(self, step, metrics):
        self.seen.append(("step", step))

    def on_eval(self, phase, step, metrics, stored):
        self.seen.append(("eval", phase, step, metrics["reward"], stored))

    def on_end(self, report):
        self.seen.append(("end", len(report.metrics)))


def close(left, right):
    return len(left) == len(right) and all(
        a == pytest.approx(b, rel=1e-3, abs=1e-4) for a, b in zip(left, right, strict=True)
    )


class TestLearning:
    def test_the_reward_rises_and_trainer_and_engine_agree(self, model, tmp_path):
        config = make_config(
            model,
            tmp_path / "run",
            train={"num_steps": 12},
            algorithm={"group_size": 6},
            optim={"lr": 2e-2},
        )
        report = start(config)
        rewards = [step["reward/mean"] for step in report.metrics]
        assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25
        assert all(
            step["train/sampling/sampling_logp_difference/mean"] < 1e-4 for step in report.metrics
        )
        assert all(step["ratio/ess"] > 0.999 for step in report.metrics)
        assert all(step["samples/reuse_factor"] > 2 for step in report.metrics)
        assert all(step["metrics/num_bytes"] > 0 for step in report.metrics)
        # the engine's estimate over all tokens is near the exact entropy over the trained ones
        for step in report.metrics[:3]:
            assert step["rollout/entropy"] == pytest.approx(step["train/entropy"], rel=0.3)

    def test_the_control_does_not_learn(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", algorithm={"name": "zero"})
        report = start(config)
        assert all(step["train/grad_norm"] == 0 for step in report.metrics)
        assert len(report.metrics) == 4

    @pytest.mark.parametrize("scope", ["step", "turn", "interleave"])
    def test_every_scope_trains_the_same(self, model, tmp_path, scope):
        tree = start(make_config(model, tmp_path / "tree"))
        other = start(make_config(model, tmp_path / scope, train={"scope": scope}))
        assert close(curve(other), curve(tree))

    def test_sharing_a_tree_over_the_step_changes_only_the_cost(self, model, tmp_path):
        group = start(make_config(model, tmp_path / "group"))
        step = start(make_config(model, tmp_path / "step", train={"share_prefix_across": "step"}))
        assert close(curve(step), curve(group))
        tokens = [
            [s["train/num_computed_tokens"] for s in report.metrics] for report in (step, group)
        ]
        assert sum(tokens[0]) < sum(tokens[1])

    def test_rows_train_the_same_as_trees(self, model, tmp_path):
        tree = start(make_config(model, tmp_path / "tree"))
        section = {"forward": "rows", "scope": "interleave"}
        rows = start(make_config(model, tmp_path / "rows", train=section))
        assert close(curve(rows), curve(tree))


class TestEmptyCompletions:
    def test_they_are_rewarded_and_train_no_token(self, model, tmp_path):
        class Silenced(LetterSource):
            """The first member of each group says nothing."""

            async def run_request(self, request, client):
                (state,) = await super().run_request(request, client)
                if request.index_in_group == 0:
                    said, state["trajectory"] = state["trajectory"], Trajectory()
                    for step in said:
                        state["trajectory"].append_call(
                            prompt=step["prompt"],
                            completion=[{"role": "assistant", "content": ""}],
                            response=empty_response(step["tokens"]["prompt_ids"]),
                        )
                    state["reward"] = 0.0
                return [state]

        report = start(make_config(model, tmp_path / "run", train={"num_steps": 2}), Silenced())
        with Run.open(tmp_path / "run", "r") as run:
            rows = list(run.rollouts(phase="train", blobs=False))
            trained = {row.request_id: int(row.num_sampled.sum()) for row in run.trained(step=2)}
        silent = [row for row in rows if row.index_in_group == 0]
        assert {(row.status, row.reward, row.num_completion_tokens) for row in silent} == {
            ("ok", 0.0, 0)
        }
        assert not any(trained.get(row.request_id) for row in silent)
        assert all(math.isfinite(step["train/loss"]) for step in report.metrics)


def empty_response(prompt_ids):
    return ModelResponse(
        message={"role": "assistant", "content": ""},
        text="",
        finish_reason=FinishReason.STOP,
        prompt_ids=np.array(prompt_ids, np.int32),
        completion_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
    )


class TestVersions:
    def test_a_steps_tokens_carry_the_version_before_it(self, model, tmp_path):
        source = LetterSource()
        start(make_config(model, tmp_path / "run"), source)
        with Run.open(tmp_path / "run", "r") as run:
            rows = list(run.rollouts(phase="train", blobs=False))
        assert {(row.train_step, row.min_version, row.max_version) for row in rows} == {
            (step, step - 1, step - 1) for step in (1, 2, 3, 4)
        }
        assert set(source.versions) == {0, 1, 2, 3}

    def test_after_a_resume_the_first_request_meets_the_restored_weights(self, model, tmp_path):
        start(make_config(model, tmp_path / "run", train={"num_steps": 2}))
        source = LetterSource()
        start(make_config(model, tmp_path / "run", train={"num_steps": 3}), source)
        assert set(source.versions) == {2}
        assert all("/000003/" in name for name in source.played)


class TestResume:
    def test_stopping_between_steps_changes_nothing(self, model, tmp_path):
        whole = start(make_config(model, tmp_path / "whole"))
        start(make_config(model, tmp_path / "run", train={"num_steps": 2}))
        again = start(make_config(model, tmp_path / "run"))
        assert close(curve(again), curve(whole))

    def test_steps_after_the_checkpoint_are_trained_again_and_not_sampled(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", checkpoint={"every": 100})

        class Stop(Silent):
            def on_step(self, step, metrics):
                if step == 3:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            start(config, reporter=Stop())
        with Run.open(tmp_path / "run", "r") as run:
            interrupted = [row.metrics for row in run.steps()]
        assert len(interrupted) == 3
        source, recorder = LetterSource(), Recorder()
        report = start(config, source, reporter=recorder)
        assert all("/000004/" in name for name in source.played)
        assert recorder.seen[0] == ("start", 1, 0)
        assert [s["rollout/reused_share"] for s in report.metrics] == [1.0, 1.0, 1.0, 0.0]
        for old, new in zip(interrupted, report.metrics[:3], strict=True):
            assert new["train/loss"] == pytest.approx(old["train/loss"], abs=1e-5)

    def test_half_a_steps_rollouts_are_kept(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", train={"num_steps": 1})
        names = [request.request_id for request in step_requests(config, LetterSource(), 1)]

        class Killed(LetterSource):
            async def run_request(self, request, client):
                if request.request_id in names[4:]:
                    await asyncio.sleep(60)
                return await super().run_request(request, client)

        class Stop(Silent):
            def on_rollouts(self, step, num_done, num_total):
                if num_done == 4:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            start(config, Killed(), reporter=Stop())
        source = LetterSource()
        report = start(config, source)
        assert sorted(source.played) == names[4:]
        assert report.metrics[0]["rollout/reused_share"] == pytest.approx(4 / 6)

    def test_a_finished_run_only_reports(self, model, tmp_path):
        config = make_config(model, tmp_path / "run")
        first = start(config)
        source, recorder = LetterSource(), Recorder()
        again = start(config, source, reporter=recorder)
        assert source.played == []
        assert curve(again) == curve(first)
        assert recorder.seen == [("start", 5, 4), ("end", 4)]

    def test_a_run_cannot_go_back_or_change_what_it_learns(self, model, tmp_path):
        start(make_config(model, tmp_path / "run", train={"num_steps": 2}))
        with pytest.raises(TrainingError, match="cannot go back"):
            start(make_config(model, tmp_path / "run", train={"num_steps": 1}))
        with pytest.raises(ConfigError, match=r"optim.lr was 0.005 and is now 0.5"):
            start(make_config(model, tmp_path / "run", optim={"lr": 0.5}))


class TestEvaluation:
    def run(self, model, path, calls, **sections):
        async def evaluate(phase, step):
            calls.append((phase, step))
            return {"reward": float(step)}

        config = make_config(
            model, path, eval={"before": True, "after": True, "every": 2}, **sections
        )
        recorder = Recorder()
        report = start(config, evaluate=evaluate, reporter=recorder)
        self.evaluated_steps = recorder.evaluated_steps
        return report, [entry for entry in recorder.seen if entry[0] == "eval"]

    def test_before_during_and_after(self, model, tmp_path):
        calls = []
        report, seen = self.run(model, tmp_path / "run", calls)
        assert calls == [("eval_before", 0), ("eval/000002", 2), ("eval_after", 4)]
        assert seen == [("eval", phase, step, float(step), False) for phase, step in calls]
        assert self.evaluated_steps == (2, 4)
        assert report.evaluations["eval_after"] == {"reward": 4.0}

    def test_stored_evaluations_are_not_repeated(self, model, tmp_path):
        self.run(model, tmp_path / "run", [])
        calls = []
        report, seen = self.run(model, tmp_path / "run", calls)
        assert calls == []
        assert [entry[-1] for entry in seen] == [True, True]
        assert set(report.evaluations) == {"eval_before", "eval/000002", "eval_after"}

    def test_a_longer_run_has_a_last_evaluation_of_its_own(self, model, tmp_path):
        """What was measured after step 2 says nothing about the weights after step 4."""
        self.run(model, tmp_path / "run", [], train={"num_steps": 2})
        calls = []
        for _ in range(2):
            report, seen = self.run(model, tmp_path / "run", calls)
        assert calls == [("eval_after/000004", 4)]
        assert seen[-1] == ("eval", "eval_after/000004", 4, 4.0, True)
        assert report.evaluations["eval_after/000004"] == {"reward": 4.0}
        assert report.evaluations["eval_after"] == {"reward": 2.0}

    def test_also_when_the_shorter_run_was_stopped_in_its_last_evaluation(self, model, tmp_path):
        """That evaluation is finished with its own weights, before training goes on."""

        async def stop(phase, step):
            raise KeyboardInterrupt

        def config(steps):
            section = {"before": False, "after": True}
            return make_config(model, tmp_path / "run", eval=section, train={"num_steps": steps})

        calls = []

        async def note(phase, step):
            calls.append((phase, step))
            return {"reward": 0.0}

        with pytest.raises(KeyboardInterrupt):
            start(config(2), evaluate=stop)
        start(config(3), evaluate=note)
        start(config(3), evaluate=note)
        assert calls == [("eval_after", 2), ("eval_after/000003", 3)]

    def test_it_is_too_late_for_the_one_before_training(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", train={"num_steps": 2})
        start(config)
        calls = []

        async def evaluate(phase, step):
            calls.append(phase)
            return {"reward": 0.0}

        async def main(run):
            parts = build_parts(config)
            late = make_config(
                model, tmp_path / "run", train={"num_steps": 2}, eval={"before": True}
            )
            await run_training(late, parts, source=LetterSource(), run=run, evaluate=evaluate)
            await parts.client.aclose()

        with Run.open(tmp_path / "run") as run:
            asyncio.run(main(run))
            (event,) = run.events("evaluation_skipped")
        assert calls == []
        assert event.data == {"phase": "eval_before", "done": 2}


class TestFailures:
    def test_failed_rollouts_are_counted_and_the_rest_trains(self, model, tmp_path):
        source = LetterSource(fail=["train/000001/g00/1"])
        report = start(make_config(model, tmp_path / "run", train={"num_steps": 1}), source)
        (step,) = report.metrics
        assert step["error/Boom"] == 1
        assert step["error/mean"] == pytest.approx(1 / 6)
        assert step["credit/untrained_share"] == pytest.approx(1 / 6)

    def test_a_step_without_a_single_success_stops_and_can_be_repeated(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", train={"num_steps": 2})
        names = [request.request_id for request in step_requests(config, LetterSource(), 2)]
        with pytest.raises(TrainingError, match=r"all 6 rollouts of step 2 failed, 6 .* Boom: it"):
            start(config, LetterSource(fail=names))
        source = LetterSource()
        report = start(config, source)
        assert sorted(source.played) == names
        assert len(report.metrics) == 2
        with Run.open(tmp_path / "run", "r") as run:
            assert run.num_rollouts(phase="train") == 12
            assert run.num_rollouts(phase="train", status="ok") == 12

    def test_a_compared_group_is_stored_whole_or_not_at_all(self, model, tmp_path):
        config = make_config(model, tmp_path / "run", train={"num_steps": 1})

        class Compared(LetterSource):
            has_group_rewards = True
            last_group_waits = False

            async def score_group(self, states):
                if self.last_group_waits and len(self.scored):
                    await asyncio.Event().wait()
                self.scored.append(len(states))
                best = max(state["reward"] for state in states)
                for state in states:
                    state["reward"] = float(state["reward"] == best)

        done = []

        class Stop(Silent):
            def on_rollouts(self, step, num_done, num_total):
                done.append(num_done)
                if num_done == 3:
                    raise KeyboardInterrupt

        killed = Compared()
        killed.last_group_waits, killed.scored = True, []
        with pytest.raises(KeyboardInterrupt):
            start(config, killed, reporter=Stop())
        assert done == [0, 3]
        with Run.open(tmp_path / "run", "r") as run:
            sizes = Counter(row.group_id for row in run.rollouts(blobs=False))
        assert list(sizes.values()) == [3]
        source = Compared()
        source.scored = []
        start(config, source)
        assert len(source.played) == 3
        assert source.scored == [3]


def test_the_export_is_the_trained_model(model, tmp_path):
    config = make_config(model, tmp_path / "run", checkpoint={"export": True})
    report = start(config)
    trained, tokenizer = load_model(str(report.model_path))
    first, _ = load_model(str(model))
    assert tokenizer.encode("a") == [ord("a")]
    assert not torch.equal(trained.model.norm.weight, first.model.norm.weight)


class Uneven(LetterSource):
    """Some rollouts have one turn, the others two."""

    async def run_request(self, request, client):
        num_turns = 1 if request.request_id.endswith("/0") else 2
        return await LetterSource(num_turns=num_turns).run_request(request, client)


class TestOlderRuns:
    """Runs from when the default of `grpo` was the mean over calls."""

    def aged(self, model, path):
        """Start a run, and let its settings say what an older version would have written."""
        by_call = {"algorithm": {"aggregation": "call"}, "train": {"num_steps": 2}}
        start(make_config(model, path, **by_call), Uneven())
        with Run.open(path, "w") as run:
            old = to_plain(make_config(model, path, train={"num_steps": 2}).as_dict())
            del old["train"]["changed_sampling"]
            run._rebind(old, "train")

    def test_the_same_command_continues_them_as_they_were(self, model, tmp_path):
        self.aged(model, tmp_path / "old")
        for num_steps in (3, 4):
            config = make_config(model, tmp_path / "old", train={"num_steps": num_steps})
            report = start(config, Uneven())
        by_call = make_config(model, tmp_path / "new", algorithm={"aggregation": "call"})
        wanted = start(by_call, Uneven())
        assert all(map(close, curve(report), curve(wanted)))
        other = start(make_config(model, tmp_path / "other"), Uneven())
        assert not all(map(close, curve(other), curve(wanted)))
        assert audit(tmp_path / "old").findings == ()

    def test_they_are_audited_as_they_were_trained(self, model, tmp_path):
        self.aged(model, tmp_path / "old")
        assert audit(tmp_path / "old").findings == ()


class Cut(LetterSource):
    """Rollouts of some steps are truncated."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    async def run_request(self, request, client):
        states = await super().run_request(request, client)
        is_cut = request.train_step in self.steps
        for state in states:
            state |= {"truncated": is_cut, "truncation_reason": "env" if is_cut else None}
            state["trajectory"][-1]["extras"]["finish_reason"] = "length" if is_cut else "stop"
        return states


class TestNothingToTrain:
    @pytest.mark.parametrize(
        "algorithm",
        [{"truncation": "drop"}, {"truncation": "mask"}, {"mask_truncated_completions": True}],
        ids=str,
    )
    @pytest.mark.parametrize("async_steps", [0, 1])
    def test_the_step_leaves_the_weights_and_the_run_goes_on(
        self, model, tmp_path, algorithm, async_steps
    ):
        """Early in training every answer may run into its limit; a restart meets the same ones."""
        notices, weights = [], []

        class Listener(Silent):
            def on_notice(self, text):
                notices.append(text)

            def on_step(self, step, metrics):
                flat = [p.detach().flatten() for p in parts.model.parameters()]
                weights.append(torch.cat(flat).clone())

        config = make_config(
            model,
            tmp_path / "run",
            algorithm=algorithm,
            train={"num_steps": 4, "async_steps": async_steps},
        )
        parts = build_parts(config)
        report = start(config, Cut({2, 3}), parts=parts, reporter=Listener())
        trains = [step["train/num_records"] > 0 for step in report.metrics]
        assert len(trains) == 4
        assert not all(trains)
        assert async_steps or trains == [True, False, False, True]
        moved = [not torch.equal(*pair) for pair in pairwise(weights)]
        assert moved == trains[1:]
        assert [step["policy/version"] for step in report.metrics] == [1, 2, 3, 4]
        (notice,) = [text for text in notices if "no token to train" in text]
        assert "train.max_seq_len" in notice
        found = audit(tmp_path / "run").findings
        assert [each for each in found if each.check != "sampler"] == []  # the reasons are made up

    @pytest.mark.parametrize("async_steps", [0, 1])
    def test_a_server_without_token_ids_is_an_error_until_it_is_mended(
        self, model, tmp_path, async_steps
    ):
        class Forgets(LetterSource):
            async def run_request(self, request, client):
                states = await super().run_request(request, client)
                for step in states[0]["trajectory"]:
                    step["tokens"] = None
                return states

        config = make_config(model, tmp_path / "run", train={"async_steps": async_steps})
        with pytest.raises(TokenError, match="no loss record"):
            start(config, Forgets())
        # Sampling may have been ahead: each step that it stored whole ends one more start.
        for _ in range(async_steps):
            with contextlib.suppress(TokenError):
                start(config)
        report = start(config)
        assert report.metrics[0]["train/num_records"] == 0
        assert report.metrics[-1]["train/num_records"] > 0

    def test_agents_that_never_call_the_model_stop_nothing(self, model, tmp_path):
        class Silent(LetterSource):
            async def run_request(self, request, client):
                (state,) = await super().run_request(request, client)
                return [State(state) | {"trajectory": []}]

        report = start(make_config(model, tmp_path / "run"), Silent())
        assert [step["train/num_records"] for step in report.metrics] == [0.0] * 4
