"""The debugger of a replay opens in the environment's code; run by `test_debugging.py`."""

import io

import pytest

import rolltree as rt
from rolltree.records.debugging import EnvironmentDebugger, replay_with_debugger


class Echo(rt.MultiTurnEnv):
    word = "said"

    async def setup_state(self, state):
        greeting = state["answer"]
        state["greeting"] = greeting
        return state

    async def env_response(self, messages, state):
        given = messages[-1]["content"]
        word = self.word if given == "b" else "said"
        return [{"role": "user", "content": f"{word} {given}"}]


class Louder(Echo):
    word = "SAID"


def an_env(kind):
    return kind(dataset=[{"question": "q", "answer": "a"}], env_id="echo", max_turns=3)


@pytest.fixture
def run(tmp_path):
    with rt.Run.create(tmp_path / "run") as run:
        rt.evaluate(an_env(Echo), rt.ScriptedClient(["a", "b", "c"]), run=run)
    return tmp_path / "run"


def debug(run, kind, typed, **options):
    env, out = an_env(kind), io.StringIO()
    debugger = EnvironmentDebugger(env, stdin=io.StringIO(typed), stdout=out)
    report = replay_with_debugger(run, "eval/echo/0/0", env, debugger=debugger, **options)
    return report, out.getvalue()


def test_it_opens_where_the_environment_first_says_something_else(run):
    report, shown = debug(run, Louder, "n\nn\np given\nn\np word\nc\n")
    assert shown.count("--Call--") == 1
    assert "env_response()" in shown.splitlines()[1]
    assert "'b'" in shown  # not the first answer, which is answered as recorded
    assert "'SAID'" in shown
    assert report.difference.live["content"] == "SAID b"


def test_it_opens_after_as_many_answers_as_are_asked_for(run):
    report, shown = debug(run, Echo, "n\nn\np given\nc\n", until=1)
    assert "'a'" in shown
    assert (report.difference, report.stopped) == (None, "stopped after 1 calls, as asked")


def test_it_opens_before_the_first_call(run):
    _, shown = debug(run, Echo, "c\n", until=0)
    assert "setup_state()" in shown


def test_quitting_the_debugger_ends_neither_the_replay_nor_the_program(run):
    report, _ = debug(run, Louder, "q\n")
    assert report.difference.live["content"] == "SAID b"


def test_it_does_not_open_without_a_difference(run):
    report, shown = debug(run, Echo, "")
    assert (report.is_equal, shown) == (True, "")
