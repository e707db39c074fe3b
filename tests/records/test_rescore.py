"""Rescoring: it equals a new evaluation with the same answers, continues, and says what changed."""

import asyncio
import random

import pytest

import rolltree as rt
from rolltree.agents import Agent, ToolAgent
from rolltree.environments import EnvGroup, MultiTurnEnv, ProtocolEnvironment, SingleTurnEnv
from rolltree.errors import ConfigError, ServerError, UnknownName
from rolltree.evaluation import evaluate
from rolltree.protocols import DelegatingProtocol, SingleAgentProtocol, SubAgent, delegate_tool
from rolltree.rollouts.decode import decode_results
from rolltree.rubrics import JudgeRubric, PerAgentRubric, Rubric, RubricGroup
from rolltree.steps import StepOutcome
from rolltree.store import Run
from rolltree.testing import ScriptedClient

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
        raise ServerError("the server hung up")
    turn = sum(message["role"] == "assistant" for message in messages)
    return str((len(asked) + turn) % 4)


async def stored(environment, path, group_size=2):
    with Run.create(path, config={"model": "scripted"}, kind="eval") as run:
        client = ScriptedClient(answers)
        await evaluate(environment, client, rollouts_per_example=group_size, run=run)
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
