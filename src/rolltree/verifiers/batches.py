"""`generate` and `evaluate` of verifiers 0.1.8 on rolltree's engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from rolltree._helpers.tasks import run_sync
from rolltree.environments.batch_runner import BatchRunner
from rolltree.environments.dataset import Data
from rolltree.environments.generate import (
    UnscoredSource,
    mean_of_known,
    metric_lists,
    requests_of,
    states_of,
)
from rolltree.inference.client import as_client
from rolltree.rollouts import RolloutEngine, derive_seed
from rolltree.rollouts.requests import current_episode
from rolltree.values.state import OF_ENVIRONMENT
from rolltree.values.types import (
    MessageType,
    RolloutInput,
    RolloutRequest,
    RolloutResult,
    SamplingArgs,
    State,
)
from rolltree.verifiers.helpers import maybe_semaphore
from rolltree.verifiers.model_calls import MissingClient, as_sent, async_client, is_direct
from rolltree.verifiers.results import (
    GenerateMetadata,
    GenerateOutputs,
    get_results_path,
    make_dataset,
    save_rollout_results,
)


@dataclass(slots=True)
class Batch:
    """The settings of one `generate` call for its rollouts."""

    sampling_args: SamplingArgs
    scoring: AbstractAsyncContextManager[Any]
    client: Any
    # Whether the client is the caller's, not one of rolltree. Overrides may use it in any way, so
    # they get the caller's object itself.
    is_own: bool
    failures: list[Exception] = field(default_factory=list)  # at most one, the first


RunGroup: TypeAlias = Callable[..., Awaitable[list[State]]]
T = TypeVar("T")


_BATCH: ContextVar[Batch | None] = ContextVar("rolltree_compat_batch", default=None)


def current_batch() -> Batch | None:
    """Return the `generate` call that the calling task belongs to."""
    return _BATCH.get()


def note_failure(error: Exception) -> None:
    """Keep the first exception of the batch, which is raised if every rollout fails."""
    batch = _BATCH.get()
    if batch is not None and not batch.failures:
        batch.failures.append(error)


def _has_raised(result: RolloutResult) -> bool:
    # A cleanup that raised ends nothing.
    return any(OF_ENVIRONMENT in (s.get("environment_errors") or ()) for s in result.states)


async def run_batch(
    env: BatchRunner,
    inputs: Any,
    client: Any,
    model: str,
    args: SamplingArgs,
    *,
    max_concurrent: int | None,
    max_scoring: int | None,
    on_group: Callable[[list[State]], None],
    run_group: RunGroup | None = None,
    score: bool = True,
    show_progress: bool = False,
) -> list[State]:
    """Play and score rows; return their states sorted by `example_id`, else in the rows' order.

    Raises:
        Exception: the first failure, if all rollouts have failed.
    """
    client = async_client(client)
    is_own = client is None or is_direct(client)
    batch = Batch(args, await maybe_semaphore(max_scoring), client, is_own)
    if not len(inputs):
        return []
    requests = requests_of(env, env.rows(inputs), args, 0, 1)
    # The engine's seeds are derived from the rows, so a second `generate` would repeat the first.
    if args.get("seed") is None:
        anew = secrets.randbits(31)
        requests = [
            replace(request, sampling_seed=derive_seed(anew, request.sampling_seed))
            for request in requests
        ]
    # Rows of one example may be apart (`get_eval_inputs` repeats the whole list), and a group
    # can only be scored when it is complete.
    groups = _by_group(requests, lambda request: request.group_id)
    with _progress(len(groups), len(requests), show_progress) as advance:

        def on_scored(states: list[State]) -> None:
            on_group(states)
            advance()

        if score and run_group is not None:
            own = client if is_own else as_client(client, model)
            playing = await maybe_semaphore(max_concurrent)

            def play(group: list[RolloutRequest]) -> Awaitable[list[State]]:
                given = [request.input for request in group]
                return run_group(given, own, model, deepcopy(args), playing, batch.scoring)

            return await _run_groups([play(group) for group in groups], on_scored)
        limit = max_concurrent if max_concurrent and max_concurrent > 0 else len(requests)
        asked = as_client(MissingClient() if client is None else client, model)
        source = env if score else UnscoredSource(env)
        engine = RolloutEngine(source, asked, model=model, max_concurrent=max(limit, 1))
        requests = [request for group in groups for request in group]
        by_id: dict[str, RolloutResult] = {}
        token = _BATCH.set(batch)
        try:
            async for results in engine.run_ready(requests):
                by_id.update({result.request.request_id: result for result in results})
                for done in _by_group(results, lambda result: result.request.group_id):
                    on_scored([state for result in done for state in states_of(result)])
        finally:
            _BATCH.reset(token)
    ordered = [by_id[request.request_id] for request in requests]
    # verifiers sorts by `example_id` at the end, and the sort is stable.
    ordered.sort(key=lambda result: result.request.input["example_id"])
    # A failed rollout is data here; in verifiers, one failure loses the whole call. If all failed,
    # the cause is most likely a typo or a server that is down, and the caller should see it.
    if batch.failures and all(result.error or _has_raised(result) for result in ordered):
        raise batch.failures[0]
    return [state for result in ordered for state in states_of(result)]


async def _run_groups(
    groups: Sequence[Awaitable[list[State]]], on_group: Callable[[list[State]], None]
) -> list[State]:
    """Play whole groups; return their states, which need not be one for each input.

    Raises:
        Exception: the first failure, as in verifiers: it belongs to no rollout.
    """
    tasks = [asyncio.ensure_future(group) for group in groups]
    states: list[State] = []
    try:
        for done in asyncio.as_completed(tasks):
            group_states = await done
            on_group(group_states)
            states += group_states
    finally:
        for task in tasks:
            task.cancel()
    return sorted(states, key=lambda state: state.get("example_id", 0))


def _by_group(items: Iterable[T], group_of: Callable[[T], str]) -> list[list[T]]:
    """Return the items of each group, the groups in the order of their first items."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    return list(groups.values())


