"""The narrator: planted problems each yield their sentence, and a clean run none that alarms."""

import json
import math

import pytest

import planted_kit
import rolltree as rt
from golden_kit import unpack
from rolltree.narrator.detectors import story
from rolltree.narrator.facts import MAX_LOOKED, Facts, Looked, chosen, read_facts
from rolltree.narrator.trends import since
from rolltree.records.story import run_story
from rolltree.rollouts.record import encode_result
from rolltree.store import Run, StoredEvaluation, StoredRollout
from step_kit import answer

DRIFT = "train/sampling/sampling_logp_difference/mean"


def rollout(step, index, reward=0.0, group=None, **columns):
    known = {
        "request_id": f"train/{step}/{index}",
        "trajectory_index": 0,
        "group_id": f"{step}/{index // 4}" if group is None else group,
        "train_step": step,
        "parent_rollout": None,
        "reward": reward,
        "status": "ok",
        "error_type": None,
        "error_phase": None,
        "truncated": False,
        "truncation_reason": None,
        "finish_reason": "stop",
        "num_calls": 1,
        "num_completion_tokens": 9,
    }
    return StoredRollout(**known | columns)


def told(kind, *, steps=None, rollouts=(), **more):
    facts = Facts("train", steps or {}, rollouts, **more)
    return [each for each in story(facts) if each["kind"] == kind]


def plain(num_steps, **columns):
    """Eight rollouts a step in two groups, half of them right."""
    return [
        rollout(step, index, float(index % 2), **columns)
        for step in range(1, num_steps + 1)
        for index in range(8)
    ]


# -- groups without variance -----------------------------------------------------------------------


def test_steps_without_variance_are_told_as_one_span():
    share = "train/frac_reward_zero_std"
    steps = {step: {share: float(31 <= step <= 40)} for step in range(1, 46)}
    rows = [rollout(step, i, 0.0 if step > 30 else i % 2) for step in steps for i in range(8)]
    (found,) = told("zero_variance", steps=steps, rollouts=rows)
    assert found["text"] == (
        "No group had reward variance in steps 31 to 40, so nothing was learned: all 80 rewards "
        "were 0."
    )
    assert (found["severity"], found["evidence"]["steps"]) == ("error", [31, 40])


def test_variance_is_computed_where_no_metric_says_it():
    rows = [rollout(step, i, 0.5 if step > 2 else i % 2) for step in range(1, 6) for i in range(8)]
    (found,) = told("zero_variance", steps={step: {} for step in range(1, 6)}, rollouts=rows)
    assert found["evidence"]["steps"] == [3, 5]


def test_one_step_without_variance_and_a_solved_task_do_not_alarm():
    steps = {step: {"train/frac_reward_zero_std": float(step == 7)} for step in range(1, 10)}
    assert told("zero_variance", steps=steps) == []
    steps = {step: {"train/frac_reward_zero_std": float(step > 5)} for step in range(1, 10)}
    rows = [rollout(step, i, 1.0 if step > 5 else i % 2) for step in steps for i in range(8)]
    (found,) = told("zero_variance", steps=steps, rollouts=rows)
    assert found["severity"] == "info"


# -- limits and failures ---------------------------------------------------------------------------


def test_the_step_from_which_on_rollouts_hit_max_tokens_is_found():
    rows = [
        rollout(step, i, i % 2, finish_reason="length" if step >= 12 and i % 8 < 3 else "stop")
        for step in range(1, 21)
        for i in range(32)
    ]
    (found,) = told("max_tokens", rollouts=rows, max_tokens=256)
    assert found["text"] == ("38 % of rollouts hit max_tokens (256) since step 12 (0 % before).")
    assert found["evidence"]["where"] == "finish_reason = length and train_step >= 12"
    assert found["evidence"]["steps"] == [12, 20]


def test_failures_are_told_by_kind():
    bad = {"status": "error", "error_type": "ServerError", "error_phase": "model", "reward": None}
    rows = [*plain(4), *(rollout(4, 8 + i, **bad) for i in range(8))]
    (found,) = told("failures", rollouts=rows)
    assert "failed since step 4 (0 % before): 8 with ServerError (model)." in found["text"]
    assert found["evidence"]["where"] == "status = error and train_step >= 4"
    assert found["evidence"]["steps"] == [4, 4]
    assert told("failures", rollouts=plain(4)) == []


