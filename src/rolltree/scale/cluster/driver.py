"""The driver of a run on several processes: starts and restarts the roles, and reports stalls.

It opens no store and runs no model, so it may be killed at any time: roles end by themselves when
they cannot reach it, and the same command starts them again and continues the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolltree._helpers.files import odd_kind, open_regular, open_to_append, write_whole
from rolltree._helpers.redact import remember
from rolltree._helpers.tasks import run_shielded
from rolltree.inference.models import check_loadable
from rolltree.reports import SafeConsole, TrainView, print_report, say
from rolltree.scale.cluster.beat import ORPHAN_S
from rolltree.scale.cluster.control import ControlServer, Note, Progress, RoleFailure, Scale
from rolltree.scale.cluster.launchers import LocalLauncher, kill_marked
from rolltree.scale.cluster.relay import relayed
from rolltree.scale.cluster.roles import (
    CLUSTER_TOKEN,
    CLUSTER_URL,
    LOST,
    RUN_DIR,
    Launcher,
    RoleSpec,
)
from rolltree.scale.cluster.roster import Beat, Registration, Roster
from rolltree.scale.cluster.state import STATE_FILE, TOKEN_FILE, read_state
from rolltree.store import Run
from rolltree.store.run import make_run_folder
from rolltree.training import Reporter, TrainConfig, TrainReport
from rolltree.training.launch import stop_on_sigterm
from rolltree.training.tracking import check_trackers
from rolltree.values.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from rolltree.training.sections import ClusterSection

MAX_RESTARTS = 5
"""Starts of a role in a row without progress: with the delays, which double, a cause that passes
within half a minute is survived, and one that does not is reported soon."""
_POLL_S = 0.25
_LONGEST_DELAY_S = 30.0
_GRACE_S = {"trainer": 40.0}
"""Seconds that a role may take to end after SIGTERM; the trainer saves a checkpoint."""
_DEFAULT_GRACE_S = 5.0
_DRAIN_S = 60.0
_SLOW_START_S = 120.0
_NAMES = {"worker": "rollout_workers", "engine": "engines"}
"""The kinds of role whose number can be scaled, and their names in these requests."""


class Driver:
    """Keeps the roles of one run running.

    Args:
        run_dir: the run directory.
        settings: the number of roles of each kind, and the limits.
        config: the settings that roles read from `GET /config`.
        launcher: starts and ends processes.
        argv: the command of each kind of role.
        reporter: gets the notices, and the progress that the head sends.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: ClusterSection,
        config: Mapping[str, Any],
        launcher: Launcher,
        argv: Mapping[str, Sequence[str]],
        reporter: Reporter,
    ) -> None:
        self.run_dir, self._settings, self._launcher = run_dir.absolute(), settings, launcher
        self._argv, self._reporter = argv, reporter
        self.roster = Roster(time.monotonic)
        self.token = secrets.token_urlsafe(32)
        remember(self.token)
        self.control = ControlServer(
            launcher.host,
            self.token,
            {
                "/register": (Registration, self.roster.register),
                "/beat": (Beat, self.roster.note_beat),
                "/scale": (Scale, self.scale),
                "/fail": (RoleFailure, self._fail),
                "/note": (Note, lambda of: self.notice(f"{of.name}: {of.message}")),
                "/progress": (Progress, lambda at: relayed(self._reporter, at.call, at.values)),
            },
            {"/status": self._status, "/config": lambda: config},
        )
        self.wanted = {"worker": settings.rollout_workers, "engine": settings.engines.count}
        """The wanted number of roles of each kind."""
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._done: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run the roles until the trainer has finished, or this task is cancelled.

        Raises:
            ClusterError: a role does not stay alive, or reports that it cannot work.
        """
        self._done = asyncio.get_running_loop().create_future()
        with _alone(self.run_dir):
            here = {socket.gethostname(), self._launcher.host}
            await end_leftovers(self.run_dir, self.notice, here)
            watching: asyncio.Task[None] | None = None
            try:
                await self.control.start()
                _write_secret(self.run_dir / TOKEN_FILE, self.token)
                self._write_state()
                names = [f"{kind}-{i}" for kind, n in self.wanted.items() for i in range(n)]
                await self._launcher.prepare([self._spec(name) for name in ["trainer", *names]])
                for name in ["trainer", *names]:
                    self._keep(name)
                watching = asyncio.ensure_future(self._watch())
                await asyncio.wait([self._done, watching], return_when=asyncio.FIRST_COMPLETED)
                for each in (self._done, watching):
                    if each.done():
                        each.result()
            finally:
                await run_shielded(self._stop_all(watching))

    def notice(self, message: str) -> None:
        """Report a message to the user: on the terminal, in the log, and through the head."""
        self.roster.notice(message)
        self._reporter.on_notice(message)
        with contextlib.suppress(OSError), open_to_append(self._log("driver")) as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n".encode())

    def scale(self, to: Scale) -> Mapping[str, Any]:
        """Change the numbers of workers and engines.

        Raises:
            ConfigError: a number is below 1.
        """
        for name in _NAMES.values():
            number = getattr(to, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name} is {number}, but a run needs at least 1.")
        for kind, name in _NAMES.items():
            number = getattr(to, name)
            if number is None or number == self.wanted[kind]:
                continue
            before, self.wanted[kind] = self.wanted[kind], number
            self.notice(f"{name}: {number} instead of {before}")
            for index in range(before, number):
                self._keep(f"{kind}-{index}")
            for index in range(number, before):
                task = asyncio.ensure_future(self._drain(f"{kind}-{index}"))
                self._drains.add(task)
                task.add_done_callback(self._drains.discard)
        return {name: self.wanted[kind] for kind, name in _NAMES.items()}

    # -- one role ----------------------------------------------------------------------------------

    def _spec(self, name: str) -> RoleSpec:
        kind = name.partition("-")[0]
        settings = self._settings
        ranks = settings.trainer.ranks if kind == "trainer" else 1
        gpus = {"engine": settings.engines.gpus, "trainer": ranks * settings.trainer.gpus}
        return RoleSpec(
            name,
            tuple(self._argv[kind]),
            {
                CLUSTER_URL: self.control.url,
                CLUSTER_TOKEN: self.token,
                RUN_DIR: str(self.run_dir),
            },
            float(ranks),
            float(gpus.get(kind, 0)),
            self._log(name),
        )

    def _log(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"

    def _keep(self, name: str) -> None:
        """Start a role, and keep it running from now on."""
        old = self._keepers.get(name)
        task = asyncio.ensure_future(self._keep_alive(name, after=old))
        self._keepers[name] = task
        task.add_done_callback(self._keeper_ended)

    def _keeper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    def _is_wanted(self, name: str) -> bool:
        kind, _, index = name.partition("-")
        return kind == "trainer" or int(index) < self.wanted[kind]

    async def _keep_alive(self, name: str, after: asyncio.Task[None] | None) -> None:
        """Start a role, and start it again whenever it ends, while it is wanted."""
        if after is not None:
            # The old role of this name drains, and must be gone before the new one starts.
            await asyncio.wait([after])
        num_failures, progress = 0, self.roster.progress
        while self._is_wanted(name):
            status = await self._live(name)
            if name == "trainer" and status == 0:
                self._finish(None)
                return
            role = self.roster.roles[name]
            if role.drains or role.is_unable or not self._is_wanted(name):
                break
            how = _how(status)
            if self.roster.steady(name, progress):
                num_failures = 0
            num_failures, progress = num_failures + 1, self.roster.progress
            self.roster.ended(name)
            if num_failures > MAX_RESTARTS:
                raise ClusterError(
                    f"{name} {how} {num_failures} times in a row while the run made no progress. "
                    f"Its log is {self._log(name)}:\n{_tail(self._log(name))}\nFix what it says; "
                    "the same command continues the run."
                )
            delay_s = min(_LONGEST_DELAY_S, 2.0 ** (num_failures - 1))
            self.notice(f"{name} {how}; it is started again in {delay_s:.0f} s")
            await asyncio.sleep(delay_s)
        self.roster.removed(name)
        self._write_state()

    async def _live(self, name: str) -> int:
        """Start a role; return its exit status after all of its processes have ended."""
        role = self.roster.started(name, name.partition("-")[0])
        place = await self._launcher.start(self._spec(name))
        role.place = asdict(place) if place is not None else {}
        self._write_state()
        while (status := await self._launcher.alive(name)) is None:  # noqa: ASYNC110  no event
            await asyncio.sleep(_POLL_S)
        # Processes that its root left behind would hold the run's lock, or a port.
        await self._launcher.stop(name, 0)
        return status

    async def _drain(self, name: str) -> None:
        """Let a role finish its work, and end it."""
        role = self.roster.roles.get(name)
        if role is None:
            return
        role.drains = True
        end = time.monotonic() + _DRAIN_S
        while self.roster.roles.get(name) is role and time.monotonic() < end:
            if role.registration is None or (
                # A worker ends by itself; an engine cannot know if more requests will come.
                role.kind == "engine"
                and role.beat is not None
                and not role.beat.metrics.get("active")
            ):
                break
            await asyncio.sleep(_POLL_S)
        # A new role of this name may run by now.
        if self.roster.roles.get(name) is role:
            await self._launcher.stop(name, _DEFAULT_GRACE_S)

    # -- all ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Report roles that stall or do not register."""
        warned: dict[str, float] = {}
        last = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            now = time.monotonic()
            # This process was stopped, or the machine slept: the roles are not to blame.
            if now - last > 4.0:
                self.roster.forgive(now - last)
            last = now
            for message in self.roster.look():
                self.notice(message)
            for role in list(self.roster.roles.values()):
                limit_s = warned.get(role.name, _SLOW_START_S)
                late_s = now - role.started_at
                if role.registration is not None:
                    warned.pop(role.name, None)
                    warned.pop(f"{role.name} has no place", None)
                elif not role.place and late_s > warned.get(
                    f"{role.name} has no place", self.roster.stall_s
                ):
                    warned[f"{role.name} has no place"] = 2 * late_s
                    self.notice(
                        f"{role.name} has had no place for {late_s:.0f} s: no machine has room for "
                        f"it, or {self._settings.launcher} does not answer"
                    )
                elif self._keepers.get(role.name) is not None and late_s > limit_s:
                    warned[role.name] = 2 * late_s
                    self.notice(
                        f"{role.name} has not registered since it was started {late_s:.0f} s ago; "
                        f"its log is {self._log(role.name)}"
                    )

    async def _stop_all(self, watching: asyncio.Task[None] | None) -> None:
        """End all roles: the trainer first, which saves while the others still answer."""
        tasks = [*self._keepers.values(), *self._drains, *([watching] if watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop(["trainer"])
        # Set only now: the saving trainer would report engines that end before it as away.
        self.roster.is_stopping = True
        await self._stop([name for name in self._keepers if name != "trainer"])
        await self._launcher.aclose()
        await self.control.aclose()
        for name in (STATE_FILE, TOKEN_FILE):
            (self.run_dir / name).unlink(missing_ok=True)

    async def _stop(self, names: Iterable[str]) -> None:
        stops = (
            self._launcher.stop(name, _GRACE_S.get(name, _DEFAULT_GRACE_S))
            for name in names
            if name in self._keepers
        )
        await asyncio.gather(*stops, return_exceptions=True)

    def _fail(self, failure: RoleFailure) -> None:
        """Go on without a role that cannot work, unless no other can do its work."""
        name, role = failure.name, self.roster.roles.get(failure.name)
        notice = f"{name} cannot go on ({failure.error}): {failure.message}"
        # The trainer's process has ranks, which speak for it.
        if role is None or not (
            role.kind == "trainer" or failure.pid in (None, role.place.get("pid"))
        ):
            if role is not None and not role.is_kept:
                self.roster.removed(name)
            self.notice(f"{notice} It was started by hand; the run goes on without it.")
            return
        role.is_unable = True
        notice += f" Its log is {self._log(name)}."
        others = [
            each.name
            for each in self.roster.roles.values()
            if each.kind == role.kind and not (each.is_unable or each.drains)
        ]
        if others:
            them = ", ".join(others) if len(others) < 4 else f"{len(others)} others"
            self.notice(f"{notice} It is not started again; the run goes on with {them}.")
        else:
            self._finish(ClusterError(notice))

    def _status(self) -> Mapping[str, Any]:
        return {
            "run": str(self.run_dir),
            "launcher": self._settings.launcher,
            "driver": _this_process(),
            "wanted": {name: self.wanted[kind] for kind, name in _NAMES.items()},
            **self.roster.status(),
        }

    def _write_state(self) -> None:
        """Write what `rolltree cluster`, and a new driver if this one is killed, need to know."""
        roles = {name: role.place for name, role in self.roster.roles.items() if role.is_kept}
        state = {
            "control": self.control.url,
            "launch_id": self._launcher.launch_id,
            "driver": _this_process(),
            "roles": roles,
        }
        write_whole(self.run_dir / STATE_FILE, json.dumps(state, indent=2) + "\n", follow=False)


async def end_leftovers(run_dir: Path, say: Callable[[str], None], here: Set[str]) -> None:
    """End a killed driver's roles on this machine; wait for the end of those not `here`."""
    state = read_state(run_dir)
    if state is None:
        return
    num_ended = await asyncio.to_thread(kill_marked, state.launch_id)
    if num_ended:
        say(f"ended {num_ended} processes that a killed driver of this run had left")
    hosts = {str(place.get("host")) for place in state.roles.values() if place}
    away = sorted(hosts - here)
    if away:
        say(f"waiting {ORPHAN_S:.0f} s until roles that a killed driver left on {away} have ended")
        await asyncio.sleep(ORPHAN_S)


@contextlib.contextmanager
def _alone(run_dir: Path) -> Any:
    """Hold the lock of the run's driver.

    Raises:
        ClusterError: another driver holds it.
    """
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if logs.is_symlink():
        raise ClusterError(
            f"{logs} is {odd_kind(logs)}, but logs are written only to a folder of the run. "
            "Remove it."
        )
    fd = open_regular(run_dir / "cluster.lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 100, 0).decode(errors="replace") or "another process"
            raise ClusterError(
                f"{run_dir} is driven by {holder} already; a second driver would start every role "
                "twice. Stop that one, wait for it, or choose another run directory."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(fd)


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only this user can read at any time."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)


def _how(status: int) -> str:
    if status == LOST:
        return "was lost with its machine"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _tail(log: Path) -> str:
    """Return the last lines of a role's log."""
    try:
        with open(open_regular(log), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "(it cannot be read)"
    return "\n".join(f"    {line}" for line in lines[-12:]) or "    (it is empty)"


def role_commands(num_ranks: int) -> dict[str, list[str]]:
    """Return the command of each kind of role, which also starts one by hand."""
    python = sys.executable
    return {
        "engine": [python, "-m", "rolltree.scale.cluster.engine"],
        "worker": [python, "-m", "rolltree.scale.cluster.worker"],
        "trainer": [python, "-m", "rolltree.scale.cluster.gang", str(num_ranks)],
    }


def make_launcher(settings: ClusterSection) -> Launcher:
    """Return the launcher that the settings name."""
    if settings.launcher == "local":
        return LocalLauncher()
    from rolltree.scale.cluster.ray_launcher import RayLauncher

    return RayLauncher(settings.address)


async def run_cluster(config: TrainConfig, *, reporter: Reporter) -> TrainReport:
    """Train on the roles that `[cluster]` describes, and return the report of the run.

    Raises:
        ConfigError: the config has no `[cluster]`.
        ClusterError: a role does not stay alive; the same command continues the run.
    """
    settings = config.cluster
    if settings is None:
        raise ConfigError("the config has no [cluster], so there is nothing to start. Add it.")
    # Checked here, before processes are started that would fail with it.
    check_trackers(config)
    check_loadable(config.model.name, device=config.model.device)
    run_dir = Path(config.run.dir)
    make_run_folder(run_dir)
    driver = Driver(
        run_dir,
        settings,
        config.as_dict(),
        make_launcher(settings),
        role_commands(settings.trainer.ranks),
        reporter,
    )
    await driver.run()
    with Run.open(run_dir, "r") as finished:
        report = TrainReport.read(finished)
    reporter.on_end(report)
    return report


def train_on_cluster(config: TrainConfig, *, num_transcripts: int, command: Sequence[str]) -> None:
    """Run `rolltree train` on a cluster: show progress on stderr, and the results on stdout.

    Raises:
        ClusterError: a role does not stay alive.
        Stopped: SIGTERM came; progress is saved.
    """
    console = SafeConsole(stderr=True, only_shows=True)

    async def work() -> None:
        with stop_on_sigterm(), TrainView(console) as view:
            await run_cluster(config, reporter=view)

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        say(console, "stopped; the same command continues the run")
        raise
    with Run.open(config.run.dir, "r") as finished:
        print_report(
            finished,
            SafeConsole(only_shows=True),
            num_transcripts=num_transcripts,
            train_command=command,
            has_env_object=False,
        )
