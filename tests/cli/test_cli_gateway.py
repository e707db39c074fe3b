"""`rolltree gateway` as a process: sessions over HTTP, stored in a run, kept over a restart."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from rolltree.gateway.cli.gateway import seed_of_start
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.testing import ScriptedServer

ADMIN_KEY = "an-admin-key-of-the-test"


@contextlib.contextmanager
def gateway(*words, env=None):
    """Start the command and give its URL; it is told to end, and must."""
    program = "from rolltree.cli import main; main()"
    command = [sys.executable, "-c", program, "gateway", *map(str, words), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving sessions of "), line
        yield line.split()[-1], process
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest


def ask(url, key, body=None, method=None):
    """Send a request with a key; return the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def chat(session, text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    answer = ask(f"{session['base_url']}/chat/completions", session["api_key"], body)
    return answer["choices"][0]["message"]["content"]


def test_sessions_in_front_of_a_url_are_stored_and_kept(tmp_path):
    run = tmp_path / "run"
    keys = {"ROLLTREE_TEST_ADMIN": ADMIN_KEY, "ROLLTREE_TEST_KEY": "the-key-of-the-server"}
    with ScriptedServer(
        lambda m: m[-1]["content"] * 2, api_key=keys["ROLLTREE_TEST_KEY"]
    ) as server:
        words = [server.base_url, "-m", server.model, "-k", "ROLLTREE_TEST_KEY", "--run", run]
        words += ["--admin-key-env", "ROLLTREE_TEST_ADMIN", "--max-calls", 3]
        with gateway(*words, env=keys) as (url, _):
            first = ask(f"{url}/sessions", ADMIN_KEY, {"info": {"group_id": "g"}})
            second = ask(f"{url}/sessions", ADMIN_KEY, {})
            assert chat(first, "a") == "aa"
            assert chat(second, "b") == "bb"
            outcome = {"reward": 0.5, "metrics": {"solved": 1.0}}
            ask(f"{url}/sessions/{first['id']}/close", ADMIN_KEY, outcome)
        with gateway(*words, env=keys) as (url, process):
            assert process.stdout.readline() == "1 sessions of an earlier start are open\n"
            second["base_url"] = f"{url}/s/{second['id']}/v1"
            assert chat(second, "c") == "cc"
            assert ask(f"{url}/sessions/{second['id']}", ADMIN_KEY)["num_calls"] == 2
            assert chat(second, "d") == "dd"
            with pytest.raises(urllib.error.HTTPError) as refused:
                chat(second, "e")
            assert "reached its limit" in refused.value.read().decode()
            ask(f"{url}/sessions/{second['id']}/close", ADMIN_KEY, {"reward": 1.0})
    with Run.open(run, mode="r") as stored:
        results = list(decode_results(stored.rollouts()))
    found = {r.request.request_id: r.states[0] for r in results}
    assert {key: (s["reward"], len(s["trajectory"])) for key, s in found.items()} == {
        first["id"]: (0.5, 1), second["id"]: (1.0, 3),
    }  # fmt: skip
    everything = b"".join(file.read_bytes() for file in run.rglob("*") if file.is_file())
    for secret in (*keys.values(), first["api_key"], second["api_key"]):
        assert secret.encode() not in everything


@pytest.mark.slow
def test_no_start_on_a_run_samples_what_an_earlier_one_did(tmp_path):
    seeds = []
    for seed in (7, 7, 7):
        with Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
            seeds.append(seed_of_start(run, seed))
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


def test_a_model_of_this_process(tmp_path):
    pytest.importorskip("torch")
    words = ["tiny", "--device", "cpu", "--dtype", "float32", "--time-limit", 600]
    with gateway(*words, "--unix-socket", tmp_path / "s.sock") as (
        url,
        process,
    ):
        key = process.stdout.readline().removeprefix("admin key: ").strip()
        session = ask(f"{url}/sessions", key, {"sampling": {"max_tokens": 4}})
        chat(session, "hello")
        shown = ask(f"{url}/sessions/{session['id']}", key)
        assert shown["num_calls"] == 1
        assert 1 <= shown["num_sampled_tokens"] <= 4
        assert (tmp_path / "s.sock").is_socket()
    assert not (tmp_path / "s.sock").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["http://127.0.0.1:9/v1", "-m", "x", "--device", "cpu"], "--device"),
        (["http://127.0.0.1:9/v1", "-m", "x", "--dtype", "float32"], "--dtype"),
        (["tiny", "--dtype", "float33"], "float33"),
        (["tiny", "--device", "gpu9"], "gpu9"),
    ],
)
def test_an_engines_device_and_dtype_are_checked(words, named):
    pytest.importorskip("torch")
    program = "from rolltree.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "gateway", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr
