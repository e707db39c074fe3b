"""The system call filter of a sandbox, as a classic BPF program that `confine` loads.

It lists the allowed calls, so a call that a later kernel adds is refused (design/0005). Not listed
are sockets (unless `connections`), namespaces, mounts, keys, tracing, other processes' memory, BPF,
io_uring, file handles, message queues, shared memory segments, performance counters, and calls that
put pages of a file into a pipe or socket: `splice`, `tee`, `sendfile` (design/0019). A refused call
fails with an error that programs handle, mostly EPERM, an unlisted one with ENOSYS; a call in a
foreign calling convention (32-bit on x86_64) kills the process. Landlock or the mount namespace
protects files.
"""

from __future__ import annotations

import errno
import struct

from rolltree.values.errors import SandboxUnavailable

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000
# CLONE_NEW: NS, CGROUP, UTS, IPC, USER, PID, NET. Code would have capabilities in its namespace.
_NEW_NAMESPACES = 0x7E020000
# CLONE_THREAD and CLONE_FILES of `clone`, and CLOSE_RANGE_UNSHARE.
_THREAD, _SAME_FILES, _UNSHARE = 0x10000, 0x400, 2
_AF_UNIX, _SOCKET_KIND, _STREAM, _SEQPACKET = 1, 0xF, 1, 5
_AF_INET, _AF_INET6, _OF_SOCKET, _OF_TCP = 2, 10, 1, 6
# REUSEADDR, KEEPALIVE, LINGER, REUSEPORT, RCVTIMEO, SNDTIMEO (old and new). Not SNDBUF and RCVBUF.
_SOCKET_OPTIONS = (2, 9, 13, 15, 20, 21, 66, 67)
# NODELAY, KEEPIDLE, KEEPINTVL, KEEPCNT, QUICKACK, USER_TIMEOUT.
_TCP_OPTIONS = (1, 4, 5, 6, 12, 18)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others control devices, or change files
# that code may only read (FS_IOC_SETFLAGS).
_IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# SETOWN, SETSIG and SETOWN_EX can send any signal to any process of the user (Landlock before ABI 6
# allows it); SETLEASE and NOTIFY act on host files that code may only read; SETPIPE_SZ gives memory
# that is not counted, since a pipe's size cannot be read from outside.
_FCNTL_REFUSED = (8, 10, 15, 1024, 1026, 1031)
_MAP_KIND, _SHARED_ANONYMOUS, _HUGE_PAGES = 0x2F, 0x21, 0x40000
_PAGEOUT = 21
# PDEATHSIG (set, get), GET_DUMPABLE, NAME (set, get), NO_NEW_PRIVS (set, get), SET_VMA. Not
# SET_DUMPABLE: it hides a process from a supervisor that is not root.
_PRCTL_ALLOWED = (1, 2, 3, 15, 16, 38, 39, 0x53564D41)

# socket, unshare, setns, mount, chroot, ptrace, bpf: programs that try them expect EPERM.
_PLAINLY_REFUSED = {
    "x86_64": (41, 272, 308, 165, 161, 101, 321),
    "aarch64": (198, 97, 268, 40, 51, 117, 280),
}


