"""Functions that the tests of worker processes call."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def echo(value):
    return {"value": value, "pid": os.getpid()}


def fail(how):
    if how == "raise":
        raise KeyError("no such key")
    if how == "exit":
        sys.exit("bye")
    if how == "no json":
        return object()
    if how == "die":
        sys.stderr.write("goodbye\n")
        sys.stderr.flush()
        os._exit(3)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return how


def hang(how):
    """Hang as asked for: "python", "c" (holding the GIL), "lock"; a path is noted in first."""
    if how == "pid":
        return os.getpid()
    if "/" in how:
        note, _, how = how.partition(":")
        child = subprocess.Popen(["sleep", "600"])
        Path(note).write_text(f"{os.getpid()} {child.pid}")
    if how == "python":
        while True:
            pass
    if how == "c":
        return (7**20_000_000) // 3**9_000_000
    if how == "idle":
        time.sleep(600)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
    return None


def allocate(num_bytes):
    return len(bytearray(num_bytes))


def noisy(value):
    print("noise")
    os.system("echo noise of a child")
    return [value, sys.stdin.read()]


def environment(name):
    return os.environ.get(name)


def leave(what):
    left = None
    if what == "process":
        left = subprocess.Popen(["sleep", "600"]).pid
    if what == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return [os.getpid(), left]


def compute(cpu_s):
    """Use the CPU for so long."""
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass
    return os.getpid()
