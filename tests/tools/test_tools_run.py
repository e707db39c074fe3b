"""Calling tools: threads, tasks and processes that end in time, and errors that are answers."""

import asyncio
import json
import os
import sys
import threading
import time

import pytest
import tool_functions

from rolltree.environments.tools import (
    Tool,
    ToolProcessError,
    ToolQuit,
    ToolTimeLimit,
    ToolUnavailable,
    answer_of,
    call_function,
    in_process,
)
from rolltree.environments.tools.run import is_plain, run_all
from rolltree.values.errors import ConfigError
from rolltree.values.steps import ToolRequest
from wait_kit import until


async def none_left(name):
    """Wait until no thread has this name; ending takes a moment."""
    await until(lambda: name not in [thread.name for thread in threading.enumerate()])


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


async def until_dead(*pids):
    await until(lambda: not any(is_alive(pid) for pid in pids))


async def call(func, limit_s=60.0, **arguments):
    tool = Tool.of(func)
    return await call_function(tool, tool.read_arguments(arguments), limit_s=limit_s)


# Threads and tasks


async def test_a_tool_in_time_and_one_that_is_late():
    assert await call(tool_functions.sleepy, seconds=0) == "awake"
    assert await call(tool_functions.sleepy, limit_s=None, seconds=0) == "awake"
    began = time.monotonic()
    with pytest.raises(ToolTimeLimit, match=r"sleepy took longer than 0\.02 s"):
        await call(tool_functions.sleepy, limit_s=0.02, seconds=30)
    assert time.monotonic() - began < 25
    await none_left("rolltree-tool-sleepy")


async def test_a_plain_function_may_return_something_to_wait_for():
    async def inner():
        await asyncio.sleep(0)
        return "waited"

    def outer():
        """Return a coroutine."""
        return inner()

    def slow():
        """Return one that takes forever."""
        return asyncio.sleep(60)

    assert await call(outer) == "waited"
    with pytest.raises(ToolTimeLimit):
        await call(slow, limit_s=0.02)


async def test_a_timeout_error_of_the_tool_is_reported_as_its_error():
    def impatient():
        """Give up."""
        raise TimeoutError("the page did not load")

    async def impatient_too():
        """Give up."""
        raise TimeoutError("the page did not load")

    for func in (impatient, impatient_too):
        with pytest.raises(TimeoutError, match="did not load"):
            await call(func)


async def test_a_tool_cannot_end_the_program_or_cancel_the_episode():
    def quitting():
        """Quit."""
        sys.exit("bye")

    async def quitting_too():
        """Quit."""
        sys.exit("bye")

    async def cancelling():
        """Cancel itself."""
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    for func in (quitting, quitting_too, cancelling):
        tool = Tool.of(func)
        request = ToolRequest("1", tool.name, {}, "internal")
        answer = await answer_of(request, call_function(tool, {}))
        assert answer.error.type == ToolQuit.__name__, func


async def test_answers_have_a_text_an_error_and_a_duration():
    tool = Tool.of(tool_functions.sleepy)
    request = ToolRequest("7", "sleepy", {"seconds": 0.01}, "internal")
    answer = await answer_of(request, call_function(tool, request.arguments))
    assert (answer.call_id, answer.name, answer.text, answer.error) == (
        "7",
        "sleepy",
        "awake",
        None,
    )
    assert answer.duration_s >= 0.01
    late = await answer_of(
        request, call_function(tool, request.arguments, limit_s=0.001), error_formatter=repr
    )
    assert late.error.type == "ToolTimeLimit"
    assert late.text.startswith("ToolTimeLimit(")


# Many at once


async def test_results_keep_the_order_of_the_items():
    seen = []

    async def run(item):
        await asyncio.sleep(0.001 * (item % 3))
        seen.append(item)
        return -item

    items = list(range(12))
    assert await run_all(items, lambda item: item % 2 == 0, run) == [-item for item in items]
    assert [item for item in seen if item % 2 == 0] == items[::2]
    assert await run_all([], lambda item: True, run) == []


async def test_an_unavailable_tool_cancels_the_others():
    ended = []

    async def run(item):
        if item == "gone":
            raise ToolUnavailable("gone")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(item)

    before = len(asyncio.all_tasks())
    with pytest.raises(ToolUnavailable, match="gone"):
        await run_all(["a", "gone", "b"], lambda item: False, run)
    assert sorted(ended) == ["a", "b"]
    assert len(asyncio.all_tasks()) == before


# Processes


async def test_tools_in_processes_get_and_give_values():
    told, said = await asyncio.gather(
        call(tool_functions.norm, point={"x": 3, "y": 4}, scale=2.0),
        call(tool_functions.later, text="a"),
    )
    values = json.loads(told)
    assert values["norm"] == 50.0
    assert values["pid"] != os.getpid()
    assert said == "A"
    assert not is_plain(Tool.of(tool_functions.norm))  # such calls run concurrently


async def test_what_goes_wrong_in_a_process_is_an_answer():
    failed, crashed = await asyncio.gather(
        call(tool_functions.fail),
        call(tool_functions.crash, status=3),
        return_exceptions=True,
    )
    assert isinstance(failed, ToolProcessError)
    assert "missing" in str(failed)
    assert "def fail" not in str(failed)
    assert "KeyError" in failed.__notes__[0]
    assert isinstance(crashed, ToolProcessError)
    assert "exit status 3" in str(crashed)
    assert "goodbye" in str(crashed)


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_a_process_that_hangs_in_c_is_killed_with_its_children(tmp_path, how):
    noted = tmp_path / "pids"
    task = asyncio.create_task(
        call(tool_functions.hang, limit_s=2.0 if how == "late" else 60.0, path=str(noted))
    )
    if how == "cancelled":
        await until(lambda: noted.exists() and noted.read_text())
        task.cancel()
    with pytest.raises(ToolTimeLimit if how == "late" else asyncio.CancelledError):
        await task
    if noted.exists() and noted.read_text():  # a slow machine may be late before it is noted
        await until_dead(*map(int, noted.read_text().split()))


def test_what_another_process_could_not_find():
    def local():
        """Be local."""

    with pytest.raises(ConfigError, match="Define it at the top of a module"):
        in_process(local)
