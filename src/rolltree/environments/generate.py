"""Runs rollouts for many rows, and collects their results in the rows' order."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rolltree._helpers.finished import Finished
from rolltree._helpers.html_view import html_table
from rolltree._helpers.tasks import yield_fairly
from rolltree.environments.batch_runner import BatchRunner, empty_state
from rolltree.environments.dataset import Data, Rows
from rolltree.environments.rubrics import write_advantages
from rolltree.inference.client import as_client
from rolltree.rollouts import (
    RolloutEngine,
    RolloutProgress,
    derive_seed,
    example_request,
    group_member,
    merge_args,
    resolve_sampling,
)
from rolltree.values.errors import did_you_mean, refuse_unknown
from rolltree.values.types import INPUT_FIELDS, RolloutRequest, RolloutResult, SamplingArgs, State

_MANY = 200
"""More requests than this are made in a thread, since making them would block the event loop."""


@dataclass(frozen=True, slots=True)
class GenerateMetadata:
    """The settings of a batch, and the means over its results."""

    env_id: str
    model: str
    sampling_args: SamplingArgs
    num_examples: int
    rollouts_per_example: int
    num_rollouts: int
    num_failed: int
    num_truncated: int
    # Over the rollouts that have a reward, None if none has. A failed rollout never counts as 0.
    avg_reward: float | None
    avg_metrics: dict[str, float | None]
    time_ms: float
    seed: int

    def __getitem__(self, name: str) -> Any:
        if name not in self.__slots__:
            raise KeyError(f"the metadata has no {name!r}.{did_you_mean(name, self.__slots__)}")
        return getattr(self, name)


_DEFAULTS: dict[str, Any] = {"answer": "", "info": {}}


@dataclass(frozen=True, slots=True, repr=False)
class GenerateResults(Finished):
    """Finished rollouts in the order of their inputs, with one list per column.

    Columns are attributes and items: `results.reward` is `results["reward"]`. They are `state`,
    the input's columns (`prompt`, `answer`, `task`, `info`, `example_id`), `completion`, `reward`
    (None for a rollout that failed or was not scored), `stop_conditions` and `metrics`, which is
    one list per metric name.
    """

    state: list[State]
    metadata: GenerateMetadata
    results: list[RolloutResult] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """One list per metric, with None for a rollout that has no value."""
        return metric_lists(self.state)

    @property
    def stop_conditions(self) -> list[str | None]:
        """The name of the stop condition that ended each rollout; None if none did."""
        return [state.stop_condition for state in self.state]

    # Columns are computed when they are read: most callers want one or two of them.
    def __getattr__(self, column: str) -> list[Any]:
        if column not in (*INPUT_FIELDS, "completion", "reward"):
            raise AttributeError(
                f"results have no column {column!r}.{did_you_mean(column, _COLUMNS)}"
            )
        return [state.get(column, _DEFAULTS.get(column)) for state in self.state]

    def __getitem__(self, column: str) -> Any:
        if column not in _COLUMNS:
            raise KeyError(f"results have no column {column!r}.{did_you_mean(column, _COLUMNS)}")
        return getattr(self, column)

    def __repr__(self) -> str:
        found = self.metadata
        return (
            f"GenerateResults({found.num_rollouts} rollouts of {found.env_id!r} with "
            f"{found.model!r}, avg_reward={found.avg_reward}, num_failed={found.num_failed})"
        )

    def _repr_html_(self) -> str:
        """Return the rollouts as a table for a notebook."""
        rows = [
            (state.example_id, state.task, state.reward, len(state.trajectory))
            for state in self.state
        ]
        return html_table(repr(self), ("example", "task", "reward", "calls"), rows)

    def __len__(self) -> int:
        return len(self.state)


_COLUMNS = (
    *INPUT_FIELDS,
    *("state", "completion", "reward", "metrics", "stop_conditions", "metadata"),
)


def metric_lists(states: Sequence[State]) -> dict[str, list[float | None]]:
    """Return one list per metric that any state has."""
    names = dict.fromkeys(name for state in states for name in state.metrics or ())
    return {name: [(state.metrics or {}).get(name) for state in states] for name in names}


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class UnscoredSource:
    """An environment that is played but not scored."""

    def __init__(self, environment: BatchRunner) -> None:
        self.env_id = environment.env_id
        self.num_examples = environment.num_examples
        self.example = environment.example
        self.run_request = environment.play_request
        # The engine checks that the chat template shows a row's tools; a `BatchRunner` need not
        # have `tools_for`.
        self.tools_for = getattr(environment, "tools_for", lambda row: ())


def states_of(result: RolloutResult) -> tuple[State, ...]:
    """Return the states of the episode's own agents, without delegated rollouts."""
    if result.states:
        return tuple(s for s in result.states if s.get("parent_rollout") is None)
    state = empty_state(result.request)
    state.error = result.error
    return (state,)


