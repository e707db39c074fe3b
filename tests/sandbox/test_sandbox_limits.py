"""Limits, and that the whole tree is dead in time, at every level that this machine has."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attacks import ATTACKS

from rolltree.sandbox import Limits, LocalBackend, RunResult
from rolltree.sandbox.machine import this_machine
from rolltree.values.errors import ConfigError, SandboxError, SandboxFileError, SandboxUnavailable
from wait_kit import until

LEVELS = ["bubblewrap", "landlock"]


@pytest.fixture(params=LEVELS)
async def sandbox(request):
    if request.param == "bubblewrap" and this_machine().bwrap is None:
        pytest.skip("bubblewrap is not installed")
    try:
        backend = LocalBackend(request.param, allow_weaker=["processes", "disk"])
        made = await backend.create(limits=Limits(wall_s=60.0))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


def alive(marker):
    """Return the processes whose arguments contain a marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def running(marker):
    """Like `alive`, without the supervisor, whose arguments name the command too."""
    return [pid for pid in alive(marker) if not _is_supervisor(pid)]


def _is_supervisor(pid):
    try:
        return b"supervisor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def sleeper(marker):
    return f"import time; time.sleep(60) # {marker}"


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60) # {marker}"])
    os._exit(0)
time.sleep({stay})
"""


async def appears(marker):
    await until(lambda: running(marker), "the start of the process")


async def test_plain_runs(sandbox):
    result = await sandbox.run_python("print(input()[::-1])", stdin="olleh")
    assert (result.stdout, result.ok, result.ended, result.exit_code) == (
        "hello\n",
        True,
        "exit",
        0,
    )
    result = await sandbox.run_python("import sys; print('no', file=sys.stderr); sys.exit(3)")
    assert (result.stderr, result.exit_code, result.ok) == ("no\n", 3, False)
    assert result.text() == "no\n[exit code 3]"
    result = await sandbox.run_python("import os; os.abort()")
    assert (result.ended, result.signal, result.exit_code) == ("signal", signal.SIGABRT, None)
    result = await sandbox.run(["no-such-program"])
    assert result.exit_code == 126
    assert result.level == sandbox.level.name


@pytest.mark.parametrize("part", ["a\0b", "x" * 200_000, "x" * 3_000_000])
async def test_a_command_that_cannot_start_is_an_answer(sandbox, part):
    """Such a command was a SandboxError, which fails the rollout: a way out of the baseline."""
    result = await sandbox.run(["sh", "-c", f"echo {part}"])
    assert (result.ended, result.exit_code) == ("exit", 126)
    assert result.text().endswith("[exit code 126]")
    assert (await sandbox.run(["echo", "on"])).stdout == "on\n"


async def test_lone_surrogates_become_question_marks(sandbox):
    """JSON of a model can have them, UTF-8 cannot."""
    assert (await sandbox.run(["echo", "\ud800"])).stdout == "?\n"
    assert (await sandbox.run(["cat"], stdin="\udfff")).stdout == "?"
    assert (await sandbox.run_python("print('\ud800')")).stdout == "?\n"
    with pytest.raises(SandboxError, match="not a path inside"):
        await sandbox.write_file("\ud800", "x")


async def test_environment_is_an_allow_list(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = await sandbox.run_python("import os; print(sorted(os.environ))")
    names = set(re.findall(r"'(\w+)'", result.stdout))
    assert names == {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONUNBUFFERED",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    }


async def test_ordinary_code_works(sandbox):
    code = """
import asyncio, json, multiprocessing, os, sqlite3, subprocess, tempfile, threading, zipfile
with tempfile.TemporaryDirectory() as folder:
    with zipfile.ZipFile(folder + "/a.zip", "w") as archive:
        archive.writestr("x", "1")
    base = sqlite3.connect(folder + "/a.db")
    base.execute("create table t (x)")
    base.close()
async def main():
    process = await asyncio.create_subprocess_exec("echo", "child", stdout=subprocess.PIPE)
    return (await process.communicate())[0]
print(asyncio.run(main()), subprocess.run(["ls"], capture_output=True).returncode)
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
def double(x):
    return 2 * x
if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.Process(target=lambda: theirs.send(double(4)))
    child.start()
    print(ours.recv())
    child.join()
    child = subprocess.Popen(["sleep", "9"])
    child.kill()
    print(child.wait())
