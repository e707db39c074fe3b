"""Computes the health and reward curve of every run in the list, one run after another."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rolltree.insight.page.cache import keep, kept
from rolltree.insight.page.glance import run_glance
from rolltree.insight.page.watching import change_mark
from rolltree.store import Run
from rolltree.values.errors import RolltreeError

logger = logging.getLogger("rolltree.insight.page")

_PAUSE = 20
"""A run in progress is examined again after this many times as long as it took."""
_VERSION = 2
"""Version of the values of `run_glance`; kept values of other versions are computed again."""


class _Seen:
    """The value for a run, the mark of its state, and when it may be examined again."""

    def __init__(self, mark: str, value: dict[str, Any], due: float) -> None:
        self.mark, self.value, self.due = mark, value, due


class Glances:
    """Examines runs in its own thread, so that no list waits for stories."""

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._is_busy = is_busy
        self._seen: dict[Path, _Seen] = {}
        self._wanted: list[tuple[Path, str]] = []
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None

    def answer(self, folders: Iterable[tuple[str, Path]]) -> dict[str, Any]:
        """Return the known values of these runs by name, and how many are still to be examined."""
        found: dict[str, Any] = {}
        wanted: list[tuple[Path, str]] = []
        now = time.monotonic()
        for name, folder in folders:
            mark = _mark(folder)
            seen = self._seen.get(folder)
            if seen is not None:
                found[name] = seen.value
            if seen is None or (seen.mark != mark and now >= seen.due):
                wanted.append((folder, mark))
        with self._lock:
            self._wanted = wanted[::-1]  # taken from the end
            if wanted and (self._worker is None or not self._worker.is_alive()):
                self._worker = threading.Thread(target=self._work, name="glances", daemon=True)
                self._worker.start()
        return {"runs": found, "left": len(wanted)}

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._worker = None
                    return
                folder, mark = self._wanted.pop()
            if (seen := self._seen.get(folder)) is not None and seen.mark == mark:
                continue  # it was requested again while it was being examined
            value, began = kept(folder, mark), time.monotonic()
            if value is None:
                # Requests that someone waits for go first, since Python's threads share one core.
                while self._is_busy() and time.monotonic() - began < 1.0:
                    time.sleep(0.02)
                began = time.monotonic()
                value = _glance(folder)
                keep(folder, mark, value)
            now = time.monotonic()
            self._seen[folder] = _Seen(mark, value, now + _PAUSE * (now - began))


def known_glance(folder: Path) -> dict[str, Any]:
    """Return the health and curve of a run, which are kept until the run changes."""
    mark = _mark(folder)
    value: dict[str, Any] | None = kept(folder, mark)
    if value is None:
        value = _glance(folder)
        keep(folder, mark, value)
    return value


def _mark(folder: Path) -> str:
    return f"{_VERSION} {change_mark([folder])}"


def _glance(folder: Path) -> dict[str, Any]:
    try:
        with Run.open(folder, mode="r", check="rows") as run:
            return run_glance(run)
    except (RolltreeError, OSError) as error:
        said = f"The run cannot be read: {error}"
    except Exception as error:  # a run that rolltree did not write must not hide the others
        logger.info("no health of %s", folder, exc_info=error)
        said = f"The run cannot be read ({type(error).__name__}): check it with `rolltree audit`."
    sentence = {"kind": "unreadable", "severity": "error", "text": said, "evidence": None}
    return {"health": sentence, "curve": []}
