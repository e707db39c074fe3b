"""Says, while a step waits for rollouts it could learn from, that it waits, and why.

With dynamic sampling, or while the trainer waits for the asynchronous stream, a run can stand still
without an error: every reward is the same, every rollout fails, or none ends. It knows results and
a clock. It leaves out what to do about it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rolltree.types import RolloutResult

PATIENCE_S = 45.0
"""Seconds without a useful group before the first notice, and between notices."""
_LOOK_EVERY_S = 5.0


class StarvationWatch:
    """Counts what came since the last group that teaches something.

    Args:
        say: gets each notice.
        patience_s: how long to wait before the first notice, and between notices.
        clock: seconds, monotonic.

    Example of a notice: `step 3 has waited 47 s for rollouts to learn from: 24 groups came and none
    has a spread of rewards; all 192 rewards are 1.`
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start counting for a step."""
        self._step = step
        self.useful()

    def useful(self) -> None:
        """Note a group that teaches something: the waiting is over for now."""
        self._since = self._said = self._clock()
        self._num_groups = 0
        self._rewards: Counter[float] = Counter()
        self._errors: Counter[str] = Counter()

    def useless(self, results: Sequence[RolloutResult]) -> None:
        """Note a group that teaches nothing."""
        self._num_groups += 1
        for result in results:
            if result.error is not None:
                self._errors[result.error.type] += 1
                continue
            self._rewards.update(
                float(state["reward"]) for state in result.states if state["reward"] is not None
            )

    def look(self) -> None:
        """Say what is wrong if it has been too long; call it every few seconds."""
        now = self._clock()
        if now - self._said >= self._patience_s:
            self._said = now
            self._say(
                f"step {self._step} has waited {now - self._since:.0f} s for rollouts to learn "
                f"from: {self.reason()}"
            )

    def reason(self) -> str:
        """Return what came instead."""
        if not self._num_groups:
            return "no group of rollouts has ended; look at the engine and the environment."
        failed, scored = sum(self._errors.values()), sum(self._rewards.values())
        parts = [f"{self._num_groups} groups came and none has a spread of rewards"]
        if failed:
            kind, count = self._errors.most_common(1)[0]
            share = f"{failed} of {failed + scored} rollouts failed"
            parts.append(f"{share}, {count} of them with {kind}")
        if len(self._rewards) == 1:
            parts.append(f"all {scored} rewards are {next(iter(self._rewards)):g}")
        elif scored:
            shown = ", ".join(f"{value:g} ({n} times)" for value, n in self._rewards.most_common(3))
            parts.append(f"the most frequent rewards are {shown}, each group alike")
        return "; ".join(parts) + "."

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        """Look every few seconds while the block runs."""
        every = min(_LOOK_EVERY_S, self._patience_s)

        async def keep_looking() -> None:
            while True:
                await asyncio.sleep(every)
                self.look()

        task = asyncio.create_task(keep_looking(), name="starvation-watch")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
