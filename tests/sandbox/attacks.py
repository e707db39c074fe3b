"""Attacks on what a machine has: disk, processes, memory, time. Each is a program run inside.

A program calls `held(n)` when it holds `n` of what its attack is after (`unit`). What only polling
bounds must be held for a second before it counts: `held_on(n)`. Attacks stop by themselves at a few
times the limit, so a sandbox that does not stop them does no harm to the machine.
"""

import textwrap
from dataclasses import dataclass

from rolltree.sandbox import Limits

MIB = 2**20
LIMITS = Limits(
    wall_s=20.0,
    cpu_s=10.0,
    memory_bytes=128 * MIB,
    max_processes=16,
    max_open_files=64,
    max_files=200,
    disk_bytes=16 * MIB,
    output_bytes=2**16,
)
PRELUDE = """
import contextlib, ctypes, errno, fcntl, mmap, os, resource, signal, socket, sys, threading, time
MIB = 2**20
out = os.dup(1)
def held(n):
    os.write(out, b"held %d\\n" % n)
def held_on(n):
    time.sleep(1)
    held(n)
def in_child(function, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    return pid
def stay():
    time.sleep(60)
held(0)
"""


@dataclass(frozen=True, slots=True)
class Attack:
    """A program and what it may hold at most.

    Fields:
        code: the program, after `PRELUDE`.
        allowed: the most that it may say it holds.
        unit: what it counts.
        guard: the protection whose absence a level must name for the attack to pass.
        limits: its limits.
        ended: how the run must end; any way when empty.
    """

    code: str
    allowed: float
    unit: str
    guard: str
    limits: Limits = LIMITS
    ended: tuple[str, ...] = ()

    @property
    def program(self):
        return PRELUDE + textwrap.dedent(self.code)

    def verdict(self, result, missing):
        """Return "stopped", "named" (it passed, as `missing` says), or what went wrong."""
        said = [int(line[5:]) for line in result.stdout.splitlines() if line.startswith("held ")]
        if not said:
            return f"broken: {result.text()[-300:]}"
        if max(said) > self.allowed or (self.ended and result.ended not in self.ended):
            if self.guard in missing:
                return "named"
            return f"PASSED: held {max(said):,} {self.unit}, ended {result.ended}"
        return "stopped"


def on_disk(code):
    return Attack(code, LIMITS.disk_bytes, "bytes on disk", "disk")


def in_files(code):
    return Attack(code, LIMITS.max_files, "files", "disk")


def in_processes(code):
    return Attack(code, LIMITS.max_processes, "processes", "processes")


def in_memory(code):
    return Attack(code, 1.25 * LIMITS.memory_bytes, "bytes of memory", "memory")


def in_time(code, *ended, **limits):
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__struct_fields__}
    return Attack(code, 0, "", "time", Limits(**{**fields, **limits}), ended)


