"""The head's progress: callbacks of a `Reporter`, as JSON for the driver's terminal."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from rolltree.scale.cluster.beat import Beats, Link
from rolltree.store import to_plain
from rolltree.training import Reporter
from rolltree.training.reporter import TrainStart
from rolltree.values.errors import ClusterError, ConfigError, did_you_mean

_CALLS = ("on_start", "on_rollouts", "on_step", "on_eval_progress", "on_eval", "on_notice")


class HeadReporter(Reporter):
    """Sends callbacks to the driver's control server, and reports in the beats what the head does.

    A thread sends them, because training must not wait for a terminal; those that cannot be sent
    are dropped, because they only show progress.
    """

    def __init__(self, link: Link, beats: Beats) -> None:
        self._link, self._beats = link, beats
        self._bodies: queue.Queue[dict[str, Any]] = queue.Queue(1000)
        threading.Thread(target=self._send, name="rolltree-relay", daemon=True).start()

    def on_start(self, start: TrainStart) -> None:
        """Send the callback."""
        self._put("on_start", start=asdict(start))
        self._beats.say("starting to train")

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        """Send the callback, unless others wait: the next one will be more recent."""
        if self._bodies.empty():
            self._put("on_rollouts", step=step, num_done=num_done, num_total=num_total)
        if num_done < num_total:
            wait = f"waiting for {num_total - num_done} of {num_total} rollouts of step {step}"
            self._beats.say(wait, "worker")
        else:
            self._beats.say(f"training step {step}")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the callback."""
        self._put("on_step", step=step, metrics=metrics)

    def on_eval_progress(self, phase: str, num_done: int, num_total: int) -> None:
        """Send the callback, unless others wait: the next one will be more recent."""
        if self._bodies.empty():
            self._put("on_eval_progress", phase=phase, num_done=num_done, num_total=num_total)
        self._beats.say(f"evaluating {phase}: {num_done} of {num_total}", "worker")

    def on_eval(self, phase: str, step: int, metrics: Mapping[str, Any], stored: bool) -> None:
        """Send the callback."""
        self._put("on_eval", phase=phase, step=step, metrics=metrics, stored=stored)

    def on_notice(self, message: str) -> None:
        """Send the callback."""
        self._put("on_notice", message=message)

    def _put(self, call: str, **values: Any) -> None:
        with suppress(queue.Full):
            # As plain data now, since the training loop may change the values.
            self._bodies.put_nowait({"call": call, "values": to_plain(values)})

    def _send(self) -> None:
        while True:
            with suppress(OSError, ClusterError):
                self._link.ask("/progress", self._bodies.get())


def relayed(reporter: Reporter, call: str, values: Mapping[str, Any]) -> None:
    """Call the method of `reporter` that a received callback names.

    Raises:
        ConfigError: there is no such callback, or its arguments differ.
    """
    if call not in _CALLS:
        raise ConfigError(f"a reporter has no callback {call!r}.{did_you_mean(call, _CALLS)}")
    try:
        if call == "on_start":
            start = msgspec.convert(
                values["start"], TrainStart, dec_hook=lambda _, path: Path(path)
            )
            reporter.on_start(start)
        else:
            getattr(reporter, call)(**values)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{call} takes other arguments ({error}).") from error
