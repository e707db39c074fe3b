"""Reduces stored rows to aggregates, with a table of pure functions that callers can extend.

A reducer takes the outcomes of one evaluation and its settings. An episode that failed, or that
nothing scored, has no reward: it is left out of every mean and counted in `failures` or
`num_unscored`, never as a silent 0.0.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any, Self, TypeAlias, overload

from rolltree.store import Run, StoredRollout, projection, raised_by_rewards
from rolltree.store.filters import METRIC
from rolltree.store.metric_names import finite_numbers, number_of
from rolltree.store.weights import task_environment
from rolltree.values.estimate import CONFIDENCE, SHARE, Estimate, estimate, mean, pass_at_k

ExampleKey: TypeAlias = tuple[str, str, int | str | None]
"""Environment, task, example id: the same in every evaluation of the same example."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """How one episode ended. `reward` is None if it failed or nothing scored it.

    An episode with several agents has the mean of their rewards and metrics, and the sum of all
    tokens and calls. Delegated rollouts count only in the tokens and calls, since their rewards are
    for their subtasks.
    """

    request_id: str
    example: ExampleKey
    task: str
    reward: float | None
    metrics: Mapping[str, float]
    error_type: str | None
    truncation_reason: str | None
    stop_condition: str | None
    num_attempts: int
    num_calls: int
    num_prompt_tokens: int
    num_completion_tokens: int
    generation_ms: float
    scoring_ms: float
    total_ms: float
    error_message: str | None = None
    scoring_errors: tuple[tuple[str, str], ...] = ()
    """Reward functions that raised, with their errors."""
    finish_reason: str | None = None
    """Why the last call ended, as the engine reported: `"length"` at the token limit."""

    @property
    def failed(self) -> bool:
        """Whether the episode ended with an error instead of a result."""
        return self.error_type is not None


_FIELDS = tuple(field.name for field in fields(EpisodeOutcome))
# The fields of a row that an outcome is made from.
_NAMES = (
    *(name for name in _FIELDS if name not in ("example", "error_message", "scoring_errors")),
    *("env_id", "example_id", "depth", "status", "truncated", "errors"),
)
_WHOLE = ("num_prompt_tokens", "num_completion_tokens")
_NUMBERS = (*_WHOLE, "generation_ms", "scoring_ms", "total_ms")
_LABELS = (
    *("example", "task", "error_type", "error_message", "truncation_reason", "stop_condition"),
    *("num_attempts", "num_calls", "scoring_errors", "finish_reason"),
)
# Marks a missing value in a column; rewards and metrics are finite.
_UNKNOWN = float("nan")


class Outcomes(Sequence[EpisodeOutcome]):
    """Outcomes in columns, one per request id, about 150 bytes each.

    `report.outcomes[3]` is an `EpisodeOutcome`, made when it is read; `values("reward")` returns
    the rewards of all. The length is the number of requests whose rows were added, and the order is
    that of `request_ids`, or else of the rows.
    """

    def __init__(self, request_ids: Iterable[str] = ()) -> None:
        self._ids = list(request_ids)
        self._place = {request_id: place for place, request_id in enumerate(self._ids)}
        self._labels: list[tuple[Any, ...] | None] = [None] * len(self._ids)
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        # The numbers of an outcome, and its metrics by `metrics/NAME`.
        self._columns = {name: self._column() for name in ("reward", *_NUMBERS)}
        self._num = 0

    def _column(self) -> array[float]:
        return array("d", [_UNKNOWN]) * len(self._ids)

    @classmethod
    def of(cls, rows: Iterable[StoredRollout]) -> Outcomes:
        """Return the outcomes of rows, in the order in which requests first appear."""
        requests: dict[str, list[StoredRollout]] = {}
        for row in rows:
            requests.setdefault(row.request_id, []).append(row)
        made = cls()
        for trajectories in requests.values():
            made._add(trajectories)
        return made

    @classmethod
    def stored(cls, run: Run, phase: str, ids: Iterable[str] | None = None, **where: Any) -> Self:
        """Return the outcomes of a phase of a run, or those of `ids`; `where` compares columns."""
        made = cls(() if ids is None else ids)
        rows = run.columns(_NAMES, phase=phase, **where)
        for request_id, adjacent in groupby(rows, attrgetter("request_id")):
            if ids is None or request_id in made._place:
                trajectories = list(adjacent)
                # The rows of this request were not adjacent.
                if made.has(request_id):
                    trajectories = list(run.columns(_NAMES, request_id=request_id, **where))
                made._add(trajectories)
        return made

    def add(self, rows: Sequence[StoredRollout]) -> EpisodeOutcome:
        """Add the rows of one request, replacing earlier ones, and return its outcome."""
        return self._at(self._add(rows))

    def _add(self, rows: Sequence[StoredRollout]) -> int:
        row = rows[0] if len(rows) == 1 and not rows[0].depth else _merged(rows)
        place = self._place.get(row.request_id)
        if place is None:
            place = self._place[row.request_id] = len(self._ids)
            self._ids.append(row.request_id)
            self._labels.append(None)
            # Every column has one entry per request, so that a place is an index into each.
            for column in self._columns.values():
                column.append(_UNKNOWN)
        self._num += self._labels[place] is None
        failed, truncated = row.status == "error", row.truncated
        labels = (
            (row.env_id, row.task, row.example_id),
            row.task,
            (row.error_type or "unknown") if failed else None,
            _first_message(row) if failed else None,
            (row.truncation_reason or "unknown") if truncated else None,
            row.stop_condition or None,
            row.num_attempts,
            row.num_calls,
            raised_by_rewards(row.errors),
            row.finish_reason,
        )
        # Most outcomes differ only in numbers, so they share one tuple of labels.
        self._labels[place] = self._known.setdefault(labels, labels)
        for column in self._columns.values():
            column[place] = _UNKNOWN
        for name in _NUMBERS:
            self._columns[name][place] = getattr(row, name)
        # A failed episode may have a reward, which does not count.
        reward = None if failed else number_of(row.reward)
        self._columns["reward"][place] = _UNKNOWN if reward is None else reward
        for metric, value in finite_numbers(row.metrics).items():
            name = METRIC + metric
            if name not in self._columns:
                self._columns[name] = self._column()
            self._columns[name][place] = value
        return place

    def has(self, request_id: str) -> bool:
        """Whether rows of this request were added."""
        place = self._place.get(request_id)
        return place is not None and self._labels[place] is not None

    def remove(self, request_id: str) -> None:
        """Remove the rows of a request."""
        place = self._place[request_id]
        self._num -= self._labels[place] is not None
        self._labels[place] = None

    def _places(self) -> Sequence[int]:
        if self._num == len(self._ids):
            return range(self._num)
        return [place for place, labels in enumerate(self._labels) if labels is not None]

    def each(self, name: str) -> Iterator[Any]:
        """Yield one field of all outcomes."""
        return self._of(name, self._places())

    def _of(self, name: str, places: Iterable[int]) -> Iterator[Any]:
        if name == "request_id":
            return map(self._ids.__getitem__, places)
        if name == "metrics":
            return map(self._metrics_at, places)
        if name not in self._columns:
            at, labels = _LABELS.index(name), self._labels
            return (labels[place][at] for place in places)  # type: ignore[index]
        column = map(self._columns[name].__getitem__, places)
        if name in _WHOLE:
            return map(int, column)
        return (None if value != value else value for value in column)

    def values(self, name: str) -> list[Any]:
        """Return one field of all outcomes."""
        return list(self.each(name))

    def metric_columns(self) -> Iterator[tuple[str, Iterable[float | None]]]:
        """Yield each metric with its value for every outcome; None for those that lack it."""
        for name in self._columns:
            if name.startswith(METRIC):
                yield name.removeprefix(METRIC), self.each(name)

    def _metrics_at(self, place: int) -> dict[str, float]:
        return {
            name.removeprefix(METRIC): column[place]
            for name, column in self._columns.items()
            if name.startswith(METRIC) and column[place] == column[place]
        }

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, index: int) -> EpisodeOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> list[EpisodeOutcome]: ...
    def __getitem__(self, index: int | slice) -> EpisodeOutcome | list[EpisodeOutcome]:
        chosen = self._places()[index]
        return self._at(chosen) if isinstance(chosen, int) else list(self._made(chosen))

    def __iter__(self) -> Iterator[EpisodeOutcome]:
        return self._made(self._places())

    def _made(self, places: Sequence[int]) -> Iterator[EpisodeOutcome]:
        return map(EpisodeOutcome, *(self._of(name, places) for name in _FIELDS))

    def _at(self, place: int) -> EpisodeOutcome:
        return next(self._made([place]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcomes | tuple | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} outcomes>"


def outcomes(rows: Iterable[StoredRollout]) -> Outcomes:
    """Return one outcome per request, in the order in which requests first appear."""
    return Outcomes.of(rows)


def values(outcomes: Sequence[EpisodeOutcome], name: str) -> Iterator[Any]:
    """Yield one field of all outcomes."""
    if isinstance(outcomes, Outcomes):
        return outcomes.each(name)
    return (getattr(outcome, name) for outcome in outcomes)


def columns(outcomes: Sequence[EpisodeOutcome], *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield some fields of each outcome."""
    return zip(*(values(outcomes, name) for name in names), strict=True)


