"""The trackers of a run: opened when it begins, and given up if they fail.

The trackers themselves (`trackers.py`) are loaded for a run that names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rolltree._helpers.redact import redact, redact_text
from rolltree.training.config import TrainConfig
from rolltree.values.errors import ConfigError, look_up

if TYPE_CHECKING:
    from rolltree.training.trackers import Sink
    from rolltree.training.transcripts import Transcript

TRANSCRIPTS_EVERY = 10
"""Steps between those whose transcripts are sent; all of them are in the run's store."""


def check_trackers(config: TrainConfig) -> None:
    """Check the names in `track.to`.

    Raises:
        UnknownName: one of them does not exist.
    """
    if config.track.to:
        from rolltree.training.trackers import TRACKERS

        for name in config.track.to:
            look_up("tracker", name, TRACKERS)


class Trackers:
    """The trackers of `track.to`, opened when training starts.

    The run store has every number, so a tracker that fails never ends a run: `notify` is called
    once, and the tracker is not used from then on.

    Raises:
        UnknownName: `track.to` names a tracker that does not exist.
    """

    def __init__(self, config: TrainConfig, notify: Callable[[str], None]) -> None:
        self._config, self._notify = config, notify
        self._sinks: dict[str, Sink] = {}
        check_trackers(config)

    def open(self, path: Path, first_step: int) -> None:
        """Open the trackers of the run at `path`.

        Raises:
            ConfigError: a tracker's package is not installed.
        """
        section = self._config.track
        if not section.to:
            return
        from rolltree.training.trackers import TRACKERS, TrackedRun

        name = section.name or path.resolve().name
        config = redact(self._config.as_dict())
        run = TrackedRun(path, section.project, name, config, first_step)
        for tracker in section.to:
            with self._survived(tracker, ConfigError):  # raised if a package is missing
                self._sinks[tracker] = TRACKERS[tracker](run)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers."""
        # A copy: a tracker that fails is removed meanwhile.
        for tracker, sink in list(self._sinks.items()):
            with self._survived(tracker):
                sink.log(values, step)

    def wants(self, step: int | None = None) -> int:
        """Return how many transcripts to send of a step, or of an evaluation (None)."""
        section = self._config.track
        is_shown = step is None or (step - 1) % TRANSCRIPTS_EVERY == 0
        return section.transcripts if self._sinks and is_shown else 0

    def show(self, name: str, read: Callable[[], Sequence[Transcript]], step: int) -> None:
        """Send the transcripts that `read` returns; it is called only if there is a tracker."""
        if not self._sinks:
            return
        try:
            rollouts = read()
        except Exception as error:  # noqa: BLE001  whatever it is, it must not end the run
            self._notify(
                f"the transcripts {name!r} of step {step} could not be read "
                f"({type(error).__name__}: {redact_text(str(error))}), so no tracker gets them; "
                "the run goes on. Check the disk of its run directory."
            )
            return
        for tracker, sink in list(self._sinks.items()):
            with self._survived(tracker):
                if rollouts:
                    sink.show(name, rollouts, step)

    def close(self) -> None:
        """Close the trackers, even if one of them fails."""
        sinks, self._sinks = self._sinks, {}
        for tracker, sink in sinks.items():
            with self._survived(tracker):
                sink.close()

    @contextmanager
    def _survived(self, tracker: str, *raised: type[Exception]) -> Iterator[None]:
        """Stop using a tracker if the block fails with anything but `raised`."""
        try:
            yield
        except raised:
            raise
        except Exception as error:  # noqa: BLE001  trackers raise what their clients raise
            self._sinks.pop(tracker, None)
            self._notify(
                f"the tracker {tracker} failed ({type(error).__name__}: {redact_text(str(error))}) "
                "and gets nothing more until the run is started again; the run goes on, and its "
                "run directory has every number."
            )
