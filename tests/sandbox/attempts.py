"""Ways out of a sandbox. Each function is run inside; it returns evidence when it got through.

An attempt that is refused raises `OSError`. The module is sent into the sandbox as text and uses
the standard library only. `H` has what the host laid out as bait. `control` marks attempts that are
harmless on the host and must get through there: that they fail inside is the sandbox's work.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time

H = {}
ATTEMPTS = {}
CONTROLS = set()
NEEDS = {"see_the_disk_under_the_folder": "disk"}  # what a level may say that it lacks
REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOENT, errno.EROFS, errno.ESRCH}
REFUSED |= {errno.EXDEV, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENODEV}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]
NUMBERS = {
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone": (56, 220),
    "clone3": (435, 435),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "fanotify_init": (300, 262),
    "inotify_init1": (294, 26),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "settimeofday": (170, 170),
    "sethostname": (170, 161),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "seccomp": (317, 277),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "setresuid": (117, 147),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "chroot": (161, 51),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "vmsplice": (278, 75),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "rt_sigqueueinfo": (129, 138),
    "socket": (41, 198),
    "landlock_restrict_self": (446, 446),
}


def _refused(why):
    raise PermissionError(errno.EPERM, why)


class Reached(Exception):
    """The kernel looked at the arguments: nothing stopped the call on its way."""


def attempt(function=None, *, control=False, name=None):
    def register(function):
        ATTEMPTS[name or function.__name__] = function
        if control:
            CONTROLS.add(name or function.__name__)
        return function

    return register(function) if function else register


def raw(name, *arguments):
    number = NUMBERS[name][COLUMN]
    result = libc.syscall(number, *arguments)
    if result >= 0:
        return f"{name} gave {result}"
    code = ctypes.get_errno()
    if code in (errno.EPERM, errno.ENOSYS):
        raise OSError(code, name)
    raise Reached(f"{name} failed with {errno.errorcode[code]}")


def report(name):
    try:
        value = ATTEMPTS[name]()
    except OSError as error:
        verdict = "blocked" if error.errno in REFUSED else "REACHED"
        return f"{verdict} {name}: {error}"
    except Reached as error:
        return f"REACHED {name}: {error}"
    return f"ESCAPED {name}: {value!r}"


def in_child(function):
    """Run in a forked child; raise what it raised, return what it returned as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"+{function()}"
        except OSError as error:
            text = f"-{error.errno}"
        except BaseException as error:
            text = f"+{type(error).__name__} {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    if text.startswith("-"):
        raise OSError(int(text[1:]), os.strerror(int(text[1:])))
    return text


def content(path):
    with open(path, "rb") as file:
        return file.read(64)


# ---- calls that nobody may make

for _name in NUMBERS:
    if NUMBERS[_name][COLUMN] is None or _name in ("clone", "socket", "settimeofday", "reboot"):
        continue
    attempt(name=f"syscall {_name}")(lambda _name=_name: raw(_name, -1, -1, -1, -1, -1, -1))


@attempt(control=True, name="clone with a user namespace")
def clone_namespace():
    pid = libc.syscall(NUMBERS["clone"][COLUMN], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    os.waitpid(pid, 0)
    return "a namespace of its own"


@attempt
def a_thread_with_its_own_descriptors():
    return raw("clone", 0x10000, 0, 0, 0, 0)


@attempt(control=True)
def a_copy_of_the_descriptors():
    def copied():
        if libc.syscall(436, 5000, 5000, 2) < 0:  # close_range with CLOSE_RANGE_UNSHARE
            raise OSError(ctypes.get_errno(), "close_range")
        return "no count sees it"

    return in_child(copied)


@attempt
def leave_a_core_file():
    import resource

    if resource.getrlimit(resource.RLIMIT_CORE) == (0, 0):
        raise PermissionError(errno.EPERM, "no core file")
    return "a core file may be written"


@attempt
def a_call_by_its_x32_number():
    found = libc.syscall(0x40000000 + 41, 1, 1, 0)  # socket
    if found < 0:
        raise OSError(ctypes.get_errno(), "socket")
    return f"socket {found}"


@attempt(name="unshare everything")
def unshare_everything():
    return in_child(lambda: raw("unshare", 0x7E020000))


@attempt(name="chroot")
def chroot():
    return in_child(lambda: os.chroot("."))


@attempt(name="become root")
def become_root():
    if os.getuid() == 0:
        raise PermissionError(errno.EPERM, "already 0, and without power: see the next ones")
    return in_child(lambda: os.setuid(0))


@attempt(name="bind a low port's socket family by number")
def raw_socket_number():
    return raw("socket", 2, 1, 0)


@attempt(name="a set-user-id program gives power")
def setuid_program():
    program = next((p for p in ("/usr/bin/su", "/usr/bin/passwd") if os.path.exists(p)), None)
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "no such program")
    status = subprocess.run(
        ["/bin/sh", "-c", f"{program} --version >/dev/null 2>&1; exec cat /proc/self/status"],
        capture_output=True,
        text=True,
    )
    if "NoNewPrivs:\t0" in status.stdout:
        return "privileges can be gained"
    raise PermissionError(errno.EPERM, "no new privileges")