def metric_columns(
    outcomes: Sequence[EpisodeOutcome],
) -> Iterator[tuple[str, Iterable[float | None]]]:
    """Yield each metric with its value for every outcome; None for those that lack it."""
    if isinstance(outcomes, Outcomes):
        yield from outcomes.metric_columns()
        return
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.metrics):
        yield name, [outcome.metrics.get(name) for outcome in outcomes]


def _merged(rows: Sequence[StoredRollout]) -> Any:
    """Return one row for an episode that has several trajectories."""
    failed = next((row for row in rows if row.status == "error"), None)
    # Delegated rollouts have rewards for their subtasks, not for the episode.
    own = [row for row in rows if not row.depth]
    rewards = [each for row in own if (each := number_of(row.reward)) is not None]
    metrics: dict[str, list[float]] = {}
    for row in own:
        for name, value in finite_numbers(row.metrics).items():
            metrics.setdefault(name, []).append(value)
    cut = next((row for row in own if row.truncated), None)
    return projection(_NAMES)(
        **{name: getattr(rows[0], name) for name in ("request_id", "env_id", "task", "example_id")},
        reward=mean(rewards) if rewards else None,
        status="ok" if failed is None else "error",
        error_type=None if failed is None else failed.error_type,
        truncated=cut is not None,
        truncation_reason=None if cut is None else cut.truncation_reason,
        stop_condition=next((row.stop_condition for row in own if row.stop_condition), None),
        finish_reason="length"
        if any(row.finish_reason == "length" for row in rows)
        else rows[0].finish_reason,
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMMED},
        **{name: max(getattr(row, name) for row in rows) for name in _LONGEST},
        metrics={name: mean(values) for name, values in metrics.items()},
        errors=failed.errors if failed is not None else [e for row in own for e in row.errors],
    )


