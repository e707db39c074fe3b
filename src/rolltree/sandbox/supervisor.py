"""The supervisor of one sandboxed process tree: a separate program, run with `python -I -S`.

It starts the command, becomes the parent of orphaned processes of the tree (as a subreaper, so a
process that forks twice or opens its own session is still its child), watches the limits and kills
the tree: at a limit, when the main process ends, or when the control pipe tells it to or closes.
The pipe closes when the process that uses the sandbox ends, however it dies.

It imports only the standard library. Its argument is a JSON object from
`process.SupervisedProcess`. Standard streams are passed to the command unchanged. The control pipe
takes single bytes: b (a limited stretch begins), e (it ends), k (kill). The status pipe gets one
JSON line when no process is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import resource
import select
import signal
import sys
import time

# Importing `typing` takes longer than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

POLL_S = 0.02
_COUNT_S = 0.2
HAS_PROC = os.path.isdir("/proc/self/task")
_PR_SET_CHILD_SUBREAPER = 36
_NEW_NAMESPACE, _NEW_USER, _NS_GET_USERNS = 0x20000, 0x10000000, 0xB701
# No set-user-id programs, no devices, remount.
_TMPFS_FLAGS = 1 << 1 | 1 << 2 | 1 << 5
_PIPE_BYTES = 2**16
# The kernel's memory for one mapping, rounded up (design/0019).
_MAPPING_BYTES = 256
# Memory of a connection, and of a byte in its queues: a byte that is sent alone takes a buffer.
_TCP_BYTES, _TCP_OVERHEAD = 4096, 768
_CPU_TIME, _MEMORY_KILLS = ("cpu.stat", "usage_usec"), ("memory.events", "oom_kill")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Run one tree to its end."""
    spec = json.loads(sys.argv[1])
    # As bytes: Python may decode and add to its own environment as its locale demands.
    names = [name.encode(errors="surrogateescape") for name in spec["env"]]
    spec["env"] = {name: os.environb[name] for name in names}
    supervise(spec)


def supervise(spec: dict[str, Any]) -> bool:
    """Run a tree to its end and return false; true in the process of a program that is forked.

    With `spec["program"]` the command is not started: its process returns (`zygote.py`).
    """
    # Before the first fork: orphans become children of this process, so that `descendants` finds a
    # program that forks twice or opens its own session (design/0005).
    become_subreaper()
    if spec["can_be_killed"] and HAS_PROC:
        guard(spec)
        become_subreaper()  # a fork does not inherit it
    # `poll` restarts after a signal (PEP 475); a byte in this pipe wakes it when a child dies.
    wake_read, wake_write = pipe()
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # SIGTERM has the same effect as the owner's death: the loop ends, and the tree with it.
    signal.signal(signal.SIGTERM, lambda *_: os.close(spec["control_fd"]))
    # The code must not inherit any of these: it could swallow the kill command, forge the report,
    # or reach the mount namespace from outside.
    os.set_blocking(spec["control_fd"], False)
    os.set_inheritable(spec["control_fd"], False)
    os.set_inheritable(spec["status_fd"], False)
    for held in (spec["mount_fd"], spec["folder_fd"]):
        if held is not None:
            os.set_inheritable(held, False)
    ready_read, ready_write = pipe()
    if spec["cgroup"]:
        spec["cgroup"] += f"/rolltree-{os.getpid()}"
    main_pid = start(spec, ready_write)
    if not main_pid:
        return True
    os.close(ready_write)
    null = os.open("/dev/null", os.O_RDWR)
    # From here on, only the tree holds the standard streams, so their readers see the end of file
    # when the tree is gone.
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    watch = Watch(spec, main_pid)
    # If the machine runs out of memory, the kernel kills this tree before the trainer.
    with contextlib.suppress(OSError), open(f"/proc/{main_pid}/oom_score_adj", "w") as file:
        file.write("1000")
    # Not `select`, which is limited to descriptors below 1024: with 200 sandboxes, there are more.
    events = select.poll()
    for fd in (spec["control_fd"], wake_read):
        events.register(fd, select.POLLIN)
    # Without limits, nothing has to be polled until an event.
    waits_ms = 1000 * POLL_S if spec["is_limited"] else None
    ended = ""
    try:
        while not ended:
            events.poll(waits_ms)
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            watch.reap()
            ended = watch.ended()
    finally:
        # Even after an error above, no process may be left.
        # Commands that end what is outside the tree (a container).
        for command in spec["after"]:
            run_quietly(command, spec["env"])
        watch.kill_all()
        if spec["cgroup"]:
            leave_cgroup(spec["cgroup"])
    report = watch.report(ended)
    try:
        report["setup"] = os.read(ready_read, 4096).decode(errors="replace")
    except BlockingIOError:
        report["setup"] = ""
    with contextlib.suppress(BrokenPipeError):
        os.write(spec["status_fd"], json.dumps(report).encode() + b"\n")
    return False


