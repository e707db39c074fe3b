"""Waiting for what sends no event: files, processes, threads. Generous: a busy machine is slow."""

import asyncio
import time

LIMIT_S = 120.0


def wait_until(check, what="it", limit_s=LIMIT_S):
    """Return when `check()` is true."""
    end = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < end, f"{what} did not happen in {limit_s:g} s"
        time.sleep(0.01)


async def until(check, what="it", limit_s=LIMIT_S):
    """Return when `check()` is true; the event loop goes on."""
    end = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < end, f"{what} did not happen in {limit_s:g} s"
        await asyncio.sleep(0.01)
