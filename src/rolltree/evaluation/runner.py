"""Runs a source's examples with a model, stores every result, and reports.

With the run of an earlier start it runs only the missing requests, and those that a server or
sandbox failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from rolltree._helpers.redact import redact
from rolltree._helpers.tasks import run_sync, yield_fairly
from rolltree.evaluation.reducers import REDUCERS, Outcomes, Reducer, Settings
from rolltree.evaluation.report import EvalReport, build_report, keep_report
from rolltree.inference.client import as_client
from rolltree.inference.models.load import has_gpu
from rolltree.rollouts import GroupScorer, RolloutEngine, RolloutSource, Split
from rolltree.rollouts.record import run_stored
from rolltree.rollouts.requests import RequestPlan, build_requests, check_whole
from rolltree.store import Run, StoredRollout, is_lost, to_plain
from rolltree.store.weights import environments_of, note_weights
from rolltree.values.errors import ConfigError, refuse_unknown
from rolltree.values.types import RolloutRequest, RolloutResult, SamplingArgs, SamplingParams

if TYPE_CHECKING:
    from rolltree.evaluation.keywords import EvalKeywords

logger = logging.getLogger("rolltree.evaluation")


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """The progress of an evaluation; the counts include results that earlier starts stored."""

    num_done: int
    num_total: int
    # Results that an earlier start had stored; this one played the others.
    num_resumed: int
    num_failed: int
    num_truncated: int
    num_scored: int
    # Over the scored ones; None before the first.
    mean_reward: float | None
    num_completion_tokens: int


@dataclass(slots=True)
class ProgressCounts:
    """Counts results, for `EvalProgress`."""

    num_total: int
    num_resumed: int
    num_done: int
    num_failed: int = 0
    num_truncated: int = 0
    num_scored: int = 0
    sum_reward: float = 0.0
    num_completion_tokens: int = 0

    def add(
        self, *, failed: bool, truncated: bool, reward: float | None, num_tokens: int = 0
    ) -> None:
        """Count one result."""
        self.num_done += 1
        self.num_failed += failed
        self.num_truncated += truncated
        self.num_scored += reward is not None
        self.sum_reward += reward or 0.0
        self.num_completion_tokens += num_tokens

    def progress(self) -> EvalProgress:
        """Return the progress so far."""
        mean = self.sum_reward / self.num_scored if self.num_scored else None
        counts = {name: getattr(self, name) for name in _COUNTED}
        return EvalProgress(**counts, mean_reward=mean)


_COUNTED = [each.name for each in fields(EvalProgress) if each.name != "mean_reward"]


def evaluate(source: RolloutSource, client: object, **settings: Unpack[EvalKeywords]) -> EvalReport:
    """Evaluate a model on a split of a source and return the report.

        report = rt.evaluate(env, client, num_examples=50, sampling={"max_tokens": 256})

    It also works if an event loop is already running, as in a notebook. `settings` are those of
    `evaluate_async`, which is for async functions.
    """
    return run_sync(evaluate_async(source, client, **settings))


async def evaluate_async(
    source: RolloutSource,
    client: object,
    *,
    num_examples: int = -1,
    rollouts_per_example: int = 1,
    sampling: SamplingArgs | SamplingParams | None = None,
    max_concurrent: int = 64,
    seed: int = 0,
    run: Run | None = None,
    phase: str = "eval",
    split: Split = "eval",
    time_limit_s: float | None = None,
    deadline_s: float | None = None,
    retries: int = 0,
    retry_failed: bool = False,
    settings: Settings | None = None,
    reducers: Mapping[str, Reducer] = REDUCERS,
    on_result: Callable[[RolloutResult], None] | None = None,
    on_progress: Callable[[EvalProgress], None] | None = None,
    engine: RolloutEngine | None = None,
    **unknown: Any,
) -> EvalReport:
    """Evaluate a model on `num_examples` (-1: all) of a source's split.

    They are the first ones; of a group of environments, equally many of each.

    Every result is stored in `run` under `phase` before it counts. Failed rollouts have no
    reward: they are left out of means and counted in `EvalReport.num_failed`. A stored failure is
    final, unless a server or a sandbox failed (`types.ErrorKind`) or `retry_failed` is set;
    then the rollout is run again, and an event records that. `sampling` overrides fields of the
    source's `sampling_args`; all seeds are derived from `seed`. `on_result` is called for new
    results, and `on_progress` also once at the start. If an `engine` is passed, it runs the
    rollouts with its own limits.

    Raises:
        ConfigError: there is nothing to run, or `run` holds this phase with different settings.
        ConnectionFailed: none of the model's servers answers.
    """
    refuse_unknown("evaluate", unknown, evaluate_async)
    if not isinstance(run, Run | None):
        raise ConfigError(
            f"run is {run!r}, not an open run. Pass one: `with Run.open_or_create(folder, "
            "config={}) as run`, of rolltree.store."
        )
    start = time.monotonic()
    model = as_client(client)
    check_whole(
        num_examples=num_examples,
        rollouts_per_example=rollouts_per_example,
        seed=seed,
        max_concurrent=max_concurrent,
        retries=retries,
    )
    if rollouts_per_example < 1:
        raise ConfigError(
            f"rollouts_per_example is {rollouts_per_example}; nothing would be measured. Use 1 or "
            "more."
        )
    # In threads, since planning ten thousand requests takes a while, and reading and reducing a
    # hundred thousand stored rollouts takes seconds.
    plan = await asyncio.to_thread(
        build_requests,
        source,
        split,
        num_examples=num_examples,
        group_size=rollouts_per_example,
        sampling=sampling,
        run_seed=seed,
        phase=phase,
    )
    if run is not None:
        _check_same_evaluation(
            run,
            phase,
            plan[0],
            model=model.model,
            split=split,
            seed=seed,
            group_size=rollouts_per_example if _compares_groups(source) else None,
        )
        # Stored before the first rollout, so that readers of a killed run know how much is missing.
        run.plan(f"phase/{phase}", len(plan))
        note_weights(source, run)
    outcomes, again = await asyncio.to_thread(_finished, run, phase, plan, retry_failed, source)
    tally = await asyncio.to_thread(_Tally, len(plan), outcomes, on_progress)
    tally.report()
    num_resumed = len(outcomes)
    engine = engine or RolloutEngine(
        source,
        model,
        # The engine starts this many workers, and a resumed evaluation may have one rollout left.
        max_concurrent=min(max_concurrent, max(1, len(plan) - num_resumed)),
        time_limit_s=time_limit_s,
        deadline_s=deadline_s,
        retries=retries,
        notify=logger.warning if run is None else partial(run.announce, show=logger.warning),
    )
    todo = plan.without(outcomes.has)
    # A finished evaluation is only read, and needs no server.
    has_servers = hasattr(model, "server") or hasattr(model, "clients")
    if has_servers and num_resumed < len(plan):
        from rolltree.inference.reachable import check_servers

        for notice in await check_servers(model):
            if run is None:
                logger.warning(notice)
            else:
                run.announce(notice, logger.warning)
    async with aclosing(run_stored(engine, todo, run, replaced=again)) as batches:
        async for batch in batches:
            for result, rows in batch:
                # Results come in batches, and callbacks may be slow.
                await yield_fairly()
                tally.add(rows)
                if on_result is not None:
                    on_result(result)
    return await asyncio.to_thread(
        _reported,
        run,
        outcomes,
        env_id=source.env_id,
        model=model.model,
        phase=phase,
        settings=settings,
        reducers=reducers,
        environments=environments_of(source),
        num_resumed=num_resumed,
        elapsed_s=time.monotonic() - start,
        run_path=None if run is None else str(run.path),
        idle_gpu=_has_idle_gpu(model),
    )


def _has_idle_gpu(model: object) -> bool:
    """Whether a model in this process is on the CPU of a machine that has a GPU."""
    device = getattr(getattr(model, "engine", None), "device", None)
    return getattr(device, "type", None) == "cpu" and has_gpu()


def _reported(
    run: Run | None, outcomes: Outcomes, *, reducers: Mapping[str, Reducer], **options: Any
) -> EvalReport:
    """Build the report, and store its aggregates in the run if the reducers are the usual ones."""
    report = build_report(outcomes, reducers=reducers, **options)
    # A stored report is read as one of the usual reducers.
    if run is not None and reducers == REDUCERS:
        keep_report(run, report)
    return report


def _compares_groups(source: RolloutSource) -> bool:
    return isinstance(source, GroupScorer) and source.has_group_rewards


def _finished(
    run: Run | None, phase: str, plan: RequestPlan, retry_failed: bool, source: RolloutSource
) -> tuple[Outcomes, set[str]]:
    """Return the stored outcomes that count, and the ids of stored requests to run again.

    If the source compares the members of a group, a group counts as a whole or not at all.
    """
    if run is None:
        return Outcomes(plan.request_ids), set()
    outcomes = Outcomes.stored(run, phase, plan.request_ids)
    failed = run.columns(("request_id", "errors"), phase=phase, status="error")
    again = {
        request_id
        for request_id, errors in failed
        # A server's failure says nothing about the model. Other failures are results; repeating
        # them until they succeed would bias the mean.
        if outcomes.has(request_id) and (retry_failed or is_lost(errors))
    }
    if _compares_groups(source):
        for group in plan.groups():
            members = {request_id for request_id in group if outcomes.has(request_id)}
            # Rewards compare the members, so a group in which one is missing is played again as a
            # whole.
            if len(members - again) < len(group):
                again |= members
    for request_id in again:
        outcomes.remove(request_id)
    return outcomes, again


def _check_same_evaluation(run: Run, phase: str, request: RolloutRequest, **settings: Any) -> None:
    """Check that a phase is continued with the same settings.

    Raises:
        ConfigError: a setting differs; the message names the first one.
    """
    key = f"evaluation.{phase}"
    sampling = asdict(replace(request.sampling, extra=dict(request.sampling.extra)))
    named = {f"sampling.{name}": value for name, value in redact(sampling).items()}
    now = to_plain({"env_id": request.env_id, **settings, **named})
    before = run.meta.get(key)
    # Settings may change until the first rollout is stored.
    if before is None or not run.num_rollouts(phase=phase):
        run.set_meta(key, now)
        return
    different = [name for name in now if before.get(name) != now[name]]
    if different:
        name = different[0]
        raise ConfigError(
            f"{run.path} holds the evaluation {phase!r} with {name} = {before.get(name)!r}, now "
            f"{name} is {now[name]!r}; one report cannot cover both. Use another run directory "
            "or phase, or the same settings."
        )


class _Tally:
    """The outcomes so far, and the progress that is reported from them."""

    def __init__(
        self,
        num_total: int,
        outcomes: Outcomes,
        on_progress: Callable[[EvalProgress], None] | None,
    ) -> None:
        self._outcomes, self._on_progress = outcomes, on_progress
        rewards = [reward for reward in outcomes.each("reward") if reward is not None]
        self._counts = ProgressCounts(
            num_total,
            num_resumed=len(outcomes),
            num_done=len(outcomes),
            num_failed=sum(kind is not None for kind in outcomes.each("error_type")),
            num_truncated=sum(why is not None for why in outcomes.each("truncation_reason")),
            num_scored=len(rewards),
            sum_reward=sum(rewards),
            num_completion_tokens=sum(outcomes.each("num_completion_tokens")),
        )

    def add(self, rows: Sequence[StoredRollout]) -> None:
        """Count a new result."""
        outcome = self._outcomes.add(rows)
        self._counts.add(
            failed=outcome.failed,
            truncated=outcome.truncation_reason is not None,
            reward=outcome.reward,
            num_tokens=outcome.num_completion_tokens,
        )
        self.report()

    def report(self) -> None:
        """Report the progress to the caller."""
        if self._on_progress is not None:
            self._on_progress(self._counts.progress())