def become_subreaper() -> None:
    """Become the parent of orphans among this process's descendants, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def guard(spec: dict[str, Any]) -> None:
    """Go on in a child; this process waits for it, and ends the tree if the child was killed.

    A program of the same user can kill its supervisor. Then its orphans become children of this
    process, which a signal to the supervisor, or to its process group, does not reach.
    """
    pid = os.fork()
    if not pid:
        os.setsid()
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    # The status pipe stays open: its end says that no process is left.
    for held in (spec["control_fd"], spec["mount_fd"], spec["folder_fd"]):
        if held is not None:
            os.close(held)
    try:
        os.waitpid(pid, 0)
        kill_tree(pid, reap)
    finally:
        os._exit(0)


def pipe() -> tuple[int, int]:
    """Return the two ends of a pipe, nonblocking and not inherited by programs."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def start(spec: dict[str, Any], ready_fd: int) -> int:
    """Start the command in its own session; return its process id, 0 in a forked program."""
    pid = os.fork()
    if pid == 0:
        is_program = False
        try:
            # No controlling terminal: Ctrl-C reaches only the owner, and code cannot type there.
            os.setsid()
            if spec["cgroup"]:
                # First, so that all memory that the run allocates is charged to the cgroup.
                join_cgroup(spec["cgroup"], spec["limits"])
            if spec["mount_fd"] is not None:
                # Before `chdir`, since the work folder exists only in that namespace.
                enter(spec["mount_fd"], spec["folder"], spec["tmpfs"])
            os.chdir(spec["cwd"])
            if "program" in spec:
                is_program = True
                return 0
            os.set_inheritable(ready_fd, True)
            command = spec["command"]
            if spec["ready_at"]:
                command[spec["ready_at"]] = str(ready_fd)
            os.execve(command[0], command, spec["env"])
        except BaseException as error:  # noqa: BLE001  the child must not return
            os.write(ready_fd, f"E{error}".encode())
            if not spec["is_limited"]:  # no set-up that could fail, so it is the command's failure
                os.write(2, f"{spec['command'][0]} cannot be run: {error}\n".encode())
        finally:
            if not is_program:
                os._exit(127)
    return pid


