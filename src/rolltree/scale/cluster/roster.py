"""The driver's record of every role: its registration, its last beat, and whether it stalls.

It does no I/O: the control server updates it, and the driver reads it. Times are seconds of one
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rolltree.values.errors import ClusterError

Kind = Literal["engine", "worker", "trainer", "rank"]

_STEADY_S = 30.0
"""Seconds of beats that count as progress, while the run's progress is not known."""
_KEPT_NOTICES = 200


class Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /register`. `url` is None for roles that nobody calls, such as workers."""

    name: str
    kind: Kind
    url: str | None
    pid: int
    host: str


class Beat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /beat`.

    `state` describes what the role does; `waits_for` is the kind of role that it waits for.
    `busy_since_s`: seconds since its main loop advanced. A `pid` and `host` that differ from the
    registered ones belong to an older process of that name, which is told to stop. `num_notices` is
    that of the head's last answer: notices before it have arrived.
    """

    name: str
    state: str
    waits_for: str | None
    busy_since_s: float
    metrics: dict[str, Any]
    pid: int | None = None
    host: str | None = None
    num_notices: int = 0


@dataclass(slots=True)
class Role:
    """A role that the driver keeps running, or (not `is_kept`) one that was started by hand."""

    name: str
    kind: str
    started_at: float
    is_kept: bool = True
    registration: Registration | None = None
    registered_at: float = 0.0
    heard_at: float = 0.0
    beat: Beat | None = None
    restarts: int = 0
    drains: bool = False
    is_unable: bool = False
    """Whether it has said that it is useless to start it again."""
    stall: str | None = None
    stalled_at: float = 0.0
    longest_busy_s: float = 0.0
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str | None:
        """The role's URL; None until it has registered, or if nobody calls it."""
        return None if self.registration is None else self.registration.url