# ---- network

FAMILIES = {
    "IPv4 stream": (socket.AF_INET, socket.SOCK_STREAM),
    "IPv4 datagram": (socket.AF_INET, socket.SOCK_DGRAM),
    "IPv6 stream": (socket.AF_INET6, socket.SOCK_STREAM),
    "unix stream": (socket.AF_UNIX, socket.SOCK_STREAM),
    "unix datagram": (socket.AF_UNIX, socket.SOCK_DGRAM),
    "netlink": (16, socket.SOCK_RAW),
}
for _name, (_family, _kind) in FAMILIES.items():
    attempt(name=f"open a socket: {_name}", control=True)(
        lambda family=_family, kind=_kind: socket.socket(family, kind).close() or "a socket"
    )
for _name, (_family, _kind) in {
    "packet": (17, socket.SOCK_RAW),
    "raw ICMP": (socket.AF_INET, socket.SOCK_RAW),
    "kernel crypto": (38, 5),
    "virtual machine": (40, socket.SOCK_STREAM),
}.items():
    attempt(name=f"open a socket: {_name}")(
        lambda family=_family, kind=_kind: socket.socket(family, kind).close() or "a socket"
    )


@attempt(control=True)
def connect_to_the_host():
    with socket.create_connection(("127.0.0.1", H["port"]), timeout=1):
        return "connected"


@attempt(control=True)
def connect_to_an_abstract_socket():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + H["abstract"])
        return "connected"


@attempt(control=True)
def connect_to_a_named_socket():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(H["unix"])
        return "connected"


@attempt(control=True)
def listen_on_a_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


@attempt(control=True)
def socketpair_of_another_family():
    left, right = socket.socketpair(30)  # TIPC
    left.close()
    right.close()
    return "a pair"


CONTROLS.discard("socketpair_of_another_family")  # few kernels have TIPC


def datagram_pair(kind=socket.SOCK_DGRAM):
    """One end of a pair can send to any socket with a path, without a call to `socket`."""
    return socket.socketpair(socket.AF_UNIX, kind)[0]


@attempt(control=True)
def send_data_to_a_named_datagram_socket():
    with datagram_pair() as pair:
        return pair.sendto(b"data", H["datagrams"])


@attempt(control=True)
def send_a_descriptor_to_a_named_datagram_socket():
    with datagram_pair() as pair, open("/dev/null") as file:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fileno()))
        return pair.sendmsg([b"fd"], [rights], 0, H["datagrams"])


@attempt(control=True)
def send_data_to_an_abstract_datagram_socket():
    with datagram_pair() as pair:
        return pair.sendto(b"data", "\0" + H["abstract_datagrams"])


@attempt(control=True)
def a_pair_of_raw_sockets():
    with datagram_pair(socket.SOCK_RAW) as pair:
        return pair.sendto(b"data", H["datagrams"])