async def _fill_advantages(results: Sequence[RolloutResult]) -> None:
    groups: defaultdict[tuple[str, str], list[State]] = defaultdict(list)
    for result in results:
        for state in result.states:
            # Delegated rollouts had different subtasks, so their mean reward is meaningless.
            if state.parent_rollout is None:
                groups[result.request.group_id, str(state.agent or "")].append(state)
    for states in groups.values():
        # Ten thousand groups in one go would block the event loop.
        await yield_fairly()
        write_advantages(states)


async def generate(
    environment: BatchRunner,
    inputs: Data,
    client: Any,
    model: str | None,
    sampling_args: SamplingArgs | None,
    *,
    rollouts_per_example: int = 1,
    score_rollouts: bool = True,
    max_concurrent: int = 64,
    time_limit_s: float | None = None,
    deadline_s: float | None = None,
    seed: int = 0,
    on_progress: Callable[[RolloutProgress], None] | None = None,
    **unknown: Any,
) -> GenerateResults:
    """Do what `BatchRunner.generate` does."""
    refuse_unknown("generate", unknown, generate)
    started = time.perf_counter()
    asked = as_client(client, model)
    name = model or asked.model
    args = merge_args(environment.sampling_args, sampling_args)
    rows = environment.rows(inputs)
    make = partial(requests_of, environment, rows, args, seed, rollouts_per_example)
    # Formatting many rows and deriving their seeds takes long, and must not block the caller's
    # event loop.
    is_long = len(rows) * rollouts_per_example > _MANY
    requests = await asyncio.to_thread(make) if is_long else make()
    if max_concurrent == -1:
        max_concurrent = max(1, len(requests))
    engine = RolloutEngine(
        # An `UnscoredSource` has no `score_group`, so the engine does not wait for groups.
        environment if score_rollouts else UnscoredSource(environment),
        asked,
        model=name,
        max_concurrent=max_concurrent,
        time_limit_s=time_limit_s,
        deadline_s=deadline_s,
        on_progress=on_progress,
    )
    results = await engine.run_all(requests)
    states = [state for result in results for state in states_of(result)]
    if score_rollouts:
        await _fill_advantages(results)
    metrics = metric_lists(states)
    metadata = GenerateMetadata(
        env_id=environment.env_id,
        model=name,
        sampling_args=args,
        # An environment may have put anything there.
        num_examples=len({repr((s.get("task"), s.get("example_id"))) for s in states}),
        rollouts_per_example=rollouts_per_example,
        num_rollouts=len(states),
        num_failed=sum(state.error is not None for state in states),
        num_truncated=sum(bool(state.truncated) for state in states),
        avg_reward=mean_of_known([state.reward for state in states]),
        avg_metrics={name: mean_of_known(values) for name, values in metrics.items()},
        time_ms=(time.perf_counter() - started) * 1000.0,
        seed=seed,
    )
    return GenerateResults(states, metadata, results)


def requests_of(
    environment: BatchRunner, rows: Rows, args: SamplingArgs, seed: int, rollouts_per_example: int
) -> list[RolloutRequest]:
    """Return the requests for rows, those of an example side by side."""
    sampling = resolve_sampling(None, args)
    # Rows with the same example id are one group, so members are counted across rows.
    met: Counter[str] = Counter()
    requests: list[RolloutRequest] = []
    for row in rows:
        group = environment.group_of(row)
        request = example_request(
            environment.env_id,
            environment.input_of(row),
            group_id=group,
            seed=derive_seed(seed, environment.env_id, group),
            sampling=sampling,
            phase="generate",
        )
        for _ in range(rollouts_per_example):
            requests.append(group_member(request, met[group]))
            met[group] += 1
    return requests
