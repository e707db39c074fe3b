"""`OpenEnv` against the server that openenv from PyPI ships as its template: an echo."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import rolltree as rt
from rolltree.testing import ScriptedClient

SERVER = Path(__file__).with_name("programs") / "openenv_server.py"


@pytest.fixture
def server(agents_python: Path, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([agents_python, SERVER, tmp_path, str(port)])
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail("the server did not start")
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_its_template_is_played(server):
    url, _ = server
    # Its server has one session; the others wait for it.
    env = rt.OpenEnv(url, max_sessions=1, num_train=0, num_eval=3, max_turns=2)
    states = env.evaluate_sync(ScriptedClient(["hello", "hi"])).state
    for state in states:
        assert state["error"] is None
        # Its reward is 0.1 for each character, at most 1.
        assert state["reward"] == pytest.approx(0.5 + 0.2)
        assert "Echo environment ready!" in state["prompt"][-1]["content"]
        assert '"echoed_message": "hello"' in state["completion"][1]["content"]
        assert state["world_info"]["original_message"] == "hi"
        assert state["truncation_reason"] == "max_steps"


def test_more_sessions_than_it_has_and_a_kill(server):
    url, process = server

    def killing(messages):
        process.kill()
        process.wait()
        return "late"

    env = rt.OpenEnv(url, num_train=0, num_eval=2, max_turns=2)
    slow = ScriptedClient(["hello", "hi"], delay_s=0.5)
    errors = [state["error"] for state in env.evaluate_sync(slow).state]
    (refused,) = [error for error in errors if error is not None]
    assert refused.type == "WorldUnavailable"
    assert "max_sessions" in refused.message
    one = rt.OpenEnv(url, num_train=0, num_eval=1, max_turns=2)
    (state,) = one.evaluate_sync(ScriptedClient(killing)).state
    assert (state["error"].type, state["reward"]) == ("WorldUnavailable", None)
