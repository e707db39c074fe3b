"""The rollout engine runs many episodes at once, up to a bound; a failure ends only its episode.

Time limits. An episode that has spent `time_limit_s` (waiting for the server excluded) should end
at its next turn boundary: sources check `current_episode().clock.expired` there. An episode that
has not ended `grace_s` later is cancelled and becomes a `RolloutTimeout` error that keeps its
states. The same happens at `deadline_s`, which counts everything, including retries and scoring.
The client retries single requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolltree._helpers.tasks import (
    OwnTask,
    ShortCollections,
    allow_open_files,
    being_cancelled,
    contain_tasks,
    contained,
    yield_fairly,
)
from rolltree.environments.rubrics import write_failure
from rolltree.inference.client import ModelClient, as_client, check_tools
from rolltree.inference.deadline import RolloutClient
from rolltree.rollouts.progress_watch import InFlight, ProgressWatch
from rolltree.rollouts.requests import (
    Clock,
    DistinctRequests,
    Episode,
    GroupScorer,
    RolloutSource,
    call_seeds,
    check_source,
    playing,
    with_tools,
)
from rolltree.rollouts.settle import settle_state, settle_states
from rolltree.samples import DEFAULT_SCOPE
from rolltree.values.errors import ConfigError, RolloutTimeout, record_error
from rolltree.values.types import (
    ErrorRecord,
    RolloutRequest,
    RolloutResult,
    Scope,
    State,
    TruncationReason,
)

if TYPE_CHECKING:
    from rolltree.rollouts.batch import Credit, GeneratedBatch
    from rolltree.samples import TruncationPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Counts after one more result. `num_total` is None if requests are read one by one."""

    num_done: int
    num_failed: int
    num_total: int | None


