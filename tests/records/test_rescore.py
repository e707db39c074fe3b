"""Rescoring: it equals a new evaluation with the same answers, continues, and says what changed."""

import asyncio
import itertools
import json
import random
import shutil

import pytest
from click.testing import CliRunner

import rolltree as rt
from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import (
    DelegatingProtocol,
    SingleAgentProtocol,
    SubAgent,
    delegate_tool,
)
from rolltree.cli import app
from rolltree.environments import EnvGroup, MultiTurnEnv, ProtocolEnvironment, SingleTurnEnv
from rolltree.environments.rubrics import JudgeRubric, PerAgentRubric, Rubric, RubricGroup
from rolltree.evaluation import evaluate_async
from rolltree.rollouts import RolloutEngine, build_requests
from rolltree.rollouts.decode import decode_results
from rolltree.rollouts.record import encode_result
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.training import load_train_config
from rolltree.values.errors import ConfigError, ServerError, UnknownName, record_error
from rolltree.values.steps import StepOutcome
from rolltree.values.types import RolloutResult

ROWS = [{"question": f"{a} + 1 =", "answer": str(a + 1)} for a in range(4)]


def said(completion):
    return completion[-1]["content"]


def exact(completion, answer):
    return float(said(completion) == answer)


def close(completion, answer):
    return 1.0 / (1 + abs(int(said(completion)) - int(answer)))


def short(completion):
    return float(len(said(completion)) == 1)


def brave(completion, answer):
    if said(completion) != answer:
        raise RuntimeError("I only like right answers")
    return 1.0


def away(completion):
    raise ConnectionError("the service does not answer")


def first_step(step, step_index):
    return 0.25 if step_index == 0 else float(len(step["completion"]))


def rank(completions):
    texts = [said(completion) for completion in completions]
    return [float(text == max(texts)) for text in texts]


def leaves_a_trace(state):
    state["trace"] = state.get("trace", 0) + 1
    return float(state["trace"])


