"""The other side of a `WorkerPool`: what runs in each of its processes."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rolltree._helpers.workers import HEADER, encode_frame


def serve_requests() -> None:
    """Answer requests until the other side is gone; `_Worker` passes the arguments."""
    target, lifeline, memory_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _end_with_parent(lifeline)
    # Copies, since what the function prints or reads must not mix with the frames.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    module, _, name = target.partition(":")
    function: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    if memory_bytes:
        # After the import, which does not count towards the limit.
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    # Encoded in advance: when it is needed, there is no memory left for it.
    out_of_memory = encode_frame({"out_of_memory": True})
    frame = encode_frame({"ready": True})
    while frame is not out_of_memory:
        replies.write(frame)
        replies.flush()
        if not (header := requests.read(HEADER)):
            return
        try:
            frame = _answer(function, requests.read(int.from_bytes(header, "big")))
        except MemoryError:
            frame = out_of_memory
    os.write(replies.fileno(), frame)
    os._exit(1)


def _answer(function: Callable[[Any], Any], request: bytes) -> bytes:
    try:
        frame = encode_frame({"value": function(json.loads(request)), "reusable": _is_clean()})
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001  a function that exits is one that fails
        kind = type(error).__name__
        failure = {"kind": kind, "message": str(error) or kind, "trace": traceback.format_exc()}
        frame = encode_frame({"error": failure, "reusable": _is_clean()})
    sys.stdout.flush()
    sys.stderr.flush()
    return frame


def _is_clean() -> bool:
    """Whether the call left neither threads nor processes behind."""
    if threading.active_count() > 1:
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process group when the other end of the lifeline is closed."""
    # By a signal, because work that hangs in C would never read an end of file. Not by the parent
    # death signal, which Linux sends when the thread that started the process ends.
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    # SIGIO's default action ends a process.
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        # An end of file: it was closed earlier, and no signal will come.
        if not os.read(lifeline, 1):
            os._exit(1)
