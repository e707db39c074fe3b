"""What to do next: each piece of advice from facts made by hand, and from reports."""

import re
import sys

import openai
import pytest

import rolltree as rt
from docs_kit import ROOT
from rolltree.evaluation import stored_report
from rolltree.narrator.detectors import DETECTORS, MOST, advise, story
from rolltree.narrator.facts import Facts, read_facts
from rolltree.narrator.rewards import GO_ON, HALVE_RATE, HARDER, RAISE_RATE, WARM_UP
from rolltree.store import Run, StoredEvaluation, StoredRollout
from rolltree.testing import FaultyClient, ScriptedClient
from rolltree.training import TrainReport
from rolltree.values.errors import ConnectionFailed
from test_pages import anchors

FLAT = "train/frac_reward_zero_std"


def played(rewards, *, num_examples=40, **columns):
    """An evaluation with these rewards, over and over, each example once."""
    known = {"env_id": "e", "task": "t"} | columns
    rollouts = [
        StoredRollout(
            request_id=f"eval/{at}", reward=rewards[at % len(rewards)], example_id=at, **known
        )
        for at in range(num_examples)
    ]
    return Facts("eval", {}, rollouts)


def trained(rewards, *, held_out=(), metrics=None, **columns):
    """A training with a mean reward per step, in groups of eight with two different rewards."""
    rollouts = [
        StoredRollout(
            request_id=f"train/{step}/{at}",
            group_id=f"{step}/{at // 8}",
            train_step=step,
            reward=reward + (0.2 if at % 2 else -0.2) * min(reward, 1 - reward),
            **columns,
        )
        for step, reward in enumerate(rewards, 1)
        for at in range(32)
    ]
    steps = {step: dict(metrics or {}) for step in range(1, len(rewards) + 1)}
    done = [
        StoredEvaluation(step, f"eval/{step}", {"reward": {"mean": m, "low": m, "high": m}})
        for step, m in held_out
    ]
    return Facts("train", steps, rollouts, evaluations=done)


RISES = [0.1 + 0.05 * step for step in range(12)]
CASES = {
    "all failed": (played([None], status="error", error_type="E"), "failures", "first failure"),
    "some failed": (
        Facts("eval", {}, [*played([0.5]).rollouts, *played([None], status="error").rollouts]),
        "failures",
        "before the reward",
    ),
    "cut": (played([0.5], finish_reason="length"), "max_tokens", "Allow more tokens"),
    "cut, in training": (trained([0.4] * 4, finish_reason="length"), "max_tokens", "Allow more"),
    "no rubric": (played([None]), "unscored", "Make the rubric score every rollout"),
    "not scored": (
        Facts(
            "train", {1: {}}, [StoredRollout(request_id=f"{at}", train_step=1) for at in range(8)]
        ),
        "unscored",
        "Make the rubric score every rollout",
    ),
    "cold": (played([0.02]), "level", "few_shot"),
    "cold, in training": (trained([0.016] * 12), "level", "few_shot"),
    "cold, in one step": (trained([0.016]), "level", "few_shot"),
    "solved": (played([0.97]), "level", "Take harder rows"),
    "solved, in training": (
        trained([0.2, 0.5, 0.8, 0.9, 0.95, *([1.0] * 7)]),
        "zero_variance",
        "Take harder rows",
    ),
    "equal groups": (
        trained([0.5] * 4, metrics={FLAT: 1.0, "train/grad_norm": 0.0}),
        "zero_variance",
        "larger groups",
    ),
    "fell": (trained(RISES[::-1]), "reward", HALVE_RATE["advice"]),
    "flat": (trained([0.4] * 6), "reward", RAISE_RATE["advice"]),
    "flat, held out": (trained([0.4], held_out=[(0, 0.4), (1, 0.4)]), "held_out", "Raise optim.lr"),
    "fell, held out": (
        trained([0.4] * 3, held_out=[(0, 0.4), (3, 0.2)]),
        "held_out",
        HALVE_RATE["advice"],
    ),
    "learned by heart": (trained(RISES, held_out=[(0, 0.4), (3, 0.2)]), "held_out", "more questi"),
    "idle GPU": (Facts("eval", {}, (), idle_gpu=True), "idle_gpu", "rolltree doctor"),
    "few examples": (played([0.0, 1.0], num_examples=10), "few_examples", "-n 100"),
    "learnable": (played([0.5]), "learnable", "Train on it"),
    "rises": (trained([0.1 + 0.01 * step for step in range(12)]), "reward", GO_ON["advice"]),
}


