"""Programs in whole runs: killed and continued, by command, replayed, trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from program_kit import rows, said, script, wait_for_death

import rolltree as rt
from rolltree.cli import app
from rolltree.insight.page.rollout_view import rollout_view
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.testing import ScriptedClient, ScriptedServer
from wait_kit import wait_until

ENVIRONMENT = """
import sys
import rolltree as rt

COMMAND = {command!r}

@rt.run_inline
def right(state):
    return float(state["program"]["stdout"].strip() == state["answer"])

def load_environment(num=20, **settings):
    rows = [dict(question=f"question {{i}}", answer=f"answer {{i}}") for i in range(num)]
    return rt.ProgramEnv(COMMAND, dataset=rows, rubric=rt.Rubric([right]), **settings)
"""
EVALUATION = """
import sys
import rolltree as rt
from rolltree.testing import ScriptedClient

env = rt.load_environment(sys.argv[1])
client = ScriptedClient(lambda messages: messages[-1]["content"].replace("question", "answer"))
with rt.Run.open_or_create(sys.argv[2], config={}) as run:
    report = rt.evaluate(env, client, run=run, max_concurrent=20)
print(report.num_rollouts, report.reward.mean)
"""


def an_environment(folder, code, more=()):
    """Write an environment of a command that runs `code`; return its folder."""
    folder.mkdir()
    command = [*script(code), "{question}", *more]
    (folder / f"{folder.name}.py").write_text(ENVIRONMENT.format(command=command))
    return folder


def num_stored(run):
    try:
        with Run.open(run, mode="r") as stored:
            return stored.num_rollouts()
    except rt.RolltreeError:
        return 0


def test_an_evaluation_that_is_killed_leaves_no_program_and_goes_on(tmp_path):
    """Ten programs are done, ten wait and ignore SIGTERM; each row counts once in the end."""
    starts, go = tmp_path / "starts", tmp_path / "go"
    code = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
number = int(sys.argv[1].split()[1])
answer = ask(sys.argv[1])
with open({str(starts)!r}, "a") as file:
    file.write(f"{{number}} {{os.getpid()}}\\n")
while number >= 10 and not os.path.exists({str(go)!r}):
    time.sleep(0.02)
print(answer)
"""
    env = an_environment(tmp_path / "waiting", code)
    command = [sys.executable, "-c", EVALUATION, str(env), str(tmp_path / "run")]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: starts.exists() and len(starts.read_text().splitlines()) == 20)
        wait_until(lambda: num_stored(tmp_path / "run") == 10, "storing the ten")
    finally:
        process.kill()
        process.wait()
    begun = [line.split() for line in starts.read_text().splitlines()]
    # The supervisors see that their owner is gone.
    wait_for_death([pid for _, pid in begun])
    go.touch()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["20", "1.0"]
    again = [line.split()[0] for line in starts.read_text().splitlines()[20:]]
    assert sorted(map(int, again)) == list(range(10, 20))
    with Run.open(tmp_path / "run", mode="r") as run:
        states = [result.states[0] for result in decode_results(run.rollouts())]
    assert sorted(state["example_id"] for state in states) == list(range(20))
    assert {state["program"]["ended"] for state in states} == {"exit"}


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_commands_take_it_like_any_environment(tmp_path):
    env = an_environment(tmp_path / "asking", "print(ask(sys.argv[1]))")
    run = tmp_path / "run"
    with ScriptedServer(said) as server:
        done = invoke(
            *("eval", env, "-m", "scripted", "-b", server.base_url, "-n", 4, "-r", 2),
            *("--run", run, "--json"),
        )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["reward"]["mean"] == 1.0
    for words in (["audit", run], ["replay", run, "--env", env], ["rescore", run, "--env", env]):
        told = invoke(*words)
        assert told.exit_code == 0, told.output
    assert "8 of 8 rollouts replay equal" in invoke("replay", run, "--env", env).stdout
    assert "answer 0" in invoke("show", run, "--transcripts", 8).stdout


def test_a_replay_says_where_a_program_differs_and_ends_it(tmp_path, capfd, caplog):
    env = an_environment(tmp_path / "asking", "print(ask(sys.argv[1]))")
    run = tmp_path / "run"
    with Run.open_or_create(run, config={}) as stored:
        rt.evaluate(rt.load_environment(env), ScriptedClient(said), run=stored, num_examples=1)
    pid = tmp_path / "pid"
    other = an_environment(
        tmp_path / "other",
        f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "try: ask('something else')\nfinally: time.sleep(1000)",
    )
    (report,) = rt.replay_many(run, rt.load_environment(other))
    assert (report.difference.kind, report.difference.live["content"]) == (
        "prompt",
        "something else",
    )
    wait_for_death([pid.read_text()])
    assert "Traceback" not in capfd.readouterr().err + caplog.text


