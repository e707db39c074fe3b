"""Runs many rollouts of an environment and collects their results.

`BatchRunner` makes requests for the rollout engine; confidence intervals are in
`rolltree.evaluation`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from rolltree._helpers.finished import Finished
from rolltree._helpers.html_view import html_table
from rolltree._helpers.tasks import contained, run_sync, yield_fairly
from rolltree.environments.dataset import Data, RowFormat, Rows
from rolltree.environments.lifecycle import end_raised, failure_of, is_scored
from rolltree.environments.openai_view import OpenAIView
from rolltree.environments.rubrics import Rubric, write_advantages
from rolltree.environments.scoring import check_scored, score_episode
from rolltree.inference.client import ModelClient, as_client, sampling_to_args
from rolltree.inference.deadline import seeded
from rolltree.rollouts import (
    RolloutEngine,
    RolloutProgress,
    Split,
    current_episode,
    derive_seed,
    example_request,
    group_member,
    merge_args,
    resolve_sampling,
)
from rolltree.rollouts.requests import Episode, call_seeds, playing
from rolltree.rollouts.settle import settle_state, settle_states
from rolltree.tokens import Trajectory
from rolltree.values.errors import ConfigError, did_you_mean, refuse_unknown
from rolltree.values.state import UnscoredSnapshot
from rolltree.values.types import (
    INPUT_FIELDS,
    RolloutInput,
    RolloutRequest,
    RolloutResult,
    SamplingArgs,
    State,
    as_input,
)

AT_THE_BEGINNING: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("is_completed", "terminated", "truncated"), False),
        **dict.fromkeys(("stop_condition", "truncation_reason", "error")),
        **dict.fromkeys(("completion", "reward", "advantage", "metrics")),
    }
)
"""Values of a state before its rollout is over: hooks can read them without a default."""
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


class BatchRunner(ABC):
    """The data of an environment, and the ways to run it. A `RolloutSource` and a `GroupScorer`."""

    env_id: str
    rubric: Rubric
    sampling_args: SamplingArgs
    row_format: RowFormat
    dataset: Rows | None
    eval_dataset: Rows | None
    _settles = False  # whether nothing can change a state after `rollout` has settled it

    @abstractmethod
    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout and return its state, which also records a failure."""

    @abstractmethod
    async def _cleanup(self, state: State) -> None:
        """Run the cleanups of this state unless they have run."""

    # Data

    def rows(self, data: Data) -> Rows:
        """Return `data` as rows with this environment's prompts; `Rows` pass through."""
        return Rows.of(data, lambda row, index: self.row_format(row, index))

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Return `n` training rows (-1: all), shuffled by `seed` when there is one.

        Raises:
            ConfigError: the environment has evaluation data only.
        """
        if self.dataset is None:
            raise ConfigError(
                f"environment {self.env_id!r} has evaluation data only, so it cannot be trained "
                "on. Pass dataset=..., or use the eval split."
            )
        return self.dataset.take(n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Return `n` evaluation rows (-1: all); the training rows if there are no others."""
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        return self.eval_dataset.take(n, seed)

    def own_rows(self, split: Split) -> Rows | None:
        """Return a split's own rows; None if it has none."""
        return self.dataset if split == "train" else self.eval_dataset

    def num_examples(self, split: Split) -> int:
        """Return how many rows the split has; without evaluation rows, how many training rows."""
        return len(self._split(split))

    def example(self, split: Split, index: int) -> RolloutInput:
        """Return the input of row `index` of the split."""
        return self.input_of(self._split(split)[index])

    def group_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of the group in which `generate` compares a row's rollouts."""
        return f"{row['task']}/{row['example_id']}"

    def input_of(self, row: Mapping[str, Any]) -> RolloutInput:
        """Return a rollout's input: all columns of a row, in a new dict."""
        return as_input(row)

    def _split(self, split: Split) -> Rows:
        return self.get_dataset() if split == "train" else self.get_eval_dataset()

    # One request

    async def run_request(self, request: RolloutRequest, client: ModelClient) -> Sequence[State]:
        """Play and score one episode. A failure does not raise, only a cancellation does.

        With group reward functions, `score_group` sets the reward later. The engine's time limit
        covers playing, not scoring.
        """
        states = await self.play_request(request, client)
        await score_episode(self.rubric, states)
        return states

    async def play_request(self, request: RolloutRequest, client: ModelClient) -> list[State]:
        """Play one episode without scoring it."""
        # The engine has made the episode, with its clock; other callers of `play_request` get an
        # episode without a time limit.
        episode = current_episode()
        if episode is not None and episode.request is request:
            return await self._play(episode, client)
        with playing(Episode(request)) as own:
            return await self._play(own, client)

    async def rollouts(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> list[State]:
        """Play one episode and return the states of its rollouts; here there is only one."""
        return [await self.rollout(input, client, model, sampling_args)]

    async def _play(self, episode: Episode, client: ModelClient) -> list[State]:
        request = episode.request
        seeds = call_seeds(request)
        client = seeded(client, seeds)
        # Overrides of `rollout` expect sampling arguments as OpenAI's fields.
        args = {**sampling_to_args(request.sampling), "seed": seeds.seed}
        states: list[State] | None = None
        try:
            with contained():
                states = await self.rollouts(request.input, OpenAIView(client), client.model, args)
            for state in states:
                # An override, or a cleanup, may have assigned a plain list, or anything.
                if not isinstance(dict.get(state, "trajectory"), Trajectory):
                    settle_state(state, request.input)
                state.trajectory = Trajectory.of(state.trajectory)
        except Exception as error:  # noqa: BLE001  an overridden rollout() may raise: it is data
            # If the episode got as far as a state, its steps are kept.
            states = [episode.states[-1] if episode.states else _empty_state(request)]
            settle_state(states[0], request.input)
            if states[0].is_answered and states[0].error is None and is_scored(error):
                end_raised(states[0], error)
            else:
                states[0].error = states[0].error or failure_of(error)
                states[0].reward = None
        finally:
            # Also when cancelled: nothing was returned then, but the episode has the states so far.
            for made in states if states is not None else episode.states:
                await self._cleanup(made)
        settle_states(states, request.input, are_settled=self._settles)
        for state in states:
            # Before scoring, so that a stored rollout can be scored again as if for the first time.
            state.unscored = UnscoredSnapshot.of(state)
        return states

    @property
    def has_group_rewards(self) -> bool:
        """Whether the rubric compares the members of a group."""
        return self.rubric.has_group_rewards

    async def score_group(self, states: Sequence[State]) -> None:
        """Score the finished rollouts of one group, in place."""
        await self.rubric.score_group(states)
        check_scored(states, self.rubric, "score_group")

    # Many requests

    async def generate(
        self,
        inputs: Data,
        client: Any,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
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
        """Run rollouts for rows and return them in the rows' order.

        Delegated rollouts are in `results.results[i].states`, after the episode's own rollouts.

        The rollouts of all rows with the same task and `example_id` are one group: they share the
        world's seed, and `advantage` is the reward minus the group's mean. All seeds are derived
        from `seed`; `max_concurrent=-1` means no limit. The caller's `sampling_args` override the
        environment's, field by field.

        Raises:
            ConfigError: the rows, the client or a setting cannot be used. Failed rollouts do not
                raise; see `results.metadata.num_failed`.
        """
        refuse_unknown("generate", unknown, BatchRunner.generate)
        started = time.perf_counter()
        asked = as_client(client, model)
        name = model or asked.model
        args = merge_args(self.sampling_args, sampling_args)
        rows = self.rows(inputs)
        make = partial(self._requests, rows, args, seed, rollouts_per_example)
        # Formatting many rows and deriving their seeds takes long, and must not block the caller's
        # event loop.
        is_long = len(rows) * rollouts_per_example > _MANY
        requests = await asyncio.to_thread(make) if is_long else make()
        if max_concurrent == -1:
            max_concurrent = max(1, len(requests))
        engine = RolloutEngine(
            # An `UnscoredSource` has no `score_group`, so the engine does not wait for groups.
            self if score_rollouts else UnscoredSource(self),
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
            env_id=self.env_id,
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

    async def evaluate(
        self,
        client: Any,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        **settings: Any,
    ) -> GenerateResults:
        """Run the first `num_examples` evaluation rows (-1: all). `settings` are `generate`'s."""
        rows = self.get_eval_dataset(num_examples)
        return await self.generate(
            rows,
            client,
            model,
            sampling_args,
            rollouts_per_example=rollouts_per_example,
            **settings,
        )

    async def run_group(
        self,
        group_inputs: Sequence[RolloutInput],
        client: Any,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        **settings: Any,
    ) -> list[State]:
        """Run the given inputs of one task as one group and return the scored states.

        Raises:
            ConfigError: the inputs are of several tasks, or as `generate` says.
        """
        tasks = sorted({repr(row.get("task")) for row in group_inputs})
        if len(tasks) > 1:
            raise ConfigError(
                f"the inputs are of the tasks {', '.join(tasks)}, and rollouts of different tasks "
                "are not compared with each other. Run one group per task."
            )
        first = group_inputs[0]["example_id"] if group_inputs else 0
        # `RowFormat` gives each row an id of its own if it is not an integer.
        first = first if isinstance(first, int) else 0
        # The same example id makes them one group, whatever rows of the task they are.
        rows = [dict(row, example_id=first) for row in group_inputs]
        results = await self.generate(rows, client, model, sampling_args, **settings)
        return results.state

    def generate_sync(self, *args: Any, **kwargs: Any) -> GenerateResults:
        """Run `generate` and wait for it, even if an event loop is running, as in notebooks."""
        return run_sync(self.generate(*args, **kwargs))

    def evaluate_sync(self, *args: Any, **kwargs: Any) -> GenerateResults:
        """Run `evaluate` and wait for it, even if an event loop is running."""
        return run_sync(self.evaluate(*args, **kwargs))

    def run_group_sync(self, *args: Any, **kwargs: Any) -> list[State]:
        """Run `run_group` and wait for it, even if an event loop is running."""
        return run_sync(self.run_group(*args, **kwargs))

    def _requests(
        self, rows: Rows, args: SamplingArgs, seed: int, rollouts_per_example: int
    ) -> list[RolloutRequest]:
        sampling = resolve_sampling(None, args)
        # Rows with the same example id are one group, so members are counted across rows.
        met: Counter[str] = Counter()
        requests: list[RolloutRequest] = []
        for row in rows:
            group = self.group_of(row)
            request = example_request(
                self.env_id,
                self.input_of(row),
                group_id=group,
                seed=derive_seed(seed, self.env_id, group),
                sampling=sampling,
                phase="generate",
            )
            for _ in range(rollouts_per_example):
                requests.append(group_member(request, met[group]))
                met[group] += 1
        return requests


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
    state = _empty_state(result.request)
    state.error = result.error
    return (state,)


def _empty_state(request: RolloutRequest) -> State:
    """Return a state for an episode that failed before it had one."""
    return State(
        input=dict(request.input),
        oai_tools=[],
        trajectory=Trajectory(),
        timing=None,
        seed=request.seed,
        **AT_THE_BEGINNING,
    )


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