def test_a_name_that_a_run_wrote_is_cut_and_stays_one_line():
    kind = "E\n<script>" + "x" * 500
    bad = {"status": "error", "error_type": kind, "error_phase": "model", "reward": None}
    (found,) = told("failures", rollouts=[rollout(1, 0, **bad)])
    assert len(found["text"]) < 200
    assert "\n" not in found["text"]


@pytest.mark.parametrize("kind", ["Timeout", "a 'Timeout'", 'a "Timeout"', "a 'Timeout\""])
def test_evidence_can_be_looked_up(tmp_path, kind):
    bad = {"status": "error", "error_type": kind, "error_phase": "timeout", "reward": None}
    (found,) = told("timeouts", rollouts=[rollout(1, 0, **bad)])
    with Run.create(tmp_path / "run", kind="train", config={}) as run:
        row = StoredRollout(request_id="a", phase="train", status="error", error_type=kind)
        run.add_rollouts([row])
        evidence = found["evidence"]
        assert run.num_rollouts(phase=evidence["phase"], where=evidence["where"]) == 1


@pytest.mark.parametrize(
    ("pairs", "at"),
    [
        ([(0, 10)] * 5 + [(10, 10)] * 5, 5),
        ([(5, 10)] * 10, 0),
        ([(1, 10), (0, 10), (1, 10), (0, 10)], 0),
        ([(9, 10)], 0),
    ],
)
def test_a_change_is_found_where_it_is_clear(pairs, at):
    assert since(pairs) == at


def test_a_tool_that_times_out_is_named():
    rows = plain(2)
    looked = [Looked(each, tool_errors=(("search", "ToolTimeLimit"),) * 2) for each in rows[:4]]
    looked += [Looked(each, tool_errors=(("price", "ValueError"),)) for each in rows[4:]]
    (found,) = told("timeouts", rollouts=rows, looked=looked)
    assert found["text"] == (
        "The tool search times out: 8 calls in 4 of 16 rollouts that were looked at."
    )
    assert (found["severity"], found["evidence"]["view"]) == ("error", "rollout")


def test_a_reward_function_that_raises_is_told_with_where():
    said = "KeyError: reward function 'broken', env.py:6: 'x'"
    looked = [Looked(each, scoring_errors=(("broken", said),)) for each in plain(1)[:2]]
    looked += [Looked(each) for each in plain(1)[:2]]
    (found,) = told("scoring", rollouts=plain(1), looked=looked)
    assert found["text"] == (
        "The reward function broken raised in 2 of 4 rollouts that were looked at, the first time "
        f"in step 1 ({said})."
    )
    assert (found["severity"], found["evidence"]["view"]) == ("error", "rollout")


def test_an_environment_that_times_out_is_told():
    late = {"status": "error", "error_type": "RolloutTimeout", "error_phase": "timeout"}
    rows = [*plain(1), rollout(1, 9, None, **late), rollout(1, 10, truncation_reason="time_limit")]
    (found,) = told("timeouts", rollouts=rows)
    assert found["text"].startswith("20 % of rollouts ran out of time: RolloutTimeout (1)")


# -- engine, templates, rewards --------------------------------------------------------------------


def test_the_step_from_which_on_engine_and_trainer_differ_is_found():
    steps = {step: {DRIFT: 0.3 if step >= 20 else 0.004} for step in range(1, 31)}
    (found,) = told("drift", steps=steps)
    assert "since step 20: they differ by 0.3 nats per token (0.004 before)" in found["text"]
    assert found["evidence"] == {"view": "curves", "series": DRIFT, "steps": [20, 30]}
    (found,) = told("drift", steps={step: {DRIFT: 0.09} for step in range(1, 9)})
    assert "since step 1: they differ by 0.09" in found["text"]
    noise = {step: {DRIFT: 0.01 + 0.003 * math.sin(step)} for step in range(1, 31)}
    assert told("drift", steps=noise) == []
    tiny = {step: {DRIFT: 1e-3 if step > 5 else 1e-7} for step in range(1, 31)}
    assert told("drift", steps=tiny) == []


KL = "train/kl"


def course(reward, **series):
    """Return metrics and rollouts of sixteen steps; `reward` and the series are functions of it."""
    steps = range(1, 17)
    metrics = {s: {name: of(s) for name, of in series.items()} for s in steps}
    rows = [rollout(s, i, float(i % 10 < 10 * reward(s))) for s in steps for i in range(40)]
    return {"steps": metrics, "rollouts": rows}


