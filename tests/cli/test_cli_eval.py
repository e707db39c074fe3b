"""`rolltree eval` end to end: a real environment folder, a real server, a real run store."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from click.testing import CliRunner

from rolltree.cli import app
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.testing import HttpFault, ScriptedServer
from rolltree.values.errors import StoreError
from wait_kit import wait_until

ENVIRONMENT = textwrap.dedent(
    """
    import os
    import rolltree as rt

    def load_environment(num=6, offset=0, leak=False):
        rows = [
            {"question": f"{i} + {i + offset} =", "answer": str(2 * i + offset)} for i in range(num)
        ]

        def right(completion, answer):
            if leak and answer == "0":
                raise ConnectionError("the key is " + os.environ["TEST_KEY"])
            return float(completion[-1]["content"].strip() == answer)

        return rt.SingleTurnEnv(eval_dataset=rows, rubric=rt.Rubric([right]))
    """
)


@pytest.fixture
def env(tmp_path):
    folder = tmp_path / "adding"
    folder.mkdir()
    (folder / "adding.py").write_text(ENVIRONMENT)
    return str(folder)


def adds(messages):
    """Add correctly, except that odd summands come out one too high."""
    a, b = (int(word) for word in messages[-1]["content"].split()[0:3:2])
    return str(a + b + a % 2)


def invoke(*words, env=None):
    return CliRunner().invoke(app, [str(word) for word in words], env=env)


def test_evaluating_over_http_needs_no_torch(env, tmp_path):
    program = (
        "import sys; from rolltree.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print('STATUS', ended.code)\n"
        "print('HEAVY', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    with ScriptedServer(adds) as server:
        words = ["eval", env, "-m", "scripted", "-b", server.base_url, "--run", tmp_path / "run"]
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, words)], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["STATUS 0", "HEAVY []"]


def test_table_store_and_tokens(env, tmp_path):
    with ScriptedServer(adds) as server:
        result = invoke(
            "eval", env, "-m", "scripted", "-b", server.base_url, "-n", 4, "-r", 2, "-t", 16,
            "-T", 1.0, "--run", tmp_path / "run", "--transcripts", 1, "-S", '{"top_p": 1.0}',
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"reward +0\.500 +\[0\.\d{3}, [01]\.\d{3}\] +4", result.stdout)
    assert "pass@2" in result.stdout
    assert "8 over 4 examples" in result.stdout
    assert "0 + 0 =" in result.stdout  # the transcript
    assert {r.body["max_tokens"] for r in server.requests} == {16}
    with Run.open(tmp_path / "run", mode="r") as run:
        assert run.num_rollouts(phase="eval", status="ok") == 8
        for rollout in decode_results(run.rollouts()):
            (step,) = rollout.states[0]["trajectory"]
            tokens = step["tokens"]
            assert len(tokens["completion_ids"]) == len(tokens["completion_logprobs"]) > 0
            assert tokens["prompt_ids"]


def test_two_servers_share_the_rollouts(env, tmp_path):
    with ScriptedServer(adds) as one, ScriptedServer(adds) as other:
        result = invoke(
            "eval", env, "-m", "scripted", "-b", one.base_url, "-b", other.base_url, "-n", 30,
            "-r", 2, "-t", 16, "-c", 4, "-a", '{"num": 60}', "--run", tmp_path / "run",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        asked = [[r.body["messages"][-1]["content"] for r in s.requests] for s in (one, other)]
    assert sum(map(len, asked)) == 60
    assert all(asked)  # by hash of address and group: one in 2 ** 29 gets nothing
    assert not set(asked[0]) & set(asked[1])  # a group's rollouts go to one server


def test_json_goes_to_stdout_and_nothing_else_does(env, tmp_path):
    with ScriptedServer(adds) as server:
        result = invoke(
            "eval", env, "-m", "scripted", "-b", server.base_url, "-n", 2, "-r", 1, "--json",
            "--run", tmp_path / "run",
        )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["reward"]["mean"] == 0.5
    assert (report["num_rollouts"], report["num_failed"]) == (2, 0)
    assert report["run"] == str(tmp_path / "run")
    assert "reward" in result.stderr


def test_environment_arguments_and_saved_files(env, tmp_path):
    with ScriptedServer(adds) as server:
        result = invoke(
            "eval", env, "-m", "scripted", "-b", server.base_url, "-n", -1, "-r", 1, "-s",
            "-a", '{"num": 3, "offset": 10}', "--run", tmp_path / "run",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"][-1]["content"] for line in lines] == [
        "0 + 10 =", "1 + 11 =", "2 + 12 =",
    ]  # fmt: skip
    metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert metadata["env_args"] == {"num": 3, "offset": 10}
    unknown = invoke("eval", env, "-a", '{"nmu": 3}', "--run", tmp_path / "other")
    assert unknown.exit_code == 2
    assert "Did you mean 'num'?" in unknown.stderr


def test_without_a_run_directory_one_is_made(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(adds) as server:
        result = invoke("eval", env, "-m", "scripted", "-b", server.base_url, "-n", 1, "-r", 1)
    (made,) = (tmp_path / "runs").iterdir()
    assert re.match(r"eval--.*adding--scripted--\d{8}-\d{6}$", made.name)
    assert str(made.relative_to(tmp_path)) in result.stderr
    listed = invoke("runs")
    path, facts = listed.stdout.splitlines()
    assert path == str(made.relative_to(tmp_path))
    assert "adding  eval 1.000" in facts
    (tmp_path / "empty").mkdir()
    assert invoke("runs", "empty").stdout == "no runs below empty\n"
    # A folder that is not there is a typing error, unless it is the default.
    refused = invoke("runs", "runss")
    assert (refused.exit_code, "runss is not a folder" in refused.stderr) == (2, True)


def test_the_key_is_used_and_never_written(env, tmp_path):
    key = "a-plain-key-without-prefix"
    with ScriptedServer(adds, api_key=key) as server:
        flags = ("-m", "scripted", "-b", server.base_url, "-n", 2, "-r", 1, "-a", '{"leak": true}')
        result = invoke(
            "eval", env, *flags, "-k", "TEST_KEY", "--run", tmp_path / "run", "-s",
            "--transcripts", 2, env={"TEST_KEY": key},
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        refused = invoke("eval", env, *flags, "--run", tmp_path / "other")
    assert refused.exit_code == 1  # every rollout failed
    assert "2 (100%, not in the means)" in refused.stdout
    assert key not in result.output
    for file in (tmp_path / "run").iterdir():
        assert key.encode() not in file.read_bytes(), file.name
    with Run.open(tmp_path / "run", mode="r") as run:
        (failed,) = run.rollouts(status="error")
        assert failed.errors[0]["message"].endswith("adding.py:12: the key is [redacted]")
        assert key not in str(list(decode_results(run.rollouts())))


def test_failures_show_and_can_be_run_again(env, tmp_path):
    flags = ("-m", "scripted", "-n", 3, "-r", 1, "-c", 1, "--run", tmp_path / "run")
    with ScriptedServer(adds, faults=[None, HttpFault(status=404)]) as server:
        first = invoke("eval", env, "-b", server.base_url, *flags)
        assert "failed" in first.stdout
        assert "1 (33%, not in the means)" in first.stdout
        shown = invoke("show", tmp_path / "run", "--failed")
        assert "scripted fault" in shown.stdout
        again = invoke("eval", env, "-b", server.base_url, *flags)  # a server failed it
        assert "2 of them from an earlier start" in again.stdout
        assert "not in the means" not in again.stdout
        whole = invoke("eval", env, "-b", server.base_url, *flags, "--retry-failed")
        assert "3 of them from an earlier start" in whole.stdout


def test_other_settings_do_not_mix_into_a_run(env, tmp_path):
    with ScriptedServer(adds) as server:
        flags = ("-b", server.base_url, "-m", "scripted", "-r", 1, "--run", tmp_path / "run")
        assert invoke("eval", env, *flags, "-n", 1).exit_code == 0
        more = invoke("eval", env, *flags, "-n", 2)
        assert "2 over 2 examples, 1 of them from an earlier start" in more.stdout
        other = invoke("eval", env, *flags, "-n", 2, "-T", 0.5)
    assert other.exit_code == 2
    assert "sampling.temperature was not set and is now 0.5" in other.stderr


@pytest.fixture
def hangs_after_two():
    """A script that answers two requests, and the others when it is released."""
    asked, released = [], threading.Event()

    async def script(messages):
        asked.append(messages)
        if len(asked) > 2:
            await asyncio.to_thread(released.wait, 120)
        return adds(messages)

    script.released = released
    yield script
    released.set()


def test_killed_and_started_again_it_asks_only_for_the_rest(env, tmp_path, hangs_after_two):
    run_dir = tmp_path / "run"
    with ScriptedServer(hangs_after_two) as server:
        command = [
            sys.executable, "-m", "rolltree", "eval", env, "-m", "scripted", "-b", server.base_url,
            "-n", "6", "-r", "1", "-c", "1", "--run", str(run_dir), "--json",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(lambda: stored(run_dir) >= 2)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        before, asked = stored(run_dir), server.num_requests
        assert before == 2
        hangs_after_two.released.set()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout)
        assert (report["num_rollouts"], report["num_resumed"]) == (6, before)
        assert server.num_requests - asked == 6 - before
    assert stored(run_dir) == 6


def test_a_silent_server_costs_no_more_than_the_deadline(env):
    with ScriptedServer(adds, faults=lambda _: HttpFault(delay_s=300.0)) as server:
        began = time.monotonic()
        given = ["-m", "scripted", "-b", server.base_url, "-n", "2", "-r", "1", "--json"]
        result = invoke("eval", env, *given, "--time-limit", "0.5", "--deadline", "1")
    report = json.loads(result.stdout)
    assert report["failures"] == {"RolloutTimeout": 2}
    assert time.monotonic() - began < 60.0  # 14 minutes and more without it


def test_ctrl_c_says_how_to_go_on(env, tmp_path, hangs_after_two):
    with ScriptedServer(hangs_after_two) as server:
        command = [
            sys.executable, "-m", "rolltree", "eval", env, "-m", "scripted", "-b", server.base_url,
            "-n", "6", "-r", "1", "-c", "1", "--run", str(tmp_path / "run"),
        ]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        wait_until(lambda: stored(tmp_path / "run") >= 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"--run {tmp_path / 'run'} continues it" in errors.decode()
    assert "Traceback" not in errors.decode()


def stored(path):
    try:
        with Run.open(path, mode="r") as run:
            return run.num_rollouts()
    except StoreError:
        return 0


def test_show_and_export(env, tmp_path):
    with ScriptedServer(adds) as server:
        invoke(
            "eval", env, "-m", "scripted", "-b", server.base_url, "-n", 2, "-r", 1,
            "--run", tmp_path / "run",
        )  # fmt: skip
    shown = invoke("show", tmp_path / "run", "--phase", "eval", "--transcripts", 2)
    assert "0.500" in shown.stdout
    assert "1 + 1 =" in shown.stdout
    invoke("export", tmp_path / "run", tmp_path / "out.jsonl")
    first, _ = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["trajectory"][0]["tokens"]["completion_ids"]
    light = invoke("data", tmp_path / "run", "rollouts", "-o", tmp_path / "light.jsonl")
    assert "wrote 2 rows" in light.stdout
    assert "trajectory" not in json.loads((tmp_path / "light.jsonl").read_text().splitlines()[0])


def test_a_dead_server_is_said_within_seconds(env, tmp_path):
    with socket.socket() as held:  # nobody listens
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/v1"
        result = invoke("eval", env, "-m", "m", "-b", url, "-n", 2, "--run", tmp_path / "run")
    assert result.exit_code == 1
    assert "error: no server has answered for" in result.stderr
    assert "nothing was sampled" in result.stderr


def test_an_answer_on_the_own_engine_is_limited(env, tmp_path):
    """Random weights never end an answer: without a limit the evaluation would not end either."""
    flags = ("-m", "tiny", "-n", 1, "-r", 1)
    first = invoke("eval", env, *flags, "--run", tmp_path / "first")
    assert "at most 512 tokens an answer, from the default; -t changes it" in first.stderr
    (tmp_path / "adding" / "train.toml").write_text("[sampling]\nmax_tokens = 3\n")
    own = invoke("eval", env, *flags, "--run", tmp_path / "own", "--json")
    assert f"at most 3 tokens an answer, from {env}" in own.stderr
    assert json.loads(own.stdout)["usage"]["num_completion_tokens"] <= 3
    given = invoke("eval", env, *flags, "-t", 2, "--run", tmp_path / "given", "--json")
    assert "at most" not in given.stderr
    assert json.loads(given.stdout)["usage"]["num_completion_tokens"] <= 2
    (tmp_path / "adding" / "train.toml").write_text("[sampling]\nmax_tokens = true\n")
    wrong = invoke("eval", env, *flags, "--run", tmp_path / "wrong")
    assert wrong.exit_code == 2
    assert "is True, not a whole number above 0" in wrong.stderr
