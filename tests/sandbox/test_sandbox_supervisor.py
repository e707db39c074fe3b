"""What the supervisor counts, apart from a sandbox."""

import builtins
import json
import os
import subprocess
import sys

from rolltree.sandbox import supervisor

COUNT = """
import ctypes, os, subprocess, sys, time
from rolltree.sandbox.supervisor import Watch, descendants
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
process = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
watch = Watch(
    {"limits": {"wall_s": 60}, "folder": "/", "folder_fd": None, "control_fd": 0,
     "trusted_processes": 0, "windowed": False, "cgroup": None, "is_limited": True,
     "has_network": False}, process.pid)
while watch.reap() and watch.main_status is None:
    total = watch.cpu_s(list(descendants(os.getpid())))
    time.sleep(0.02)
print(total, watch.loses_cpu)
"""
CHILDREN = """
import os, signal, time
{before}
for _ in range(20):
    if os.fork() == 0:
        end = time.process_time() + 0.05
        while time.process_time() < end: pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


def counted(before):
    """Return the CPU seconds of 20 children with 0.05 s each as counted, and how."""
    command = [sys.executable, "-c", COUNT, CHILDREN.format(before=before)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    total, loses = out.split()
    return float(total), loses == "True"


def test_children_that_are_waited_for_count_once():
    total, loses = counted("")
    assert not loses
    assert 0.95 <= total < 3.0  # 1.0 and what Python itself takes


def test_children_that_nobody_waits_for_count():
    total, loses = counted("signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    assert loses
    assert total >= 0.3  # when each is seen is a matter of chance


def test_what_a_process_hides_counts_as_the_worst(monkeypatch):
    """A program that nobody may read hides its descriptors and mappings from other users."""
    sockets = supervisor.num_descriptors(os.getpid())
    pages = supervisor.address_pages(os.getpid())
    plain = builtins.open

    def hidden(path, *arguments, **settings):
        if str(path).endswith("/maps"):
            raise PermissionError
        return plain(path, *arguments, **settings)

    def refused(path):
        raise PermissionError

    monkeypatch.setattr(builtins, "open", hidden)
    monkeypatch.setattr(os, "scandir", refused)
    found = supervisor.descriptors(os.getpid())
    assert len(found) >= sockets - 1
    assert all(kind.startswith("socket:") for kind in found)
    assert supervisor.num_mappings(os.getpid()) >= 0.5 * pages


def test_a_name_that_is_no_text_hides_nothing():
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) Z 0', 0, 0, 0); print(1); input()"
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert supervisor.stat_of(process.pid)[1] > 2**20
        process.kill()


def test_processes_nested_deeper_than_calls_are_found(monkeypatch):
    monkeypatch.setattr(supervisor, "children_of", lambda pid: [pid + 1] if pid < 5000 else [])
    assert list(supervisor.descendants(0)) == list(range(1, 5001))


def test_a_supervisor_that_fails_leaves_no_process():
    spec = {
        "limits": {"wall_s": 60},
        "folder": "/",
        "cwd": "/",
        "tmpfs": "",
        "env": {},
        "after": [],
    }
    spec |= {"command": ["/bin/sleep", "60"], "ready_at": 0, "cgroup": None, "mount_fd": None}
    spec |= {"folder_fd": None, "trusted_processes": 0, "windowed": False}
    spec |= {"is_limited": True, "has_network": False}
    read, write = os.pipe()
    spec |= {"control_fd": read, "status_fd": write}  # its other limits are missing
    command = [sys.executable, supervisor.__file__, json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, pass_fds=(read, write), timeout=30)
    assert done.returncode != 0  # and here it ended: `sleep` let go of the pipe
    os.close(read)
    os.close(write)


def test_what_is_slow_to_measure_is_measured_in_turns(monkeypatch):
    """Limits on time wait for one process at most, and no process is left out for good."""
    now, asked = 0.0, []

    def measure(pid):
        nonlocal now
        now += 0.5
        asked.append(pid)
        return 100

    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    now, seen = 1000.0, {}
    sums = [supervisor.in_turns(seen, [1, 2, 3], measure, 0.0) for _ in range(4)]
    assert (sums, asked) == ([100, 200, 300, 300], [1, 2, 3, 1])
    assert supervisor.in_turns(seen, [2], measure, 9.0) == 100  # measured a moment ago
    assert len(asked) == 4


def test_memory_is_measured_in_turns(monkeypatch):
    asked = []
    monkeypatch.setattr(supervisor, "proportional", lambda pid: asked.append(pid) or 7)
    monkeypatch.setattr(supervisor.time, "monotonic", iter(range(1000, 2000)).__next__)
    watch = supervisor.Watch.__new__(supervisor.Watch)
    watch.portions = {}
    assert (watch.proportional_bytes([1, 2, 3]), asked) == (7, [1])


WITHOUT_PROC = """
import subprocess, sys
from rolltree.sandbox import supervisor
supervisor.HAS_PROC, supervisor.descendants = False, lambda pid: iter(())
spec = {"limits": {"wall_s": 60}, "folder": "/", "folder_fd": None, "control_fd": 0,
        "trusted_processes": 0, "windowed": False, "cgroup": None, "is_limited": False,
        "has_network": False}
code = "import os, time; os.fork(); print(1, flush=True); time.sleep(600)"
process = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
process.stdout.readline(), process.stdout.readline()
supervisor.Watch(spec, process.pid).kill_all()
print(process.stdout.read())
"""


def test_without_proc_the_group_of_the_command_is_ended():
    """As on a system without /proc, where nothing can be listed."""
    command = [sys.executable, "-c", WITHOUT_PROC]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "b''\n", done.stderr  # both let go of the pipe
