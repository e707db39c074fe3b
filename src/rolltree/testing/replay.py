"""A pytest plugin that uses recorded rollouts as regression tests of an environment.

    pytest_plugins = ["rolltree.testing.replay"]  # in conftest.py

    @pytest.mark.recorded("recordings", env="my_env")
    def test_the_environment_answers_as_recorded(replayed):
        assert replayed.live.states[0]["reward"] == 1.0

The test runs once for each recorded rollout, and fails with both sides of the first difference if
the environment answers differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rolltree.insight.replaying import environment_of
from rolltree.insight.reports.replay import replay_lines
from rolltree.records import ReplayReport, replay
from rolltree.store import Run

MARKER = "recorded"
_HELP = (
    f"{MARKER}(run, rollouts=None, env=None, ...): replay the rollouts of a run with the fixture "
    "'replayed'; see rolltree.testing.replay"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The arguments of `@pytest.mark.recorded`."""

    # The run's directory, relative to the test's file.
    run: Path
    # The names of the rollouts; None: all of them.
    rollouts: Sequence[str] | None = None
    # The most rollouts to replay.
    num: int | None = None
    # Only rollouts with these columns, such as `{"phase": "eval"}`.
    where: Mapping[str, Any] | None = None
    # The environment: its name or path (from the working directory), or a function that makes it.
    # None: the name in the run.
    env: Any = None
    # The last four are arguments of `rolltree.records.replay_async`.
    env_args: Mapping[str, Any] | None = None
    compat: bool = False
    score: bool = True
    ignore: Sequence[str] = ()

    def request_ids(self) -> list[str]:
        """Return the names of the rollouts to replay."""
        if self.rollouts is not None:
            return list(self.rollouts)
        with Run.open(self.run, mode="r") as run:
            names = run.columns(["request_id"], **(self.where or {}))
            return list(islice(dict.fromkeys(name for (name,) in names), self.num))

    def source(self) -> Any:
        """Return the environment."""
        if callable(self.env):
            return self.env()
        with Run.open(self.run, mode="r") as run:
            return environment_of(run, self.env, self.env_args, compat=self.compat)[0]


def recorded_of(item: Any) -> Recorded:
    """Return the arguments of a test's marker.

    Raises:
        UsageError: the test has no marker, or its arguments are wrong.
    """
    marker = item.get_closest_marker(MARKER)
    if marker is None:
        raise pytest.UsageError(
            f"{item.name} uses the fixture 'replayed' and does not say what is recorded. Mark it "
            f'with @pytest.mark.{MARKER}("RUN").'
        )
    try:
        (run,) = marker.args
        return Recorded(run=Path(item.path).parent / run, **marker.kwargs)
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"@pytest.mark.{MARKER} of {item.name}: {error}") from error


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _HELP)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture `replayed` once for each rollout."""
    if "replayed" in metafunc.fixturenames:
        names = recorded_of(metafunc.definition).request_ids()
        metafunc.parametrize("replayed", names, indirect=True, ids=names)


@pytest.fixture(scope="module")
def _environments() -> dict[int, Any]:
    """The environments of a module's tests, by marker, so that each is loaded once."""
    return {}


@pytest.fixture
def replayed(request: pytest.FixtureRequest, _environments: dict[int, Any]) -> ReplayReport:
    """Replay a recorded rollout; a difference fails the test and is shown."""
    recorded = recorded_of(request.node)
    # By marker, because the marker of a class or module covers many tests.
    key = id(request.node.get_closest_marker(MARKER))
    if key not in _environments:
        _environments[key] = recorded.source()
    options = {"score": recorded.score, "ignore": recorded.ignore}
    report = replay(recorded.run, request.param, _environments[key], **options)
    if not report.is_equal:
        # Both sides are shown, without a traceback of this file, which would not help.
        pytest.fail("\n".join(replay_lines(report)), pytrace=False)
    return report
