"""Worker processes: calls, limits, deaths, cancellation, and that none outlives its owner."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import worker_functions
from rolltree._helpers import workers
from rolltree._helpers.workers import WorkerCallError, WorkerDied, WorkerPool


def pool_of(name, **settings):
    return WorkerPool(f"worker_functions:{name}", **settings)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, within_s=30.0):
    """Wait for something that sends no event."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


VALUES = [None, True, 7, 10**40, 1.5, "ü\ud800", [1, [2]], {"a": {"b": []}}, "x" * 3_000_000]


def test_values_come_back_as_they_were_and_the_process_is_used_again():
    pool = pool_of("echo")
    pids = set()
    for value in VALUES:
        answer = pool.call(value)
        assert answer["value"] == value
        pids.add(answer["pid"])
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_an_error_is_told_with_its_traceback_and_ends_nothing():
    pool = pool_of("fail")
    with pytest.raises(WorkerCallError, match="no such key") as caught:
        pool.call("raise")
    assert caught.value.kind == "KeyError"
    assert "in fail" in caught.value.traceback
    with pytest.raises(WorkerCallError) as caught:
        pool.call("exit")
    assert caught.value.kind == "SystemExit"
    with pytest.raises(WorkerCallError, match="JSON"):
        pool.call("no json")
    with pytest.raises(TypeError, match="JSON"):
        pool.call(object())
    assert pool.call("fine") == "fine"


@pytest.mark.parametrize("how", ["python", "c", "lock", "deaf"])
def test_a_call_that_hangs_is_killed_and_the_next_one_works(how):
    pool = pool_of("hang", limit_s=60.0)
    pid = pool.call("pid")
    data = how if how != "deaf" else "x" * 3_000_000  # it never reads the rest of the request
    if how == "deaf":
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="time") as caught:
        pool.call(data, limit_s=0.2)
    assert caught.value.why == "time"
    assert time.monotonic() - started < 30
    until(lambda: not is_alive(pid))
    assert pool.call("pid") != pid


def starve(pid, held_s):
    """Let a process not run for a while, as on a machine with too much to do."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(held_s)
    with contextlib.suppress(ProcessLookupError):  # killed meanwhile
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("counts_cpu", [True, False])
def test_a_starved_process_is_not_a_slow_one(counts_cpu):
    pool = WorkerPool("worker_functions:compute", limit_s=1.0, counts_cpu=counts_cpu)
    pid = pool.call(0)
    starved = threading.Thread(target=starve, args=(pid, 2.0))
    starved.start()
    try:
        if counts_cpu:
            assert pool.call(0.3) == pid
        else:
            with pytest.raises(WorkerDied, match="time"):
                pool.call(0.3)
    finally:
        starved.join()


@pytest.mark.parametrize(("how", "most_s"), [("python", 60), ("idle", 60)])
def test_a_limit_on_cpu_time_ends_every_call(how, most_s):
    pool = WorkerPool("worker_functions:hang", limit_s=0.3, counts_cpu=True)
    began = time.monotonic()
    with pytest.raises(WorkerDied, match="time"):
        pool.call(how)
    assert (0.3 if how == "python" else 3.0) <= time.monotonic() - began < most_s


def test_too_much_memory_is_told_as_such():
    pool = pool_of("allocate", memory_bytes=256 * 2**20, limit_s=60.0)
    assert pool.call(2**20) == 2**20
    with pytest.raises(WorkerDied) as caught:
        pool.call(2**30)
    assert caught.value.why == "memory"
    assert pool.call(2**20) == 2**20


def test_a_process_that_ends_says_what_it_said():
    pool = pool_of("fail")
    with pytest.raises(WorkerDied, match=r"exit status 3.*goodbye") as caught:
        pool.call("die")
    assert (caught.value.why, caught.value.status) == ("exit", 3)
    with pytest.raises(WorkerDied, match="exit status -11"):
        pool.call("crash")
    assert pool.call("fine") == "fine"


def test_a_process_that_dies_between_calls_is_replaced():
    pool = pool_of("echo")
    first = pool.call(1)["pid"]
    os.kill(first, signal.SIGKILL)
    until(lambda: not is_alive(first))
    assert pool.call(2)["value"] == 2


def test_what_is_printed_does_not_mix_with_replies_and_standard_input_is_empty():
    assert pool_of("noisy").call("x") == ["x", ""]


def test_secrets_are_not_passed_on_unless_asked_for(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pool_of("environment").call("HF_TOKEN") is None
    assert pool_of("environment", inherit_env=True).call("HF_TOKEN") == "secret"


def test_a_call_that_leaves_something_running_ends_its_process_and_what_it_left():
    pool = pool_of("leave")
    for what in ("process", "thread"):
        pid, left = pool.call(what)
        until(lambda pid=pid: not is_alive(pid))
        until(lambda left=left: not (left and is_alive(left)))
    first, _ = pool.call("nothing")
    assert pool.call("nothing") == [first, None]


def test_threads_share_a_bounded_number_of_processes():
    pool = pool_of("echo", max_workers=2, max_idle=2)
    answers = []
    threads = [threading.Thread(target=lambda n=n: answers.append(pool.call(n))) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["value"] for answer in answers) == list(range(40))
    assert len({answer["pid"] for answer in answers}) <= 2


async def test_the_event_loop_goes_on_and_cancellation_kills(tmp_path):
    pool = pool_of("hang")
    note = tmp_path / "pids"
    task = asyncio.create_task(pool.call_async(str(note)))
    while not (note.exists() and note.read_text()):  # noqa: ASYNC110  a file sends no events
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until(lambda: not any(is_alive(int(pid)) for pid in note.read_text().split()))
    assert isinstance(await pool.call_async("pid"), int)


async def test_cancellation_while_the_process_starts(monkeypatch):
    pool = pool_of("hang")
    begun, go_on = threading.Event(), threading.Event()
    begin = workers._Call.begin

    def slowly(self, worker):
        begun.set()
        go_on.wait()
        begin(self, worker)

    monkeypatch.setattr(workers._Call, "begin", slowly)
    task = asyncio.create_task(pool.call_async("lock"))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_worker_ends_with_its_pool():
    pool = pool_of("echo")
    pid = pool.call(1)["pid"]
    del pool
    assert not is_alive(pid)


@pytest.mark.parametrize("how", ["idle", "c", "lock"])
def test_workers_die_with_the_process_that_started_them(tmp_path, how):
    """Also those that hang in C, and their children; and though the starting thread has ended."""
    note = tmp_path / "pids"
    program = f"""
import sys, threading, time
sys.path[:] = {sys.path!r}
from rolltree._helpers.workers import WorkerPool
pool = WorkerPool("worker_functions:hang")
thread = threading.Thread(target=pool.call, args=("pid",))
thread.start()
thread.join()
threading.Thread(target=pool.call, args=({str(note)!r} + ":" + {how!r},)).start()
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program])
    until(lambda: note.exists() and note.read_text().count(" ") == 1)
    owner.kill()
    owner.wait()
    pids = [int(pid) for pid in note.read_text().split()]
    until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_forked_child_does_not_use_its_parents_workers():
    pool = pool_of("echo")
    first = pool.call(1)["pid"]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if pool.call(2)["pid"] != first else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.call(3)["pid"] == first


def test_a_worker_that_cannot_start_says_why(monkeypatch):
    with pytest.raises(RuntimeError, match=r"(?s)did not start.*No module named 'no_such_module'"):
        WorkerPool("no_such_module:function").call(1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="exit status 1"):
        pool_of("echo").call(1)


def test_functions_are_importable():
    assert worker_functions.echo(1)["value"] == 1
