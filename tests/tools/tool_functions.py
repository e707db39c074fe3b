"""Tools that a process of its own can import."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from rolltree.environments.tools import in_process


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@in_process
def norm(point: Point, *, scale: float = 1.0) -> dict[str, float]:
    """Return the squared length."""
    print("noise on standard output")
    return {"norm": scale * (point.x**2 + point.y**2), "pid": os.getpid()}


@in_process
async def later(text: str) -> str:
    """Return the text, asynchronously."""
    return text.upper()


@in_process
def fail() -> None:
    """Fail."""
    raise KeyError("missing")


@in_process
def crash(status: int) -> None:
    """End the process at once."""
    sys.stderr.write("goodbye\n")
    sys.stderr.flush()
    os._exit(status)


@in_process
def hang(path: str) -> None:
    """Start another process, note both, and hang in a lock."""
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleepy(seconds: float) -> str:
    """Sleep in small steps."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.001)
    return "awake"
