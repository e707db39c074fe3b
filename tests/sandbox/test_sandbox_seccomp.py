"""The filter program, run by a small BPF machine written for this test."""

import errno
import platform
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.sandbox.seccomp import (
    ATTRIBUTES,
    AUDIT_ARCH,
    CONNECTIONS,
    METADATA,
    NUMBERS,
    SIGNALS,
    build_filter,
)
from rolltree.values.errors import SandboxUnavailable

ALLOW, KILL = 0x7FFF0000, 0x80000000
MACHINES = sorted(NUMBERS)


def verdict(program, arch, number, arguments=()):
    """Run the program on one call; return "allow", "kill" or the errno."""
    arguments = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments)
    lines = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, accumulator = 0, 0
    tests = {
        0x15: lambda a, k: a == k,
        0x35: lambda a, k: a >= k,
        0x45: lambda a, k: bool(a & k),
    }
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            if value in (ALLOW, KILL):
                return {ALLOW: "allow", KILL: "kill"}[value]
            assert value >> 16 == 5
            return value & 0xFFFF
        else:
            at += if_true if tests[code](accumulator, value) else if_false


def of(machine, name, *arguments, signals=True, metadata=True, attributes=True):
    program = build_filter(machine, signals=signals, metadata=metadata, attributes=attributes)
    return verdict(program, AUDIT_ARCH[machine], NUMBERS[machine][name], arguments)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_listed_call_without_conditions_is_allowed(machine):
    conditional = {"prctl", "ioctl", "fcntl", "clone", "socketpair", "prlimit64", "mmap", "madvise"}
    conditional |= {"close_range"}
    assert conditional <= set(NUMBERS[machine])
    for name in set(NUMBERS[machine]) - conditional:
        assert of(machine, name) == "allow", name


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine):
    assert of(machine, "clone", 17) == "allow"
    assert of(machine, "clone", 0x3D0F00) == "allow"  # a thread as C libraries make it
    assert of(machine, "clone", 0x3D0F00 & ~0x400) == errno.EPERM  # with descriptors of its own
    assert of(machine, "close_range", 3, 9, 4) == "allow"
    assert of(machine, "close_range", 3, 9, 2) == errno.EPERM
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert of(machine, "clone", 17 | flag) == errno.EPERM
    for kind in (1, 5, 1 | 0o4000 | 0o2000000):  # stream, packets; flags
        assert of(machine, "socketpair", 1, kind) == "allow"
        assert of(machine, "socketpair", 2, kind) == errno.EPERM
    for kind in (0, 2, 3, 4, 6, 10, 2 | 0o4000, 3 | 0o2000000):  # datagrams reach the host's paths
        assert of(machine, "socketpair", 1, kind) == errno.EPERM
    assert of(machine, "prlimit64", 0) == "allow"
    assert of(machine, "prlimit64", 1) == errno.EPERM
    for number in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451):
        assert of(machine, "ioctl", 0, number) == "allow"
        assert of(machine, "ioctl", 0, number | 1 << 32) == "allow"  # the kernel drops that half
    # TIOCSTI, TIOCLINUX, FIOASYNC, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FIFREEZE, FICLONE
    for number in (0x5412, 0x541C, 0x5452, 0x40086602, 0x401C5820, 0xC0045877, 0x40049409):
        assert of(machine, "ioctl", 0, number) == errno.ENOTTY
    for command in (0, 1, 2, 3, 4, 6, 9, 11, 16, 1030, 1032):
        assert of(machine, "fcntl", 0, command) == "allow"
    for command in (8, 10, 15, 1024, 1026, 1031):  # SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY,
        assert of(machine, "fcntl", 0, command) == errno.EPERM  # SETPIPE_SZ
    for flags in (0x22, 0x02, 0x01, 0x03, 0x11, 0x20022, 0x28):  # private, or of a file
        assert of(machine, "mmap", 0, 4096, 3, flags) == "allow"
    for flags in (0x21, 0x31, 0x8021, 0x40021):  # shared and of no file: uncounted once unmapped
        assert of(machine, "mmap", 0, 4096, 3, flags) == errno.EPERM
    assert of(machine, "madvise", 0, 4096, 4) == "allow"
    assert of(machine, "madvise", 0, 4096, 21) == errno.EPERM  # swapped out is not resident
    for option in (1, 2, 3, 15, 16, 38, 39, 0x53564D41):
        assert of(machine, "prctl", option) == "allow"
    for option in (4, 8, 22, 24, 28, 35, 36, 47, 0x59616D61):
        assert of(machine, "prctl", option) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_switches(machine):
    for name in SIGNALS & set(NUMBERS[machine]):
        assert of(machine, name, signals=False) == errno.EPERM
        assert of(machine, name, metadata=False) == "allow"
    for name in METADATA & set(NUMBERS[machine]):
        assert of(machine, name, metadata=False) == errno.EPERM
        assert of(machine, name, signals=False, attributes=False) == "allow"
    for name in ATTRIBUTES:
        assert of(machine, name, attributes=False) == errno.EOPNOTSUPP
        assert of(machine, name, signals=False, metadata=False) == "allow"