def test_every_piece_of_advice_has_a_case():
    assert {kind for _, kind, _ in CASES.values()} | {
        *("scoring", "tools", "programs", "flat_groups")
    } == {kind for kind, each in DETECTORS.items() if each.advice} | {"level", "reward", "held_out"}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_first_in_its_case(name):
    facts, kind, said = CASES[name]
    found = advise(facts)
    assert (found[0].rule, said in found[0].text) == (kind, True), found
    assert len(found) <= MOST
    assert str(found[0]).endswith(f"(rolltree docs {found[0].page.replace('.md', '')})")


def test_figures_are_in_the_sentence():
    assert "is 0.020, too little" in advise(CASES["cold"][0])[0].text
    assert "40 with E" in advise(CASES["all failed"][0])[0].text
    assert "100 % of rollouts hit" in advise(CASES["cut"][0])[0].text
    assert "With 10 examples" in advise(CASES["few examples"][0])[0].text


def test_advice_is_given_once_and_never_on_a_doubtful_rise():
    both = trained([0.1 + 0.01 * step for step in range(12)], held_out=[(0, 0.1), (12, 0.2)])
    good = [(each["kind"], bool(each["advice"])) for each in story(both)]
    assert good == [("reward", True), ("held_out", False)]
    gamed = trained(RISES, metrics={"metrics/correct": 0.5, "train/loss": 1.0})
    for step, found in gamed.steps.items():
        found["metrics/correct"] = 0.9 - 0.07 * step
    kinds = {each["kind"]: each for each in story(gamed)}
    assert kinds["gaming"]["severity"] == "error"
    assert kinds["reward"]["advice"] == ""
    falls = trained(RISES, held_out=[(0, 0.4), (12, 0.2)])
    kinds = {each["kind"]: each for each in story(falls)}
    assert (kinds["reward"]["severity"], kinds["reward"]["advice"]) == ("good", "")
    assert "for fewer steps" in kinds["held_out"]["advice"]


@pytest.mark.parametrize("answer", ["2", "3", "no", None])
def test_an_evaluation_in_memory_and_a_stored_one_get_the_same(tmp_path, answer):
    def correct(completion, answer):
        return float(completion[-1]["content"] == answer)

    def cautious(completion):
        return 1.0 / (completion[-1]["content"] != "no")

    env = rt.SingleTurnEnv(
        dataset=[{"question": f"{at} + 1 =", "answer": "2"} for at in range(30)],
        rubric=rt.Rubric([rt.run_inline(correct), rt.run_inline(cautious)], weights=[0.9, 0.0]),
    )
    with Run.create(tmp_path / "run") as run:
        faults = [ConnectionFailed("no route")] * 30 if answer is None else []
        client = FaultyClient(ScriptedClient([answer or "2"]), faults)
        report = rt.evaluate(env, client, split="train", run=run)
    with Run.open(tmp_path / "run", "r") as run:
        stored = [(each.rule, each.page) for each in advise(read_facts(run))]
        assert stored_report(run).advice == report.advice
        assert stored_report(run, outcomes=False).advice == ()
    # Failures do not have their phase in memory.
    assert [(each.rule, each.page) for each in report.advice] == stored
    kinds = {"2": "learnable", "3": "level", "no": "scoring", None: "failures"}
    assert stored[0][0] == kinds[answer]


def test_a_report_of_training_outlives_its_run(tmp_path):
    with Run.create(tmp_path / "run", kind="train") as run:
        run.add_rollouts(
            StoredRollout(request_id=f"{n}", phase="train", train_step=1, reward=0.0)
            for n in range(8)
        )
        run.add_step(1, {"reward/mean": 0.0})
        report = TrainReport.read(run)
    assert [each.rule for each in report.advice][:2] == ["zero_variance", "level"]
    assert "next: No group had reward variance in step 1" in repr(report)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert report.advice == ()
    assert repr(report).startswith("TrainReport(1 steps")


def test_a_reward_below_zero_is_on_another_scale():
    assert advise(played([-3.0])) == ()