@attempt(control=True)
def a_datagram_pair_with_flags():
    with datagram_pair(socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as pair:
        return pair.sendto(b"data", H["datagrams"])


def addressed(kind):
    """Send from a pair that is allowed to the host's socket; a stream cannot be readdressed."""
    with socket.socketpair(socket.AF_UNIX, kind)[0] as pair:
        try:
            pair.sendto(b"data", H["datagrams"])
        except OSError as error:
            if error.errno in (errno.EISCONN, errno.EOPNOTSUPP, errno.EPIPE):
                raise PermissionError(errno.EPERM, str(error)) from None
            raise
    raise PermissionError(errno.EPERM, "the host heard nothing")  # it is asked later


attempt(name="send from a stream pair to a named socket")(lambda: addressed(socket.SOCK_STREAM))
attempt(name="send from a packet pair to a named socket")(lambda: addressed(socket.SOCK_SEQPACKET))


@attempt
def autobind_a_socket():
    left, _ = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return left.getsockname()


@attempt
def bind_a_pair_to_a_path():
    left, _ = socket.socketpair()
    left.bind("bound")
    return left.getsockname()


@attempt
def enlarge_a_socket():
    left, _ = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    return left.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@attempt(control=True)
def enlarge_a_pipe():
    read, write = os.pipe()
    try:
        return fcntl.fcntl(read, 1031, 2**19)
    finally:
        os.close(read)
        os.close(write)


@attempt
def resolve_a_name():
    try:
        return socket.getaddrinfo("example.com", 80)
    except socket.gaierror as error:
        raise PermissionError(errno.EPERM, str(error)) from None


# ---- files of the host


def reads(path):
    return lambda: content(path)


for _path in ("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/1/environ"):
    attempt(reads(_path), control=True, name=f"read {_path}")
for _path in (
    "/etc/shadow",
    "/etc/ssh/sshd_config",
    "/proc/1/mem",
    "/proc/1/maps",
    "/proc/kcore",
    "/proc/kmsg",
    "/proc/sys/kernel/core_pattern",
    "/sys/kernel/uevent_helper",
    "/dev/mem",
    "/dev/kmsg",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/vda",
    "/dev/fuse",
    "/dev/shm/anything",
    "/var/run/docker.sock",
):
    attempt(reads(_path), name=f"read {_path}")


@attempt(control=True)
def read_the_bait():
    return content(H["file"])


@attempt(control=True)
def read_the_bait_through_a_link():
    os.symlink(H["file"], "link")
    try:
        return content("link")
    finally:
        os.unlink("link")


@attempt(control=True)
def read_the_bait_through_proc_root():
    return content(f"/proc/self/root{H['file']}")


@attempt
def read_the_bait_through_the_root_of_process_1():
    return content(f"/proc/1/root{H['file']}")


@attempt
def read_the_bait_through_the_parent():
    return content(f"/proc/{os.getppid()}/root{H['file']}")


@attempt(control=True)
def read_the_environment_of_the_parent():
    return content(f"/proc/{os.getppid()}/environ")


@attempt(control=True)
def read_the_environment_of_the_host_process():
    return content(f"/proc/{H['pid']}/environ")


@attempt(control=True)
def read_the_bait_by_dots():
    return content("/".join([".."] * 20) + H["file"])


@attempt(control=True)
def hard_link_to_the_bait():
    os.link(H["file"], f"{H['file']}.hard")
    try:
        return content(f"{H['file']}.hard")
    finally:
        os.unlink(f"{H['file']}.hard")


@attempt
def hard_link_into_the_work_folder():
    os.link(H["file"], "hard")
    return content("hard")


@attempt
def hard_link_of_a_system_file():
    os.link("/usr/bin/env", "hard")
    return "linked"


@attempt(control=True)
def list_the_bait_folder():
    return os.listdir(H["dir"])


@attempt(control=True)
def list_the_root():
    return os.listdir("/")


@attempt(control=True)
def list_processes():
    return os.listdir("/proc")


@attempt(control=True)
def list_home():
    return os.listdir(H["home"])


@attempt(control=True)
def write_beside_the_bait():
    with open(f"{H['dir']}/written", "w") as file:
        file.write("x")
    return "written"


@attempt(control=True)
def append_to_the_bait():
    with open(H["file"], "a") as file:
        file.write("x")
    return "written"


@attempt(control=True)
def truncate_the_bait():
    os.truncate(H["victim"], 0)
    return "truncated"


@attempt(control=True)
def change_the_mode_of_the_bait():
    os.chmod(H["victim"], 0o777)
    return "changed"


@attempt(control=True)
def change_the_times_of_the_bait():
    os.utime(H["victim"], (0, 0))
    return "changed"


@attempt(control=True)
def set_an_attribute_on_the_bait():
    os.setxattr(H["victim"], "user.x", b"1")
    return "changed"


CONTROLS.discard("set_an_attribute_on_the_bait")  # not every file system has them


def file_flags(path, number):
    """Set what is set, through a descriptor that may only read."""
    with open(path, "rb") as file:
        flags = bytearray(8)
        fcntl.ioctl(file, 0x80086601, flags)  # FS_IOC_GETFLAGS
        return fcntl.ioctl(file, number, bytes(flags)) or "set"


@attempt(control=True)
def set_the_flags_of_the_bait():
    return file_flags(H["file"], 0x40086602)


@attempt
def set_the_flags_of_the_interpreter():
    return file_flags(sys.executable, 0x40086602)


@attempt
def set_the_project_of_the_interpreter():
    with open(sys.executable, "rb") as file:
        fields = bytearray(28)
        fcntl.ioctl(file, 0x801C581F, fields)  # FS_IOC_FSGETXATTR
        return fcntl.ioctl(file, 0x401C5820, bytes(fields)) or "set"


@attempt
def freeze_the_file_system():
    with open(sys.executable, "rb") as file:
        return fcntl.ioctl(file, 0xC0045877, 0)


@attempt
def trim_the_file_system():
    with open(sys.executable, "rb") as file:
        return fcntl.ioctl(file, 0xC0185879, bytes(24))


@attempt
def map_the_blocks_of_the_interpreter():
    with open(sys.executable, "rb") as file:
        return fcntl.ioctl(file, 0xC020660B, bytearray(32))


@attempt
def lease_the_interpreter():
    with open(sys.executable, "rb") as file:
        return fcntl.fcntl(file, 1024, fcntl.F_RDLCK) or "leased"  # who writes it has to wait


@attempt(control=True)
def lease_the_bait():
    with open(H["file"], "rb") as file:
        return fcntl.fcntl(file, 1024, fcntl.F_RDLCK) or "leased"


@attempt
def watch_the_python_library():
    fd = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
    try:
        return fcntl.fcntl(fd, 1026, 2) or "watched"
    finally:
        os.close(fd)


@attempt
def map_the_interpreter_for_writing():
    with open(sys.executable, "rb") as file:
        return bool(mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_WRITE))


