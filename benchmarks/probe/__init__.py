"""Measures how long an event loop is blocked: by how much a sleep of 10 ms is late.

It needs the standard library only: some scripts also run in environments without rolltree.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from itertools import accumulate

PROBE_S = 0.010


class Probe:
    """How late sleeps of 10 ms are: by the clock, and as far as this process's CPU time explains.

    The second leaves out what other programs did on a busy machine.
    """

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.own_ms: list[float] = []

    async def run(self) -> None:
        """Sleep again and again, until cancelled."""
        while True:
            before, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(PROBE_S)
            late = max(0.0, time.perf_counter() - before - PROBE_S)
            own = max(0.0, time.process_time() - cpu)
            self.late_ms.append(1000 * late)
            self.own_ms.append(1000 * min(late, own))

    def figures(self) -> dict[str, float]:
        """Return percentiles of the lag and the largest."""
        return {
            "lag_p50_ms": percentile(self.own_ms, 50),
            "lag_p99_ms": percentile(self.own_ms, 99),
            "lag_max_ms": max(self.own_ms, default=0.0),
            "clock_lag_p99_ms": percentile(self.late_ms, 99),
        }


def percentile(late_ms: list[float], percent: float) -> float:
    """Return a percentile of lags, each weighed with the sleeps of 10 ms that it stands for.

    A loop held for a second is one sample of a sleeping task, but a hundred sleeps met it.
    """
    late = sorted(late_ms or [0.0])
    weight = list(accumulate(1 + each / (1000 * PROBE_S) for each in late))
    return late[bisect_left(weight, weight[-1] * percent / 100)]