"""
    result = await sandbox.run_python(code)
    assert result.stdout == "b'child\\n' 0\nthread\n8\n-9\n", result.text()


async def test_wall_limit_kills_the_tree_in_time(sandbox):
    marker = f"mark-{sandbox.id}"
    code = DAEMON.format(marker=marker, stay=60)
    limits = Limits(wall_s=3.0)
    work = asyncio.create_task(sandbox.run_python(code, limits=limits))
    await appears(marker)
    result = await work
    left = running(marker)
    assert result.ended == "wall"
    assert left == []
    assert 3.0 <= result.wall_s < 6.0  # 3.02 on an idle machine


async def test_a_daemon_does_not_outlive_its_program(sandbox):
    marker = f"mark-{sandbox.id}"
    result = await sandbox.run_python(DAEMON.format(marker=marker, stay=0.2))
    assert result.ok
    assert running(marker) == []


async def test_close_kills_in_time(sandbox):
    marker = f"mark-{sandbox.id}"
    work = asyncio.create_task(sandbox.run_python(DAEMON.format(marker=marker, stay=60)))
    await appears(marker)
    began = time.monotonic()
    closing = asyncio.create_task(sandbox.close())
    while running(marker):  # noqa: ASYNC110  processes send no events
        await asyncio.sleep(0.005)
    assert time.monotonic() - began < 5.0  # 0.03 on an idle machine
    await closing
    with pytest.raises(SandboxError, match="closed"):
        await work
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run(["true"])


async def test_cancellation_leaves_nothing(sandbox):
    marker = f"mark-{sandbox.id}"
    work = asyncio.create_task(sandbox.run_python(DAEMON.format(marker=marker, stay=60)))
    await appears(marker)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert alive(marker) == []
    assert (await sandbox.run_python("print('again')")).stdout == "again\n"


async def test_cpu_limit_counts_all_processes(sandbox):
    code = "import os\nos.fork(); os.fork()\nwhile True: pass"
    result = await sandbox.run_python(code, limits=Limits(wall_s=60, cpu_s=0.5))
    assert result.ended == "cpu"
    assert 0.5 <= result.cpu_s < 1.5


async def test_memory_of_one_process(sandbox):
    code = "try: bytearray(2**30)\nexcept MemoryError: print('no')"
    result = await sandbox.run_python(code, limits=Limits(memory_bytes=256 * 2**20))
    assert result.stdout == "no\n"


async def test_memory_of_many_processes(sandbox):
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(b"x" * 60 * 2**20)
        break
time.sleep(60)
"""
    result = await sandbox.run_python(code, limits=Limits(wall_s=60, memory_bytes=150 * 2**20))
    assert result.ended == "memory"


@pytest.mark.parametrize("kind", ["fork", "thread"])
async def test_fork_bombs_are_bounded(sandbox, kind):
    code = {
        "fork": """
import os, time
for _ in range(400):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError as error:
        print("refused", flush=True)
        os._exit(0)
time.sleep(60)
""",
        "thread": """
import threading, time, os
for _ in range(400):
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError:
        print("refused", flush=True)
        os._exit(0)
time.sleep(60)
""",
    }[kind]
    result = await sandbox.run_python(code, limits=Limits(wall_s=60, max_processes=12))
    assert result.ended == "processes" or result.stdout == "refused\n"


async def test_disk_fill(sandbox):
    """The kernel says that there is no space; where only polling sees it, the tree is killed."""
    limits = Limits(wall_s=60, disk_bytes=2**20, max_files=50)
    result = await sandbox.run_python("open('x', 'wb').write(bytes(2**22))", limits=limits)
    assert result.ended == "disk" or re.search("File too large|No space left", result.stderr)
    code = "import time\nfor i in range(8): open(f'y{i}', 'wb').write(bytes(2**18))\ntime.sleep(60)"
    result = await sandbox.run_python(code, limits=limits)
    assert result.ended == "disk" or "No space left" in result.stderr
    assert ("No space left" in result.stderr) is ("disk" not in sandbox.level.missing)


async def test_many_files(sandbox):
    code = "import time\nfor i in range(200): open(f'f{i}', 'w').close()\ntime.sleep(60)"
    result = await sandbox.run_python(code, limits=Limits(wall_s=60, max_files=50))
    assert result.ended == "disk" or "No space left" in result.stderr


async def test_a_full_folder_is_an_answer(sandbox):
    """The next program finds no space for its own file: that is the code's doing, no failure."""
    if "disk" in sandbox.level.missing:
        pytest.skip("this machine bounds no folder")
    limits = Limits(wall_s=60, disk_bytes=2**20)
    fill = "file = open('x', 'wb', buffering=0)\nwhile file.write(b'x' * 4096): pass"
    assert "No space left" in (await sandbox.run_python(fill, limits=limits)).stderr
    assert (await sandbox.run_python("print('small')", limits=limits)).stdout == "small\n"
    result = await sandbox.run_python("print('large')" + "#" * 10_000, limits=limits)
    assert (result.ended, result.stdout) == ("disk", "")
    assert "delete files" in result.text()
    with pytest.raises(SandboxFileError, match=r"Limits\.disk_bytes"):
        await sandbox.write_file("y", bytes(2**20))
    assert "y" not in await sandbox.list_files()
    assert (await sandbox.run(["rm", "x"], limits=limits)).ok
    assert (await sandbox.run_python("print('on')", limits=limits)).stdout == "on\n"


