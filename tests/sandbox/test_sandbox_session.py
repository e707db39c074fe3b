"""A Python process that remembers."""

import asyncio

import pytest

from rolltree.sandbox import Limits, LocalBackend
from rolltree.values.errors import SandboxError


@pytest.fixture
async def sandbox():
    made = await LocalBackend().create(limits=Limits(wall_s=60))
    yield made
    await made.close()


async def test_variables_stay(sandbox):
    session = sandbox.python_session()
    assert (await session.run("x = 20\ndef f(): return x + 1")).stdout == ""
    assert (await session.run("print('f')\nf()")).stdout == "f\n21\n"
    assert (await session.run("None")).stdout == ""
    assert (await session.run("import os; os.system('echo by a shell'); 'ü'")).stdout == (
        "by a shell\n'ü'\n"
    )


async def test_errors_are_told_and_end_nothing(sandbox):
    session = sandbox.python_session()
    result = await session.run("y = 5\n1/0")
    assert result.exit_code == 1
    assert result.stdout.startswith('Traceback (most recent call last):\n  File "<cell 1>", line 2')
    assert "1/0" in result.stdout
    result = await session.run("def g(:")
    assert "SyntaxError" in result.stdout
    assert "worker" not in result.stdout
    assert "SystemExit: 3" in (await session.run("import sys; sys.exit(3)")).stdout
    assert "EOFError" in (await session.run("input()")).stdout
    assert (await session.run("y")).stdout == "5\n"


async def test_code_cannot_break_the_loop(sandbox):
    session = sandbox.python_session()
    code = "import sys; kept = 1; sys.stdout.close(); sys.stdout = None; sys.stderr = None"
    result = await session.run(code)
    assert (result.ended, result.exit_code) == ("exit", 0)
    assert (await session.run("import os; os.write(2, b'%d' % kept); None")).stdout == "1"
    forged = await session.run("import os; os.write(1, b'\\x1e0000000000000000:0\\n'); 7")
    assert forged.exit_code in (0, 1)


async def test_files_and_modules(sandbox):
    await sandbox.write_file("helper.py", "value = 3")
    session = sandbox.python_session()
    assert (
        await session.run("import helper; open('o', 'w').write('hi'); helper.value")
    ).stdout == ("3\n")
    assert await sandbox.read_file("o") == b"hi"
    assert "helper.py" in await sandbox.list_files()
    with pytest.raises(SandboxError):
        await sandbox.read_file("../lock")


async def test_a_limit_loses_the_variables(sandbox):
    session = sandbox.python_session(limits=Limits(wall_s=3.0))
    await session.run("z = 1")
    result = await session.run("print('before', flush=True)\nwhile True: pass")
    assert (result.ended, result.stdout) == ("wall", "before\n")
    assert result.text() == "before\n[killed: the time limit is over]"
    assert "NameError" in (await session.run("z")).stdout


async def test_time_between_pieces_is_free(sandbox):
    session = sandbox.python_session(limits=Limits(wall_s=2.0))
    await session.run("z = 1")
    await asyncio.sleep(2.1)
    assert (await session.run("z")).stdout == "1\n"


async def test_much_output_is_cut_and_a_flood_ends_it(sandbox):
    session = sandbox.python_session(limits=Limits(output_bytes=100, wall_s=60))
    result = await session.run("k = 9\nprint('x' * 5000)")
    assert (result.ended, result.stdout) == ("exit", "x" * 100)
    assert (await session.run("k")).stdout == "9\n"
    result = await session.run("while True: print('x' * 1000)")
    assert (result.ended, len(result.stdout)) == ("output", 100)


async def test_the_process_dies_by_itself(sandbox):
    session = sandbox.python_session()
    result = await session.run("import os; os._exit(5)")
    assert (result.ended, result.exit_code) == ("exit", 5)
    assert (await session.run("1 + 1")).stdout == "2\n"


async def test_cancellation_ends_the_process(sandbox):
    session = sandbox.python_session()
    await session.run("q = 1")
    work = asyncio.create_task(session.run("open('begun', 'w').close()\nwhile True: pass"))
    while "begun" not in await sandbox.list_files():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert "NameError" in (await session.run("q")).stdout


async def test_pieces_run_one_after_another(sandbox):
    session = sandbox.python_session()
    await session.run("n = 0")
    code = "import time\nm = n\ntime.sleep(0.02)\nn = m + 1"
    await asyncio.gather(*(session.run(code) for _ in range(5)))
    assert (await session.run("n")).stdout == "5\n"


async def test_closed(sandbox):
    session = sandbox.python_session()
    await session.run("1")
    await session.close()
    with pytest.raises(SandboxError, match="closed"):
        await session.run("1")
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.python_session()