def enter(mount_fd: int, folder: str, options: str) -> None:
    """Enter the mount namespace of the bounded work folder, and set this run's bounds.

    A folder that has more content already keeps its bounds; the run then exceeds its disk limit.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str, *allowed: int) -> None:
        number = ctypes.get_errno()
        if result < 0 and number not in allowed:
            raise OSError(number, f"{what}: {os.strerror(number)}")

    if os.geteuid() != 0:
        # The mount namespace of an unprivileged user belongs to a user namespace, whose members
        # alone may enter it.
        check(libc.setns(fcntl.ioctl(mount_fd, _NS_GET_USERNS), _NEW_USER), "user namespace")
    check(libc.setns(mount_fd, _NEW_NAMESPACE), "mount namespace")
    again = libc.mount(b"tmpfs", folder.encode(), None, _TMPFS_FLAGS, options.encode())
    check(again, "bounds of the folder", errno.EINVAL)


def join_cgroup(group: str, limits: dict[str, Any]) -> None:
    """Make a cgroup with the bounds of a run, and move this process into it.

    The bound includes files of the work folder, which are memory, too; polling applies the closer
    bound to the rest.
    """
    with contextlib.suppress(FileExistsError):  # of a supervisor that was killed
        os.mkdir(group)
    most = limits["memory_bytes"] + limits["disk_bytes"]
    # `memory.oom.group`: the kernel kills the whole run, which could survive the death of one
    # process. `cgroup.procs` comes last, so that no process is in a cgroup without bounds.
    bounds = {"memory.max": most, "memory.swap.max": 0, "memory.oom.group": 1, "cgroup.procs": 0}
    for name, value in bounds.items():
        if name == "cgroup.procs" or os.path.exists(f"{group}/{name}"):
            with open(f"{group}/{name}", "w") as file:
                file.write(str(value))


def leave_cgroup(group: str) -> None:
    """Delete a cgroup in which no process is left; the kernel may need a moment."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            os.rmdir(group)
        if not os.path.exists(group):
            return
        time.sleep(0.001)


def cgroup_number(group: str, what: tuple[str, str]) -> int:
    """Return a number that the kernel keeps for a cgroup; 0 if it does not keep it."""
    name, key = what
    try:
        with open(f"{group}/{name}") as file:
            return next(int(line.split()[1]) for line in file if line.split()[0] == key)
    except (OSError, StopIteration):
        return 0