def test_every_advice_names_a_page_and_a_heading_that_exist():
    cases = [RAISE_RATE, HALVE_RATE, GO_ON, WARM_UP, HARDER]
    rows = {kind: each.page for kind, each in DETECTORS.items() if each.advice}
    for name, named in {**rows, **{each["advice"]: each["page"] for each in cases}}.items():
        page, _, anchor = named.partition("#")
        file = ROOT / "docs" / page
        assert file.is_file(), name
        assert not anchor or anchor in anchors(file), name


class Untidy(rt.SingleTurnEnv):
    @rt.cleanup
    async def tidy(self, state):
        raise OSError("\x1b[31mno\u202ehandle")


def test_a_cleanup_that_raises_is_named_without_its_control_characters():
    env = Untidy(dataset=[{"question": "1?", "answer": "1"}], rubric=rt.Rubric([one]))
    report = rt.evaluate(env, ScriptedClient(["x"]))
    said = " ".join(each.text for each in report.advice)
    assert "A cleanup of the environment raised in 1 of 1 rollouts" in said
    assert "\x1b" not in said
    assert "\u202e" not in said


class TwiceUntidy(Untidy):
    @rt.cleanup
    async def tidy_more(self, state):
        raise OSError("no table")


ROWS = [{"question": f"{at}?", "answer": "1"} for at in range(4)]


def test_two_cleanups_that_raise_are_counted_once_a_rollout():
    env = TwiceUntidy(dataset=ROWS, rubric=rt.Rubric([one]))
    report = rt.evaluate(env, ScriptedClient(lambda messages: "x"))
    said = " ".join(each.text for each in report.advice)
    assert "A cleanup of the environment raised in 4 of 4 rollouts" in said


def first_advice(env, said, folder):
    """The first advice in the story of a stored evaluation."""
    with Run.open_or_create(folder, config={}) as run:
        rt.evaluate(env, ScriptedClient(said), run=run)
    with rt.read_run(folder) as data:
        return next(f"{each['text']} {each['advice']}" for each in data.story() if each["advice"])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    raise ValueError("no adder")


def adder(messages):
    if messages[-1]["role"] == "tool":
        return "It is 3."
    function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def test_a_tool_that_always_raises_gets_advice(tmp_path):
    env = rt.ToolEnv(tools=[add], dataset=ROWS, rubric=rt.Rubric([nothing]))
    said = first_advice(env, adder, tmp_path / "run")
    assert said.startswith("The tool add raises ValueError in 100 % of rollouts. The model is told")


async def agent(session, state):
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        asked = [{"role": "user", "content": "x"}]
        await client.chat.completions.create(model="any", messages=asked)
    raise RuntimeError("the agent is broken")


SCRIPT = """
import os, openai
openai.OpenAI().chat.completions.create(model="m", messages=[{{"role": "user", "content": "x"}}])
os.{end}
"""


@pytest.mark.parametrize(
    ("program", "how"),
    [
        (agent, "raised RuntimeError"),
        ([sys.executable, "-c", SCRIPT.replace("{end}", "_exit(3)")], "ended with status 3"),
        ([sys.executable, "-c", SCRIPT.replace("{end}", "abort()")], "was ended by signal 6"),
    ],
)
def test_a_program_that_always_fails_gets_advice(tmp_path, program, how):
    env = rt.ProgramEnv(program, dataset=ROWS, rubric=rt.Rubric([one]))
    said = first_advice(env, lambda messages: "x", tmp_path / "run")
    assert said.startswith(f"The program {how} in 100 % of rollouts. The rollouts count")


class Raises(rt.MultiTurnEnv):
    async def env_response(self, messages, state):
        raise ValueError("no board")


def test_an_environment_that_raises_everywhere_gets_no_advice_about_the_model():
    rows = [{"question": f"{at}?", "answer": "1"} for at in range(20)]
    env = Raises(dataset=rows, rubric=rt.Rubric([nothing]))
    report = rt.evaluate(env, ScriptedClient(lambda messages: "x"))
    assert [each.rule for each in report.advice] == ["scoring"]


def one(completion):
    return 1.0


def nothing(completion):
    return 0.0


def test_numbers_of_any_size_are_short():
    found = advise(played([-1e99, 1e99], num_examples=30))
    assert found
    assert not re.search(r"\d{20}", " ".join(each.text for each in found))


def test_one_example_is_one():
    facts = played([0.5], num_examples=1)
    assert not any("1 examples" in each["text"] for each in story(facts))
