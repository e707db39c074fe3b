"""Warns when no group has reward variance.

With dynamic sampling, or while the trainer waits for the asynchronous feed, a run can stand still
without an error: every reward is the same, every rollout fails, or none finishes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rolltree.values.types import RolloutResult

PATIENCE_S = 45.0
"""Seconds without reward variance before the first notice, and between notices."""
_CHECK_EVERY_S = 5.0


class NoSignalWarning:
    """Counts the groups since the last one with reward variance.

    Args:
        notify: gets each notice.
        patience_s: how long to wait before the first notice, and between notices.
        clock: seconds, monotonic.

    Example of a notice: `step 3 has waited 47 s for a group with reward variance: none of
    24 groups has any; all 192 rewards are 1.`
    """

    def __init__(
        self,
        notify: Callable[[str], None],
        *,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notify, self._clock = notify, clock
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start counting for a step."""
        self._step = step
        self._reset()
        self._had_signal = False

    def signal(self) -> None:
        """Note a group with reward variance."""
        self._reset()
        self._had_signal = True

    def _reset(self) -> None:
        self._since = self._notified = self._clock()
        self._num_groups = 0
        self._rewards: Counter[float] = Counter()
        self._errors: Counter[str] = Counter()

    def no_signal(self, results: Sequence[RolloutResult]) -> None:
        """Note a group without reward variance."""
        self._num_groups += 1
        for result in results:
            if result.error is not None:
                # A failed rollout may have a reward that says nothing about the task.
                self._errors[result.error.type] += 1
                continue
            self._rewards.update(
                float(state["reward"]) for state in result.states if state["reward"] is not None
            )

    def check(self) -> None:
        """Send a notice if it has been too long; call it every few seconds."""
        now = self._clock()
        # Since the last notice, so that they come once per patience while nothing changes.
        if now - self._notified >= self._patience_s:
            self._notified = now
            self._notify(
                f"step {self._step} has waited {now - self._since:.0f} s for a group with reward "
                f"variance: {self.reason()}"
            )

    def reason(self, num_judged: int | None = None) -> str:
        """Return what happened instead, as a sentence.

        `num_judged`: of how many groups, if some have reward variance.
        """
        count = self._num_groups
        if not count:
            since = " since the last one with variance" if self._had_signal else ""
            return f"no group of rollouts has ended{since}. Check the engine and the environment."
        first, *more = self._details() or [""]
        if num_judged is None or num_judged == count:
            parts = [f"none of {count} groups has any", first, *more]
        else:
            parts = [
                f"{count} of {num_judged} groups have none",
                first and f"in these, {first}",
                *more,
            ]
        return "; ".join(filter(None, parts)) + "."

    def _details(self) -> list[str]:
        """Return what the groups without reward variance have instead."""
        failed, scored = sum(self._errors.values()), sum(self._rewards.values())
        parts = []
        if failed:
            kind, count = self._errors.most_common(1)[0]
            share = f"{failed} of {failed + scored} rollouts failed"
            parts.append(f"{share}, {count} of them with {kind}")
        if len(self._rewards) == 1:
            parts.append(f"all {scored} rewards are {next(iter(self._rewards)):g}")
        elif scored:
            shown = ", ".join(f"{value:g} ({n} times)" for value, n in self._rewards.most_common(3))
            parts.append(f"the most frequent rewards are {shown}, equal within each group")
        return parts

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Check every few seconds while the block runs."""
        # Otherwise a shorter patience would be noticed too late.
        every = min(_CHECK_EVERY_S, self._patience_s)

        async def keep_checking() -> None:
            while True:
                await asyncio.sleep(every)
                self.check()

        task = asyncio.create_task(keep_checking(), name="no-signal-warning")
        try:
            yield
        finally:
            task.cancel()
            # `wait` does not raise the task's cancellation; `result` raises what `notify` raised.
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