@given(number=st.integers(0, 2**32 - 1), machine=st.sampled_from(MACHINES))
def test_whatever_is_not_listed_is_refused(number, machine):
    program = build_filter(machine, signals=True, metadata=True, attributes=True)
    got = verdict(program, AUDIT_ARCH[machine], number)
    if number not in NUMBERS[machine].values():
        assert got in (errno.EPERM, errno.ENOSYS)


@given(arch=st.integers(0, 2**32 - 1), number=st.integers(0, 500))
def test_foreign_calling_conventions_are_killed(arch, number):
    program = build_filter("x86_64", signals=True, metadata=True, attributes=True)
    if arch != AUDIT_ARCH["x86_64"]:
        assert verdict(program, arch, number) == "kill"
    assert verdict(program, 0x40000003, number) == "kill"  # i386
    assert verdict(program, AUDIT_ARCH["x86_64"], number | 0x40000000) == errno.ENOSYS  # x32


def test_another_machine_is_refused():
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        build_filter("riscv64", signals=True, metadata=True, attributes=True)


def test_it_fits_the_kernel():
    for machine in MACHINES:
        assert len(build_filter(machine, signals=True, metadata=True, attributes=True)) <= 4096 * 8


HEADER = Path(f"/usr/include/{platform.machine()}-linux-gnu/asm/unistd_64.h")


@pytest.mark.skipif(not HEADER.exists(), reason="no kernel headers")
def test_numbers_are_the_kernel_headers():
    found = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text()))
    for name, number in NUMBERS["x86_64"].items():
        assert name not in found or int(found[name]) == number, name


@pytest.mark.parametrize("machine", MACHINES)
def test_connections_are_streams_with_small_queues(machine):
    settings = {"signals": True, "metadata": True, "attributes": True}
    closed = build_filter(machine, **settings)
    program = build_filter(machine, **settings, connections=True)
    arch, numbers = AUDIT_ARCH[machine], CONNECTIONS[machine]
    for name in ("connect", "bind", "listen", "accept", "accept4"):
        assert verdict(program, arch, numbers[name]) == "allow"
        assert verdict(closed, arch, numbers[name]) == errno.ENOSYS
    nonblocking, stream, datagram, raw = 0x800, 1, 2, 3
    for family in (1, 2, 10):  # unix, IPv4, IPv6
        assert verdict(program, arch, numbers["socket"], [family, stream | nonblocking]) == "allow"
        for kind in (datagram, raw):
            assert verdict(program, arch, numbers["socket"], [family, kind]) == errno.EPERM
    for family in (16, 17, 40):  # netlink, packets, virtual machines
        assert verdict(program, arch, numbers["socket"], [family, stream]) == errno.EAFNOSUPPORT
    for level, option, wanted in [
        *((6, option, "allow") for option in (1, 4, 5, 6)),
        *((1, option, "allow") for option in (2, 9)),
        *((1, option, errno.ENOPROTOOPT) for option in (7, 8, 26, 32, 33, 50)),
        (6, 31, errno.ENOPROTOOPT),  # another protocol above TCP
        (0, 1, errno.ENOPROTOOPT),
    ]:
        assert verdict(program, arch, numbers["setsockopt"], [3, level, option]) == wanted