class RolloutEngine:
    """Run episodes of one source with one client.

    Args:
        source: plays the episodes.
        client: a `ModelClient`, or an object that `as_client` accepts.
        model: the model to request, if it is not the client's own.
        max_concurrent: the maximum number of episodes in flight.
        time_limit_s: seconds an episode may spend, waiting for the server excluded; None: no limit.
        grace_s: seconds between that limit and the cancellation of an episode that has not ended.
        deadline_s: seconds a rollout may take in all: its attempts, their waits for the server and
            their scoring. Comparing a group may take as long again. None: no deadline.
        retries: how often an episode that failed because of a server or a sandbox
            (`types.ErrorKind`) is run again, from its start and with the same seeds.
            `RolloutResult.num_attempts` counts the attempts.
        on_progress: called after every result, in the event loop.
        notify: gets notices about rollouts that make no progress, in a thread; default: a warning
            of the logger.

    Raises:
        ConfigError: a limit makes no sense, or the source has tools and the client's chat template
            leaves tools out of the prompt. If rows have their own tools, `run` raises it at
            the first such row.
    """

    def __init__(
        self,
        source: RolloutSource,
        client: object,
        *,
        model: str | None = None,
        max_concurrent: int = 64,
        time_limit_s: float | None = None,
        grace_s: float = 5.0,
        deadline_s: float | None = None,
        retries: int = 0,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        notify: Callable[[str], None] = logger.warning,
    ) -> None:
        if max_concurrent < 1:
            raise ConfigError(
                f"max_concurrent is {max_concurrent}; no episode could ever run. Use at least 1."
            )
        if time_limit_s is not None and not time_limit_s > 0:  # so NaN is refused, too
            raise ConfigError(
                f"time_limit_s is {time_limit_s}; every episode would be over before its first "
                "turn. Use a positive number of seconds, or None for no limit."
            )
        if deadline_s is not None and not deadline_s > 0:
            raise ConfigError(
                f"deadline_s is {deadline_s}; every rollout would be over before its first call. "
                "Use a positive number of seconds, or None for no deadline."
            )
        if retries < 0 or grace_s < 0:
            raise ConfigError("retries and grace_s cannot be negative; use 0 for none.")
        check_source(source)
        allow_open_files()
        self.source = source
        self.client = as_client(client, model)
        check_tools(self.client, getattr(source, "oai_tools", None))
        self.model = model
        self.max_concurrent = max_concurrent
        self.time_limit_s = time_limit_s
        self.grace_s = grace_s
        self.deadline_s = deadline_s
        self.retries = retries
        self.on_progress = on_progress
        self.watch = ProgressWatch(notify)

    async def run_all(self, requests: Iterable[RolloutRequest]) -> list[RolloutResult]:
        """Run all requests and return their results in the order of the requests."""
        listed = list(requests)
        # Results arrive as episodes finish, but callers pair them with requests by position.
        by_id: dict[str, RolloutResult] = {}
        # An async generator that is not closed ends only when the garbage collector finds it, and
        # its episodes keep running until then.
        async with aclosing(self.run(listed)) as results:
            async for result in results:
                by_id[result.request.request_id] = result
        return [by_id[request.request_id] for request in listed]

    async def generate_batch(
        self,
        requests: Iterable[RolloutRequest],
        *,
        scope: Scope = DEFAULT_SCOPE,
        credit: Credit | None = None,
        whole_groups: bool = False,
        truncation: TruncationPolicy | None = None,
        max_seq_len: int | None = None,
    ) -> GeneratedBatch:
        """Run all requests and return training samples; see `rollouts.batch.generate_batch`."""
        from rolltree.rollouts.batch import generate_batch

        return await generate_batch(
            self,
            requests,
            scope=scope,
            credit=credit,
            whole_groups=whole_groups,
            truncation=truncation,
            max_seq_len=max_seq_len,
        )

    async def run(self, requests: Iterable[RolloutRequest]) -> AsyncGenerator[RolloutResult, None]:
        """Yield one result per request, as they finish; otherwise like `run_ready`."""
        async with aclosing(self.run_ready(requests)) as batches:
            async for batch in batches:
                for result in batch:
                    yield result

    async def run_ready(
        self, requests: Iterable[RolloutRequest]
    ) -> AsyncGenerator[list[RolloutResult], None]:
        """Yield lists of results as they finish: all that have come since the previous list.

        If the source compares the members of a group, the group's results come together in one
        list, after its last member. Cancelling the consumer, or closing the iterator, cancels
        every episode in flight (their `@cleanup` runs) and leaves no task behind.

        Raises:
            ConfigError: two requests share an id, so their results would count as one.
        """
        contain_tasks()
        groups = _Groups(self.source, self.deadline_s)
        total: int | None = None
        is_distinct = isinstance(requests, DistinctRequests)
        # To hold a group back until its last member, its size must be known, so an iterator is
        # read to its end first.
        if isinstance(requests, list | tuple) or groups.active:
            requests = list(requests)
            total = len(requests)
            groups.expect(requests)
        feed = with_tools(requests if is_distinct else _unique(requests), self.source, self.client)
        done = _Done()
        num_workers = self.max_concurrent if total is None else min(self.max_concurrent, total)
        workers: list[asyncio.Task[None]] = []

        # A separate task starts the workers, so that results of the first ones can be taken while
        # thousands are still being started.
        async def start() -> None:
            for index in range(num_workers):
                await yield_fairly()
                work = self._work(feed, groups, done)
                workers.append(asyncio.create_task(work, name=f"rollout-worker-{index}"))

        starting = asyncio.create_task(start(), name="rollout-workers")
        num_done = num_failed = num_ended = 0
        try:
            # A garbage collection visits every object that rollouts in flight hold
            # (design/0018-scale.md).
            with ShortCollections(num_workers) as collections:
                while num_ended < num_workers:
                    results, ended = await done.take()
                    num_ended += ended
                    for result in results:
                        num_done += 1
                        num_failed += result.error is not None
                        if self.on_progress is not None:
                            self.on_progress(RolloutProgress(num_done, num_failed, total))
                    collections.ended(len(results))
                    if results:
                        yield results
            # Not `gather`, which blocks the loop with ten thousand tasks; all have ended anyway.
            for worker in workers:
                # Raises the worker's error, for example that of a bad request iterator.
                worker.result()
        finally:
            # First, because no worker may start after the workers to cancel are listed.
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            unfinished = [worker for worker in workers if not worker.done()]
            for worker in unfinished:
                worker.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
            # The first failure is raised; asyncio would log the others.
            for worker in workers:
                if not worker.cancelled():
                    worker.exception()

    async def _work(self, feed: Iterator[RolloutRequest], groups: _Groups, done: _Done) -> None:
        try:
            while True:
                await yield_fairly()
                request = next(feed, None)
                if request is None:
                    return
                with self.watch.over(request) as flight:
                    results = await groups.add(await self._run_one(request, flight))
                await done.put(results)
        finally:
            done.end()

    async def _run_one(self, request: RolloutRequest, flight: InFlight) -> RolloutResult:
        attempt, left_s = 1, self.deadline_s
        while True:
            # The episode swallowed the cancellation; the next attempt must not begin.
            if being_cancelled():
                raise asyncio.CancelledError
            # A new clock for each attempt: the time that a failed attempt took must not count
            # against the next one's limit.
            clock = flight.clock = Clock(self.time_limit_s, self.grace_s, left_s)
            result = await self._attempt(request, attempt, clock, flight)
            error = result.error
            if error is None or attempt > self.retries or error.kind != "infrastructure":
                return result
            # The deadline covers the whole rollout: a retry gets the time that is left.
            left_s = clock.left_s
            if left_s == 0.0:
                return result
            attempt += 1

    async def _attempt(
        self, request: RolloutRequest, attempt: int, clock: Clock, flight: InFlight
    ) -> RolloutResult:
        episode = Episode(request, clock)
        # Seeds are counted from the start of the attempt, so a retry replays the same random
        # numbers.
        client = RolloutClient(self.client, clock, seeds=call_seeds(request), model=self.model)
        error: ErrorRecord | None = None
        try:
            with playing(episode):
                async with clock.guard() as scope:
                    played = OwnTask(self._play(request, client))
                    flight.task = played.task
                    states = await played.wait()
        except TimeoutError as failure:
            states = tuple(episode.states)
            # The guard's own timeout and a TimeoutError that user code raised are the same class.
            if scope.expired():
                error = self._timed_out(states, clock.past_deadline)
            else:
                error = _broken_source(failure, states)
        except asyncio.CancelledError as failure:
            if being_cancelled():
                # This run is being cancelled, not just something inside the episode.
                raise
            # The source returned nothing, so only the states that it registered are left.
            states = tuple(episode.states)
            error = _broken_source(failure, states)
        except Exception as failure:  # noqa: BLE001  one failed episode is data
            states = tuple(episode.states)
            error = _broken_source(failure, states)
        finally:
            # A call that outlives its episode must not be limited by the episode's remaining time.
            clock.stop()
            flight.task = asyncio.current_task()
        settle_states(states)
        if error is None:
            error = _error_in(states)
        return RolloutResult(request, states, error, attempt)

    async def _play(self, request: RolloutRequest, client: ModelClient) -> tuple[State, ...]:
        states = tuple(await self.source.run_request(request, client))
        for state in states:
            if not isinstance(state, State):
                raise ConfigError(
                    f"{type(self.source).__name__}.run_request returned a {type(state).__name__} "
                    "among its states, which can be neither trained nor stored. Return "
                    "`rolltree.State`s, or dicts as State(...)."
                )
        return states

    def _timed_out(self, states: tuple[State, ...], at_deadline: bool) -> ErrorRecord:
        why = (
            f"the episode had spent its {self.time_limit_s} s (waiting for the server excluded) "
            f"and did not end in the {self.grace_s} s after that, so it was cancelled and has no "
            "reward. Look for an environment or tool call that hangs, or raise time_limit_s."
        )
        if at_deadline:
            why = _past_deadline("the rollout", self.deadline_s)
        error = record_error(RolloutTimeout(why), "timeout")
        _mark_failed(states, error)
        for state in states:
            state.truncated = True
            state.truncation_reason = TruncationReason.TIME_LIMIT.value
        return error