def run_quietly(command: list[str], env: dict[bytes, bytes]) -> None:
    """Run a command that ends something outside the tree, for at most ten seconds."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            signal.alarm(10)
            os.execve(command[0], command, env)
        os._exit(127)
    os.waitpid(pid, 0)


class Watch:
    """The limits of one tree and the resources that it has used."""

    def __init__(self, spec: dict[str, Any], main_pid: int) -> None:
        self.limits: dict[str, Any] = spec["limits"]
        self.is_limited: bool = spec["is_limited"]
        self.has_network: bool = spec["has_network"]
        self.cgroup: str | None = spec["cgroup"]
        self.folder: str = spec["folder"]
        self.folder_fd: int | None = spec["folder_fd"]
        self.socket_bytes = socket_bytes()
        self.control_fd: int = spec["control_fd"]
        self.trusted: int = spec["trusted_processes"]
        self.main_pid = main_pid
        self.main_status: int | None = None
        self.began = time.monotonic()
        is_timed = spec["is_limited"] and not spec["windowed"]
        self.deadline = self.began + self.limits["wall_s"] if is_timed else None
        self.peak_bytes = 0
        self.cpu_before = 0.0
        self.cpu_seen = 0.0
        # CPU seconds of each process alone, as last seen, so that they still count when it is gone.
        self.own: dict[int, float] = {}
        self.gone_s = self.gone_at_most_s = 0.0
        self.looked = self.began
        self.loses_cpu = False
        self.next_disk_check = self.began + 0.05
        # The time and the result of each process's last measurement.
        self.mappings: dict[int, tuple[float, int]] = {}
        self.portions: dict[int, tuple[float, int]] = {}

    def ended(self) -> str:
        """Return the reason to kill the tree now, or an empty string."""
        if self.main_status is not None:
            # A kill by the kernel looks like any signal, or like code 137 behind a shell, but the
            # cgroup counts these kills.
            if self.main_status and self.cgroup and cgroup_number(self.cgroup, _MEMORY_KILLS):
                return "memory"
            return "signal" if os.WIFSIGNALED(self.main_status) else "exit"
        try:
            commands = os.read(self.control_fd, 64)
        except BlockingIOError:
            commands = b"-"
        except OSError:
            commands = b""
        if not commands or b"k" in commands:
            return "closed"
        if b"b" in commands or b"e" in commands:
            begins = commands.rindex(b"b") > commands.rfind(b"e") if b"b" in commands else False
            self.deadline = time.monotonic() + self.limits["wall_s"] if begins else None
            if begins:
                self.cpu_before = self.cpu_s(list(descendants(os.getpid())))
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "wall"
        return self.over_limit() if self.is_limited else ""

    def over_limit(self) -> str:
        """Return the first limit that the whole tree exceeds, or an empty string."""
        pids = list(descendants(os.getpid()))
        shown = [shown_by(pid) for pid in pids]
        resident = sum(stat_of(pid)[1] for pid in shown)
        self.peak_bytes = max(self.peak_bytes, resident)
        self.cpu_seen = self.cpu_s(pids)
        if self.cpu_seen - self.cpu_before > self.limits["cpu_s"]:
            return "cpu"
        limit = self.limits["memory_bytes"] - (tcp_bytes(pids) if self.has_network else 0)
        # The cheap number counts a shared page once per process, so it can only be too high. The
        # exact number needs a walk through the page tables, so it is computed only now.
        if resident > limit and self.proportional_bytes(shown) > limit:
            return "memory"
        if resident + self.kernel_bytes(shown, limit - resident) > limit:
            resident = min(resident, self.proportional_bytes(shown))
            if resident + self.kernel_bytes(shown, limit - resident) > limit:
                return "memory"
        if sum(num_tasks(pid) for pid in pids) - self.trusted > self.limits["max_processes"]:
            return "processes"
        now = time.monotonic()
        if self.folder_fd is not None:
            return "disk" if holds_too_much(self.folder_fd, self.limits) else ""
        if now >= self.next_disk_check:
            exceeds = too_much(self.folder, self.limits["disk_bytes"], self.limits["max_files"])
            took = time.monotonic() - now
            # Walks take at most a tenth of the time: a folder of many files must not delay the
            # other limits.
            self.next_disk_check = now + max(0.05, 10 * took)
            return "disk" if exceeds else ""
        return ""

    def kernel_bytes(self, pids: list[int], room: int) -> int:
        """Return an upper bound of the kernel's memory for the tree's sockets, pipes and mappings.

        Descriptors are distinguished, and mappings counted, only if there could be enough of them
        to fill `room` bytes; a mapping has at least a page.
        """
        # No file that a supervisor may read shows socket buffers, so each descriptor counts as a
        # full socket at first (design/0019).
        queues = sum(num_descriptors(pid) for pid in pids) * self.socket_bytes
        mappings = sum(address_pages(pid) for pid in pids) * _MAPPING_BYTES
        if queues + mappings <= room:
            return 0
        mappings = in_turns(self.mappings, pids, num_mappings, _COUNT_S) * _MAPPING_BYTES
        if queues + mappings <= room:
            return mappings
        kinds = set().union(*(descriptors(pid) for pid in pids))
        num_sockets = sum(kind.startswith("socket:") for kind in kinds)
        num_pipes = sum(kind.startswith("pipe:") for kind in kinds)
        return num_sockets * self.socket_bytes + num_pipes * _PIPE_BYTES + mappings

    def proportional_bytes(self, pids: list[int]) -> int:
        """Return the resident bytes of the tree; pages that its processes share count once."""
        return in_turns(self.portions, pids, proportional, 0.0)

    def cpu_s(self, pids: list[int]) -> float:
        """Return the CPU seconds of these living processes and of all that ended.

        The kernel does not add the time of children whose parent ignores SIGCHLD to the parent's.
        After the processes that were seen have proved that time is missing, each counts as it was
        last seen, but at least as a whole step between two looks: brief processes are rarely seen,
        and then in the middle.
        """
        # The cgroup's count is complete.
        if self.cgroup and (used_us := cgroup_number(self.cgroup, _CPU_TIME)):
            return used_us / 1e6
        now = time.monotonic()
        step, self.looked = now - self.looked, now
        own = {pid: own_cpu_s(pid) for pid in pids}
        living = sum(own.values())
        dead = resource.getrusage(resource.RUSAGE_CHILDREN)
        waited = dead.ru_utime + dead.ru_stime + sum(stat_of(pid)[0] for pid in pids)
        # The times of reaped children are rounded to hundredths of a second, for each parent.
        self.loses_cpu |= self.gone_s - waited > 0.05 + 2 * len(pids) / _TICKS
        for pid, spent in self.own.items():
            if pid not in own and own_cpu_s(pid) >= spent > 0:
                # It is alive: a walk through a changing tree can miss a process.
                own[pid] = spent
            elif own.get(pid, -1.0) < spent:
                self.gone_s += spent
                self.gone_at_most_s += max(spent, step)
        self.own = own
        return living + max(waited, self.gone_at_most_s if self.loses_cpu else self.gone_s)

    def reap(self) -> bool:
        """Collect dead children; return whether any child is left."""

        def note(pid: int, status: int) -> None:
            if pid == self.main_pid:
                self.main_status = status

        return reap(note)

    def kill_all(self) -> None:
        """Kill until no process is left."""
        kill_tree(self.main_pid, self.reap)

    def report(self, ended: str) -> dict[str, Any]:
        """Return the report for the status pipe: how the tree ended, and the resources it used."""
        status = self.main_status
        exited = ended == "exit" and status is not None
        killed = ended == "signal" and status is not None
        rusage = resource.getrusage(resource.RUSAGE_CHILDREN)
        # macOS counts bytes; Linux, KiB.
        peak_bytes = rusage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "ended": ended,
            "exit_code": os.WEXITSTATUS(status) if exited and status is not None else None,
            "signal": os.WTERMSIG(status) if killed and status is not None else None,
            "wall_s": time.monotonic() - self.began,
            "cpu_s": max(self.cpu_seen, rusage.ru_utime + rusage.ru_stime),
            "peak_memory_bytes": max(self.peak_bytes, peak_bytes),
        }


def reap(note: Callable[[int, int], None] = lambda pid, status: None) -> bool:
    """Collect dead children, and call `note` with each; return whether any child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        note(pid, status)


