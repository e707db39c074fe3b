"""The head's server for rollout workers: hands out work, stores results, reports ready engines.

It has its own thread and event loop, since a synchronous training step blocks the main one. A
result is acknowledged after it is stored; a worker sends results again that were not acknowledged,
and a duplicate is answered with "known".
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from aiohttp import web

from rolltree.rollouts.record import Stored, encode_result
from rolltree.rollouts.wire import result_from_rows
from rolltree.scale.cluster.control import Handler, in_time, refusal, serve_at, token_guard
from rolltree.scale.cluster.leases import Leases
from rolltree.scale.cluster.messages import (
    Delivery,
    FleetState,
    Item,
    Poll,
    Receipt,
    RoleMessage,
    Served,
    Suspect,
    Work,
    WorkDone,
    digest,
    read_item,
    read_message,
)
from rolltree.store import Run
from rolltree.values.errors import ClusterError, RolltreeError, StoreError, record_error
from rolltree.values.types import RolloutRequest, RolloutResult

SILENT_S = 30.0
"""Seconds without a poll after which a worker is taken for dead."""
QUEUE_BYTES = 2**28
"""Results that wait to be stored: several steps of most runs, and little beside a model's memory;
workers keep the others."""
_MAX_WAIT_S = 10.0
_MAX_POLL_BYTES = 2**22
_MAX_DELIVERY_BYTES = 2**30
"""More than SQLite can store as one value."""
_PROMPT_S = 2.0
"""Seconds for which a delivery has all the room that it asks for."""
_MAX_LATE = 1000
_TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The outcome of an offer: its stored results, or the error that prevented them."""

    item_id: str
    stored: Sequence[Stored]
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Requests to be played, and the callback for their results (in the broker's thread).

    `encoded` has the requests as workers get them. `replace_failed` and `replaced` are arguments of
    `Run.add_rollouts`.
    """

    item_id: str
    requests: tuple[RolloutRequest, ...]
    encoded: tuple[bytes, ...]
    done: Callable[[Sequence[ItemOutcome]], None]
    replace_failed: bool = False
    replaced: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class _Arrival:
    """A result that waits to be stored. `offer` is None if there is no open offer for it."""

    given: WorkDone
    offer: Offer | None
    stored: Sequence[Stored] = ()
    status: str = ""
    """The answer to its worker; empty until it is known."""
    why: str = ""
    error: Exception | None = None
    """The error of the store, with which the run cannot continue."""


@dataclass(slots=True, eq=False)
class _Arrivals:
    """The results of one delivery; `answer` is set once they are stored."""

    items: Sequence[_Arrival]
    answer: asyncio.Future[None]


class WorkerLost(RolltreeError):
    """A rollout was given up because the workers that played it were lost, one after another."""


@dataclass(slots=True)
class Head:
    """The parts of the head that the broker uses, once the head is ready."""

    run: Run
    env_id: str
    served: Served
    fleet: Callable[[], FleetState]
    suspect: Callable[[str], None]


@dataclass(slots=True)
class BrokerCounts:
    """Counts of results since the start, for `rolltree cluster status`."""

    stored: int = 0
    known: int = 0
    refused: int = 0
    late: int = 0
    waiting_bytes: int = 0


@dataclass(slots=True)
class _Room:
    """The part of the queue that a delivery takes."""

    counts: BrokerCounts
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        self.counts.waiting_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes


class Broker:
    """Serves rollout workers.

    Args:
        host: the address to listen on.
        token: the token that every request must carry.
        queue_bytes: the size of results that may wait to be stored; workers keep the others.
        visible: returns the names of the workers that the driver sees; None if they are not known.
        silent_s: seconds without a poll after which a worker loses its items.
    """

    def __init__(
        self,
        host: str,
        token: str,
        *,
        queue_bytes: int = QUEUE_BYTES,
        visible: Callable[[], Collection[str] | None] = lambda: None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.url = ""
        """The server's URL; empty until it is started."""
        self.life = secrets.token_hex(8)
        self.counts = BrokerCounts()
        self._host, self._token = host, token
        self._queue_bytes, self._visible = queue_bytes, visible
        self._leases: Leases[Offer] = Leases(silent_s, time.monotonic)
        self._head: Head | None = None
        # Stored results that came without an open offer, kept for a later one.
        self._late: OrderedDict[str, Sequence[Stored]] = OrderedDict()
        self._lock = threading.Lock()  # guards `_leases` and `_late`
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="rolltree-broker", daemon=True)
        self._is_up = threading.Event()
        self._failure: Exception | None = None

    def start(self) -> None:
        """Listen on a free port.

        Raises:
            ClusterError: it cannot listen on the address.
        """
        self._thread.start()
        self._is_up.wait()
        if self._failure is not None:
            raise ClusterError(
                f"the head cannot listen on {self._host} for rollout workers ({self._failure}). "
                "Check the address of this machine."
            )

    def attach(self, head: Head) -> None:
        """Begin to answer workers, now that the store is open."""
        self._head = head

    def close(self) -> None:
        """Stop listening, after pending results are stored; then the store may be closed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    # -- the head's side -----------------------------------------------------------------------

    def offer(self, offers: Iterable[Offer]) -> None:
        """Have requests played. Each offer's outcome is passed to its `done` once.

        That happens in the broker's thread, or in this call if the results are stored already.
        """
        found = list[tuple[Offer, Sequence[Stored]]]()
        with self._lock:
            for offer in offers:
                late = self._late.pop(offer.item_id, None)
                # A late result is not used for requests that are played again on purpose.
                if late is None or {r.request_id for r in offer.requests} & offer.replaced:
                    self._leases.offer(offer.item_id, offer, len(offer.requests))
                else:
                    found.append((offer, late))
        for offer, late in found:
            offer.done([ItemOutcome(offer.item_id, late)])
        self._loop.call_soon_threadsafe(self._changed)

    def withdraw(self, item_ids: Iterable[str]) -> None:
        """Withdraw items; a result that is already being stored is stored anyway."""
        with self._lock:
            self._leases.withdraw(item_ids)

    @property
    def num_slots(self) -> int:
        """How many rollouts the known workers can play at a time."""
        with self._lock:
            return self._leases.num_slots

    def metrics(self) -> dict[str, Any]:
        """Return the queue metrics that `rolltree cluster status` shows."""
        with self._lock:
            leases = self._leases
            return {
                "queued": leases.num_queued,
                "playing": len(leases) - leases.num_queued,
                "requeued": leases.num_requeued,
                "slots": leases.num_slots,
                **asdict(self.counts),
            }

    # -- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
            # The tasks of open connections.
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

    async def _run(self) -> None:
        self._stopping, self._offered = asyncio.Event(), asyncio.Event()
        self._arrivals: asyncio.Queue[_Arrivals] = asyncio.Queue()
        # No size limit here, because `_body` checks sizes.
        guards = [token_guard(self._token), self._when_ready]
        app = web.Application(middlewares=guards, client_max_size=0)
        app.add_routes(
            [
                web.post("/work", self._work),
                web.post("/results", self._results),
                web.post("/suspect", self._suspect),
                web.get("/fleet", self._fleet),
                web.get("/served", self._served),
            ]
        )
        try:
            runner, self.url = await serve_at(app, self._host)
        except OSError as error:
            self._failure = error
            return
        finally:
            self._is_up.set()
        tasks = [asyncio.create_task(work) for work in (self._store_all(), self._watch())]
        try:
            for task in tasks:
                task.add_done_callback(self._end_with)
            await self._stopping.wait()
        finally:
            await runner.cleanup()
            # `_store_all` ends between two batches: nobody would hear of half a batch.
            tasks[1].cancel()
            self._arrivals.put_nowait(_END)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            with self._lock:
                before = self._leases.num_queued
                given_up = [
                    offer
                    for item_id in self._leases.expire(self._visible())
                    if (offer := self._leases.claim(item_id)) is not None
                ]
                is_more = self._leases.num_queued > before
            for offer in given_up:
                await self._give_up(offer)
            if is_more:
                self._changed()

    def _end_with(self, task: asyncio.Task[None]) -> None:
        """Pass the error that ended a task to the callers of all offers, which wait for results."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            with self._lock:
                offers = self._leases.contents()
            for offer in offers:
                offer.done([ItemOutcome(offer.item_id, (), error)])

    def _changed(self) -> None:
        self._offered.set()

    async def _give_up(self, offer: Offer) -> None:
        """Store an offer's rollouts as failed, since they may be what kills their workers."""
        error = WorkerLost(
            "every worker that played this rollout was lost before its end, so it is not tried "
            "again. Does it use up the memory of its worker? See the workers' logs."
        )
        failed = [
            RolloutResult(request, (), record_error(error, "environment"))
            for request in offer.requests
        ]
        pairs = [(result, encode_result(result)) for result in failed]
        rows = [row for _, rows in pairs for row in rows]
        await asyncio.to_thread(
            self._known_head.run.add_rollouts,
            rows,
            replace_failed=offer.replace_failed,
            replaced=offer.replaced,
        )
        with self._lock:
            self._leases.settle(offer.item_id, True)
        offer.done([ItemOutcome(offer.item_id, pairs)])

    # -- requests ------------------------------------------------------------------------------

    @web.middleware
    async def _when_ready(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._head is None:
            return refusal(503, "the head is not ready yet")
        try:
            return await handler(request)
        except msgspec.DecodeError as error:
            return refusal(400, f"{error}")

    @property
    def _known_head(self) -> Head:
        assert self._head is not None  # checked by `_when_ready`
        return self._head

    async def _work(self, request: web.Request) -> web.Response:
        poll = read_message(Poll, await self._body(request))
        with self._lock:
            drop = self._leases.poll(poll.worker, poll.life, poll.slots, poll.have)
            leased = self._leases.take(poll.worker, poll.free)
        end = time.monotonic() + min(poll.wait_s, _MAX_WAIT_S)
        while not leased and not drop and poll.free > 0 and not self._stopping.is_set():
            left_s = end - time.monotonic()
            if left_s <= 0:
                break
            self._offered.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._offered.wait()
            except TimeoutError:
                break
            with self._lock:
                # A new process of this worker may have polled meanwhile.
                if not self._leases.is_current(poll.worker, poll.life):
                    break
                leased = self._leases.take(poll.worker, poll.free)
        items = tuple(
            Item(item_id=each.item_id, attempt=each.attempt, requests=each.content.encoded)
            for each in leased
        )
        fleet = self._known_head.fleet()
        return _answer(Work(head=self.life, items=items, drop=tuple(drop), fleet=fleet))

    async def _fleet(self, request: web.Request) -> web.Response:
        return _answer(self._known_head.fleet())

    async def _served(self, request: web.Request) -> web.Response:
        return _answer(self._known_head.served)

    async def _suspect(self, request: web.Request) -> web.Response:
        self._known_head.suspect(read_message(Suspect, await self._body(request)).url)
        return _answer(self._known_head.fleet())

    async def _body(self, request: web.Request) -> bytes:
        _size(request, _MAX_POLL_BYTES)
        async with in_time(request):
            return await request.read()

    async def _delivery(self, request: web.Request, room: _Room) -> bytes:
        """Return the body of a delivery; a slow one takes only the room that it has filled."""
        parts, num_bytes = list[bytes](), 0
        reading = asyncio.ensure_future(request.content.readany())
        async with in_time(request):
            began_s = time.monotonic()
            try:
                while True:
                    await asyncio.wait([reading], timeout=_PROMPT_S)
                    if reading.done():
                        if not (part := reading.result()):
                            return b"".join(parts)
                        parts.append(part)
                        num_bytes += len(part)
                        reading = asyncio.ensure_future(request.content.readany())
                    if time.monotonic() - began_s > _PROMPT_S:
                        room.take(num_bytes)
            finally:
                reading.cancel()

    async def _results(self, request: web.Request) -> web.Response:
        size = _size(request, _MAX_DELIVERY_BYTES)
        # A delivery that is larger than the whole queue is accepted while no other waits.
        if self.counts.waiting_bytes and self.counts.waiting_bytes + size > self._queue_bytes:
            return refusal(503, "too many results wait to be stored; send these again later")
        room = _Room(self.counts)
        room.take(size)
        try:
            delivery = read_message(Delivery, await self._delivery(request, room))
            with self._lock:
                items = [self._arrived(given) for given in delivery.items]
            arrivals = _Arrivals(items, asyncio.get_running_loop().create_future())
            self._arrivals.put_nowait(arrivals)
            await arrivals.answer
        finally:
            room.take(0)
        return _answer(Receipt(items=tuple((item.status, item.why) for item in items)))

    def _arrived(self, given: tuple[int, bytes]) -> _Arrival:
        try:
            done = read_item(given)
        except StoreError as error:
            return _Arrival(_NOTHING, None, status="refused", why=f"{error}")
        if self._leases.is_claimed(done.item_id):
            # This result is a duplicate if the one being stored succeeds, and needed if that fails.
            return _Arrival(done, None, status="later")
        return _Arrival(done, self._leases.claim(done.item_id))

    # -- results -------------------------------------------------------------------------------

    async def _store_all(self) -> None:
        """Store results; those that arrive during a transaction share the next one."""
        is_last = False
        while not is_last:
            batch = [await self._arrivals.get()]
            while not self._arrivals.empty():
                batch.append(self._arrivals.get_nowait())
            is_last = _END in batch
            batch = [arrivals for arrivals in batch if arrivals is not _END]
            found = [item for arrivals in batch for item in arrivals.items if not item.status]
            if found:
                await self._take_in(found)
            for arrivals in batch:
                self.counts.known += sum(item.status == "known" for item in arrivals.items)
                self.counts.refused += sum(item.status == "refused" for item in arrivals.items)
                if not arrivals.answer.done():
                    arrivals.answer.set_result(None)

    async def _take_in(self, batch: Sequence[_Arrival]) -> None:
        with self._lock:
            late = [outcome for arrival in batch if (outcome := self._find_offer(arrival))]
        await asyncio.to_thread(self._store, batch)
        with self._lock:
            found = [outcome for arrival in batch if (outcome := self._settle(arrival))]
        by_caller: dict[Any, list[ItemOutcome]] = {}
        for offer, told in (*late, *found):
            by_caller.setdefault(offer.done, []).append(told)
        for done, outcomes in by_caller.items():
            done(outcomes)

    def _find_offer(self, arrival: _Arrival) -> tuple[Offer, ItemOutcome] | None:
        """Look for a result's offer again, which may be new, or served by a late result now."""
        offer, item_id = arrival.offer, arrival.given.item_id
        if offer is None:
            arrival.offer = self._leases.claim(item_id)
        elif (stored := self._late.pop(item_id, None)) is not None:
            # The late result is in the store, so it is the one that trains.
            self._leases.settle(item_id, True)
            arrival.offer, arrival.status = None, "known"
            return offer, ItemOutcome(item_id, stored)
        return None

    def _store(self, batch: Sequence[_Arrival]) -> None:
        """Check and store results, and set the status of each."""
        run = self._known_head.run
        kept: dict[bool, list[_Arrival]] = {False: [], True: []}
        for arrival in batch:
            if arrival.status:
                continue
            try:
                arrival.stored = self._read(arrival)
            except StoreError as error:
                arrival.status, arrival.why = "refused", f"{error}"
                continue
            arrival.status = "stored" if arrival.stored else "known"
            if arrival.stored:
                offer = arrival.offer
                kept[offer is not None and offer.replace_failed].append(arrival)
        for replace_failed, arrivals in kept.items():
            rows = [row for a in arrivals for rows in a.given.results for row in rows]
            replaced = {name for a in arrivals if a.offer for name in a.offer.replaced}
            try:
                if rows:
                    run.add_encoded(rows, replace_failed=replace_failed, replaced=replaced)
            except Exception as error:  # noqa: BLE001  whoever waits for these results raises it
                for arrival in arrivals:
                    arrival.status, arrival.stored, arrival.error = "later", (), error
            else:
                self.counts.stored += sum(len(arrival.stored) for arrival in arrivals)

    def _read(self, arrival: _Arrival) -> Sequence[Stored]:
        """Return the results of an arrival; none if they are known or will not be needed.

        Raises:
            StoreError: they are not results of these requests.
        """
        given, offer = arrival.given, arrival.offer
        if offer is None:
            found = [result_from_rows(rows) for rows in given.results]
            return found if all(map(self._is_wanted, found)) else ()
        if len(given.results) != len(offer.requests) or given.asked != digest(offer.encoded):
            raise StoreError(f"these are results of requests that {given.item_id!r} does not have.")
        return [
            result_from_rows(rows, request)
            for rows, request in zip(given.results, offer.requests, strict=True)
        ]

    def _is_wanted(self, result: Stored) -> bool:
        """Whether this run will ask for a result for which there is no offer now."""
        head, row = self._known_head, result[1][0]
        # An evaluation asks for its rollouts again. A failure may be due to the last head's end.
        return (
            row.phase == "train"
            and row.env_id == head.env_id
            and row.status == "ok"
            and not head.run.num_rollouts(phase="train", request_id=row.request_id)
        )

    def _settle(self, arrival: _Arrival) -> tuple[Offer, ItemOutcome] | None:
        """Close a result's item, or put it back; return the offer and its outcome, if any."""
        offer, item_id, is_stored = arrival.offer, arrival.given.item_id, bool(arrival.stored)
        if offer is not None:
            self._leases.settle(item_id, is_stored)
        elif is_stored:
            self.counts.late += 1
            # It may have been offered while it was stored.
            offer = self._leases.claim(item_id)
            if offer is not None:
                self._leases.settle(item_id, True)
            else:
                self._late[item_id] = arrival.stored
                if len(self._late) > _MAX_LATE:
                    self._late.popitem(last=False)
        if offer is None or not (is_stored or arrival.error):
            return None
        return offer, ItemOutcome(item_id, arrival.stored, arrival.error)


def _size(request: web.Request, most: int) -> int:
    """Return the size of a request's body, which must be known and at most `most`."""
    size = request.content_length
    if size is None:
        raise web.HTTPLengthRequired(text="the request has no Content-Length")
    if size > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=size)
    return size


_NOTHING = WorkDone(item_id="", asked=0, results=())
_END: Any = object()


def _answer(message: RoleMessage) -> web.Response:
    return web.Response(body=message.to_bytes(), content_type="application/msgpack")
