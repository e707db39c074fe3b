"""What lies about on a host for code that gets out of its sandbox: files, sockets, a process."""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

FILES = ("file", "victim", "victim2", "victim3")
SECRET = "s3cret-of-the-host-8417"


def sockets(folder, label):
    """Listen in every way that code inside could connect to."""
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract_name = f"rolltree-bait-{label}-{os.getpid()}"
    abstract.bind("\0" + abstract_name)
    named.bind(str(folder / "socket"))
    for server in (abstract, named):
        server.listen(8)
    os.chmod(folder / "socket", 0o777)
    datagrams, abstract_datagrams = (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)
    )
    datagrams.bind(str(folder / "datagrams"))
    os.chmod(folder / "datagrams", 0o777)
    abstract_datagrams.bind(f"\0{abstract_name}-datagrams")
    return [tcp, abstract, named, datagrams, abstract_datagrams], {
        "datagrams": str(folder / "datagrams"),
        "abstract_datagrams": f"{abstract_name}-datagrams",
        "port": tcp.getsockname()[1],
        "abstract": abstract_name,
        "unix": str(folder / "socket"),
    }


@contextmanager
def a_victim():
    """A process that says which signals it gets."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _VICTIM], stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@contextmanager
def laid_out(victim, label):
    """What lies about on the host: files, sockets, a process, secrets."""
    folder = Path("/var/tmp") / f"rolltree-bait-{label}-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o777)
    for name in FILES:
        (folder / name).write_text(SECRET)
        (folder / name).chmod(0o666)
    os.mkfifo(folder / "fifo", 0o666)
    (folder / "program").write_text("#!/bin/sh\necho it ran\n")
    (folder / "program").chmod(0o755)
    shm = Path("/dev/shm") / f"rolltree-bait-{label}-{os.getpid()}"
    shm.write_text(SECRET)
    shm.chmod(0o666)
    servers, names = sockets(folder, label)
    try:
        yield {
            **{
                name: str(folder / name)
                for name in ("file", "victim", "victim2", "victim3", "fifo", "program")
            },
            **names,
            "dir": str(folder),
            "shm": shm.name,
            "pid": os.getpid(),
            "victim_pid": victim.pid,
            "home": str(Path.home() if Path.home().exists() else "/var"),
            "secret": SECRET,
        }
    finally:
        for server in servers:
            server.close()
        shm.unlink()
        shutil.rmtree(folder)


_VICTIM = """
import signal, sys
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGIO):
    signal.signal(number, lambda got, frame: print("signal", got, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def heard(victim, within_s=0.1):
    """Return which signals a process says it got."""
    found, _, _ = select.select([victim.stdout], [], [], within_s)
    return victim.stdout.readline() if found else ""


async def tried(session, facts, source, name):
    """Run one of `attempts` in a session of a sandbox; the session may be a new one."""
    code = f"print(report({name!r}))"
    result = await session.run(code)
    if "NameError" in result.stdout or "name 'report'" in result.stdout:
        prelude = source.partition('if __name__ == "__main__"')[0]
        told = json.dumps({**facts, "own_fds": 2})  # the session's own pipes
        await session.run(f"{prelude}\nH.update({told})\nNone")
        result = await session.run(code)
    return result