def _past_deadline(what: str, deadline_s: float | None) -> str:
    return (
        f"{what} was not done after deadline_s = {deadline_s:g} s (waiting, retries and scoring "
        "included), so it was cancelled and has no reward. Is a server, a judge or a tool stuck? "
        "Look at it, or raise deadline_s."
    )


def _broken_source(failure: BaseException, states: tuple[State, ...]) -> ErrorRecord:
    cancelled = isinstance(failure, asyncio.CancelledError)
    error = record_error(failure, "cancelled" if cancelled else "environment")
    _mark_failed(states, error)
    return error


def _mark_failed(states: tuple[State, ...], error: ErrorRecord) -> None:
    for state in states:
        if state.error is None:
            state.error = error
        state.reward = None


def _unique(requests: Iterable[RolloutRequest]) -> Iterator[RolloutRequest]:
    # Not used for the requests of a plan: they are distinct by construction, and a hundred
    # thousand ids take tens of megabytes.
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise ConfigError(
                f"two requests have the id {request.request_id!r}; the run store would count their "
                "rollouts as one. Give each request its own id, for example with GroupStrategy."
            )
        seen.add(request.request_id)
        yield request


MAX_READY = 256
"""How many results may wait for the consumer before workers block."""


class _Done:
    """A bounded queue of finished results, since the consumer may be slower than the episodes."""

    def __init__(self) -> None:
        # The queue itself is unbounded, because `end` must never wait: a cancelled worker calls it,
        # too.
        self._room = asyncio.Semaphore(MAX_READY)
        self._queue: asyncio.Queue[list[RolloutResult] | None] = asyncio.Queue()
        self._num_taken = 0

    async def put(self, results: list[RolloutResult]) -> None:
        """Hand results over together, after waiting for room."""
        if results:
            await self._room.acquire()
            self._queue.put_nowait(results)

    def end(self) -> None:
        """Note that a worker has ended."""
        self._queue.put_nowait(None)

    async def take(self) -> tuple[list[RolloutResult], int]:
        """Wait for results; return all that are ready and how many workers have ended.

        Calling it again frees the room of the results that the previous call returned.
        """
        # Room is freed only now that the consumer comes for more. If it were freed earlier, a slow
        # consumer would keep twice as many results in memory.
        for _ in range(self._num_taken):
            self._room.release()
        ready = [await self._queue.get()]
        while not self._queue.empty():
            ready.append(self._queue.get_nowait())
        taken = [results for results in ready if results is not None]
        self._num_taken = len(taken)
        return [result for results in taken for result in results], len(ready) - len(taken)


