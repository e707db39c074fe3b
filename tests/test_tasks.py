"""What must end although its task is cancelled, and a CancelledError that nobody asked for."""

import asyncio

import pytest

from rolltree.tasks import being_cancelled, outlast, uninterrupted


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


async def test_a_result_and_an_error_pass_through():
    assert await uninterrupted(asyncio.sleep(0, 7)) == 7

    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await uninterrupted(fails())


async def test_work_ends_although_its_task_is_cancelled_twice():
    done, release = [], asyncio.Event()

    async def work():
        await release.wait()
        done.append(1)

    task = asyncio.create_task(uninterrupted(work()))
    await cancelled_twice(task, release)
    assert done == [1]


async def test_an_error_of_the_work_does_not_swallow_the_cancellation():
    release = asyncio.Event()

    async def work():
        await release.wait()
        raise OSError("the disk is full")

    end = await cancelled_twice(asyncio.create_task(uninterrupted(work())), release)
    assert repr(end.__cause__) == "OSError('the disk is full')"


async def test_outlast_tells_whether_there_was_a_cancellation():
    future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(outlast(future))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    future.set_exception(OSError("left to the caller"))
    assert isinstance(await task, asyncio.CancelledError)
    assert await outlast(future) is None
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
