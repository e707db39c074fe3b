"""Code that reaches one unix socket of this machine, as TCP, and nothing else."""

import asyncio
import contextlib
import os
import platform
import socket

import pytest

from rolltree.sandbox import Limits, LocalBackend
from rolltree.sandbox.local import REACHED_AT
from rolltree.values.errors import SandboxUnavailable

LIMITS = Limits(wall_s=60, memory_bytes=2**30, max_open_files=512, max_processes=64)
ECHO = f"""
import socket
def connect():
    return socket.create_connection({REACHED_AT}, 30)
def read_all(connection):
    data = b""
    while part := connection.recv(65536):
        data += part
    return data
"""


@contextlib.asynccontextmanager
async def reaching(serve, tmp_path, **settings):
    """Give a sandbox in which `serve(reader, writer)` answers."""
    try:
        await (await LocalBackend("bubblewrap").create()).close()
    except SandboxUnavailable as error:
        pytest.skip(f"bubblewrap does not work here: {error}")
    path = tmp_path / "reached.sock"
    server = await asyncio.start_unix_server(serve, path)
    path.chmod(0o666)
    backend = LocalBackend(reach=path, **settings)
    async with server, await backend.create(limits=LIMITS) as sandbox:
        yield sandbox


async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_bytes_go_both_ways_also_many_and_at_once(tmp_path):
    code = f"""{ECHO}
import threading
def send(connection, data):
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
big = bytes(range(256)) * 20000
found = []
def one(data):
    with connect() as connection:
        sending = threading.Thread(target=send, args=(connection, data))
        sending.start()
        found.append(read_all(connection) == data)
threads = [threading.Thread(target=one, args=(big[i:],)) for i in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
print(found == [True] * 8)
"""
    async with reaching(echo, tmp_path) as sandbox:
        result = await sandbox.run_python(code)
    assert result.stdout == "True\n", result.text()


async def test_who_hangs_up_is_seen_on_the_other_side(tmp_path):
    left = asyncio.Event()

    async def wait(reader, writer):
        writer.write(b"x")
        if not await reader.read():
            left.set()
        writer.close()

    code = f"{ECHO}\nc = connect(); c.recv(1); c.close(); import time; time.sleep(60)"
    async with reaching(wait, tmp_path) as sandbox:
        run = asyncio.ensure_future(sandbox.run_python(code))
        await asyncio.wait_for(left.wait(), 60)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run

    async def leave(reader, writer):
        writer.write(b"half")
        writer.close()

    async with reaching(leave, tmp_path) as sandbox:
        result = await sandbox.run_python(f"{ECHO}\nprint(read_all(connect()))")
    assert result.stdout == "b'half'\n", result.text()


async def test_nothing_else_is_reached(tmp_path):
    """Neither another port of this machine, nor another machine, nor another socket."""
    listener = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    other = await asyncio.start_unix_server(echo, tmp_path / "other.sock")
    (tmp_path / "other.sock").chmod(0o777)
    abstract = await asyncio.start_unix_server(echo, f"\0rolltree-test-{os.getpid()}")
    code = f"""{ECHO}
def tried(name, work):
    try:
        work()
        print(name, "REACHED")
    except OSError as error:
        print(name, "no")
def unix(address):
    socket.socket(socket.AF_UNIX).connect(address)
tried("port", lambda: socket.create_connection(("127.0.0.1", {port}), 5))
tried("port", lambda: socket.create_connection(("::1", {port}), 5))
tried("machine", lambda: socket.create_connection(("192.0.2.1", 80), 5))
tried("socket", lambda: unix({str(tmp_path / "other.sock")!r}))
tried("abstract", lambda: unix("\\0rolltree-test-{os.getpid()}"))
tried("datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
tried("netlink", lambda: socket.socket(16, socket.SOCK_RAW))
tried("packets", lambda: socket.socket(17, socket.SOCK_RAW))
tried("queues", lambda: socket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24))
tried("file", lambda: open("/etc/passwd"))
print("own", connect().getpeername())
"""
    async with reaching(echo, tmp_path) as sandbox:
        result = await sandbox.run_python(code)
    for server in (listener, other, abstract):
        server.close()
    lines = result.stdout.splitlines()
    assert len(lines) == 11, result.text()
    assert [line for line in lines if "REACHED" in line] == []
    assert lines[-1] == f"own {REACHED_AT}"


async def test_connections_that_nobody_takes_are_closed(tmp_path):
    async with reaching(echo, tmp_path) as sandbox:
        (tmp_path / "reached.sock").unlink()
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(str(tmp_path / "reached.sock"))  # and never listens
            result = await sandbox.run_python(f"{ECHO}\nprint(read_all(connect()))")
    assert result.stdout == "b''\n", result.text()


async def test_queues_of_connections_count_as_memory(tmp_path):
    """What is sent and never read is in the kernel, in no process."""
    code = """
import socket
listener = socket.create_server(("127.0.0.1", 5000), backlog=200)
kept = []
while True:
    one = socket.create_connection(("127.0.0.1", 5000))
    one.setblocking(False)
    kept.append(one)
    try:
        while True:
            one.send(bytes(65536))
    except BlockingIOError:
        pass
"""
    async with reaching(echo, tmp_path) as sandbox:
        result = await sandbox.run_python(code)
    assert result.ended == "memory", result.text()


@pytest.mark.skipif(platform.system() != "Linux", reason="the local sandbox needs Linux")
@pytest.mark.parametrize("level", ["landlock", "rlimits"])
async def test_levels_without_a_network_of_their_own_refuse(level, tmp_path):
    backend = LocalBackend(level, allow_weaker=True, reach=tmp_path / "any.sock")
    with pytest.raises(SandboxUnavailable, match=f"{level}.*cannot let code reach one socket"):
        await backend.create()
