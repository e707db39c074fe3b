"""Attempts to get out, each run inside the sandbox at every level that this machine has."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import attempts
import pytest
from bait_kit import FILES, SECRET, a_victim, heard, laid_out, tried

from rolltree.sandbox import Limits, LocalBackend
from rolltree.sandbox.machine import this_machine
from rolltree.values.errors import SandboxUnavailable

SOURCE = Path(attempts.__file__).read_text()
LEVELS = ["bubblewrap", "landlock"]
MAY_MISS = ["processes", "disk"]


@pytest.fixture(scope="module")
def victim():
    with a_victim() as process:
        yield process


@pytest.fixture(scope="module")
def bait(victim):
    with laid_out(victim, "inside") as facts, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLTREE_SECRET_TOKEN", SECRET)
        yield facts


@pytest.fixture(scope="module", params=LEVELS)
def inside(request, bait):
    """A Python session in a sandbox of one level; the attempts are defined in it."""
    if request.param == "bubblewrap" and this_machine().bwrap is None:
        pytest.skip("bubblewrap is not installed")
    with asyncio.Runner() as runner:
        try:
            sandbox = runner.run(LocalBackend(request.param, allow_weaker=MAY_MISS).create())
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        session = sandbox.python_session(limits=Limits(wall_s=60))

        def attempt(name):
            if attempts.NEEDS.get(name) in sandbox.level.missing:
                pytest.skip("the level says that it lacks this")
            return runner.run(tried(session, bait, SOURCE, name))

        yield attempt
        runner.run(sandbox.close())


@pytest.mark.parametrize("name", sorted(attempts.ATTEMPTS))
def test_no_way_out(inside, name):
    result = inside(name)
    assert result.stdout.startswith("blocked"), result.text()
    assert SECRET not in result.stdout


def test_there_are_at_least_120():
    assert len(attempts.ATTEMPTS) >= 120
    assert len(attempts.CONTROLS) >= 45


def test_the_bait_is_untouched(inside, bait):
    for name in ("truncate_the_bait", "delete_the_bait", "rename_the_bait", "append_to_the_bait"):
        inside(name)
    for name in FILES:
        assert Path(bait[name]).read_text() == SECRET
        assert Path(bait[name]).stat().st_mode & 0o777 == 0o666
    assert not list(Path(bait["dir"]).glob("written*"))


def test_the_same_attempts_get_through_outside():
    """The bait is real: without a sandbox these attempts succeed, signals arrive, files change."""
    with a_victim() as victim, laid_out(victim, "outside") as bait:
        facts = json.dumps({**bait, "own_fds": 0})
        out = subprocess.run(
            [sys.executable, "-c", SOURCE, facts],
            capture_output=True,
            text=True,
            check=True,
            cwd=bait["dir"],
        )
        assert Path(bait["victim"]).read_text() == ""
        assert heard(victim, within_s=60.0).startswith("signal")
    verdicts = json.loads(out.stdout.splitlines()[-1])
    through = {name for name, verdict in verdicts.items() if verdict.startswith("ESCAPED")}
    assert set(verdicts) - through <= _MAY_FAIL_OUTSIDE


_MAY_FAIL_OUTSIDE = {  # on a host that is a container itself, or has no such file
    "clone with a user namespace",
    "read /proc/1/environ",
    "read /etc/hostname",
    "open a socket: IPv6 stream",
    "open a socket: netlink",
}


def test_no_signal_reached_the_victim(inside, victim):
    """A call that is refused might still have sent one: the victim is asked too."""
    for name in ("signal_by_descriptor_owner", "signal_a_victim", "signal_a_victim_by_queue"):
        inside(name)
    assert heard(victim) == ""


def test_nothing_is_left_of_the_threads():
    assert threading.active_count() < 20