@contextmanager
def _progress(num_groups: int, num_rollouts: int, shown: bool) -> Iterator[Callable[[], object]]:
    """Show a progress bar, if `tqdm` is installed; yield the function that advances it."""
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda: None
        return
    what = f"Processing {num_groups} groups ({num_rollouts} total rollouts)"
    with tqdm(total=num_groups, desc=what) as bar:
        yield bar.update


def args_of_rollout(env_args: SamplingArgs, given: SamplingArgs | None) -> SamplingArgs:
    """Return the sampling arguments that a rollout of the engine gets.

    In `generate` they are the batch's, as the caller wrote them, without a seed from rolltree.
    Elsewhere (evaluation, training) the request's override the environment's.
    """
    batch = _BATCH.get()
    # Requests of `generate` carry a derived seed; verifiers sends none unless the caller asked.
    if batch is not None and current_episode() is not None:
        return deepcopy(batch.sampling_args)
    return {**deepcopy(env_args), **(given or {})}


class Batches(BatchRunner):
    """The methods of an environment that run many rollouts."""

    env_args: dict[str, Any]
    message_type: MessageType

    def _own_run_group(self) -> RunGroup | None:
        """Return `run_group` if it is the author's own."""
        return None

    async def generate(
        self,
        inputs: Data,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_concurrent: int | None = -1,
        max_concurrent_generation: int | None = None,
        max_concurrent_scoring: int | None = None,
        results_path: Path | None = None,
        state_columns: list[str] | None = None,
        save_results: bool = False,
        save_every: int = -1,
        use_tqdm: bool = True,
        score_rollouts: bool = True,
    ) -> GenerateOutputs:
        """Play and score rows, and return the rollouts sorted by `example_id`.

        Rows with the same `example_id` are one group.

        Raises:
            Exception: the first failure, if all rollouts have failed.
        """
        started = time.time()
        # As in verifiers, the call's keys replace the environment's; `extra_body` is not merged.
        args = deepcopy(self.sampling_args)
        args.update(sampling_args or {})
        done: list[State] = []
        num_groups = 0

        def outputs(states: list[State]) -> GenerateOutputs:
            sent = as_sent(args, self.message_type)
            return self._prepare_rollout_results(
                states, model, client, state_columns, results_path, sent, started
            )

        def on_group(states: list[State]) -> None:
            nonlocal num_groups
            done.extend(states)
            num_groups += 1
            if save_results and save_every > 0 and num_groups % save_every == 0:
                save_rollout_results(outputs(done))

        # `max_concurrent` is only the default of the other two, as in verifiers.
        scoring, playing = max_concurrent_scoring, max_concurrent_generation
        states = await run_batch(
            self,
            inputs,
            client,
            model,
            args,
            max_concurrent=max_concurrent if playing is None else playing,
            max_scoring=max_concurrent if scoring is None else scoring,
            on_group=on_group,
            run_group=self._own_run_group(),
            score=score_rollouts,
            show_progress=use_tqdm,
        )
        results = outputs(states)
        if save_results:
            save_rollout_results(results)
        return results

    def _prepare_rollout_results(
        self,
        all_states: list[State],
        model: str,
        client: Any,
        state_columns: list[str] | None,
        results_path: Path | None,
        gen_sampling_args: SamplingArgs,
        start_time: float,
    ) -> GenerateOutputs:
        states = list(all_states)
        ids = [state.get("example_id", 0) for state in states]
        num_examples = len(set(ids))
        rewards = [state.get("reward", 0.0) for state in states]
        metrics = metric_lists(states)
        metadata = GenerateMetadata(
            env_id=self.env_id,
            env_args=self.env_args,
            model=model,
            base_url=str(getattr(client, "base_url", "")),
            num_examples=num_examples,
            rollouts_per_example=len(states) // num_examples if num_examples else 1,
            sampling_args=gen_sampling_args,
            date=datetime.now().isoformat(),
            time_ms=(time.time() - start_time) * 1000.0,
            avg_reward=mean_of_known(rewards) or 0.0,
            avg_metrics={name: mean_of_known(values) or 0.0 for name, values in metrics.items()},
            state_columns=state_columns or [],
            path_to_save=results_path or get_results_path(self.env_id, model),
        )
        return GenerateOutputs(
            prompt=[state["prompt"] for state in states],
            completion=[state.get("completion") for state in states],
            answer=[state.get("answer", "") for state in states],
            state=states,
            task=[state.get("task", "default") for state in states],
            info=[state.get("info", {}) for state in states],
            example_id=ids,
            reward=rewards,
            metrics=metrics,
            metadata=metadata,
        )

    def generate_sync(self, inputs: Data, client: Any, **kwargs: Any) -> GenerateOutputs:
        """`generate` for callers without an event loop (or with a running one)."""
        return run_sync(self.generate(inputs, client=client, **kwargs))

    def get_eval_inputs(
        self, num_examples: int = -1, rollouts_per_example: int = 1
    ) -> list[RolloutInput]:
        """Return the inputs of an evaluation: every row, `rollouts_per_example` times in turn."""
        # As in verifiers, `get_dataset` is called here, not an override of `get_eval_dataset`.
        if self.eval_dataset is None:
            rows = self.get_dataset(n=num_examples)
        else:
            rows = self.get_eval_dataset(n=num_examples)
        listed = rows.to_list() if hasattr(rows, "to_list") else list(rows)
        return [
            cast(RolloutInput, dict(row))
            for _ in range(max(rollouts_per_example, 1))
            for row in listed
        ]

    async def evaluate(
        self,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        max_concurrent: int | None = -1,
        max_concurrent_generation: int | None = None,
        max_concurrent_scoring: int | None = None,
        results_path: Path | None = None,
        state_columns: list[str] | None = None,
        save_results: bool = False,
        save_every: int = -1,
        **kwargs: Any,
    ) -> GenerateOutputs:
        """Play and score evaluation rows; `kwargs` are `generate`'s."""
        return await self.generate(
            self.get_eval_inputs(num_examples, rollouts_per_example),
            client=client,
            model=model,
            sampling_args=sampling_args,
            max_concurrent=max_concurrent,
            max_concurrent_generation=max_concurrent_generation,
            max_concurrent_scoring=max_concurrent_scoring,
            results_path=results_path,
            state_columns=state_columns,
            save_results=save_results,
            save_every=save_every,
            **kwargs,
        )

    @wraps(evaluate)
    def evaluate_sync(self, *args: Any, **settings: Any) -> Any:
        """`evaluate` for callers without an event loop (or with a running one)."""
        # As in verifiers, an overridden `evaluate` is not called.
        return run_sync(Batches.evaluate(self, *args, **settings))

    make_dataset = staticmethod(make_dataset)
