"""`rolltree replay`: from a run on disk to lines, JSON and exit codes."""

import json

import pytest
from click.testing import CliRunner

import rolltree as rt
from rolltree.cli import app
from rolltree.environments.code_hashes import changed_code

ENV = """
import rolltree as rt

def hint(given):
    return {hint}

class Guess(rt.MultiTurnEnv):
    async def env_response(self, messages, state):
        given = messages[-1]["content"]
        text = hint(given) + given
        return [{{"role": "user", "content": text}}]

@rt.run_inline
def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def load_environment():
    rows = [{{"question": "guess", "answer": "2"}}] * 2
    return Guess(dataset=rows, rubric=rt.Rubric([right]), max_turns=3)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_environment(tmp_path, "'Not '")
    env = rt.load_environment("guess")
    with rt.Run.create("run", config={"env": "guess", "env_args": {}}, kind="eval") as stored:
        rt.evaluate(env, rt.ScriptedClient(["0", "1", "2"]), run=stored)
    return "run"


def write_environment(tmp_path, hint):
    folder = tmp_path / "environments" / "guess"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "guess.py").write_text(ENV.format(hint=hint))


def call(*words, **settings):
    return CliRunner().invoke(app, ["replay", *words], **settings)


def test_equal_rollouts_of_a_run(run):
    done = call(run)
    assert (done.exit_code, done.stdout) == (0, "2 of 2 rollouts replay equal\n")


def test_equal_rollouts_of_changed_code_say_so_once(run, tmp_path):
    with rt.Run.open(run) as stored:
        changed_code(rt.load_environment("guess"), stored)  # as `rolltree eval` stores it
    write_environment(tmp_path, '"Not "')
    done = call(run)
    assert done.exit_code == 0
    equal, note = done.stdout.splitlines()
    assert equal == "2 of 2 rollouts replay equal"
    assert note.startswith("note: the environment's code has changed since the run: ")


def broken(tmp_path, setup):
    """Let the environment's setup fail, as it does without its file, package or sandbox."""
    text = ENV.format(hint="'Not '").replace(
        "    async def env_response",
        f"    async def setup_state(self, state):\n        {setup}\n\n    async def env_response",
    )
    (tmp_path / "environments" / "guess" / "guess.py").write_text(text)


BROKEN = {
    "open('words.txt')": "FileNotFoundError: [Errno 2] No such file or directory: 'words.txt'",
    "import no_such_package": "ModuleNotFoundError: No module named 'no_such_package'",
    "from rolltree.values.errors import SandboxUnavailable as No; raise No('no sandbox here')": (
        "SandboxUnavailable: no sandbox here"
    ),
}


@pytest.mark.parametrize("setup", BROKEN)
def test_an_environment_that_cannot_be_set_up_is_not_equal(run, tmp_path, setup):
    broken(tmp_path, setup)
    # One run was recorded while all worked, the other failed as the replay does.
    with rt.Run.create("lost", config={"env": "guess", "env_args": {}}, kind="eval") as stored:
        rt.evaluate(rt.load_environment("guess"), rt.ScriptedClient(["0"]), run=stored)
    for recorded in (run, "lost"):
        done = call(recorded)
        assert done.exit_code == 1
        first, advice, last = done.stdout.splitlines()
        assert first == f"could not set up 2 of 2: {BROKEN[setup]}"
        assert "Give the environment what it lacks" in advice
        assert last == "0 of 2 rollouts replay equal"
        one = call(recorded, "eval/guess/0/0", "--json")
        assert one.exit_code == 1
        (found,) = json.loads(one.stdout)
        assert not found["is_equal"]
        assert found["failure"] == f"could not set up: {BROKEN[setup]}"


def test_a_judge_that_cannot_be_asked_is_not_equal(run, tmp_path):
    paid, dead = 'return float(completion[-1]["content"] == answer)', "ConnectionFailed('no judge')"
    text = ENV.format(hint="'Not '").replace(paid, f"raise rt.values.errors.{dead}")
    (tmp_path / "environments" / "guess" / "guess.py").write_text(text)
    with rt.Run.create("lost", config={"env": "guess", "env_args": {}}, kind="eval") as stored:
        rt.evaluate(rt.load_environment("guess"), rt.ScriptedClient(["0", "1", "2"]), run=stored)
    for recorded in (run, "lost"):
        done = call(recorded)
        assert done.exit_code == 1
        assert done.stdout.startswith("could not score 2 of 2: ConnectionFailed: ")
    assert call(run, "--no-score").exit_code == 0


def test_rescoring_says_what_had_failed_before_it_was_scored(run, tmp_path):
    broken(tmp_path, "open('words.txt')")
    with rt.Run.create("lost", config={"env": "guess", "env_args": {}}, kind="eval") as stored:
        rt.evaluate(rt.load_environment("guess"), rt.ScriptedClient(["0"]), run=stored)
    done = CliRunner().invoke(app, ["rescore", "lost", "--env", "guess"])
    assert done.exit_code == 1
    said = " ".join(done.stdout.split())
    assert "2 had failed before they were scored, so nothing scored them" in said
    assert "FileNotFoundError" in said


def test_one_rollout_that_differs(run, tmp_path):
    write_environment(tmp_path, "'Nope, '")
    done = call(run, "eval/guess/0/0")
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "eval/guess/0/0: DIFFERENT, 1 of 3 recorded calls",
        "  call 1, message 2 of the prompt (user) (prompt)",
        "    recorded: Not 0",
        "    live:     Nope, 0",
    ]
    assert call(run, "-n", "1").stdout.splitlines()[-2:] == [
        "0 of 1 rollouts replay equal",
        "first differences: prompt 1",
    ]
    found = json.loads(call(run, "eval/guess/0/0", "--json").stdout)[0]
    assert found["difference"]["live"] == {"role": "user", "content": "Nope, 0"}


def test_until(run):
    done = call(run, "eval/guess/0/0", "--until", "1")
    assert done.exit_code == 0
    assert "stopped after 1 calls, as asked" in done.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--until", "1"], "--until is for one rollout"),
        (["eval/guess/0/0", "-n", "1"], "-n selects rollouts"),
        (["eval/guess/00/0"], "Did you mean 'eval/guess/0/0'"),
        (["--phase", "none"], "has no rollouts to replay"),
    ],
)
def test_mistakes_are_messages(run, words, why):
    done = call(run, *words)
    assert done.exit_code == 2
    assert why in done.stderr
    assert "Traceback" not in done.output