class TwoTurns(MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": "Again."}]


def stepped(*funcs):
    rubric = Rubric(list(funcs))
    rubric.add_step_reward_func(first_step)
    return rubric


async def agrees(judge, prompt, completion, answer, state):
    return float((await judge(prompt, completion, answer, state)) == "yes")


def judged(reply, prompt="{question} {answer} {response}"):
    return JudgeRubric([agrees], judge_client=ScriptedClient(reply), judge_prompt=prompt)


def by_answer(messages):
    return "yes" if messages[-1]["content"][-1] in "12" else "no"


def one_turn(rubric):
    return SingleTurnEnv(dataset=ROWS, rubric=rubric, env_id="sums")


def two_turns(rubric):
    return TwoTurns(dataset=ROWS, rubric=rubric, env_id="sums", max_turns=2)


def both(rubric):
    say = SingleTurnEnv(dataset=ROWS[:1], rubric=Rubric([short]), env_id="say")
    return EnvGroup([one_turn(rubric), say], env_id="both")


class Guess:
    """Guess the number that the seed made."""

    in_thread = False

    def reset(self, *, seed=None):
        self.secret = random.Random(seed).randrange(3)
        return "Guess.", {}

    def step(self, action):
        right = str(self.secret) == action
        return StepOutcome("yes" if right else "no", float(right), terminated=right)

    def close(self):
        pass


def guessing(rubric):
    return ProtocolEnvironment(
        SingleAgentProtocol(lambda: Agent(name="guesser"), max_steps=3),
        lambda row: Guess(),
        num_eval=3,
        env_id="guess",
        rubric=rubric,
    )


def helped(rubric):
    rubrics = rubric.rubrics if isinstance(rubric, PerAgentRubric) else {}
    protocol = DelegatingProtocol(
        lambda: ToolAgent(name="boss", external_tools=[delegate_tool("helper")]),
        {"helper": SubAgent(lambda: Agent(name="helper"))},
    )
    default = rubric.default if isinstance(rubric, PerAgentRubric) else rubric
    rows = [{"prompt": [{"role": "user", "content": "Ask for help."}], "answer": "5"}]
    return ProtocolEnvironment(
        protocol, None, dataset=rows, env_id="team", rubric=default, rubrics=rubrics
    )


def answers(messages):
    """Answer some sums wrong, guess upwards, delegate once; break down at the third sum."""
    asked = messages[-1]["content"]
    if asked == "Ask for help.":
        call = {"name": "helper", "arguments": '{"task": "What is 2 + 3?"}'}
        return {"role": "assistant", "tool_calls": [{"function": call}]}
    if asked.startswith("2"):
        raise ServerError("the server hung up", status=500, retryable=False)
    turn = sum(message["role"] == "assistant" for message in messages)
    return str((len(asked) + turn) % 4)


async def stored(environment, path, group_size=2):
    with Run.create(path, config={"model": "scripted"}, kind="eval") as run:
        client = ScriptedClient(answers)
        await evaluate_async(environment, client, rollouts_per_example=group_size, run=run)
    return path


TIMES = {"generation_ms", "scoring_ms", "total_ms", "started_at", "created_at"}


def comparable(path):
    """Everything that a run says of its rollouts, but times and places in code."""
    with Run.open(path, "r") as run:
        found = {}
        for row in run.rollouts(blobs=False):
            values = {name: getattr(row, name) for name in row.__slots__ if name not in TIMES}
            for each in values["errors"]:
                each.pop("traceback", None)
            found[row.request_id, row.trajectory_index] = values
        for result in decode_results(run.rollouts()):
            for index, state in enumerate(result.states):
                values = dict(state)
                error = values.pop("error")
                values["error"] = error and (error.type, error.message, error.phase)
                for each in (values.get("scoring_errors") or {}).values():
                    each.pop("traceback")
                del values["timing"]
                steps = values.pop("trajectory")
                values["steps"] = [
                    {key: step[key] for key in ("prompt", "completion", "reward", "advantage")}
                    | {"ids": list(step["tokens"]["completion_ids"])}
                    for step in steps
                ]
                found[result.request.request_id, index]["state"] = values
        return found


CASES = {
    "metrics of the old rubric go": (
        one_turn, Rubric([exact, short], [1.0, 0.0]), Rubric([close]),
    ),
    "to step rewards": (two_turns, Rubric([exact]), stepped(exact)),
    "from step rewards": (two_turns, stepped(exact), Rubric([exact])),
    "step rewards to others": (two_turns, stepped(exact), stepped(close)),
    "to a comparison of the group": (one_turn, Rubric([exact]), Rubric([rank, exact])),
    "from a comparison of the group": (one_turn, Rubric([rank]), Rubric([exact])),
    "what failed to score is scored": (one_turn, Rubric([brave]), Rubric([exact])),
    "what was scored fails": (two_turns, Rubric([exact]), Rubric([brave])),
    "what functions left in the state": (
        one_turn, Rubric([leaves_a_trace]), Rubric([leaves_a_trace, exact]),
    ),
    "another judge": (one_turn, judged(["yes"]), judged(by_answer)),
    "two rubrics": (
        one_turn, Rubric([exact]), RubricGroup([Rubric([close]), judged(by_answer)]),
    ),
    "a group of environments": (both, Rubric([exact]), Rubric([close])),
    "a world's own rewards": (guessing, Rubric([short]), Rubric()),
    "beside a world's own rewards": (guessing, Rubric(), Rubric([short])),
    "agents": (
        helped,
        PerAgentRubric(Rubric([exact]), {"helper": Rubric([short])}),
        PerAgentRubric(Rubric([short]), {}),
    ),
    "more agents": (
        helped,
        PerAgentRubric(Rubric([short]), {}),
        PerAgentRubric(Rubric([exact]), {"helper": Rubric([short])}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_it_equals_a_new_evaluation_with_the_same_answers(tmp_path, case):
    make, old, new = CASES[case]
    await stored(make(old), tmp_path / "old")
    before = comparable(tmp_path / "old")
    report = await rt.records.rescore_async(tmp_path / "old", environment=make(new))
    await stored(make(new), tmp_path / "new")
    expected = comparable(tmp_path / "new")
    assert comparable(tmp_path / "old-rescored") == expected
    assert comparable(tmp_path / "old") == before
    assert before != expected
    assert report.num_rollouts == len(expected)
    rewards = [(before[key]["reward"], expected[key]["reward"]) for key in expected]
    assert report.num_changed == sum(one != other for one, other in rewards)


async def test_there_and_back_again(tmp_path):
    await stored(two_turns(stepped(exact)), tmp_path / "run")
    await rt.records.rescore_async(
        tmp_path / "run", rubric=Rubric([leaves_a_trace]), run_dir=tmp_path / "there"
    )
    await rt.records.rescore_async(
        tmp_path / "there", rubric=stepped(exact), run_dir=tmp_path / "back"
    )
    assert comparable(tmp_path / "back") == comparable(tmp_path / "run")


def rewards(path):
    with Run.open(path, "r") as run:
        return dict(run.columns(("request_id", "reward"), status="ok"))


@pytest.mark.parametrize("rubric", [[exact], [exact, rank]])
async def test_an_interrupted_rescoring_continues(tmp_path, monkeypatch, rubric):
    monkeypatch.setattr("rolltree.insight.rescoring._BATCH_CALLS", 1)  # a group at a time
    await stored(one_turn(Rubric([short])), tmp_path / "run", group_size=3)
    scored = []

    def counted(state, completion, answer):
        scored.append(state["example_id"])
        return exact(completion, answer)

    def stop(progress):
        seen.append(progress)
        if progress.num_done == 3:
            raise KeyboardInterrupt

    seen = []
    others = rubric[1:]
    settings = {"rubric": Rubric([counted, *others]), "on_progress": stop}
    with pytest.raises(KeyboardInterrupt):
        await rt.records.rescore_async(tmp_path / "run", **settings)
    with Run.open(tmp_path / "run-rescored", "r") as run:
        assert run.num_rollouts() == 3
    report = await rt.records.rescore_async(tmp_path / "run", **{**settings, "on_progress": None})
    assert sorted(scored) == [0, 0, 0, 1, 1, 1, 3, 3, 3]  # example 2 failed before it was scored
    assert report.num_rollouts == 12
    again = await rt.records.rescore_async(tmp_path / "run", **{**settings, "on_progress": None})
    assert len(scored) == 9
    assert again.phases == report.phases
    with Run.open(tmp_path / "run-rescored", "r") as run:
        assert run.num_rollouts() == 12
        assert run.meta["kind"] == "rescore"


async def test_a_rollout_that_was_played_again_is_scored_again(tmp_path):
    """Under the same id there is another rollout: a run was rolled back and went on."""
    await stored(one_turn(Rubric([short])), tmp_path / "run")
    await rt.records.rescore_async(tmp_path / "run", rubric=lengthy)
    env, again = one_turn(Rubric([short])), ["eval/sums/0/0", "eval/sums/0/1"]
    requests = build_requests(env, "eval", indices=[0], group_size=2, phase="eval")
    with Run.open(tmp_path / "run", "w") as run:
        for result in await RolloutEngine(env, ScriptedClient("12345")).run_all(requests):
            run.add_rollouts(encode_result(result), replaced=again)
    scored = []

    def counted(state, completion):
        scored.append(state["example_id"])
        return lengthy(completion)

    counted.__name__ = "lengthy"
    await rt.records.rescore_async(tmp_path / "run", rubric=counted)
    assert scored == [0, 0]
    found = rewards(tmp_path / "run-rescored")
    assert [found[name] for name in (*again, "eval/sums/1/0")] == [5.0, 5.0, 1.0]
    failed = RolloutResult(requests[0], (), record_error(ValueError("no world"), "environment"))
    with Run.open(tmp_path / "run", "w") as run:
        run.add_rollouts(encode_result(failed), replaced=again)
    report = await rt.records.rescore_async(tmp_path / "run", rubric=lengthy)
    assert report.num_unplayed == 3  # two of them as before
    assert again[0] not in rewards(tmp_path / "run-rescored")


async def test_scores_of_rollouts_that_are_gone_are_not_reported(tmp_path):
    await stored(one_turn(Rubric([short])), tmp_path / "run")
    await rt.records.rescore_async(tmp_path / "run", rubric=odd)
    shutil.rmtree(tmp_path / "run")
    await stored(one_turn(Rubric([short])), tmp_path / "run", group_size=1)
    with pytest.raises(ConfigError, match=r"run no longer has \(4, such as eval/sums/0/1\)"):
        await rt.records.rescore_async(tmp_path / "run", rubric=odd)
    report = await rt.records.rescore_async(
        tmp_path / "run", rubric=odd, run_dir=tmp_path / "other"
    )
    assert report.num_rollouts == 4


@pytest.mark.parametrize("compared", [False, True])
async def test_what_a_judges_server_failed_is_scored_by_the_next_call(tmp_path, compared):
    await stored(one_turn(Rubric([short])), tmp_path / "run", group_size=3)
    is_down, asked = True, []

    def reply(messages):
        asked.append(messages[-1]["content"])
        if is_down and asked[-1].startswith("1"):
            raise ServerError("the judge is down", status=500, retryable=False)
        return "yes"

    judge = judged(reply)
    rubric = RubricGroup([judge, Rubric([rank])]) if compared else judge
    report = await rt.records.rescore_async(tmp_path / "run", rubric=rubric)
    assert report.num_failed == 3
    assert "the judge is down" in report.failure
    assert len(rewards(tmp_path / "run-rescored")) == 6
    is_down, asked[:] = False, []
    report = await rt.records.rescore_async(tmp_path / "run", rubric=rubric)
    assert len(asked) == 3  # the others are stored
    assert report.num_failed == 0
    assert len(rewards(tmp_path / "run-rescored")) == 9


async def test_a_judge_is_asked_by_as_many_rollouts_at_once_as_allowed(tmp_path):
    await stored(one_turn(Rubric([short])), tmp_path / "run", group_size=4)
    now, most = 0, 0

    async def slow(completion):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return 1.0

    await rt.records.rescore_async(tmp_path / "run", rubric=slow, max_concurrent=3)
    assert most == 3


async def test_a_deadline_is_for_scoring_too(tmp_path):
    async def stuck(answer):
        if answer == "1":
            await asyncio.Event().wait()
        return 1.0

    await stored(one_turn(Rubric([short])), tmp_path / "run", group_size=1)
    report = await rt.records.rescore_async(tmp_path / "run", rubric=stuck, deadline_s=0.2)
    assert rewards(tmp_path / "run-rescored").keys() == {"eval/sums/1/0", "eval/sums/3/0"}
    (lost,) = [change for change in report.changes if change.after is None]
    assert lost.request_id == "eval/sums/0/0"


async def test_the_report_says_what_changed(tmp_path):
    """Four answers to one sum; lengths 1, 2, 3, 4; the reward was the length, now it is its parity.

    GRPO's advantages: (r - mean) / (std + 1e-6), with Bessel's correction.
    """
    env = SingleTurnEnv(dataset=ROWS[:2], rubric=Rubric([lengthy]), env_id="sums")
    client = ScriptedClient(lambda messages: "x" * next(lengths))
    lengths = iter([1, 2, 3, 4, 2, 2, 2, 2])
    with Run.create(tmp_path / "run", config={"model": "m"}, kind="eval") as run:
        await evaluate_async(env, client, rollouts_per_example=4, run=run, max_concurrent=1)
    report = await rt.records.rescore_async(tmp_path / "run", rubric=odd)
    assert (report.num_rollouts, report.num_changed, report.num_failed) == (8, 7, 0)
    (phase,) = report.phases
    assert (phase.phase, phase.num_rollouts, phase.num_changed) == ("eval", 8, 7)
    assert phase.rewards.before.mean == 2.25
    assert phase.rewards.after.mean == 0.25
    assert phase.rewards.difference.mean == -2.0
    assert [change.request_id for change in report.changes[:2]] == [
        "eval/sums/0/3",
        "eval/sums/0/1",
    ]
    most = report.changes[0]
    assert (most.before, most.after) == (4.0, 0.0)
    assert most.advantage_before == pytest.approx(1.5 / (5 / 3) ** 0.5, rel=1e-5)
    assert most.advantage_after == pytest.approx(-0.5 / (1 / 3) ** 0.5, rel=1e-5)
    credit = report.credit
    assert (credit.name, credit.num_groups, credit.num_rollouts) == ("grpo", 2, 8)
    assert (credit.num_flat_before, credit.num_flat_after) == (1, 1)
    assert credit.num_turned == 2  # 1 was bad and 4 was good; 2 stays bad and 3 stays good
    old = [-1.5 / (5 / 3) ** 0.5, -0.5 / (5 / 3) ** 0.5, 0.5 / (5 / 3) ** 0.5, 1.5 / (5 / 3) ** 0.5]
    new = [0.5 / (1 / 3) ** 0.5 * sign for sign in (1, -1, 1, -1)]
    change = sum(abs(a - b) for a, b in zip(old, new, strict=True)) / 8
    assert credit.mean_change == pytest.approx(change, rel=1e-5)
    assert report.as_dict()["phases"][0]["rewards"]["difference"]["mean"] == -2.0


def lengthy(completion):
    return float(len(said(completion)))


def odd(completion):
    return float(len(said(completion)) % 2)


def zero_argument_rubric():
    return Rubric([odd])


NAMED = Rubric([odd])
NOT_A_RUBRIC = 7


@pytest.mark.parametrize("name", ["odd", "zero_argument_rubric", "NAMED"])
def test_a_rubric_by_name(tmp_path, name):
    asyncio.run(stored(one_turn(Rubric([exact])), tmp_path / "run"))
    report = rt.rescore(tmp_path / "run", rubric=f"{__file__}:{name}")
    assert report.scored_by == f"{__file__}:{name}"
    assert set(rewards(tmp_path / "run-rescored").values()) == {1.0}


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({}, ConfigError, "an environment or a rubric"),
        ({"rubric": odd, "environment": "gsm8k"}, ConfigError, "not both"),
        ({"rubric": odd, "env_args": {"a": 1}}, ConfigError, "ignored"),
        ({"rubric": odd, "phase": "train"}, ConfigError, "no rollouts of the phase 'train'"),
        ({"rubric": "odd"}, ConfigError, "module:name"),
        ({"rubric": f"{__file__}:odds"}, UnknownName, "Did you mean 'odd'"),
        ({"rubric": f"{__file__}:NOT_A_RUBRIC"}, ConfigError, "cannot score"),
        ({"rubric": "no_such_module:odd"}, UnknownName, "no module 'no_such_module'"),
        ({"rubric": "no_such_file.py:odd"}, ConfigError, "no file"),
        ({"rubric": odd, "run_dir": "run"}, ConfigError, "would be lost"),
        ({"rubric": odd, "run_dir": "other"}, ConfigError, "rescored.rubric was 'exact'"),
    ],
)
def test_what_cannot_be_scored(tmp_path, monkeypatch, settings, error, said):
    monkeypatch.chdir(tmp_path)
    asyncio.run(stored(one_turn(Rubric([exact])), tmp_path / "run"))
    if settings.get("run_dir") == "other":
        rt.rescore("run", rubric=exact, run_dir="other")
    with pytest.raises(error, match=said):
        rt.rescore("run", **settings)


async def test_a_run_of_training_keeps_its_credit_and_steps(tmp_path):
    """Its own credit, the groups of its steps, and not those of its evaluations."""
    env = one_turn(Rubric([lengthy]))
    config = load_train_config({}, credit="leave_one_out").as_dict()
    lengths = itertools.count(1)
    engine = RolloutEngine(env, ScriptedClient(lambda messages: "x" * next(lengths)))
    with Run.create(tmp_path / "train", config=config, kind="train") as run:
        await evaluate_async(env, ScriptedClient("x"), run=run, phase="eval@0")
        for step in (1, 2):
            requests = build_requests(
                env, "train", indices=[0, 1], group_size=2, phase="train", train_step=step
            )
            for result in await engine.run_all(requests):
                run.add_rollouts(encode_result(result))
    report = await rt.records.rescore_async(tmp_path / "train", rubric=odd)
    credit = report.credit
    assert credit.name == "leave_one_out"
    assert (credit.num_groups, credit.num_rollouts) == (4, 8)
    assert (credit.num_flat_before, credit.num_flat_after) == (0, 0)
    assert {phase.phase: phase.num_rollouts for phase in report.phases} == {"eval@0": 4, "train": 8}
    with Run.open(tmp_path / "train-rescored", "r") as run:
        assert sorted(row[0] for row in run.columns(("train_step",), phase="train")) == [
            1, 1, 1, 1, 2, 2, 2, 2,
        ]  # fmt: skip


def command(*words):
    return CliRunner().invoke(app, ["rescore", *map(str, words)])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    asyncio.run(stored(one_turn(Rubric([short])), tmp_path / "run"))
    shown = command("run", "--rubric", f"{__file__}:exact", "--top", 1)
    assert shown.exit_code == 0
    assert "run, scored by" in shown.stdout
    assert "6 of 8 rollouts have another reward" in shown.stdout
    assert "Advantages (grpo, 4 groups)" in shown.stdout
    assert shown.stdout.count("eval/sums/") == 1
    assert shown.stdout.endswith("run  run-rescored\n")
    again = command("run", "--rubric", f"{__file__}:exact", "--json")
    report = json.loads(again.stdout)
    assert (report["num_rollouts"], report["num_changed"], report["run"]) == (8, 6, "run-rescored")
    assert [change["after"] for change in report["changes"]] == [0.0] * 6


def test_a_command_that_scores_nothing_fails_and_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"question": "0 + 1 =", "answer": "none"}]
    env = SingleTurnEnv(dataset=rows, rubric=Rubric([short]), env_id="sums")
    asyncio.run(stored(env, tmp_path / "run"))
    failed = command("run", "--rubric", f"{__file__}:away")
    assert failed.exit_code == 1
    assert "2 could not be scored" in failed.stdout
    assert "the service does not answer" in failed.stdout
    wrong = command("run")
    assert wrong.exit_code == 2
    assert "--rubric module:name" in wrong.stderr
    assert not wrong.stdout
    assert command("no_run", "--rubric", f"{__file__}:exact").exit_code == 1