@pytest.mark.parametrize("name", ["train/entropy", "rollout/entropy"])
def test_entropy_that_is_gone_before_the_task_is_solved_is_told(name):
    def gone(step):
        return 0.6 if step < 7 else 0.004

    (found,) = told("entropy", **course(lambda s: 0.4, **{name: gone}))
    assert found["text"] == (
        "The policy hardly varies since step 7: its entropy is 0.004 nats per token (0.6 at first),"
        " so little else is tried. The mean reward is 0.4, the best 1."
    )
    assert found["severity"] == "warning"
    assert found["evidence"] == {"view": "curves", "series": name, "steps": [7, 16]}
    assert told("entropy", steps={s: {name: gone(s)} for s in range(1, 17)})  # no rewards known


@pytest.mark.parametrize(
    ("reward", "entropy"),
    [
        (lambda s: 0.4, lambda s: 0.9 * 0.93**s),  # falls by two thirds, as in runs that learn
        (lambda s: min(1.0, s / 10), lambda s: 0.9 if s < 9 else 0.01),  # solved
        (lambda s: 0.4, lambda s: 0.03),  # was so from the beginning
        (lambda s: 0.4, lambda s: 0.004 if s in (5, 9, 14) else 0.5),  # single steps
    ],
)
def test_entropy_of_a_healthy_run_is_not_told(reward, entropy):
    assert told("entropy", **course(reward, **{"train/entropy": entropy})) == []


def test_kl_that_grows_while_the_reward_falls_is_told():
    def reward(step):
        return 0.7 if 5 <= step <= 8 else 0.2

    (found,) = told("kl", **course(reward, **{KL: lambda s: 0.02 * s}))
    assert found["text"] == (
        "The policy moves away from the reference and earns less: the KL went from 0.13 to 0.29 "
        "nats per token and the reward from 0.7 to 0.2, from steps 5 to 8 to steps 13 to 16."
    )
    assert (found["severity"], found["evidence"]["steps"]) == ("error", [5, 16])


def test_kl_that_runs_away_is_told():
    (found,) = told("kl", **course(lambda s: 0.4, **{KL: lambda s: 0.001 * 2.0**s}))
    assert found["text"] == (
        "The KL to the reference grows and the reward does not: it went from 0.006 to 25 nats per "
        "token and the reward from 0.4 to 0.4, from steps 1 to 4 to steps 13 to 16."
    )
    assert found["severity"] == "warning"


@pytest.mark.parametrize(
    ("reward", "kl"),
    [
        (lambda s: s / 16, lambda s: 0.08 * s),  # it learns, and needs 1.3 nats
        (lambda s: min(0.8, s / 8), lambda s: min(0.5, s / 16)),  # it has learned
        (lambda s: 0.9 - 0.05 * s, lambda s: 0.002 * s),  # it falls, but not because of KL
        (lambda s: 0.9 - 0.05 * s, lambda s: 0.4),  # neither here: it stays
        (lambda s: 0.4, lambda s: 0.03 * s),
        (lambda s: min(0.8, s / 4), lambda s: min(1.2, s / 6)),  # few tokens, and it has learned
    ],
)
def test_kl_of_a_healthy_run_is_not_told(reward, kl):
    assert told("kl", **course(reward, **{KL: kl})) == []


def test_breaks_are_told_by_cause():
    steps = {step: {"samples/breaks/reasoning_stripped": 0.75} for step in range(1, 5)}
    (found,) = told("breaks", steps=steps)
    assert found["text"] == (
        "In 75 % of later calls the prompt does not extend the call before, because the chat "
        "template strips the reasoning of earlier turns; what follows is computed again."
    )
    rows = plain(1)
    looked = [Looked(each, breaks=((2, 40, "compaction"),), num_later_calls=4) for each in rows]
    (found,) = told("breaks", rollouts=rows, looked=looked)
    assert "In 25 % of later calls" in found["text"]
    assert found["severity"] == "info"
    assert (found["evidence"]["call"], found["evidence"]["position"]) == (2, 40)