def kill_tree(group: int, reap: Callable[[], bool]) -> None:
    """Kill until no process is left. Orphans become children of this one, so none is missed."""
    while True:
        # Repeated: even a tree that forks faster than it is listed is killed in the end, because
        # dead processes do not fork.
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Without /proc nothing is listed, and only the command's process group can be killed.
        if not HAS_PROC:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        if not reap():
            return
        time.sleep(0.001)


def descendants(pid: int) -> Iterator[int]:
    """Yield the living descendants of a process, parents first."""
    pending = [pid]
    # Without recursion: code can nest processes deeper than Python nests calls.
    while pending:
        children = children_of(pending.pop())
        yield from children
        pending += children


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        # Linux lists a child under the thread that started it.
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def shown_by(pid: int) -> int:
    """Return a thread whose /proc entries show the memory and descriptors of a process.

    The first thread can end before the others; then its entries are those of a zombie.
    """
    if address_pages(pid):
        return pid
    with contextlib.suppress(OSError):
        return next(filter(address_pages, map(int, os.listdir(f"/proc/{pid}/task"))), pid)
    return pid


def in_turns(
    seen: dict[int, tuple[float, int]],
    pids: list[int],
    measure: Callable[[int], int],
    fresh_s: float,
) -> int:
    """Return a sum of recent measurements of processes; `seen` keeps the time and value of each.

    A call measures for about 10 ms, but at least one process: 65,530 mappings take 20 ms to read,
    and up to a second if code keeps changing them. The limits on time must not wait for all.
    """
    began = time.monotonic()
    for pid in seen.keys() - set(pids):
        del seen[pid]
    # The process measured longest ago comes first, so that each has its turn.
    for pid in sorted(pids, key=lambda pid: seen.get(pid, (0.0, 0))):
        if began - seen.get(pid, (0.0, 0))[0] < fresh_s:
            break
        seen[pid] = (time.monotonic(), measure(pid))
        if time.monotonic() - began > 0.01:
            break
    return sum(number for _, number in seen.values())