_SUMMED = ("num_calls", *_WHOLE)
_LONGEST = ("num_attempts", "generation_ms", "scoring_ms", "total_ms")


def _first_message(row: StoredRollout) -> str | None:
    return next((str(e["message"]) for e in row.errors if e.get("message")), None)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of reducers; an episode passes if its reward is at least `pass_threshold`."""

    confidence: float = CONFIDENCE
    pass_threshold: float = 1.0


Reducer: TypeAlias = Callable[[Sequence[EpisodeOutcome], Settings], Any]


def rewards_by_example(outcomes: Sequence[EpisodeOutcome]) -> dict[Hashable, array[float]]:
    """Return the rewards of the scored episodes, clustered by example."""
    return by_example(outcomes, values(outcomes, "reward"))


def by_example(
    outcomes: Sequence[EpisodeOutcome], column: Iterable[float | None]
) -> dict[Hashable, array[float]]:
    """Return the values of a column that are not None, clustered by example."""
    clusters: dict[Hashable, array[float]] = {}
    for example, value in zip(values(outcomes, "example"), column, strict=True):
        if value is not None:
            if example not in clusters:
                clusters[example] = array("d")
            clusters[example].append(value)
    return clusters


def reward(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> Estimate | None:
    """Mean reward over examples, scored episodes only."""
    return estimate(rewards_by_example(outcomes), confidence=settings.confidence)


def passes(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[int, Estimate]:
    """pass@k for k = 1, 2, 4, ... up to the scored rollouts of the best-covered example."""
    most = max(map(len, rewards_by_example(outcomes).values()), default=0)
    found: dict[int, Estimate] = {}
    for k in sorted({2**power for power in range(most.bit_length())} | ({most} if most else set())):
        clusters = passes_by_example(outcomes, settings.pass_threshold, k)
        result = estimate(clusters, confidence=settings.confidence, bounds=SHARE)
        if result is not None:
            found[k] = result
    return found


def passes_by_example(
    outcomes: Sequence[EpisodeOutcome],
    threshold: float,
    k: int,
    chance: Callable[[int, int, int], float] = pass_at_k,
) -> dict[Hashable, array[float]]:
    """Return the estimate of pass@k, or of a different `chance`, for each example.

    An example with fewer than k scored rollouts is left out. For k = 1 the values are whether each
    rollout passed, so that pass@1 equals the mean reward, with its interval, if rewards are 0 or 1.
    """
    # Cached, since it is a product of many factors, and many examples share (n, c, k).
    share = cache(chance)
    found: dict[Hashable, array[float]] = {}
    for example, rewards in rewards_by_example(outcomes).items():
        passed = [float(reward >= threshold) for reward in rewards]
        num = len(passed)
        if num >= k:
            found[example] = array("d", passed if k == 1 else [share(num, int(sum(passed)), k)])
    return found


def tasks(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, Estimate]:
    """Mean reward of each task that has a scored episode."""
    by_task: dict[str, dict[Hashable, array[float]]] = {}
    for example, rewards in rewards_by_example(outcomes).items():
        by_task.setdefault(example[1], {})[example] = rewards  # type: ignore[index]
    found = {name: estimate(by_task[name], confidence=settings.confidence) for name in by_task}
    return {name: result for name, result in sorted(found.items()) if result is not None}


def metrics(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, Estimate]:
    """Mean of every numeric metric, over the episodes that have it."""
    found: dict[str, Estimate] = {}
    for name, column in metric_columns(outcomes):
        pairs = zip(values(outcomes, "error_type"), column, strict=True)
        worked = (value if error_type is None else None for error_type, value in pairs)
        result = estimate(by_example(outcomes, worked), confidence=settings.confidence)
        if result is not None:
            found[name] = result
    return found


def per_environment(
    outcomes: Sequence[EpisodeOutcome], settings: Settings, environments: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return `reward` and `metrics` of each environment of a group that played an episode."""
    parts: dict[str | None, list[EpisodeOutcome]] = {}
    known: dict[str, str | None] = {}
    for outcome in outcomes:
        if outcome.task not in known:
            known[outcome.task] = task_environment(outcome.task, environments)
        parts.setdefault(known[outcome.task], []).append(outcome)
    return {
        name: {"reward": reward(parts[name], settings), "metrics": metrics(parts[name], settings)}
        for name in environments
        if name in parts
    }


