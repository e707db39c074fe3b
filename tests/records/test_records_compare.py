"""`rt.compare` and `rolltree compare` on stored runs: arms, phases, seeds, flips, Markdown."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import rolltree as rt
from golden_kit import unpack
from rolltree.cli import app
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from rolltree.tokens import Trajectory
from rolltree.values.types import FinishReason, ModelResponse, RolloutRequest, RolloutResult, State


def rollout(
    phase, example, reward, *, answer="12", index=0, prompts=((1, 2, 3),), key="a", is_rendered=True
):
    """Return the row of a rollout with a call per prompt, each of which samples 8 and 9."""
    given = {
        "prompt": [{"role": "user", "content": f"{example} + 5 ="}],
        "example_id": example, "task": "add", "answer": f"{key}{example}",
    }  # fmt: skip
    request = RolloutRequest(
        request_id=f"{phase}/{example}/{index}", env_id="add", input=given, seed=0,
        sampling_seed=0, group_id=f"{phase}/{example}", index_in_group=index, phase=phase,
    )  # fmt: skip
    trajectory = Trajectory()
    message = {"role": "assistant", "content": answer}
    for call, ids in enumerate(prompts):
        trajectory.append_call(
            prompt=given["prompt"],
            completion=[message],
            response=ModelResponse(
                message=message,
                text=answer,
                finish_reason=FinishReason.STOP,
                prompt_ids=np.array(ids, dtype=np.int32),
                completion_ids=np.array([8, 9], dtype=np.int32),
                logprobs=np.array([-0.5, -0.25], dtype=np.float32),
                versions=np.zeros(2, dtype=np.int32),
                temperature=1.0,
                call_id=call,
            ),
        )
    completion = [message] if is_rendered else None
    state = State(input=given, trajectory=trajectory, completion=completion, reward=reward)
    return encode_result(RolloutResult(request, (state,), None))


def evaluation(path, rewards, phase="eval", step=None, **options):
    """Store an evaluation with one rollout per example."""
    with Run.open_or_create(path, config={"model": "tiny"}, kind="eval") as run:
        for example, reward in enumerate(rewards):
            run.add_rollouts(rollout(phase, example, reward, **options))
        if step is not None:
            run.add_event("evaluation", {"phase": phase}, step=step)
    return path


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


def brief(completion):
    return 1.0


def kind(completion):
    return 0.5


kind.__name__ = "{kind}"  # names are text, not a place to fill in


@pytest.fixture
def trained(tmp_path):
    path = evaluation(tmp_path / "demo", [0.0] * 18 + [1.0] * 2, "eval_before", 0, answer="no")
    return evaluation(path, [1.0] * 19 + [0.0], "eval_after", 28, answer="yes | `x`")


class TestArms:
    def test_a_report_names_the_model_of_a_training_run(self, tmp_path):
        path, config = tmp_path / "run", {"model": {"name": "tiny", "dtype": "float32"}}
        with Run.create(path, config=config, kind="train") as run:
            for phase in ("before", "after"):
                run.add_rollouts(rollout(phase, 0, 1.0))
        found = rt.compare(f"{path}:before", f"{path}:after")
        assert [arm.reports[0].model for arm in found.arms] == ["tiny", "tiny"]

    def test_one_run_is_compared_with_itself(self, trained):
        found = rt.compare(trained)
        assert [arm.name for arm in found.arms] == ["step 0", "step 28"]
        assert [str(run) for run in found.arms[0].runs] == [f"{trained}:eval_before"]
        (pair,) = found.pairs
        assert pair.reward.difference.mean == pytest.approx(0.85)
        assert (pair.num_lost, pair.num_won) == (1, 18)
        assert str(found).startswith("The reward of step 28 is higher than that of step 0, +0.850")

    def test_a_phase_is_a_name_or_a_step(self, trained):
        by_name = rt.compare(f"{trained}:eval_before", f"{trained}:eval_after")
        by_step = rt.compare(f"{trained}:0", f"{trained}:28")
        assert by_name.pairs == by_step.pairs == rt.compare(trained).pairs

    def test_a_path_with_signs_is_a_path(self, tmp_path):
        first = evaluation(tmp_path / "a=1,b:2", [0.0] * 8)
        second = evaluation(tmp_path / "b", [1.0] * 8)
        found = rt.compare(str(first), f"new={second}")
        assert [arm.name for arm in found.arms] == ["a=1,b:2", "new"]

    def test_several_seeds(self, tmp_path):
        """Pooled, 4 runs of 20 examples look different; runs of one recipe differ as much."""
        rates = {"a0": 2, "a1": 12, "b0": 10, "b1": 20}
        for name, num in rates.items():
            evaluation(tmp_path / name, [float(i < num) for i in range(20)])
        where = {name: str(tmp_path / name) for name in rates}
        found = rt.compare(f"old={where['a0']},{where['a1']}", f"new={where['b0']},{where['b1']}")
        reward = found.pairs[0].reward
        assert reward.num_runs == (2, 2)
        assert reward.difference.mean == pytest.approx(0.4)
        assert reward.verdict == "noise"
        assert "2 against 2 runs" in str(found)
        assert (
            rt.compare([where["a0"], where["a1"]], [where["b0"], where["b1"]]).pairs[0].reward
            == reward
        )

    def test_with_three_arms_the_intervals_are_wider(self, tmp_path):
        paths = [
            evaluation(tmp_path / str(n), [float((i * n) % 3 == 1) for i in range(30)])
            for n in (1, 2, 4)
        ]
        two, three = rt.compare(*paths[:2]), rt.compare(*paths)
        assert [(p.a, p.b) for p in three.pairs] == [("1", "2"), ("1", "4")]
        assert three.pairs[0].reward.confidence == pytest.approx(0.975)
        assert three.pairs[0].reward.difference.low < two.pairs[0].reward.difference.low

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["demo:eval_before"], "A single arm cannot be compared"),
            (["demo:eval_befor", "demo"], "Did you mean 'eval_before'"),
            (["demo", "other"], "no scored example in common"),
            (["other"], "has no held-out evaluation"),
            (["demo", "empty"], "no rollouts"),
            (["demo", "nothing"], "is not a run directory"),
            (["demo", "--json", "--markdown"], "choose one"),
            (["demo", "demo:12"], "no evaluation at that step"),
        ],
    )
    def test_mistakes(self, words, said, trained, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with Run.create("other", kind="eval") as run:
            run.add_rollouts(rollout("eval", 900, 1.0))
        Run.create("empty", kind="eval").close()
        result = CliRunner().invoke(app, ["compare", *words])
        assert result.exit_code in (1, 2)
        assert said in result.stderr
        assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    where = tmp_path_factory.mktemp("runs")
    return [unpack(name, where / name) for name in ("demo", "demo-seed1")]


class TestTheDemo:
    """The committed runs of the real demo: 135M parameters, 100 held-out sums."""

    def test_before_and_after_training_is_not_noise(self, runs):
        found = rt.compare(runs[0])
        assert [arm.name for arm in found.arms] == ["step 0", "step 28"]
        (pair,) = found.pairs
        assert pair.reward.verdict == "higher"
        assert pair.reward.difference.low > 0.5
        assert str(found).endswith("over 100 examples: not noise.")
        assert pair.num_won > 50 > 10 > pair.num_lost

    def test_two_seeds_are_noise(self, runs):
        found = rt.compare(*runs)
        assert found.pairs[0].reward.verdict == "noise"
        assert "over 100 examples: noise, the interval contains 0." in str(found)

    def test_before_and_after_over_both_seeds(self, runs):
        arms = [[f"{run}:{step}" for run in runs] for step in (0, 28)]
        reward = rt.compare(*arms).pairs[0].reward
        assert (reward.num_runs, reward.difference.num_examples) == ((2, 2), 100)
        assert reward.difference.mean == pytest.approx(0.70, abs=0.05)


class TestFacts:
    def test_breaks_of_the_prefix_are_counted(self, tmp_path):
        holds, broken = [(1, 2), (1, 2, 8, 9, 3)], [(1, 2), (1, 7, 7)]
        a = evaluation(tmp_path / "a", [1.0] * 8, prompts=holds)
        b = evaluation(tmp_path / "b", [1.0] * 8, prompts=broken)
        found = rt.compare(a, b).pairs[0].measures["breaks"]
        assert (found.before.mean, found.after.mean) == (0.0, 1.0)

    def test_cost(self, trained):
        found = rt.compare(trained, price=(1.0, 10.0)).pairs[0].measures["cost"]
        assert found.before.mean == pytest.approx((3 * 1.0 + 2 * 10.0) / 1e6)
        assert "cost" not in rt.compare(trained).pairs[0].measures

    def test_other_questions_under_the_same_ids_are_said(self, tmp_path):
        a = evaluation(tmp_path / "a", [0.0] * 8)
        b = evaluation(tmp_path / "b", [1.0] * 8, key="b")
        assert "8 of 8 examples have the same id but different contents" in str(rt.compare(a, b))

    def test_arms_that_were_scored_differently_are_said(self, tmp_path):
        def scored(name, funcs, weights):
            rows = [{"question": f"{n} + 5 =", "answer": str(n + 5)} for n in range(6)]
            rubric = rt.Rubric(list(funcs), weights)
            env = rt.SingleTurnEnv(dataset=rows, rubric=rubric, env_id="add")
            with Run.create(tmp_path / name, config={"model": "m"}, kind="eval") as run:
                rt.evaluate(env, rt.ScriptedClient("12"), run=run)
            return tmp_path / name

        a = scored("a", [right, brief], [1.0, 0.5])
        same = scored("same", [right, brief], [1.0, 0.5])
        other = scored("other", [right, kind], [2.0, 1.0])
        said = (
            "The two were scored differently: right has weight 1 in a and 2 in other; brief has "
            "weight 0.5 in a and 0 in other; {kind} has weight 0 in a and 1 in other. Their "
            "rewards are not comparable; compare a metric that both have."
        )
        (_, warning) = rt.compare(a, other).pairs[0].sentences
        assert warning == said
        done = CliRunner().invoke(app, ["compare", str(a), str(other)], env={"COLUMNS": "400"})
        assert said in " ".join(done.stdout.split())
        # The same rubric, and a run that does not say how it was scored, are not accused.
        unknown = evaluation(tmp_path / "unknown", [0.0] * 6)
        for arm in (same, unknown):
            assert "scored differently" not in str(rt.compare(a, arm))

    def test_each_phase_is_compared_by_the_weights_that_it_was_scored_with(self, tmp_path):
        def evaluated(run, phase, env_id, weight):
            rows = [{"question": f"{n} + 5 =", "answer": str(n + 5)} for n in range(6)]
            rubric = rt.Rubric([right], [weight])
            env = rt.SingleTurnEnv(dataset=rows, rubric=rubric, env_id=env_id)
            rt.evaluate(env, rt.ScriptedClient("12"), run=run, phase=phase)

        path = tmp_path / "run"
        with Run.create(path, config={"model": "m"}, kind="eval") as run:
            evaluated(run, "first", "add", 1.0)
            evaluated(run, "same", "add", 1.0)
            evaluated(run, "later", "add", 2.0)
            evaluated(run, "other", "sub", 3.0)

        def said(a, b):
            return str(rt.compare(f"{path}:{a}", f"{path}:{b}"))

        assert "right has weight 1 in first and 2 in later" in said("first", "later")
        assert "scored differently" not in said("first", "same")

    def test_the_rollouts_that_show_a_change(self, tmp_path):
        a, b = tmp_path / "a", tmp_path / "b"
        for path, rewards in ((a, (1.0, 0.0)), (b, (0.0, 0.0))):
            with Run.create(path, kind="eval") as run:
                for index, reward in enumerate(rewards):
                    answer = f"{path.name}{reward:.0f}"
                    (row,) = rollout("eval", 3, reward, index=index, answer=answer)
                    run.add_rollouts([replace(row, trajectory_index=len(path.name))])
        ((before, after),) = rt.compare(a, b).pairs[0].shown
        assert (before.question, before.answers, after.answers) == ("3 + 5 =", ("a1",), ("b0",))
        assert (before.run, before.request_id) == (a, "eval/3/0")
        assert before.trajectory_index == 1

    def test_a_rollout_without_a_completion_shows_what_its_last_call_said(self, tmp_path):
        for name, reward in (("a", 0.0), ("b", 1.0)):
            evaluation(tmp_path / name, [reward] * 4, answer=name, is_rendered=False)
        (before, after) = rt.compare(tmp_path / "a", tmp_path / "b").pairs[0].shown[0]
        assert (before.answers, after.answers) == (("a",), ("b",))


class TestCommand:
    def invoke(self, *words):
        result = CliRunner().invoke(app, ["compare", *map(str, words)], env={"COLUMNS": "160"})
        assert result.exit_code == 0, result.output
        return result.stdout

    def test_tables(self, trained):
        out = self.invoke(trained, "--examples", 2)
        assert "not noise" in out
        (row,) = [line for line in out.splitlines() if line.split()[:1] == ["reward"]]
        assert row.split()[1:4] == ["0.100", "0.950", "+0.850"]
        assert "1 examples pass with step 0 and not with step 28, 18 the other way, of 20" in out
        lines = [line.split() for line in out.splitlines()]
        shown = [line[0] for line in lines if "→" in line]
        assert shown == ["19", "0"]  # what was lost comes first

    def test_json(self, trained):
        data = json.loads(self.invoke(trained, "--json"))
        (pair,) = data["pairs"]
        assert pair["measures"]["reward"]["verdict"] == "higher"
        assert pair["changes"][0]["example"] == ["add", "add", 19]
        assert pair["num_won"] == 18

    def test_markdown_cannot_be_broken_by_an_answer(self, trained):
        out = self.invoke(trained, "--markdown")
        assert "### `step 28` against `step 0`" in out
        assert "| reward | 0.100 | 0.950 | +0.850 |" in out
        (row,) = [line for line in out.splitlines() if line.startswith("| `19`")]
        assert row == "| `19` | 1.000 → 0.000 | `19 + 5 =` | `no` | `yes ¦ 'x'` |"


def test_a_setting_that_was_removed_differs_only_if_its_value_does(runs, tmp_path):
    newer = shutil.copytree(runs[0], tmp_path / "newer")
    other = shutil.copytree(runs[0], tmp_path / "other")
    for path, share in ((newer, None), (other, 0.5)):
        with Run.open(path) as run:
            config = run.config
            del config["engine"]["away_limit_s"], config["optim"]["final_lr_share"]
            if share is not None:
                config["optim"]["final_lr_share"] = share
            run.set_meta("config", config)
    assert rt.compare(runs[0], newer).pairs[0].settings == {}
    differs = {"optim.final_lr_share": (None, 0.5)}
    assert rt.compare(newer, other).pairs[0].settings == differs
