"""What must end although its task is cancelled, and a CancelledError that nobody asked for."""

import asyncio
import gc
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import rolltree._helpers.tasks
from rolltree._helpers.tasks import (
    ShortCollections,
    Terminated,
    being_cancelled,
    contained,
    run_shielded,
    wait_shielded,
    yield_fairly,
)
from rolltree.values.errors import Escaped, record_error


async def cancelled_twice(task, release):
    for _ in range(2):
        for _ in range(3):
            await asyncio.sleep(0)  # it begins, and takes notice of the cancellation
        task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError) as ended:
        await task
    return ended.value


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_memory_is_in_bytes_on_every_system(monkeypatch, platform, unit):
    usage = SimpleNamespace(ru_maxrss=5_000_000)
    monkeypatch.setattr(rolltree._helpers.tasks.resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(sys, "platform", platform)
    assert rolltree._helpers.tasks.peak_rss_bytes() == 5_000_000 * unit


async def test_a_result_and_an_error_pass_through():
    assert await run_shielded(asyncio.sleep(0, 7)) == 7

    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await run_shielded(fails())


async def test_work_ends_although_its_task_is_cancelled_twice():
    done, release = [], asyncio.Event()

    async def work():
        await release.wait()
        done.append(1)

    task = asyncio.create_task(run_shielded(work()))
    await cancelled_twice(task, release)
    assert done == [1]


async def test_an_error_of_the_work_does_not_swallow_the_cancellation():
    release = asyncio.Event()

    async def work():
        await release.wait()
        raise OSError("the disk is full")

    end = await cancelled_twice(asyncio.create_task(run_shielded(work())), release)
    assert repr(end.__cause__) == "OSError('the disk is full')"


async def test_outlast_tells_whether_there_was_a_cancellation():
    future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(wait_shielded(future))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    future.set_exception(OSError("left to the caller"))
    assert isinstance(await task, asyncio.CancelledError)
    assert await wait_shielded(future) is None
    assert isinstance(future.exception(), OSError)


async def test_awaiting_a_cancelled_task_is_not_being_cancelled():
    async def awaits_what_it_cancelled():
        inner = asyncio.create_task(asyncio.sleep(60))
        inner.cancel()
        try:
            await inner
        except asyncio.CancelledError:
            return being_cancelled()

    async def is_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return being_cancelled()

    assert await asyncio.create_task(awaits_what_it_cancelled()) is False
    task = asyncio.create_task(is_cancelled())
    await asyncio.sleep(0.01)
    task.cancel()
    assert await task is True


class TestTurns:
    """With rounds of no length, a round has as many turns as are woken before it is measured."""

    @pytest.fixture(autouse=True)
    def rounds_without_length(self, monkeypatch):
        monkeypatch.setattr("rolltree._helpers.tasks.ROUND_S", 0.0)

    async def test_tasks_that_are_ready_at_once_go_on_in_order_a_few_in_a_round(self):
        went, rounds = [], []

        async def work(number):
            await yield_fairly()
            went.append(number)

        async def watch():
            while len(went) < 200:
                before = len(went)
                await asyncio.sleep(0)
                rounds.append(len(went) - before)

        await asyncio.gather(watch(), *(work(number) for number in range(200)))
        assert went == list(range(200))
        assert max(rounds) <= 8

    async def test_one_that_is_cancelled_does_not_keep_the_others(self):
        went = []

        async def work(number):
            await yield_fairly()
            went.append(number)

        tasks = [asyncio.create_task(work(number)) for number in range(40)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert went == list(range(1, 40, 2))
        await asyncio.wait_for(yield_fairly(), 60)

    async def test_while_there_is_time_nobody_waits(self, monkeypatch):
        monkeypatch.setattr("rolltree._helpers.tasks.ROUND_S", 3600.0)
        turn = yield_fairly()
        with pytest.raises(StopIteration):
            turn.send(None)

    def test_a_loop_that_is_over_is_not_kept(self):
        async def work():
            await asyncio.gather(*(yield_fairly() for _ in range(20)))
            return weakref.ref(asyncio.get_running_loop())

        ended = asyncio.run(work())
        gc.collect()
        assert ended() is None


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.me = self


class TestShortCollections:
    async def test_the_young_do_not_pile_up_while_as_many_objects_go_as_come(self):
        old = [[] for _ in range(30_000)]
        gc.collect()
        with ShortCollections(1000) as collections:
            await asyncio.sleep(0)
            for at in range(len(old)):
                old[at] = []  # one comes and one goes: Python counts none
            await asyncio.sleep(2 * collections.YOUNG_S)
            assert len(gc.get_objects(generation=0)) < 3000
            await asyncio.sleep(2 * collections.YOUNG_S)
            assert len(gc.get_objects(generation=1)) < 3000

    async def test_what_there_was_at_the_start_is_set_aside_until_the_end(self):
        with ShortCollections(1000):
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() == 0

    async def test_old_garbage_is_found_after_ten_thousand_rollouts(self):
        with ShortCollections(1000) as collections:
            ring = Ring()
            found = weakref.ref(ring)
            gc.collect(1)  # now it is old
            del ring
            collections.ended(9_999)
            gc.collect(1)
            assert found() is not None
            collections.ended(1)
            assert found() is None

    async def test_old_garbage_is_found_when_the_process_has_grown(self, monkeypatch):
        peak = rolltree._helpers.tasks.peak_rss_bytes()
        assert peak > 1_000_000
        monkeypatch.setattr(rolltree._helpers.tasks, "peak_rss_bytes", lambda: peak)
        with ShortCollections(1000) as collections:
            ring = Ring()
            found = weakref.ref(ring)
            gc.collect(1)  # now it is old
            del ring
            await asyncio.sleep(3 * collections.YOUNG_S)
            assert found() is not None
            peak += collections.GROWTH_BYTES + 1
            await asyncio.sleep(3 * collections.YOUNG_S)
            assert found() is None

    async def test_the_end_is_not_followed_by_a_full_collection(self):
        usual = gc.get_threshold()
        gc.set_threshold(*usual[:2], 10)  # Python's own; the tests' is higher
        try:
            with ShortCollections(1000):
                for _ in range(20):
                    gc.collect(1)  # a full one is due after ten
            before = gc.get_stats()[2]["collections"]
            kept = [[] for _ in range(20 * usual[0])]
            assert gc.get_stats()[2]["collections"] == before
            assert kept
        finally:
            gc.set_threshold(*usual)

    async def test_few_rollouts_change_nothing_nor_does_a_program_that_freezes_itself(self):
        usual = gc.get_threshold()
        with ShortCollections(31):
            assert gc.get_freeze_count() == 0
            assert gc.get_threshold() == usual
        gc.freeze()
        try:
            frozen = gc.get_freeze_count()
            with ShortCollections(1000):
                assert gc.get_threshold() == usual
            assert gc.get_freeze_count() > frozen / 2  # a few may have gone
        finally:
            gc.unfreeze()

    async def test_two_at_once_end_in_any_order(self):
        usual = gc.get_threshold()
        with ShortCollections(1000):
            with ShortCollections(1000):
                pass
            assert gc.get_freeze_count()
        assert gc.get_freeze_count() == 0
        assert gc.get_threshold() == usual


def test_the_soft_limit_on_open_files_is_raised():
    code = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from rolltree._helpers.tasks import allow_open_files
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    soft, kept, hard = map(int, out.stdout.split())
    assert kept == hard
    assert soft == (65_536 if hard == -1 else min(hard, 65_536))


class Own(BaseException):
    """An author's own class."""


def escape(error):
    with contained():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        *(Own(), SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError()),
        BaseExceptionGroup("", [Own(), ValueError()]),
    ],
)
def test_what_code_raises_to_end_the_program_is_contained(error):
    with pytest.raises(Escaped) as contained_error:
        escape(error)
    assert contained_error.value.raised is error
    record = record_error(contained_error.value, "environment")
    assert (record.type, record.kind) == (type(error).__name__, "episode")
    assert "in escape" in record.traceback


