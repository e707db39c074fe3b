"""The table of work items and of the workers that play them, without I/O.

An item waits in the queue, is leased to one process of a worker, or is being stored. A worker
reports in its polls which items it has. Items that it was given and does not have, and the items of
lost workers, go back to the front of the queue, with the same requests and seeds. The first result
of an item counts, whichever worker it comes from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ATTEMPTS = 10
"""How often an item is handed out before it is given up: it may be what kills its workers."""


@dataclass(slots=True)
class _Item(Generic[T]):
    item_id: str
    cost: int
    content: T
    attempt: int = 0
    worker: str | None = None  # the worker that has it; None while it is in the queue
    is_claimed: bool = False  # a result is being stored


@dataclass(slots=True)
class _Worker:
    life: str
    heard_at: float
    slots: int = 0
    items: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Lease(Generic[T]):
    """An item for a worker; `attempt` counts how often it was handed out, from 1."""

    item_id: str
    attempt: int
    content: T


class Leases(Generic[T]):
    """The items of one head.

    Args:
        silent_s: seconds without a poll after which a worker loses its items.
        clock: returns monotonic seconds.
    """

    def __init__(self, silent_s: float, clock: Callable[[], float]) -> None:
        self._silent_s, self._clock = silent_s, clock
        self._items: dict[str, _Item[T]] = {}
        self._queue: OrderedDict[str, None] = OrderedDict()
        self._workers: dict[str, _Worker] = {}
        self._given_up: list[str] = []
        self.num_requeued = 0

    def __len__(self) -> int:
        return len(self._items)

    def contents(self) -> list[T]:
        """Return the contents of all open items."""
        return [item.content for item in self._items.values()]

    @property
    def num_queued(self) -> int:
        """How many items wait in the queue."""
        return len(self._queue)

    @property
    def num_slots(self) -> int:
        """How many rollouts the known workers can play at a time."""
        return sum(worker.slots for worker in self._workers.values())

    def offer(self, item_id: str, content: T, cost: int = 1) -> None:
        """Put an item at the end of the queue; `cost` is how many slots it takes."""
        if item_id in self._items:
            raise ValueError(f"{item_id!r} is open already")
        self._items[item_id] = _Item(item_id, cost, content)
        self._queue[item_id] = None

    def withdraw(self, item_ids: Iterable[str]) -> None:
        """Forget items; workers are told to drop them when they next list their items."""
        for item_id in item_ids:
            self._close(item_id)

    def poll(self, worker: str, life: str, slots: int, have: Collection[str] | None) -> list[str]:
        """Note a poll, and return the items that the worker has and need not play any more.

        `life` identifies its process, `slots` is how many rollouts it can play at a time. `have` is
        None if the poll does not list the worker's items.
        """
        known = self._workers.get(worker)
        if known is None or known.life != life:
            self._lose(worker)
            known = self._workers[worker] = _Worker(life, 0.0)
        known.heard_at, known.slots = self._clock(), slots
        if have is None:
            return []
        # The worker never got the answers with these items.
        self._requeue(known.items.difference(have))
        return [item_id for item_id in have if item_id not in known.items]

    def is_current(self, worker: str, life: str) -> bool:
        """Whether `life` is the last known process of a worker."""
        known = self._workers.get(worker)
        return known is not None and known.life == life

    def take(self, worker: str, free: int) -> list[Lease[T]]:
        """Lease the items that fit into `free` slots to a worker that has just polled."""
        known, found = self._workers[worker], list[Lease[T]]()
        while self._queue:
            item = self._items[next(iter(self._queue))]
            # A group that needs more slots goes to a worker that has nothing else.
            if item.cost > free and (found or known.items):
                break
            if free <= 0:
                break
            del self._queue[item.item_id]
            item.worker, item.attempt = worker, item.attempt + 1
            known.items.add(item.item_id)
            found.append(Lease(item.item_id, item.attempt, item.content))
            free -= item.cost
        return found

    def claim(self, item_id: str) -> T | None:
        """Return the content of an item whose result has come, and accept no other result.

        Return None if the item is not open, or another result is being stored.
        """
        item = self._items.get(item_id)
        if item is None or item.is_claimed:
            return None
        self._unlease(item)
        item.is_claimed = True
        return item.content

    def is_claimed(self, item_id: str) -> bool:
        """Whether a result of this item is being stored."""
        item = self._items.get(item_id)
        return item is not None and item.is_claimed

    def settle(self, item_id: str, is_stored: bool) -> None:
        """Close a claimed item, or put it back because its result could not be stored."""
        item = self._items.get(item_id)
        # It may have been withdrawn, and offered again.
        if item is None or not item.is_claimed:
            return
        item.is_claimed = False
        if is_stored:
            self._close(item_id)
        else:
            self._requeue([item_id])

    def expire(self, visible: Collection[str] | None = None) -> list[str]:
        """Take back the items of lost workers, and return the ids of items that are given up.

        `visible` names the workers that the driver sees, if known; a worker that it does not see is
        lost after a tenth of `silent_s`.
        """
        now = self._clock()
        for name, worker in list(self._workers.items()):
            silent_s = now - worker.heard_at
            is_gone = visible is not None and name not in visible and silent_s > self._silent_s / 10
            if silent_s > self._silent_s or is_gone:
                self._lose(name)
        given_up, self._given_up = self._given_up, []
        return given_up

    def _lose(self, name: str) -> None:
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._requeue(worker.items)

    def _requeue(self, item_ids: Iterable[str]) -> None:
        # Sorted and at the front, so that the oldest steps and groups are done first.
        for item_id in sorted(item_ids, reverse=True):
            item = self._items[item_id]
            self._unlease(item)
            self.num_requeued += 1
            if item.attempt >= MAX_ATTEMPTS:
                self._given_up.append(item_id)
                continue
            self._queue[item_id] = None
            self._queue.move_to_end(item_id, last=False)

    def _unlease(self, item: _Item[T]) -> None:
        self._queue.pop(item.item_id, None)
        worker = None if item.worker is None else self._workers.get(item.worker)
        if worker is not None:
            worker.items.discard(item.item_id)
        item.worker = None

    def _close(self, item_id: str) -> None:
        item = self._items.pop(item_id, None)
        if item is not None:
            self._unlease(item)