@attempt
def open_a_library_file_again_for_writing():
    with open(os.__file__, "rb") as file:
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY)


@attempt
def see_the_disk_under_the_folder():
    here = os.statvfs(".")
    if here.f_blocks * here.f_frsize > 2**30:
        return "the folder is on the host's disk"
    raise PermissionError(errno.EPERM, "a bounded folder")


@attempt
def grow_the_folder():
    options = b"size=1g"
    return raw("mount", b"tmpfs", os.getcwd().encode(), None, 32, options)


@attempt
def uncover_the_folder():
    return raw("umount2", os.getcwd().encode(), 2)


@attempt(control=True)
def read_the_bait_by_openat2():
    how = struct.pack("QQQ", 0, 0, 0)
    fd = libc.syscall(437, -100, H["file"].encode(), how, len(how))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "openat2")
    return os.read(fd, 64)


@attempt(control=True)
def read_the_bait_from_its_folder():
    """Landlock lets everybody enter a folder, and hold a path."""
    here = os.getcwd()
    os.chdir(H["dir"])
    try:
        return content("file")
    finally:
        os.chdir(here)


@attempt(control=True)
def read_the_bait_beneath_a_held_path():
    fd = os.open(H["dir"], os.O_PATH | os.O_DIRECTORY)
    try:
        return os.read(os.open("file", os.O_RDONLY, dir_fd=fd), 64)
    finally:
        os.close(fd)


