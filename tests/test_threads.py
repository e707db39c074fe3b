"""Blocking work in threads that end when nobody waits for them any more."""

import asyncio
import contextvars
import ctypes
import logging
import threading
import time

import pytest

from rolltree._helpers import threads
from rolltree._helpers.threads import ThreadInterrupt, run_in_pool, run_in_thread
from wait_kit import until

NAME = "rolltree-test-work"


def num_running():
    return sum(thread.name == NAME for thread in threading.enumerate())


async def all_ended():
    """Threads that gave their result have a few bytecodes to go."""
    await until(lambda: not num_running())


async def test_a_result_an_error_and_the_context():
    variable = contextvars.ContextVar("variable")
    variable.set("seen")
    assert await run_in_thread(variable.get, name=NAME) == "seen"
    assert await run_in_thread(threading.current_thread, name=NAME) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 / 0, name=NAME)
    with pytest.raises(SystemExit):
        await run_in_thread(lambda: exit(1), name=NAME)
    await all_ended()


async def test_an_exhausted_iterator_is_an_error_and_nobody_waits_for_ever():
    with pytest.raises(RuntimeError, match="StopIteration") as failed:
        await run_in_thread(lambda: next(iter([])), limit_s=5.0, name=NAME)
    assert isinstance(failed.value.__cause__, StopIteration)
    await all_ended()


async def test_python_code_is_stopped_at_its_time_limit():
    turns = []

    def spin():
        while True:
            turns.append(1)
            time.sleep(0.001)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await run_in_thread(spin, limit_s=0.05, name=NAME)
    assert time.monotonic() - began < 60.0
    await all_ended()
    count = len(turns)
    await asyncio.sleep(0.02)
    assert len(turns) == count


async def test_one_that_catches_everything_is_stopped_again(monkeypatch):
    monkeypatch.setattr("rolltree._helpers.threads._GRACE_S", 30.0)  # on a busy machine, too
    caught = []

    def stubborn():
        while len(caught) < 3:
            try:
                while True:
                    time.sleep(0.001)
            except BaseException as error:
                caught.append(type(error))

    with pytest.raises(TimeoutError):
        await run_in_thread(stubborn, limit_s=0.01, name=NAME)
    assert caught == [ThreadInterrupt] * 3
    assert num_running() == 0


async def test_a_call_of_c_is_given_up_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr("rolltree._helpers.threads._GRACE_S", 0.02)
    lock = threading.Lock()
    lock.acquire()
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError):
        await run_in_thread(lock.acquire, limit_s=0.01, name=NAME)
    assert "cannot interrupt" in caplog.text
    assert num_running() == 1
    lock.release()  # the call returns, and the thread ends
    await all_ended()


async def test_cancellation_stops_the_thread_and_is_raised():
    started = threading.Event()

    def spin():
        started.set()
        while True:
            time.sleep(0.001)

    task = asyncio.create_task(run_in_thread(spin, name=NAME))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_ended()


async def test_many_at_once_and_a_race_with_the_limit():
    """Work that ends at its very limit gives its result or a TimeoutError, and never a hang."""

    async def one(number):
        try:
            return await run_in_thread(lambda: time.sleep(0.01), limit_s=0.0095, name=NAME)
        except TimeoutError:
            return number

    outcomes = await asyncio.gather(*(one(number) for number in range(40)))
    assert len(outcomes) == 40
    await all_ended()


async def test_an_exception_raised_at_the_very_end_does_not_come_out_of_the_thread(monkeypatch):
    settle_as_usual = threads._Work._settle

    def settle_and_stop(self, settle, value):
        settle_as_usual(self, settle, value)
        ident = ctypes.c_ulong(threading.get_ident())  # met at one of the next bytecodes
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ThreadInterrupt))

    monkeypatch.setattr(threads._Work, "_settle", settle_and_stop)
    unhandled = []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    for number in range(20):
        assert await run_in_thread(lambda number=number: number, name=NAME) == number
    await all_ended()
    assert unhandled == []


async def test_threads_of_the_pool_see_the_task_context():
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    assert await run_in_pool(variable.get) == "set"
    assert await run_in_pool(threading.current_thread) is not threading.main_thread()