@pytest.mark.parametrize("error", [ValueError(), Terminated(1)])
def test_the_end_of_the_program_is_not_contained(error):
    with pytest.raises(type(error)) as passed:
        escape(error)
    assert passed.value is error


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_the_end_of_a_coroutine_that_is_closed_is_not_contained(depth):
    passed = []

    async def waits(depth):
        try:
            with contained():
                await (waits(depth - 1) if depth else asyncio.sleep(60))
        except BaseException as error:
            passed.append(type(error))
            raise

    work = waits(depth)
    work.send(None)
    work.close()
    assert passed == [GeneratorExit] * (depth + 1)


async def test_the_cancellation_of_a_task_is_not_contained():
    async def waits():
        with contained():
            await asyncio.sleep(60)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_users_ctrl_c_is_not_contained():
    with pytest.raises(KeyboardInterrupt), contained():
        signal.raise_signal(signal.SIGINT)


def test_the_users_second_ctrl_c_is_not_contained():
    """asyncio's handler answers the first one by cancelling the task, and raises at the second."""
    seen = []

    async def busy():
        try:
            with contained():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            seen.append(type(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(busy())
    assert seen == [KeyboardInterrupt]


def test_a_keyboard_interrupt_in_a_thread_is_contained():
    """Python raises Ctrl-C in the main thread only."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(Escaped):
        pool.submit(escape, KeyboardInterrupt()).result()