@attempt(control=True)
def read_the_bait_by_a_held_path():
    fd = os.open(H["file"], os.O_PATH)
    try:
        return content(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


@attempt
def run_the_bait_by_a_held_path():
    def run():
        fd = os.open(H["program"], os.O_PATH)
        words = (ctypes.c_char_p * 2)(b"x", None)
        libc.syscall({0: 322, 1: 281}[COLUMN], fd, b"", words, words, 0x1000)  # execveat, empty
        raise OSError(ctypes.get_errno(), "execveat")

    return in_child(run) or "it ran in place of the child"


@attempt(control=True)
def run_a_program_beside_the_bait():
    return subprocess.run([H["program"]], capture_output=True, text=True, check=False).stdout


@attempt(control=True)
def print_the_bait_by_an_interpreter_line():
    with open("shown.sh", "w") as file:
        file.write(f"#!/bin/cat {H['file']}\n")
    os.chmod("shown.sh", 0o700)
    done = subprocess.run(["./shown.sh"], capture_output=True, text=True, check=False)
    os.unlink("shown.sh")
    return H["secret"] in done.stdout or _refused(done.stderr)


@attempt(control=True)
def exchange_the_bait_for_an_own_file():
    open("x", "w").close()
    pair = (-100, f"{os.getcwd()}/x".encode(), -100, H["victim"].encode(), 2)  # RENAME_EXCHANGE
    for _ in range(2):  # and back
        if libc.syscall({0: 316, 1: 276}[COLUMN], *pair) < 0:
            raise OSError(ctypes.get_errno(), "renameat2")
    return "exchanged"


@attempt(control=True)
def make_a_link_beside_the_bait():
    os.symlink("x", f"{H['dir']}/written-link")
    return "made"


@attempt(control=True)
def make_a_pipe_beside_the_bait():
    os.mkfifo(f"{H['dir']}/written-pipe")
    return "made"


@attempt(control=True)
def make_a_nameless_file_beside_the_bait():
    return os.open(H["dir"], os.O_TMPFILE | os.O_WRONLY)


@attempt
def give_a_program_a_capability():
    with open("able", "w"):
        os.setxattr("able", "security.capability", b"\1\0\0\2" + b"\xff" * 16)
    return "able"


@attempt
def leave_a_program_of_root_that_anyone_can_run():
    with open("rooted", "w"):
        os.chmod("rooted", 0o4755)
    found = os.stat("rooted")
    if found.st_uid == 0 and found.st_mode & 0o4000 and not os.statvfs(".").f_flag & os.ST_NOSUID:
        return "a set-user-id file of root"
    return _refused("nobody gains anything")


@attempt(control=True)
def delete_the_bait():
    os.unlink(H["victim2"])
    return "deleted"


@attempt(control=True)
def rename_the_bait():
    os.rename(H["victim3"], H["victim3"] + ".new")
    return "renamed"


@attempt
def write_into_the_python_library():
    with open(os.path.join(os.path.dirname(os.__file__), "sandbox_probe.py"), "w") as file:
        file.write("x")
    return "written"


@attempt
def change_the_mode_of_a_system_file():
    os.chmod("/usr/bin/env", os.stat("/usr/bin/env").st_mode)
    return "changed"


@attempt
def write_into_the_real_tmp():
    with open("/var/tmp/sandbox_probe", "w") as file:
        file.write("x")
    return "written"


@attempt
def make_a_device():
    os.mknod("device", 0o666 | 0o020000, os.makedev(1, 1))
    return "a device"


@attempt(control=True)
def write_to_the_host_fifo():
    fd = os.open(H["fifo"], os.O_RDWR | os.O_NONBLOCK)
    os.close(fd)
    return "opened"


@attempt
def map_the_bait():
    with open(H["file"], "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:8]


@attempt(control=True)
def open_shared_memory():
    fd = os.open(f"/dev/shm/{H['shm']}", os.O_RDONLY)
    return os.read(fd, 8)


# ---- other processes


@attempt(control=True)
def signal_the_host_process():
    os.kill(H["pid"], 0)
    return "reached"


@attempt(control=True)
def signal_a_victim():
    os.kill(H["victim_pid"], signal.SIGUSR1)
    return "sent"


@attempt(control=True)
def signal_a_victim_by_queue():
    info = struct.pack("iii", signal.SIGUSR1, 0, -1).ljust(128, b"\0")
    buffer = ctypes.create_string_buffer(info)
    result = libc.syscall(NUMBERS["rt_sigqueueinfo"][COLUMN], H["victim_pid"], 10, buffer)
    if result < 0:
        raise OSError(ctypes.get_errno(), "rt_sigqueueinfo")
    return "sent"


@attempt
def signal_the_supervisor():
    outer = os.getsid(0)
    for pid in (os.getppid(), outer):
        if pid not in (0, 1, os.getpid()):
            os.kill(pid, 0)
            return f"reached {pid}"
    if os.getpid() < 100:
        os.kill(H["pid"], 0)  # inside a PID namespace there is no supervisor to be named
        return "reached"
    raise ProcessLookupError(errno.ESRCH, "no supervisor to be seen")


def with_a_pipe(function):
    return with_both_ends(lambda read, write: function(read))


def with_both_ends(function):
    read, write = os.pipe()
    try:
        return function(read, write)
    finally:
        os.write(write, b"x")
        os.close(read)
        os.close(write)


@attempt(control=True)
def signal_by_descriptor_owner():
    def own(read):
        fcntl.fcntl(read, fcntl.F_SETOWN, H["victim_pid"])
        fcntl.fcntl(read, 10, signal.SIGUSR2)  # F_SETSIG
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        return "asked"

    return with_a_pipe(own)


@attempt(control=True)
def own_a_descriptor_as_the_host_process():
    """Landlock before ABI 6 lets the kernel send the owner any signal, SIGKILL too."""
    return with_a_pipe(lambda read: fcntl.fcntl(read, fcntl.F_SETOWN, H["victim_pid"]) or "owned")


@attempt(control=True)
def own_a_descriptor_as_a_thread_of_the_host():
    owner = struct.pack("ii", 0, H["victim_pid"])
    return with_a_pipe(lambda read: fcntl.fcntl(read, 15, owner) and "owned")


@attempt(control=True)
def own_a_descriptor_as_the_supervisors_group():
    return with_a_pipe(lambda read: fcntl.fcntl(read, fcntl.F_SETOWN, -os.getpgid(0)) or "owned")


@attempt(control=True)
def choose_the_signal_of_a_descriptor():
    return with_a_pipe(lambda read: fcntl.fcntl(read, 10, signal.SIGKILL) or "chosen")


@attempt(control=True)
def share_memory_that_no_limit_sees():
    with mmap.mmap(-1, 4096):
        return "shared"


@attempt
def share_memory_of_a_device():
    with open("/dev/zero", "rb") as file:
        return mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)[:8]


@attempt
def use_the_hosts_huge_pages():
    """They are not resident memory, and a database on the host may count on them."""
    libc.mmap.restype = ctypes.c_size_t
    found = libc.mmap(None, ctypes.c_size_t(2**21), 3, 0x40022, -1, ctypes.c_long(0))
    if found == 2**64 - 1:
        raise OSError(ctypes.get_errno(), "mmap")
    return "mapped"


def pinned(move):
    """Put a page of a file into a pipe: the memory around it stays when the file is cut."""
    with open("spliced", "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        return with_both_ends(lambda read, write: move(file.fileno(), write))


for _name, _move in {
    "splice": lambda file, pipe: os.splice(file, pipe, 1, offset_src=0),
    "sendfile": lambda file, pipe: os.sendfile(pipe, file, 0, 1),
}.items():
    attempt(name=f"pin memory by {_name}", control=True)(lambda move=_move: pinned(move))


@attempt(name="pin memory by tee", control=True)
def tee():
    def twice(read, write):
        os.write(write, b"x")
        if libc.syscall({0: 276, 1: 77}[COLUMN], read, write_of_another, 1, 0) < 0:
            raise OSError(ctypes.get_errno(), "tee")
        return "twice"

    read_of_another, write_of_another = os.pipe()
    try:
        return with_both_ends(twice)
    finally:
        os.close(read_of_another)
        os.close(write_of_another)


@attempt(control=True)
def own_a_socket_as_the_host_process():
    """What F_SETOWN does, asked of the socket (FIOSETOWN, SIOCSPGRP)."""
    left, right = socket.socketpair()
    with left, right:
        owner = struct.pack("i", H["victim_pid"])
        return [fcntl.ioctl(left, number, owner) for number in (0x8901, 0x8902)] and "owned"


@attempt
def kill_the_supervisor_by_an_exit_signal():
    """A sibling is the supervisor's child: it must die with SIGCHLD whatever it was made with."""
    clone_parent = 0x8000
    pid = libc.syscall(NUMBERS["clone"][COLUMN], clone_parent | signal.SIGKILL, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    time.sleep(0.1)  # who is dead by now reports nothing
    raise PermissionError(errno.EPERM, "the supervisor lives on")


@attempt
def call_in_the_32_bit_way():
    def ask_for_the_process_id():
        if platform.machine() != "x86_64":
            raise PermissionError(errno.EPERM, "no such way")
        code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
        page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
        page.write(code)
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return ctypes.CFUNCTYPE(ctypes.c_int)(at)()

    return in_child(ask_for_the_process_id) or _refused("the child was killed")


@attempt
def signal_another_thread_by_a_timer():
    event = struct.pack("PiiIi", 0, signal.SIGUSR1, 4, H["victim_pid"], 0).ljust(64, b"\0")
    made = libc.syscall({0: 222, 1: 107}[COLUMN], 0, event, ctypes.byref(ctypes.c_int()))
    return made >= 0 or _refused("the kernel knows no such thread here")


@attempt
def signal_a_child_by_its_descriptor():
    """A descriptor of a process can be passed on, and no scope holds for it then."""
    found = ctypes.c_int(-1)
    flags = 0x1000 | signal.SIGCHLD  # CLONE_PIDFD
    pid = libc.syscall(NUMBERS["clone"][COLUMN], flags, 0, ctypes.byref(found), 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    try:
        if libc.syscall(424, found.value, 0, None, 0) < 0:  # pidfd_send_signal
            raise OSError(ctypes.get_errno(), "pidfd_send_signal")
        return "sent"
    finally:
        os.close(found.value)
        os.waitpid(pid, 0)


@attempt(control=True)
def limit_the_host_process():
    import resource

    return resource.prlimit(H["victim_pid"], resource.RLIMIT_NOFILE)


@attempt(control=True)
def slow_the_host_process():
    return os.setpriority(os.PRIO_PROCESS, H["victim_pid"], 19) or "slowed"


@attempt
def attach_to_the_parent():
    return raw("ptrace", 16, os.getppid(), 0, 0)


@attempt
def read_memory_of_the_host_process():
    fd = os.open(f"/proc/{H['pid']}/mem", os.O_RDONLY)
    return f"fd {fd}"


# ---- what was inherited


@attempt
def use_an_inherited_descriptor():
    found = []
    for fd in range(3, 256):
        try:
            kind = os.fstat(fd).st_mode
        except OSError:
            continue
        found.append((fd, kind))
    mine = H.get("own_fds", 0)
    if len(found) > mine:
        return found
    raise OSError(errno.ENOENT, "nothing was inherited")


@attempt
def find_a_secret_in_the_environment():
    found = [key for key in os.environ if "SECRET" in key or "TOKEN" in key or "KEY" in key]
    if found or any(H["secret"] in value for value in os.environ.values()):
        return found
    raise OSError(errno.ENOENT, "no secret")


@attempt
def find_a_secret_in_the_arguments():
    return [content("/proc/self/cmdline"), content(f"/proc/{os.getppid()}/cmdline")]


@attempt
def have_a_terminal():
    fd = os.open(os.ctermid(), os.O_RDWR)
    return f"fd {fd}"


@attempt
def push_characters_into_a_terminal():
    fcntl.ioctl(0, 0x5412, b"x")
    return "pushed"


@attempt
def keep_a_capability():
    with open("/dev/null") as file:
        header = struct.pack("Ii", 0x20080522, 0)
        buffer = ctypes.create_string_buffer(24)
        libc.syscall({0: 125, 1: 90}[COLUMN], header, buffer)
        if any(buffer.raw):
            return buffer.raw
        file.read()
    raise OSError(errno.EPERM, "no capability, and no way to ask")


@attempt
def raise_a_limit():
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    except ValueError as error:
        raise PermissionError(errno.EPERM, str(error)) from None
    return "raised"


if __name__ == "__main__":
    import json

    H.update(json.loads(sys.argv[1]))
    print(json.dumps({name: report(name) for name in sorted(CONTROLS)}))