def test_empty_answers_that_are_paid_are_told():
    rows = plain(4)
    looked = [Looked(each, is_empty=each.reward == 1.0) for each in rows]
    (found,) = told("empty_answers", rollouts=rows, looked=looked)
    assert "16 say nothing, and their mean reward is 1 (all: 0.5)" in found["text"]
    assert found["severity"] == "error"
    looked = [Looked(each, is_empty=each.reward == 0.0) for each in rows]
    assert told("empty_answers", rollouts=rows, looked=looked) == []


def by_reward(reward):
    return [rollout(step, i, reward(step, i)) for step in range(1, 17) for i in range(16)]


def test_the_reward_rises_is_flat_or_falls():
    (found,) = told("reward", rollouts=by_reward(lambda step, i: step + i / 16))
    assert found["text"].startswith("The reward rises: 2.97 [")
    assert "still rises: +4 [" in found["text"]
    (found,) = told("reward", rollouts=by_reward(lambda step, i: float(i % 3 == 0)))
    assert (found["text"][:18], found["severity"]) == ("The reward is flat", "warning")
    (found,) = told("reward", rollouts=by_reward(lambda step, i: -step + i / 16))
    assert (found["text"][:16], found["severity"]) == ("The reward falls", "error")


def test_a_held_out_reward_that_falls_alarms():
    def at(step, mean):
        found = {"reward": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}
        return StoredEvaluation(step, f"eval/{step}", found)

    (found,) = told("held_out", evaluations=[at(0, 0.8), at(20, 0.3)])
    assert "the reward fell: 0.8 [0.7, 0.9] after 0 steps, 0.3 [0.2, 0.4] after 20" in found["text"]
    (found,) = told("held_out", evaluations=[at(0, 0.4), at(20, 0.5)])
    assert found["severity"] == "info"


def test_a_rise_of_the_mean_does_not_hide_an_environment_that_falls():
    def at(step, **means):
        found = {
            name: {"reward": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}}
            for name, mean in means.items()
        }
        return StoredEvaluation(step, f"eval/{step}", {**found.pop("whole"), "env": found})

    ends = [at(0, whole=0.3, a=0.0, b=0.6), at(20, whole=0.6, a=1.0, b=0.2)]
    fallen, whole = told("held_out", evaluations=ends)
    assert (whole["severity"], whole["evidence"]["series"]) == ("good", "eval/reward")
    said = "Held out, the reward of b fell: 0.6 [0.5, 0.7] after 0 steps, 0.2 [0.1, 0.3] after 20."
    assert (fallen["text"], fallen["severity"]) == (said, "error")
    assert fallen["evidence"]["series"] == "eval/env/b/reward"


def test_staleness_and_the_error_at_the_end_are_told():
    steps = {s: {"train/lag_mean": 1.5, "async/lag_max": 4.0} for s in range(1, 4)}
    (found,) = told("staleness", steps=steps)
    assert found["text"] == (
        "Tokens are trained 1.5 versions after they were sampled on average, 4 at most."
    )
    (found,) = told("ended", error="TrainingError: the loss is nan")
    assert found["text"].endswith("TrainingError: the loss is nan")


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "demo-seed1", "delegation"])
def test_a_clean_run_alarms_nobody(tmp_path, name):
    with rt.read_run(unpack(name, tmp_path / "run")) as data:
        found = run_story(data.run)["sentences"]
    assert [each["text"] for each in found if each["severity"] in ("error", "warning")] == []
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_stories_of_other_real_runs(tmp_path):
    with rt.read_run(unpack("4/train", tmp_path / "train")) as data:
        kinds = {each["kind"] for each in run_story(data.run)["sentences"]}
    assert kinds >= {"failures", "max_tokens", "truncated"}
    with rt.read_run(unpack("4/tools", tmp_path / "tools")) as data:
        kinds = {each["kind"]: each for each in run_story(data.run)["sentences"]}
    assert kinds.keys() == {"failures", "breaks", "level", "few_examples"}