def build_filter(
    machine: str, *, signals: bool, metadata: bool, attributes: bool, connections: bool = False
) -> bytes:
    """Return the program for a machine (`platform.machine()`).

    Args:
        machine: "x86_64" or "aarch64".
        signals: allow `kill` and related calls; something else must confine them.
        metadata: allow `chmod` and related calls; something else must confine them.
        attributes: allow extended attributes; something else must confine them.
        connections: allow stream sockets; a network namespace must confine them.

    Raises:
        SandboxUnavailable: `machine` is anything else.
    """
    if machine not in NUMBERS:
        raise SandboxUnavailable(
            f"the local sandbox has no system call table for {machine!r}; untrusted code would run "
            "unfiltered. Use the Docker backend on this machine."
        )
    numbers = NUMBERS[machine] | (CONNECTIONS[machine] if connections else {})
    groups = ((signals, SIGNALS), (metadata, METADATA), (attributes, ATTRIBUTES))
    refused = {name for allowed, names in groups if not allowed for name in names}
    # Numbers mean different calls in other calling conventions, so a foreign one kills the process.
    lines = [_load(4), _jump(_EQUAL, AUDIT_ARCH[machine], 1, 0), _return(_KILL), _load(0)]
    if machine == "x86_64":
        # x32 calls look native except for this bit in their number.
        lines += [_jump(_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    checks = _checks() | (_connection_checks() if connections else {})
    for name, check in checks.items():
        # Each block ends with a verdict, so the order of calls does not matter.
        lines += [_jump(_EQUAL, numbers[name], 0, len(check)), *check]
    for name, number in numbers.items():
        if name not in checks:
            # Programs continue if attributes are not supported, and give up if they are forbidden.
            code = errno.EOPNOTSUPP if name in ATTRIBUTES else errno.EPERM
            verdict = _refuse(code) if name in refused else _return(_ALLOW)
            lines += [_jump(_EQUAL, number, 0, 1), verdict]
    for number in _PLAINLY_REFUSED[machine]:
        lines += [_jump(_EQUAL, number, 0, 1), _refuse(errno.EPERM)]
    # As an older kernel answers: C libraries then fall back to other calls.
    return b"".join([*lines, _refuse(errno.ENOSYS)])


def _checks() -> dict[str, list[bytes]]:
    """Return the blocks of calls that are allowed with some arguments; each ends with a verdict."""
    allow, refuse = _return(_ALLOW), _refuse(errno.EPERM)
    return {
        # No namespaces; no thread with its own table of descriptors: /proc shows the table of the
        # first thread, so sockets with full buffers could hide in another (design/0019). The
        # flags of `clone3` are behind a pointer, which a filter cannot follow, so it is not listed:
        # libraries then fall back to `clone`.
        "clone": [
            _argument(0),
            _jump(_ANY_BIT, _NEW_NAMESPACES, 2, 0),
            struct.pack("<HBBI", _AND, 0, 0, _THREAD | _SAME_FILES),
            _jump(_EQUAL, _THREAD, 0, 1),
            refuse,
            allow,
        ],
        # With UNSHARE, the call would make such a table, too.
        "close_range": [_argument(2), _jump(_ANY_BIT, _UNSHARE, 0, 1), refuse, allow],
        # asyncio needs socket pairs. A datagram socket can send to any socket that has a path, so
        # only AF_UNIX stream and packet sockets are allowed.
        "socketpair": [
            _argument(0),
            _jump(_EQUAL, _AF_UNIX, 0, 4),
            _argument(1),
            struct.pack("<HBBI", _AND, 0, 0, _SOCKET_KIND),
            _jump(_EQUAL, _STREAM, 2, 0),
            _jump(_EQUAL, _SEQPACKET, 1, 0),
            refuse,
            allow,
        ],
        # Only for the process itself: new limits could end another process of the user.
        "prlimit64": [_argument(0), _jump(_EQUAL, 0, 1, 0), refuse, allow],
        "ioctl": [_argument(1), *_one_of(_IOCTL_ALLOWED), _refuse(errno.ENOTTY), allow],
        "fcntl": [_argument(1), *_one_of(_FCNTL_REFUSED), allow, refuse],
        # Shared memory without a file is kept whole when all but a page is unmapped, but does not
        # count as resident: 1,200 MB under a limit of 128 MiB (design/0019). For the same reason,
        # `memfd_create` and System V segments are not listed. Huge pages come from a pool of the
        # host, and do not count as resident either.
        "mmap": [
            _argument(3),
            _jump(_ANY_BIT, _HUGE_PAGES, 2, 0),
            struct.pack("<HBBI", _AND, 0, 0, _MAP_KIND),
            _jump(_EQUAL, _SHARED_ANONYMOUS, 0, 1),
            refuse,
            allow,
        ],
        # Memory that is swapped out on request is not resident, so no limit sees it.
        "madvise": [_argument(2), _jump(_EQUAL, _PAGEOUT, 0, 1), refuse, allow],
        "prctl": [_argument(0), *_one_of(_PRCTL_ALLOWED), refuse, allow],
    }


def _connection_checks() -> dict[str, list[bytes]]:
    """Return blocks for stream sockets and options that neither enlarge queues nor attach BPF."""
    allow, no_option = _return(_ALLOW), _refuse(errno.ENOPROTOOPT)
    of_tcp = [_argument(2), *_one_of(_TCP_OPTIONS), no_option, allow]
    of_socket = [_argument(2), *_one_of(_SOCKET_OPTIONS), no_option, allow]
    return {
        "socket": [
            _argument(0),
            *_one_of((_AF_UNIX, _AF_INET, _AF_INET6)),
            _refuse(errno.EAFNOSUPPORT),
            _argument(1),
            struct.pack("<HBBI", _AND, 0, 0, _SOCKET_KIND),
            _jump(_EQUAL, _STREAM, 1, 0),
            _refuse(errno.EPERM),
            allow,
        ],
        "setsockopt": [
            _argument(1),
            _jump(_EQUAL, _OF_TCP, 0, len(of_tcp)),
            *of_tcp,
            _jump(_EQUAL, _OF_SOCKET, 0, len(of_socket)),
            *of_socket,
            no_option,
        ],
    }


def _one_of(values: tuple[int, ...]) -> list[bytes]:
    """Return jumps over the line that follows them, if the value is one of `values`."""
    return [_jump(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", _LOAD, 0, 0, offset)


def _argument(index: int) -> bytes:
    # The low half, since the kernel takes these arguments as 32 bits.
    return _load(16 + 8 * index)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("<HBBI", test, if_true, if_false, value)


def _return(action: int) -> bytes:
    return struct.pack("<HBBI", _RETURN, 0, 0, action)


def _refuse(number: int) -> bytes:
    return _return(_ERRNO | number)


# System call numbers (`asm/unistd_64.h`, `asm-generic/unistd.h`) and which calls belong together

_X86_64 = """
read 0  write 1  open 2  openat 257  openat2 437  creat 85  close 3  close_range 436  stat 4
fstat 5  lstat 6  newfstatat 262  statx 332  statfs 137  fstatfs 138  poll 7  ppoll 271
select 23  pselect6 270  epoll_create 213  epoll_create1 291  epoll_ctl 233  epoll_wait 232
epoll_pwait 281  epoll_pwait2 441  eventfd 284  eventfd2 290  timerfd_create 283
timerfd_settime 286  timerfd_gettime 287  lseek 8  pread64 17  pwrite64 18  readv 19
writev 20  preadv 295  pwritev 296  preadv2 327  pwritev2 328
copy_file_range 326  fallocate 285  fadvise64 221  fsync 74  fdatasync 75
sync_file_range 277  truncate 76  ftruncate 77  mmap 9  mprotect 10  munmap 11  brk 12
mremap 25  madvise 28  msync 26  membarrier 324  rt_sigaction 13  rt_sigprocmask 14
rt_sigreturn 15  rt_sigpending 127  rt_sigtimedwait 128  rt_sigsuspend 130  sigaltstack 131
signalfd4 289  restart_syscall 219  ioctl 16  fcntl 72  flock 73  dup 32  dup2 33  dup3 292
pipe 22  pipe2 293  access 21  faccessat 269  faccessat2 439  getdents 78  getdents64 217
getcwd 79  chdir 80  fchdir 81  rename 82  renameat 264  renameat2 316  mkdir 83  mkdirat 258
rmdir 84  link 86  linkat 265  unlink 87  unlinkat 263  symlink 88  symlinkat 266  readlink 89
readlinkat 267  umask 95  mknod 133  mknodat 259  sched_yield 24  sched_getaffinity 204
sched_getparam 143  sched_getscheduler 145  sched_get_priority_max 146
sched_get_priority_min 147  sched_rr_get_interval 148  getcpu 309  getpriority 140
nanosleep 35  clock_nanosleep 230  clock_gettime 228  clock_getres 229  gettimeofday 96
time 201  times 100  getitimer 36  setitimer 38  alarm 37  pause 34  timer_create 222
timer_settime 223  timer_gettime 224  timer_getoverrun 225  timer_delete 226  getpid 39
getppid 110  gettid 186  getuid 102  geteuid 107  getgid 104  getegid 108  getresuid 118
getresgid 120  getgroups 115  getpgid 121  getpgrp 111  getsid 124  setpgid 109  setsid 112
uname 63  sysinfo 99  getrusage 98  getrlimit 97  setrlimit 160  prlimit64 302  getrandom 318
fork 57  vfork 58  clone 56  execve 59  execveat 322  exit 60  exit_group 231  wait4 61
waitid 247  set_tid_address 218  set_robust_list 273  get_robust_list 274  rseq 334
arch_prctl 158  prctl 157  futex 202  futex_waitv 449  socketpair 53  sendto 44  recvfrom 45
sendmsg 46  recvmsg 47  recvmmsg 299  sendmmsg 307  shutdown 48  getsockopt 55  getsockname 51
getpeername 52  kill 62  tkill 200  tgkill 234  chmod 90  fchmod 91  fchmodat 268
fchmodat2 452  utime 132  utimes 235  utimensat 280  futimesat 261  chown 92  fchown 93
lchown 94  fchownat 260  setxattr 188  lsetxattr 189  fsetxattr 190  removexattr 197
lremovexattr 198  fremovexattr 199  getxattr 191  lgetxattr 192  fgetxattr 193  listxattr 194
llistxattr 195  flistxattr 196
"""

_AARCH64 = """
read 63  write 64  openat 56  openat2 437  close 57  close_range 436  fstat 80  newfstatat 79
statx 291  statfs 43  fstatfs 44  ppoll 73  pselect6 72  epoll_create1 20  epoll_ctl 21
epoll_pwait 22  epoll_pwait2 441  eventfd2 19  timerfd_create 85  timerfd_settime 86
timerfd_gettime 87  lseek 62  pread64 67  pwrite64 68  readv 65  writev 66  preadv 69
pwritev 70  preadv2 286  pwritev2 287  copy_file_range 285
fallocate 47  fadvise64 223  fsync 82  fdatasync 83  sync_file_range 84  truncate 45
ftruncate 46  mmap 222  mprotect 226  munmap 215  brk 214  mremap 216  madvise 233  msync 227
membarrier 283  rt_sigaction 134  rt_sigprocmask 135  rt_sigreturn 139  rt_sigpending 136
rt_sigtimedwait 137  rt_sigsuspend 133  sigaltstack 132  signalfd4 74  restart_syscall 128
ioctl 29  fcntl 25  flock 32  dup 23  dup3 24  pipe2 59  faccessat 48  faccessat2 439
getdents64 61  getcwd 17  chdir 49  fchdir 50  renameat 38  renameat2 276  mkdirat 34
linkat 37  unlinkat 35  symlinkat 36  readlinkat 78  umask 166  mknodat 33  sched_yield 124
sched_getaffinity 123  sched_getparam 121  sched_getscheduler 120  sched_get_priority_max 125
sched_get_priority_min 126  sched_rr_get_interval 127  getcpu 168  getpriority 141
nanosleep 101  clock_nanosleep 115  clock_gettime 113  clock_getres 114  gettimeofday 169
times 153  getitimer 102  setitimer 103  timer_create 107  timer_settime 110
timer_gettime 108  timer_getoverrun 109  timer_delete 111  getpid 172  getppid 173  gettid 178
getuid 174  geteuid 175  getgid 176  getegid 177  getresuid 148  getresgid 150  getgroups 158
getpgid 155  getsid 156  setpgid 154  setsid 157  uname 160  sysinfo 179  getrusage 165
getrlimit 163  setrlimit 164  prlimit64 261  getrandom 278  clone 220  execve 221
execveat 281  exit 93  exit_group 94  wait4 260  waitid 95  set_tid_address 96
set_robust_list 99  get_robust_list 100  rseq 293  prctl 167  futex 98  futex_waitv 449
socketpair 199  sendto 206  recvfrom 207  sendmsg 211  recvmsg 212  recvmmsg 243  sendmmsg 269
shutdown 210  getsockopt 209  getsockname 204  getpeername 205  kill 129  tkill 130
tgkill 131  fchmod 52  fchmodat 53  fchmodat2 452  utimensat 88  fchown 55  fchownat 54
setxattr 5  lsetxattr 6  fsetxattr 7  removexattr 14  lremovexattr 15  fremovexattr 16
getxattr 8  lgetxattr 9  fgetxattr 10  listxattr 11  llistxattr 12  flistxattr 13
"""


def _numbers(table: str) -> dict[str, int]:
    words = table.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": _numbers(_X86_64),
    "aarch64": _numbers(_AARCH64),
}
CONNECTIONS: dict[str, dict[str, int]] = {
    "x86_64": _numbers(
        "socket 41  connect 42  accept 43  accept4 288  bind 49  listen 50  setsockopt 54"
    ),
    "aarch64": _numbers(
        "socket 198  connect 203  accept 202  accept4 242  bind 200  listen 201  setsockopt 208"
    ),
}
AUDIT_ARCH: dict[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's number of each machine's calling convention in filters (`linux/audit.h`)."""

# These calls reach every process of the same user unless something else confines signals.
SIGNALS = frozenset({"kill", "tkill", "tgkill"})

# Landlock does not cover attributes, and any process that may write a file may set them. The calls
# are refused as unsupported, which `ls` and `shutil` handle.
ATTRIBUTES = frozenset(
    {"getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr"}
    | {"setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"}
)

# Landlock does not cover these calls, which reach every file that the user owns.
METADATA = frozenset(
    {"chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"}
    | {"utime", "utimes", "utimensat", "futimesat"}
)