def _counts(outcomes: Sequence[EpisodeOutcome], name: str) -> dict[str, int]:
    """Count the values of a field, most frequent first; None and "" do not count."""
    counts = Counter(values(outcomes, name)).most_common()
    return {value: num for value, num in counts if value}


def failures(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, int]:
    """Failed episodes by error type, most frequent first."""
    return _counts(outcomes, "error_type")


def failure_messages(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, str]:
    """The message of the first failed episode of each error type, as `failures` orders them."""
    first: dict[str, str] = {}
    for kind, message in columns(outcomes, "error_type", "error_message"):
        if kind and message:
            first.setdefault(kind, message)
    return {kind: first[kind] for kind in failures(outcomes, settings) if kind in first}


def scoring_errors(
    outcomes: Sequence[EpisodeOutcome], settings: Settings
) -> dict[str, dict[str, Any]]:
    """For each reward function that raised: in how many episodes (`num`), and its first error."""
    found: dict[str, dict[str, Any]] = {}
    for errors in values(outcomes, "scoring_errors"):
        for function, said in dict(errors).items():
            found.setdefault(function, {"num": 0, "first": said})["num"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["num"]))


def truncations(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, int]:
    """Truncated episodes by reason, most frequent first."""
    return _counts(outcomes, "truncation_reason")


def stops(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, int]:
    """Episodes by the stop condition that ended them, most frequent first."""
    return _counts(outcomes, "stop_condition")


def usage(outcomes: Sequence[EpisodeOutcome], settings: Settings) -> dict[str, float]:
    """Totals and means per episode of calls, tokens and milliseconds."""
    totals = ("num_calls", "num_prompt_tokens", "num_completion_tokens")
    found: dict[str, float] = {}
    means: dict[str, float] = {}
    for name in totals:
        found[name] = sum(values(outcomes, name))
    for name in (*totals, "generation_ms", "scoring_ms", "total_ms"):
        sum_of = math.fsum(values(outcomes, name))
        means[f"mean_{name}"] = sum_of / len(outcomes) if outcomes else 0.0
    found |= means
    found["num_retried"] = sum(num > 1 for num in values(outcomes, "num_attempts"))
    found["num_cut_by_tokens"] = sum(why == "length" for why in values(outcomes, "finish_reason"))
    return found


REDUCERS: Mapping[str, Reducer] = {
    "reward": reward,
    "pass_at": passes,
    "tasks": tasks,
    "metrics": metrics,
    "failures": failures,
    "failure_messages": failure_messages,
    "scoring_errors": scoring_errors,
    "truncations": truncations,
    "stops": stops,
    "usage": usage,
}
"""The reducers of every report. Pass `{**REDUCERS, "mine": function}` to add your own."""