async def test_a_run_may_have_wider_and_narrower_bounds(sandbox):
    if "disk" in sandbox.level.missing:
        pytest.skip("this machine bounds no folder")
    fill = "open('x', 'wb').write(bytes({}))"
    wide = Limits(wall_s=60, disk_bytes=80 * 2**20)
    assert (await sandbox.run_python(fill.format(70 * 2**20), limits=wide)).ok
    assert len(await sandbox.read_file("x", max_bytes=2**27)) == 70 * 2**20
    narrow = Limits(wall_s=60, disk_bytes=2**20)
    assert (await sandbox.run(["sleep", "60"], limits=narrow)).ended == "disk"


SAMPLE = (
    *("unlinked files, allocated", "files without a name", "files in flight between sockets"),
    *("2,300 nested folders", "sleeping children", "full sockets", "limits raised"),
    *("mappings of many processes", "shared memory of which a page shows"),
    *("shared memory of /dev/zero", "children that nobody waits for"),
    *("brief children that nobody waits for", "children that nobody waits for, by a flag"),
    *("blocks of processes whose first thread ended", "blocks of processes with misleading names"),
    "full sockets of processes whose first thread ended",
)


@pytest.mark.parametrize("name", SAMPLE)
async def test_attacks(sandbox, name):
    """Some of the attacks that `benchmarks/sandbox.py` runs, each against the real kernel."""
    found = ATTACKS[name]
    result = await sandbox.run_python(found.program, limits=found.limits)
    assert found.verdict(result, sandbox.level.missing) in ("stopped", "named")


def test_an_attack_that_gets_through_is_seen():
    found = ATTACKS["files without a name"]
    through = RunResult(f"held 0\nheld {2**26}\n", "", "exit", 0)
    assert found.verdict(through, ()).startswith("PASSED: held 67,108,864 bytes on disk")
    assert found.verdict(through, ("disk",)) == "named"
    assert found.verdict(through, ("processes",)).startswith("PASSED")
    assert found.verdict(RunResult("", "no Python", "exit", 1), ("disk",)).startswith("broken")
    assert len(ATTACKS) >= 40


async def test_output_flood(sandbox):
    code = "import sys\nwhile True: sys.stdout.write('x' * 1000); sys.stderr.write('y' * 1000)"
    result = await sandbox.run_python(code, limits=Limits(output_bytes=5000))
    assert result.ended == "output"
    assert len(result.stdout) + len(result.stderr) == 5000
    assert "too much output" in result.text()


async def test_open_files(sandbox):
    code = """
kept = []
try:
    while True:
        kept.append(open('x', 'w'))
except OSError:
    print(len(kept))
"""
    result = await sandbox.run_python(code, limits=Limits(max_open_files=20))
    assert 10 <= int(result.stdout) < 20


async def test_runs_side_by_side(sandbox):
    results = await asyncio.gather(*(sandbox.run_python(f"print({i})") for i in range(4)))
    assert [result.stdout for result in results] == ["0\n", "1\n", "2\n", "3\n"]


async def test_stdin_larger_than_a_pipe_that_nobody_reads(sandbox):
    result = await sandbox.run(["true"], stdin="x" * 2**20)
    assert result.ok


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_limits_are_positive(name):
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: 0})


def test_the_host_process_dies_and_takes_the_tree_with_it(tmp_path):
    marker = f"mark-host-{os.getpid()}"
    host = f"""
import asyncio
from rolltree.sandbox import LocalBackend
async def main():
    sandbox = await LocalBackend(base={str(tmp_path)!r}).create()
    await sandbox.run_python({DAEMON.format(marker=marker, stay=60)!r})
asyncio.run(main())
"""
    program = tmp_path.with_suffix(".py")  # in a file: its arguments must not have the marker
    program.write_text(host)
    process = subprocess.Popen([sys.executable, str(program)])
    try:
        asyncio.run(appears(marker))
    finally:
        process.kill()
        process.wait()
    began = time.monotonic()
    while running(marker) and time.monotonic() - began < 60:
        time.sleep(0.005)
    assert time.monotonic() - began < 5.0  # 0.03 on an idle machine
    assert len(list(tmp_path.iterdir())) == 1  # its folder: the next one removes it
    made = asyncio.run(_create_and_close(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert made.level.missing == ()


async def _create_and_close(base):
    sandbox = await LocalBackend(base=base).create()
    await sandbox.close()
    return sandbox