def num_tasks(pid: int) -> int:
    """Return the number of threads of a process."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def num_descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    try:
        # Since Linux 6.2, the folder's size is the count, so its entries need not be read.
        return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def descriptors(pid: int) -> set[str]:
    """Return the targets of a process's open descriptors, like "socket:[4711]".

    An unreadable program hides them from users other than root; then all count as sockets.
    """
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found.add(os.readlink(entry.path))
    except PermissionError:
        found = {f"socket:{pid}:{n}" for n in range(num_descriptors(pid))}
    except OSError:
        pass
    return found


def address_pages(pid: int) -> int:
    """Return the number of pages in the address space of a process."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[0])
    except OSError:
        return 0


def num_mappings(pid: int) -> int:
    """Return the number of separate mappings in the address space of a process."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return file.read().count(b"\n")
    except PermissionError:
        # Hidden, as descriptors can be. Each mapping has at least a page.
        return address_pages(pid)
    except OSError:
        return 0


def socket_bytes() -> int:
    """Return the size of a socket's buffer, which code cannot change."""
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return int(file.read())
    except (OSError, ValueError):
        # The kernel's default.
        return 212992


@functools.cache
def tcp_queue_bytes() -> tuple[int, int]:
    """Return the largest sizes of a connection's queues: bytes to send, and bytes to read."""
    found = []
    for name in ("tcp_wmem", "tcp_rmem"):
        try:
            with open(f"/proc/sys/net/ipv4/{name}") as file:
                found.append(int(file.read().split()[2]))
        except (OSError, ValueError, IndexError):
            # The kernel's default on machines with much memory.
            found.append(2**25)
    return found[0], found[1]


def tcp_bytes(pids: list[int]) -> int:
    """Return an upper bound of the kernel's memory for TCP connections of a network namespace.

    It is the namespace of the last process, the deepest that `descendants` lists; 0 if that is the
    host's. A connection that was not accepted yet has no descriptor, so connections are counted in
    the kernel's list.
    """
    total = 0
    try:
        if not pids or os.readlink(f"/proc/{pids[-1]}/ns/net") == os.readlink("/proc/self/ns/net"):
            return 0
    except OSError:
        return 0
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/{pids[-1]}/net/{name}") as file:
            for line in file.readlines()[1:]:
                # The numbers of bytes to send and to read.
                queues = [int(each, 16) for each in line.split()[4].split(":")]
                most = zip(queues, tcp_queue_bytes(), strict=True)
                total += _TCP_BYTES + sum(min(_TCP_OVERHEAD * used, top) for used, top in most)
    return total


def own_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, without its children's."""
    try:
        # The kernel's MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def stat_of(pid: int) -> tuple[float, int]:
    """Return the CPU seconds of a process's reaped children, and its resident bytes."""
    try:
        # As bytes: code can give itself a name that is not UTF-8 (design/0019).
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0, 0
    return sum(map(int, fields[13:15])) / _TICKS, int(fields[21]) * _PAGE


def proportional(pid: int) -> int:
    """Return the resident bytes of a process; shared pages are divided among their processes."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except OSError:
        return stat_of(pid)[1]


def holds_too_much(folder_fd: int, limits: dict[str, Any]) -> bool:
    """Whether a bounded folder has more than this run may use, including unlinked files."""
    found = os.fstatvfs(folder_fd)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    # Without the folder itself, which takes an inode too.
    count = found.f_files - found.f_ffree - 1
    return bool(used > limits["disk_bytes"] or count > limits["max_files"])


def too_much(folder: str, max_bytes: int, max_files: int) -> bool:
    """Whether a folder has more than it may; the count stops when that is known."""
    size, count, pending = 0, 0, [folder]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    # Links are not followed: they may lead to the host's folders.
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                if size > max_bytes or count > max_files:
                    return True
    return False


if __name__ == "__main__":
    main()