@pytest.fixture
def planted(tmp_path):
    """Reasoning is stripped in every rollout, empty answers earn reward, and a tool is late."""
    with Run.create(tmp_path / "run", kind="train", config={"model": "none"}) as run:
        for index in range(40):
            is_empty = index % 4 == 0
            said = "<think>hm</think> " if is_empty else "12"
            thought, spoken = [50, 51, 52, 53], [60, 61, 62]
            steps = (
                answer([1, 2], thought + spoken, "<think>hm</think> 12"),
                answer([1, 2, *spoken, 7, 8], [63], said, turn=1),
            )
            request = rt.RolloutRequest(
                request_id=f"train/{index}",
                env_id="sums",
                input={"prompt": "?", "example_id": index // 4, "task": "adding"},
                seed=0,
                sampling_seed=0,
                group_id=str(index // 4),
                index_in_group=index % 4,
                sampling=rt.SamplingParams(),
                phase="train",
                train_step=1 + index // 8,
            )
            late = {"tool": "search", "type": "ToolTimeLimit", "message": "m", "traceback": "t"}
            state = rt.State(
                input=request.input,
                trajectory=rt.Trajectory(steps),
                reward=1.0 if is_empty else float(index % 3 == 0),
                completion=[{"role": "assistant", "content": said}],
                tool_errors=[late] if index % 2 else [],
            )
            run.add_rollouts(encode_result(rt.RolloutResult(request, (state,), None, 1)))
        yield run


def test_planted_problems_are_found_in_a_stored_run(planted):
    found = {each["kind"]: each for each in run_story(planted)["sentences"]}
    assert "strips the reasoning" in found["breaks"]["text"]
    assert found["breaks"]["text"].startswith("In 100 %")
    assert (
        found["breaks"]["evidence"] | {"view": "tokens", "call": 1, "position": 2}
        == (found["breaks"]["evidence"])
    )
    assert "Empty answers earn reward" in found["empty_answers"]["text"]
    assert int(found["empty_answers"]["evidence"]["request_id"].rpartition("/")[2]) % 4 == 0
    assert "The tool search times out: 20 calls in 20 of 40" in found["timeouts"]["text"]


def test_a_few_rollouts_of_a_large_run_are_read_whole(planted):
    rows = [rollout(step, i, float(i % 2)) for step in range(1, 101) for i in range(100)]
    assert len(chosen(rows)) <= MAX_LOOKED
    assert chosen(rows)[-1] is rows[-1]
    assert len({each.train_step for each in chosen(rows)}) > 20
    large = [rollout(1, i, num_unique_tokens=600_000) for i in range(50)]
    assert len(chosen(large)) == 1
    facts = read_facts(planted)
    assert len(facts.looked) == len(facts.rollouts) == 40


@pytest.mark.parametrize("problem", [*planted_kit.PROBLEMS, None])
def test_each_planted_problem_is_the_only_one_that_alarms(tmp_path, problem):
    with rt.read_run(planted_kit.plant(tmp_path / "run", problem)) as data:
        found = run_story(data.run)["sentences"]
    alarms = {each["kind"]: each for each in found if each["severity"] in ("error", "warning")}
    if problem == "zero_variance":
        assert alarms.pop("reward")["text"].startswith("The reward falls")
        assert alarms.pop("collapse")["text"].startswith("The reward collapsed at step 6")
    assert set(alarms) == ({problem} if problem else set())
    if problem:
        assert planted_kit.PROBLEMS[problem] in alarms[problem]["text"]
        assert alarms[problem]["evidence"]["view"]


def test_a_long_run_is_told_from_a_sample(tmp_path):
    """What `show` says of 5,000 rollouts reads a fifth of them, and no more of a longer run."""
    from rolltree.narrator import facts as story_facts
    from rolltree.store import Run, StoredRollout

    with Run.create(tmp_path / "run") as run:
        run.add_rollouts(
            StoredRollout(request_id=f"{phase}{n}", phase=phase, finish_reason="length", reward=1.0)
            for n in range(5000)
            for phase in ("eval", "train")
        )
        facts = read_facts(run, quick=True)
        assert (facts.phase, facts.num_sampled_of) == ("train", 5000)
        assert len(facts.rollouts) == story_facts.MAX_SAMPLED
        names = [int(each.request_id.removeprefix("train")) for each in facts.rollouts]
        assert names == sorted(set(names))
        gaps = [b - a for a, b in zip([0, *names], [*names, 4999], strict=True)]
        assert max(gaps) < 5000 // 8
        told = [each["text"] for each in run_story(run, quick=True)["sentences"]]
        assert told[0].startswith("100 % of rollouts hit max_tokens")
        assert "based on 1,024 of 5,000 rollouts" in told[-1]
        assert not any("based on" in each["text"] for each in run_story(run)["sentences"])
        assert read_facts(run).num_sampled_of is None