_KEEP = """
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
def keep(fd=-1, flags=0x21, rights=3):
    at = libc.mmap(0, 50 * MIB, rights, flags, fd, 0)
    if at == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
    for page in range(at, at + 50 * MIB, 4096):
        ctypes.memset(page, 1, 1) if rights & 2 else ctypes.string_at(page, 1)
    return at
def hide(at):
    libc.munmap(at + 4096, 50 * MIB - 4096)
"""
_UNREAPED = """
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def spend(seconds, pause):
    while True:
        with contextlib.suppress(OSError): in_child(work, seconds)
        time.sleep(pause)
"""
_MANY = Limits(wall_s=60.0, memory_bytes=128 * MIB, max_processes=40)
FULL_SOCKETS = """
import array
read, write = os.pipe()
def fill():
    total, kept = 0, []
    with contextlib.suppress(OSError):
        while True:
            pair = socket.socketpair(); kept += pair
            for end in pair:
                end.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True: total += end.send(bytes(65536))
    os.write(write, array.array("q", [total])); stay()
for n in range(13): in_child(fill)
total = sum(array.array("q", os.read(read, 8))[0] for _ in range(13))
held_on(total)
"""
_PACKETS = FULL_SOCKETS.replace("socketpair()", "socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)")
_ONE_END = FULL_SOCKETS.replace("+= pair", "+= pair[:1]").replace("in pair:", "in pair[1:]:")
_THREADS = """
libc = ctypes.CDLL(None)
def alone(function):
    threading.Thread(target=lambda: (time.sleep(0.1), function())).start()
    libc.syscall(93 if os.uname().machine == "aarch64" else 60, 0)  # ends this thread only
def apart(function):
    def with_its_own_descriptors():
        if libc.syscall(436, 5000, 5000, 2) == 0: function()  # close_range(.., CLOSE_RANGE_UNSHARE)
        os.write(write, bytes(8)); stay()
    threading.Thread(target=with_its_own_descriptors).start()
    stay()
def misnamed(function):
    libc.prctl(15, b"\\xff) Z 0 0\\n(", 0, 0, 0)
    function()
def fill():
    block = bytearray(b"x") * (60 * MIB); os.write(write, b"x"); stay()
def busy():
    while True: pass
read, write = os.pipe()
"""
_BLOCKS = """
for n in range(4): in_child({}, fill)
for n in range(4): os.read(read, 1)
held_on(240 * MIB)
"""
ATTACKS = {
    # ---- disk: the bytes
    "one large file": on_disk("""
        with open("x", "wb", buffering=0) as file:
            for n in range(64):
                file.write(bytes(MIB)); held((n + 1) * MIB)
    """),
    "many files below the limit": on_disk("""
        for n in range(64):
            with open(f"x{n}", "wb", buffering=0) as file:
                file.write(bytes(MIB))
            held((n + 1) * MIB)
    """),
    "unlinked files": on_disk("""
        kept = []
        for n in range(50):
            kept.append(open("x", "wb", buffering=0)); os.unlink("x")
            kept[-1].write(bytes(MIB)); held((n + 1) * MIB)
    """),
    "unlinked files, allocated": on_disk("""
        for n in range(8):
            fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x")
            os.posix_fallocate(fd, 0, 8 * MIB); held((n + 1) * 8 * MIB)
    """),
    "files without a name": on_disk("""
        for n in range(8):
            fd = os.open(".", os.O_RDWR | os.O_TMPFILE)
            os.posix_fallocate(fd, 0, 8 * MIB); held((n + 1) * 8 * MIB)
    """),
    "space beyond the end of a file": on_disk("""
        libc = ctypes.CDLL(None, use_errno=True)
        for n in range(8):
            fd = os.open(f"x{n}", os.O_RDWR | os.O_CREAT)
            size = ctypes.c_long(8 * MIB)
            if libc.fallocate(fd, 1, ctypes.c_long(0), size) < 0:
                raise OSError(ctypes.get_errno(), "fallocate")
            held((n + 1) * 8 * MIB)
    """),
    "files below 2,300 folders": on_disk("""
        with contextlib.suppress(OSError):
            for n in range(2300):
                os.mkdir("d" * 200); os.chdir("d" * 200)
        for n in range(8):
            fd = os.open(f"x{n}", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, 8 * MIB); held((n + 1) * 8 * MIB)
            time.sleep(0.1)
    """),
    "holes with a byte in each page": on_disk("""
        for n in range(16384):
            if n % 1000 == 0: fd = os.open(f"x{n}", os.O_RDWR | os.O_CREAT)
            os.pwrite(fd, b"x", n % 1000 * 8192)
            if n % 256 == 255: held((n + 1) * 4096)
    """),
    "files written through a mapping": on_disk("""
        kept = []
        for n in range(8):
            fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x"); os.ftruncate(fd, 8 * MIB)
            kept.append(mmap.mmap(fd, 8 * MIB)); os.close(fd)
            for at in range(0, 8 * MIB, 4096): kept[-1][at] = 1
            held((n + 1) * 8 * MIB)
    """),
    "files in flight between sockets": on_disk("""
        left, right = socket.socketpair()
        for n in range(8):
            fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x")
            os.posix_fallocate(fd, 0, 8 * MIB); socket.send_fds(left, [b"x"], [fd]); os.close(fd)
            held((n + 1) * 8 * MIB)
    """),
    "files of many processes": on_disk("""
        def fill(n):
            fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x")
            os.posix_fallocate(fd, 0, 8 * MIB); os.write(write, b"x"); stay()
        read, write = os.pipe()
        os.set_blocking(read, False)
        for n in range(8): in_child(fill, n)
        for n in range(10):
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError): held((n + len(os.read(read, 64))) * 8 * MIB)
    """),
    "a file in a folder without rights": on_disk("""
        os.mkdir("d"); os.chdir("d"); os.umask(0)
        for n in range(8):
            fd = os.open(f"x{n}", os.O_RDWR | os.O_CREAT, 0)
            with contextlib.suppress(OSError): os.chmod(".", 0)
            os.posix_fallocate(fd, 0, 8 * MIB); held((n + 1) * 8 * MIB)
            with contextlib.suppress(OSError): os.chmod(".", 0o700)
    """),
    "files that move about": on_disk("""
        os.mkdir("a"); os.mkdir("b")
        def move():
            while True:
                with contextlib.suppress(OSError):
                    os.rename("a", "c"); os.rename("b", "a"); os.rename("c", "b")
        in_child(move)
        total = 0
        for n in range(60):
            with contextlib.suppress(FileNotFoundError):
                with open(f"a/x{n}", "wb", buffering=0) as file: file.write(bytes(MIB))
                total += MIB
            held(total)
    """),
    "copies inside the kernel": on_disk("""
        with open("x", "wb") as file: file.write(bytes(4 * MIB))
        source = os.open("x", os.O_RDONLY)
        for n in range(16):
            copy = os.open("y", os.O_RDWR | os.O_CREAT); os.unlink("y")
            sent = 0
            while sent < 4 * MIB: sent += os.copy_file_range(source, copy, 4 * MIB, sent, sent)
            held((n + 2) * 4 * MIB)
    """),
    "links with long targets": on_disk("""
        for n in range(190): os.symlink("x" * 4000, f"l{n}")
        for n in range(8):
            fd = os.open(".", os.O_RDWR | os.O_TMPFILE)
            os.posix_fallocate(fd, 0, 8 * MIB); held((n + 1) * 8 * MIB)
    """),
    "extended attributes": on_disk("""
        n = 0
        for file in range(180):
            os.close(os.open(f"x{file}", os.O_RDWR | os.O_CREAT))
            with contextlib.suppress(OSError):
                for at in range(40):
                    os.setxattr(f"x{file}", f"user.x{at}", bytes(16384)); n += 16384
            held(n)
    """),
    # ---- disk: the number of files
    "empty files": in_files("""
        for n in range(2000): open(f"x{n}", "w").close(); n % 50 or held(n)
    """),
    "empty folders": in_files("""
        for n in range(2000): os.mkdir(f"x{n}"); n % 50 or held(n)
    """),
    "2,300 nested folders": in_files("""
        for n in range(2300): os.mkdir("d" * 200); os.chdir("d" * 200); n % 50 or held(n)
        time.sleep(1)
    """),
    "hard links": in_files("""
        open("x", "w").close()
        for n in range(2000): os.link("x", f"x{n}"); n % 50 or held(n)
    """),
    "symbolic links": in_files("""
        for n in range(2000): os.symlink("x", f"x{n}"); n % 50 or held(n)
    """),
    "named pipes": in_files("""
        for n in range(2000): os.mkfifo(f"x{n}"); n % 50 or held(n)
    """),
    # ---- processes
    "sleeping children": in_processes("""
        for n in range(100): in_child(stay); held(n + 2)
    """),
    "a fork bomb": in_processes("""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        def bomb():
            os.write(write, b"x")
            for _ in range(9):
                with contextlib.suppress(OSError):
                    if os.fork() == 0: os.write(write, b"x")
            stay()
        in_child(bomb)
        n = 1
        for _ in range(20):
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError): n += len(os.read(read, 65536))
            held(n)
    """),
    "threads": in_processes("""
        threading.stack_size(65536)
        for n in range(100): threading.Thread(target=stay, daemon=True).start(); held(n + 2)
    """),
    "daemons in sessions of their own": in_processes("""
        def leave():
            os.setsid()
            in_child(stay)
        n = 1
        for _ in range(100):
            n += os.waitpid(in_child(leave), 0)[1] == 0; held(n)
    """),
    "programs": in_processes("""
        import subprocess
        for n in range(100): subprocess.Popen(["sleep", "60"]); held(n + 2)
    """),
    "unreaped children": in_processes("""
        for n in range(100): in_child(int); held(n + 2)
    """),
    "threads of many processes": in_processes("""
        read, write = os.pipe()
        os.set_blocking(read, False)
        threading.stack_size(65536)
        def spread():
            os.write(write, b"x")
            for n in range(8):
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=stay, daemon=True).start(); os.write(write, b"x")
            stay()
        n = 1
        for _ in range(12):
            with contextlib.suppress(OSError): in_child(spread)
        for _ in range(10):
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError): n += len(os.read(read, 65536))
            held(n)
    """),
    # ---- memory
    "one large block": in_memory("""
        kept = bytearray(b"x") * (400 * MIB)
        held_on(400 * MIB)
    """),
    "blocks of many processes": in_memory("""
        def fill():
            kept = bytearray(b"x") * (50 * MIB); stay()
        for n in range(10): in_child(fill)
        held_on(500 * MIB)
    """),
    "shared blocks": in_memory("""
        def fill():
            kept = mmap.mmap(-1, 50 * MIB)
            for at in range(0, len(kept), 4096): kept[at] = 1
            os.write(write, b"x"); stay()
        read, write = os.pipe()
        for n in range(10): in_child(fill)
        os.close(write)
        n = 0
        while n < 10 and os.read(read, 1): n += 1
        held_on(n * 50 * MIB)
    """),
    "mappings of the stack": in_memory("""
        resource.setrlimit(resource.RLIMIT_STACK, (400 * MIB, 400 * MIB))
        kept = mmap.mmap(-1, 400 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100)
        for at in range(0, len(kept), 4096): kept[at] = 1
        held_on(400 * MIB)
    """),
    "full sockets": in_memory(FULL_SOCKETS),
    "full packet sockets": in_memory(_PACKETS),
    "full sockets whose other end is closed": in_memory(_ONE_END),
    "sockets in flight": in_memory("""
        import array
        read, write = os.pipe()
        def fill():
            total, kept = 0, []
            with contextlib.suppress(OSError):
                while True:
                    post = socket.socketpair(); kept += post
                    for _ in range(4):
                        left, right = socket.socketpair()
                        left.setblocking(False)
                        with contextlib.suppress(BlockingIOError):
                            while True: total += left.send(bytes(65536))
                        socket.send_fds(post[0], [b"x"], [right.fileno()])
                        left.close(); right.close()
            os.write(write, array.array("q", [total])); stay()
        for n in range(13): in_child(fill)
        total = sum(array.array("q", os.read(read, 8))[0] for _ in range(13))
        held_on(total)
    """),
    "full pipes": in_memory("""
        import array
        read, write = os.pipe()
        def fill():
            total, kept = 0, []
            with contextlib.suppress(OSError):
                while True:
                    pair = os.pipe(); kept += pair
                    os.set_blocking(pair[1], False)
                    with contextlib.suppress(OSError): fcntl.fcntl(pair[1], 1031, MIB)
                    with contextlib.suppress(BlockingIOError):
                        while True: total += os.write(pair[1], bytes(65536))
            os.write(write, array.array("q", [total])); stay()
        for n in range(13): in_child(fill)
        total = sum(array.array("q", os.read(read, 8))[0] for _ in range(13))
        held_on(total)
    """),
    "many mappings": in_memory("""
        libc = ctypes.CDLL(None)
        kept = mmap.mmap(-1, 80 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        at = ctypes.addressof(ctypes.c_char.from_buffer(kept))
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        n = 0
        while n < 20480 and libc.mprotect(at + n * 4096, 4096, 1) == 0: n += 2
        held_on(n * 256)
    """),
    "shared memory of which a page shows": in_memory(_KEEP + """
for n in range(6): hide(keep())
held_on(6 * 50 * MIB)
"""),
    "shared memory of /dev/zero": in_memory(_KEEP + """
for n in range(6): hide(keep(os.open("/dev/zero", os.O_RDWR), 1))
held_on(6 * 50 * MIB)
"""),
    "shared memory that is only read": in_memory(_KEEP + """
for n in range(6): hide(keep(os.open("/dev/zero", os.O_RDONLY), 1, 1))
held_on(6 * 50 * MIB)
"""),
    "shared memory that is not resident": in_memory(_KEEP + """
def fill():
    libc.madvise(keep(), 50 * MIB, 4); os.write(write, b"x"); stay()
read, write = os.pipe()
for n in range(6): in_child(fill)
os.close(write)
n = 0
while n < 6 and os.read(read, 1): n += 1
held_on(n * 50 * MIB)
"""),
    "locks of parts of a file": in_memory("""
        total = 0
        end = time.process_time() + 3
        while time.process_time() < end:
            fd = os.open(f"x{total}", os.O_RDWR | os.O_CREAT)
            with contextlib.suppress(OSError):
                for at in range(1000): fcntl.lockf(fd, fcntl.LOCK_EX, 1, 2 * at)
            total += 1000
            if total >= 60000: break
        held_on(total * 256)
    """),
    "blocks of processes whose first thread ended": Attack(
        _THREADS + _BLOCKS.format("alone"), 0, "bytes of memory", "memory", ended=("memory",)),
    "blocks of processes with misleading names": Attack(
        _THREADS + _BLOCKS.format("misnamed"), 0, "bytes of memory", "memory", ended=("memory",)),
    "full sockets of processes whose first thread ended": Attack(
        _THREADS + FULL_SOCKETS.replace("(fill)", "(alone, fill)"),
        0, "bytes of memory", "memory", _MANY, ("memory",)),
    "full sockets of threads with their own descriptors": Attack(
        _THREADS + FULL_SOCKETS.replace("(fill)", "(apart, fill)"),
        _MANY.memory_bytes, "bytes of memory", "memory", _MANY),
    "mappings of many processes": Attack("""
        libc = ctypes.CDLL(None)
        kept = mmap.mmap(-1, 80 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        at = ctypes.addressof(ctypes.c_char.from_buffer(kept))
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        n = 0
        while n < 20480 and libc.mprotect(at + n * 4096, 4096, 1) == 0: n += 2
        for _ in range(30): in_child(stay)
        stay()
    """, 0, "bytes of memory", "memory", _MANY, ("memory",)),
    # ---- time, output, and what would undo a limit
    "busy children": in_time("""
        def work():
            while True: pass
        for n in range(6): in_child(work)
        stay()
        held(1)
    """, "cpu", cpu_s=1.0),
    "busy processes with misleading names whose first thread ended": in_time(_THREADS + """
for n in range(3): in_child(misnamed, lambda: alone(busy))
stay()
""", "cpu", cpu_s=1.0),
    "brief threads": in_time("""
        def work():
            end = time.thread_time() + 0.002
            while time.thread_time() < end: pass
        while True:
            thread = threading.Thread(target=work); thread.start(); thread.join()
    """, "cpu", cpu_s=1.0),
    "a supervisor with 100,000 mappings to read": in_time("""
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        kept = mmap.mmap(-1, 40 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        at = ctypes.addressof(ctypes.c_char.from_buffer(kept))
        for n in range(0, 8000, 2): libc.mprotect(at + n * 4096, 4096, 1)
        def change():
            while True: libc.mprotect(at, 4096, 1); libc.mprotect(at, 4096, 3)
        for n in range(12): in_child(change)
        stay()
    """, "cpu", "wall", "memory", cpu_s=1.0, wall_s=5.0),
    "children that die busy": in_time("""
        def work():
            end = time.process_time() + 0.2
            while time.process_time() < end: pass
        while True: os.waitpid(in_child(work), 0)
    """, "cpu", cpu_s=1.0),
    "children that nobody waits for": in_time(_UNREAPED + """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
spend(0.2, 0.25)
""", "cpu", "processes", cpu_s=1.0, wall_s=12.0),
    "brief children that nobody waits for": in_time(_UNREAPED + """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
spend(0.005, 0.006)
""", "cpu", "processes", cpu_s=1.0, wall_s=12.0),
    "children that nobody waits for, by a flag": in_time(_UNREAPED + """
action = ctypes.create_string_buffer(152)
action[136:140] = (2).to_bytes(4, sys.byteorder)  # SA_NOCLDWAIT
if ctypes.CDLL(None).sigaction(signal.SIGCHLD, action, None): os._exit(9)
spend(0.1, 0.11)
""", "cpu", "processes", cpu_s=1.0, wall_s=12.0),
    "grandchildren that nobody waits for": in_time(_UNREAPED + """
def between():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    spend(0.05, 0.05)
in_child(between)
stay()
""", "cpu", "processes", cpu_s=1.0, wall_s=12.0),
    "endless sleep, signals ignored": in_time("""
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            with contextlib.suppress(OSError, ValueError): signal.signal(number, signal.SIG_IGN)
        while True: time.sleep(60)
    """, "wall", wall_s=2.0),
    "stopped processes": in_time("""
        in_child(lambda: os.kill(os.getpid(), signal.SIGSTOP))
        os.kill(os.getpid(), signal.SIGSTOP)
        held(1)
        stay()
    """, "wall", "signal", "exit", wall_s=2.0),
    "parents that die at once": in_time("""
        def run():
            while os.fork() == 0: time.sleep(0.01)
            os._exit(0)
        in_child(run)
        stay()
    """, "wall", "cpu", "processes", wall_s=3.0),
    "endless output": in_time("""
        in_child(lambda: all(os.write(2, bytes(65536)) for _ in iter(int, 1)))
        while True: os.write(1, bytes(65536))
    """, "output"),
    "many open files": Attack("""
        for n in range(1000): os.open("/dev/null", os.O_RDONLY); held(n + 4)
    """, LIMITS.max_open_files, "descriptors", "files"),
    "limits raised": in_time("""
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                kind = getattr(resource, name)
                soft, hard = resource.getrlimit(kind)
                with contextlib.suppress(ValueError, OSError):
                    if hard >= 0:
                        resource.setrlimit(kind, (hard + 1, hard + 1)); held(1)
    """, "exit"),
    "priority raised": in_time("""
        with contextlib.suppress(OSError): os.nice(-5); held(1)
        first = os.sched_param(1)
        with contextlib.suppress(OSError): os.sched_setscheduler(0, os.SCHED_FIFO, first); held(2)
        with contextlib.suppress(OSError): os.sched_setaffinity(0, {0}); held(3)
        with contextlib.suppress(OSError):
            with open("/proc/self/oom_score_adj", "w") as file: file.write("-1000")
            held(4)
    """, "exit"),
}  # fmt: skip