class Roster:
    """The roles of a run.

    Args:
        clock: seconds, monotonic.
    """

    stall_s = 20.0
    """Seconds without a beat, or without progress of its loop, until a role stalls: several beats,
    one of which waited for its timeout."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.roles: dict[str, Role] = {}
        self.notices: list[str] = []
        """Messages for the user, in order; the oldest are dropped."""
        self.progress = 0.0
        """The progress of the run: a growing number, in the head's own unit."""
        self.is_stopping = False
        self._clock = clock
        self._num_dropped = self._num_handed = 0

    def started(self, name: str, kind: str) -> Role:
        """Note that the driver starts a role, or starts it again."""
        role = Role(name, kind, self._clock())
        if name in self.roles:
            role.restarts = self.roles[name].restarts + 1
        self.roles[name] = role
        return role

    def ended(self, name: str) -> None:
        """Note that a role's process has ended: its address is not given out any more."""
        role = self.roles[name]
        role.registration = role.beat = role.stall = None
        # The time until its restart must not count as a slow start.
        role.started_at = self._clock()
        if role.kind == "trainer":
            # Its other ranks end with it.
            self.roles = {n: r for n, r in self.roles.items() if r.kind != "rank"}

    def removed(self, name: str) -> None:
        """Forget a role that will not be started again."""
        self.roles.pop(name, None)

    def register(self, given: Registration) -> None:
        """Note a role's address; a role that the driver did not start is added."""
        role = self.roles.get(given.name)
        if role is None or role.kind != given.kind:
            role = self.started(given.name, given.kind)
            role.is_kept = False
        role.registration, role.beat, role.stall = given, None, None
        role.registered_at = role.heard_at = self._clock()

    def note_beat(self, beat: Beat) -> dict[str, Any]:
        """Note a beat and return its answer.

        Raises:
            ClusterError: no such role has registered.
        """
        role = self.roles.get(beat.name)
        if role is None or role.registration is None:
            raise ClusterError(
                f"{beat.name} has not registered, so other roles cannot find it. POST /register "
                "first."
            )
        known = role.registration
        # A newer process has the name, since this one was taken for lost or a user started another.
        if beat.pid is not None and (beat.pid, beat.host) != (known.pid, known.host):
            return {**self._answer(role), "stop": True}
        if role.beat is not None and beat.busy_since_s < role.beat.busy_since_s:
            role.longest_busy_s = max(role.longest_busy_s, role.beat.busy_since_s)
        role.beat, role.heard_at = beat, self._clock()
        if role.kind == "trainer":
            progress = beat.metrics.get("progress")
            if isinstance(progress, int | float):
                self.progress = max(self.progress, progress)
        answer = self._answer(role)
        if role.kind == "trainer":
            # Only the head can store them. They come again until it says that they have arrived.
            self._num_handed = max(self._num_handed, beat.num_notices)
            answer["notices"] = self.notices[max(0, self._num_handed - self._num_dropped) :]
            answer["num_notices"] = self._num_dropped + len(self.notices)
        return answer

    def _answer(self, asking: Role) -> dict[str, Any]:
        there = [role for role in self.roles.values() if role.registration is not None]
        return {
            "stop": self.is_stopping,
            "drain": asking.drains,
            "head": next((role.url for role in there if role.kind == "trainer"), None),
            "engines": [
                {"name": role.name, "url": role.url}
                for role in there
                if role.kind == "engine" and not role.drains
            ],
            "workers": [role.name for role in there if role.kind == "worker"],
        }

    def steady(self, name: str, since: float) -> bool:
        """Whether the role worked, and the run's progress is above `since`.

        If the run's progress is not known, the role must have worked for a while.
        """
        role = self.roles[name]
        if role.beat is None:
            return False
        if self.progress:
            return self.progress > since
        return role.heard_at - role.registered_at > _STEADY_S

    def notice(self, message: str) -> None:
        """Keep a message for the head and for `status`."""
        self.notices.append(message)
        if len(self.notices) > _KEPT_NOTICES:
            self.notices.pop(0)
            self._num_dropped += 1

    def forgive(self, gap_s: float) -> None:
        """Do not count a time in which the driver itself was stopped and could not hear beats."""
        for role in self.roles.values():
            role.heard_at += gap_s
            role.started_at += gap_s

    def look(self) -> list[str]:
        """Return new notices: which roles stall now, and which work again."""
        now, said = self._clock(), []
        for role in list(self.roles.values()):
            if not role.is_kept and now - role.heard_at > 2 * self.stall_s:
                # The process of a role that was started by hand is not watched.
                self.removed(role.name)
                said.append(f"{role.name}, which was started by hand, is gone")
                continue
            stall = self._stall(role, now)
            if stall is not None and role.stall is None:
                role.stalled_at = now
                said.append(stall + self._waiting(role.kind))
            elif stall is None and role.stall is not None:
                said.append(f"{role.name} goes on, {now - role.stalled_at:.0f} s after that notice")
            role.stall = stall
        return said

    def _stall(self, role: Role, now: float) -> str | None:
        if role.registration is None:
            return None
        silent_s = now - role.heard_at
        if silent_s > self.stall_s:
            return (
                f"{role.name} has not answered for {silent_s:.0f} s: its process runs, but it is "
                "stopped or the machine does not get to it"
            )
        if role.beat is None:
            return None
        busy_s = role.beat.busy_since_s
        # Steps of one run take about equally long, so one like the longest so far is not a stall.
        if busy_s > max(self.stall_s, 2 * role.longest_busy_s):
            return (
                f"{role.name} answers, but its loop has not advanced for {busy_s:.0f} s "
                f"({role.beat.state})"
            )
        return None

    def _waiting(self, kind: str) -> str:
        names = [
            role.name
            for role in self.roles.values()
            if role.beat is not None and role.beat.waits_for == kind
        ]
        if not names:
            return ""
        listed = " and ".join(names) if len(names) < 3 else f"{len(names)} roles"
        return f"; {listed} {'waits' if len(names) == 1 else 'wait'} for it"

    def status(self) -> dict[str, Any]:
        """Return everything as plain data; times are in seconds before now."""
        now = self._clock()
        roles = []
        for role in self.roles.values():
            given, beat = role.registration, role.beat
            roles.append(
                {
                    "name": role.name,
                    "kind": role.kind,
                    "host": role.place.get("host") or (given.host if given else None),
                    "pid": given.pid if given else role.place.get("pid"),
                    "node_id": role.place.get("node_id", ""),
                    "url": role.url,
                    "state": _state(role),
                    "waits_for": beat.waits_for if beat else None,
                    "restarts": role.restarts,
                    "up_s": round(now - role.started_at, 1),
                    "heard_s": round(now - role.heard_at, 1) if given else None,
                    "stall": role.stall,
                    "metrics": beat.metrics if beat else {},
                }
            )
        return {"roles": roles, "notices": self.notices, "progress": self.progress}


def _state(role: Role) -> str:
    if role.registration is None:
        return "starting"
    if role.stall is not None:
        return "stalls"
    if role.drains:
        return "draining"
    return role.beat.state if role.beat is not None else "registered"