class _Groups:
    """Holds finished members back until their group is complete, then scores the group."""

    def __init__(self, source: RolloutSource, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._scorer: GroupScorer | None = None
        if isinstance(source, GroupScorer) and source.has_group_rewards:
            self._scorer = source
        self._missing: Counter[str] = Counter()
        self._members: defaultdict[str, list[RolloutResult]] = defaultdict(list)

    @property
    def active(self) -> bool:
        return self._scorer is not None

    def expect(self, requests: Iterable[RolloutRequest]) -> None:
        if self.active:
            self._missing.update(request.group_id for request in requests)

    async def add(self, result: RolloutResult) -> list[RolloutResult]:
        """Return the results that are now final."""
        if self._scorer is None:
            return [result]
        group = result.request.group_id
        self._members[group].append(result)
        self._missing[group] -= 1
        if self._missing[group]:
            return []
        # In the order of the group, not in that of completion, so that a scorer sees the same list
        # in every run.
        members = sorted(self._members.pop(group), key=lambda r: r.request.index_in_group)
        # A failed member has no completion to compare; it keeps its error and gets no reward.
        states = [s for member in members if member.error is None for s in member.states]
        try:
            if states:
                # The comparison begins after the last member has ended, perhaps at its deadline,
                # so it gets a deadline of its own.
                async with asyncio.timeout(self._deadline_s) as deadline:
                    with contained():  # an override may be a plain function
                        await OwnTask(self._scorer.score_group(states)).wait()
        except (Exception, asyncio.CancelledError) as error:
            # A CancelledError of the scorer's own is recorded like any error.
            if being_cancelled():
                raise
            for state in states:
                settle_state(state)
            if deadline.expired():
                late = RolloutTimeout(_past_deadline("the group's scoring", self._deadline_s))
                _mark_failed(tuple(states), record_error(late, "scoring"))
            else:
                write_failure(states, getattr(self._scorer, "rubric", self._scorer), error)
        for member in members:
            settle_states(member.states, member.request.input)
        return [_with_state_error(member) for member in members]


def _with_state_error(result: RolloutResult) -> RolloutResult:
    """Return the result with the error that group scoring may have left in its states."""
    if result.error is not None:
        return result
    error = _error_in(result.states)
    return RolloutResult(result.request, result.states, error, result.num_attempts)


def _error_in(states: tuple[State, ...]) -> ErrorRecord | None:
    """Return the episode's error, if any; errors of delegated rollouts do not count."""
    # The parent sees a child's failure and continues, so the episode has not failed.
    own = (state for state in states if state.parent_rollout is None)
    return next((state.error for state in own if state.error is not None), None)