@pytest.mark.slow
def test_it_trains(tmp_path):
    """On the embedded engine; every sampled token of every call is trained, once."""
    pytest.importorskip("torch")
    code = "print(ask(sys.argv[1])); print(ask([{'role': 'user', 'content': 'again'}]))"
    env = rt.ProgramEnv(
        [*script(code), "{question}"],
        dataset=rows(2),
        rubric=rt.Rubric([lambda state: float(len(state["program"]["stdout"]) % 3)]),
        env_id="asking",
    )
    settings = {
        "environment": env, "model": "tiny", "group_size": 4, "groups_per_step": 2,
        "sampling_max_tokens": 4, "run_dir": tmp_path / "run",
    }  # fmt: skip
    rt.train(**settings, num_steps=1, reporter=rt.Silent())
    rt.train(**settings, num_steps=2, reporter=rt.Silent())  # goes on
    with Run.open(tmp_path / "run", mode="r") as run:
        states = [r.states[0] for r in decode_results(run.rollouts(phase="train"))]
    assert len(states) == 16
    assert [state["error"] for state in states] == [None] * 16
    assert {len(state["trajectory"]) for state in states} == {2}
    assert rt.audit(tmp_path / "run").ok


WITH_TITLE = """
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
system = {"role": "system", "content": "You give titles."}
ask([system, {"role": "user", "content": "name it"}], model="small")
print(ask(sys.argv[1], tools=[tool]))
print("a warning", file=sys.stderr)
"""


def test_a_title_is_left_out_by_training_and_by_every_command(tmp_path):
    pytest.importorskip("torch")
    env, run = an_environment(tmp_path / "titled", WITH_TITLE), tmp_path / "run"
    settings = {"model": "tiny", "group_size": 2, "groups_per_step": 2, "sampling_max_tokens": 4}
    settings |= {"skip_zero_advantage": False, "run_dir": run, "reporter": rt.Silent()}
    environment = rt.load_environment(env, num=2)
    report = rt.train(environment=environment, **settings, num_steps=1)
    assert report.metrics[0]["masked/left_out"] == report.metrics[0]["masked/num_calls"] == 4
    with rt.read_run(run) as data:
        calls = list(data.calls(phase="train").rows())
        sft = list(data.sft(phase="train").rows())
    assert [bool(row["left_out"]) for row in calls] == [True, False] * 4
    assert report.metrics[0]["train/num_records"] == sum(
        row["num_completion_tokens"] for row in calls if not row["left_out"]
    )
    trained = sum(sum(row["loss_mask"]) for row in sft)
    assert trained == report.metrics[0]["train/num_records"]
    assert rt.audit(run).ok
    assert "replay equal" in invoke("replay", run, "--env", env).stdout
    scored = tmp_path / "scored"
    assert invoke("rescore", run, "--env", env, "--run", scored).exit_code == 0
    for stored in (run, scored):
        shown = invoke("show", stored, "--transcripts", 4).stdout
        assert "call 0: beside the task" in shown
        assert "exit status 0" in shown
        assert "stderr: a warning" in shown
    with Run.open(run, mode="r") as stored:
        view = rollout_view(stored, next(iter(calls))["request_id"])
    assert view["program"]["how"] == "exit status 0"
    assert view["program"]["stderr"] == "a warning\n"
    (beside,) = view["left_out"]
    assert (beside["call"], beside["messages"][0]["content"]) == (0, "name it")
    assert [message["call"] for message in view["messages"]] == [None, 1]


def test_the_example_plays_the_same_in_process_and_as_a_command():
    pytest.importorskip("openai")
    example = Path(__file__).parents[2] / "examples" / "program_agent"
    played = []
    for as_command in (False, True):
        env = rt.load_environment(example, as_command=as_command)
        client = ScriptedClient(lambda messages: str(len(messages)))
        states = env.evaluate_sync(client, num_examples=2).state
        assert [state["error"] for state in states] == [None, None]
        played.append([(s["completion"], s["reward"], s["metrics"]) for s in states])
    assert played[0] == played[1]


@pytest.mark.long
def test_hundreds_of_programs_at_once():
    """More pipes than 1,024, the usual limit and the last descriptor that `select` takes."""
    num = 250
    client = ScriptedClient(said, delay_s=5.0)
    env = rt.ProgramEnv(
        [*script("print(ask(sys.argv[1]))"), "{question}"],
        dataset=rows(num),
        rubric=rt.Rubric([rt.run_inline(right)]),
    )
    report = rt.evaluate(env, client, num_examples=num, max_concurrent=num)
    assert (report.num_rollouts, report.reward.mean) == (num, 1.0)


def right(state):
    return float(state["program"]["stdout"].strip() == state["answer"])
