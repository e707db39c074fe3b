"""Replays recorded rollouts: with the recorded answers, and the environment as it is now.

A replay runs the environment's code and scores the result, but needs no model. With a client, a
model continues after the recorded part, and these branches are rollouts of a new run.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from rolltree._helpers.finished import Finished
from rolltree._helpers.tasks import run_sync
from rolltree.environments import Environment, load_environment
from rolltree.environments.code_hashes import META, code_hashes
from rolltree.environments.generate import UnscoredSource
from rolltree.inference.client import ModelClient, as_client
from rolltree.insight.recorded import (
    Difference,
    ReplayClient,
    ReplaySession,
    outcome_difference,
)
from rolltree.rollouts import GroupScorer, RolloutEngine, RolloutSource, derive_seed
from rolltree.rollouts.decode import decode_results
from rolltree.rollouts.record import run_stored
from rolltree.store import Opaque, Run, to_plain
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import INPUT_FIELDS, RolloutInput, RolloutRequest, RolloutResult

MAX_CONCURRENT = 32
BRANCH_PHASE = "branch"


@dataclass(frozen=True, slots=True)
class ReplayReport(Finished):
    """The result of replaying one recorded rollout."""

    request_id: str  # of the recorded rollout
    num_calls: int  # how many calls the recording has, of all agents
    num_replayed: int  # how many of them were answered from it
    num_continued: int  # how many calls a model answered after that
    # Where the replay first differs; None if it does not.
    difference: Difference | None
    # Why it ended early, such as "the recording ends here, ..."; empty if it did not.
    stopped: str
    # Why the environment could not be set up or scored, so that nothing was compared; or empty.
    failure: str
    # What was not compared, or has changed since the recording.
    notes: tuple[str, ...]
    recorded: RolloutResult
    live: RolloutResult
    # The reward of each branch that a model played.
    branch_rewards: tuple[float | None, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether the environment could be played, and nothing that was compared differs."""
        return self.difference is None and not self.failure

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, without the two episodes."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["recorded"], found["live"]
        if self.difference is not None:
            found["difference"] = asdict(self.difference)
        plain: dict[str, Any] = to_plain({"is_equal": self.is_equal, **found})
        return plain


def replay(run: str | Path | Run, rollout: str, env: Any = None, **options: Any) -> ReplayReport:
    """Play one recorded rollout again and compare what the environment says.

    Example:
        >>> report = rt.replay("runs/demo", "eval_before/arithmetic/3/0")  # doctest: +SKIP

    Args:
        run: a run, or its directory.
        rollout: the request id of the rollout, as `rolltree show` prints it.
        env: an environment, or the name or path of one. None: the one that the run names, unless
            that is a path: replaying runs the environment's code, and the run may be anybody's.
        options: see `replay_async`.

    Raises:
        ConfigError: there is no such rollout, or no environment to play it.
    """
    return run_sync(replay_async(run, rollout, env, **options))


async def replay_async(
    run: str | Path | Run,
    rollout: str,
    env: Any = None,
    *,
    until: int | None = None,
    client: object = None,
    num_branches: int = 1,
    into: Run | None = None,
    **options: Any,
) -> ReplayReport:
    """Play one recorded rollout again: `replay` for code that has an event loop.

    Args:
        run, rollout, env: see `replay`.
        until: how many calls are answered from the recording; the replay ends before the next one.
        client: a model that goes on from there: after `until` calls, or else at the first
            difference or the recording's end.
        num_branches: how often the model continues, each time with a different sampling seed.
        into: the run that stores the branches. Branches that it has are not played again.
        options: `env_args` (arguments of the environment), `compat`, `score` (False leaves the
            rewards out), `ignore` (regular expressions whose matches are left out of the JSON that
            is compared), `on_answer` (called with the source and the number of each answer before
            it is returned).

    Returns the report of the first branch that was played.

    Raises:
        ConfigError: as in `replay`; or nothing is left to play, because `into` has all branches.
    """
    if client is None and (num_branches != 1 or into is not None):
        raise ConfigError(
            "branches are made by a model that goes on where the recorded part ends, but no client "
            "was given. Pass client=..., or --continue on the command line."
        )
    if until is not None and until < 0:
        raise ConfigError(f"until is {until}; it counts answered calls. Use 0 or more.")
    async with _opened(run, env, options) as replayer:
        replayer.session_settings |= {"until": until, "goes_on": client is not None}
        recorded = replayer.recorded(rollout)
        if client is None:
            return await replayer.one(recorded)
        return await replayer.branches(recorded, client, num_branches, into)


def replay_many(
    run: str | Path | Run, env: Any = None, *, num: int | None = None, **options: Any
) -> list[ReplayReport]:
    """Play many recorded rollouts again: `replay_many_async` for code without an event loop."""

    async def collect() -> list[ReplayReport]:
        return [report async for report in replay_many_async(run, env, num=num, **options)]

    return run_sync(collect())


async def replay_many_async(
    run: str | Path | Run,
    env: Any = None,
    *,
    num: int | None = None,
    where: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[ReplayReport, None]:
    """Yield the reports of the first `num` rollouts (None: of all), as they finish.

    `where` filters by columns, as `run.rollouts` does; the other arguments are `replay_async`'s.

    Raises:
        ConfigError: there is nothing to play, or no environment to play it.
    """
    async with _opened(run, env, options) as replayer:
        chosen = replayer.whole_groups(where or {}, num)
        found = decode_results(replayer.run.rollouts(**chosen))
        num = num if chosen == (where or {}) else None
        num_found = 0
        async with aclosing(replayer.reports(islice(found, num))) as reports:
            async for report in reports:
                num_found += 1
                yield report
    if not num_found:
        raise ConfigError(f"{replayer.run.path} has no rollouts to replay with {where or {}}.")


@asynccontextmanager
async def _opened(
    run: str | Path | Run, env: Any, options: dict[str, Any]
) -> AsyncIterator[_Replayer]:
    known = ("env_args", "compat", "score", "ignore", "on_answer")
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(f"replay has no option {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
    found = opened_environment(run, env, options.get("env_args"), options.get("compat", False))
    async with found as (stored, source):
        yield _Replayer(stored, source, options)


@asynccontextmanager
async def opened_environment(
    run: str | Path | Run, env: Any, env_args: Mapping[str, Any] | None, compat: bool
) -> AsyncIterator[tuple[Run, RolloutSource]]:
    """Open a run and the environment to replay it with; arguments that are objects stay open."""
    async with AsyncExitStack() as stack:
        if not isinstance(run, Run):
            run = stack.enter_context(Run.open(run, mode="r"))
        source, is_own = environment_of(run, env, env_args, compat=compat)
        if is_own and isinstance(source, Environment):
            await stack.enter_async_context(source)
        yield run, source


def environment_of(
    run: Run, env: Any = None, env_args: Mapping[str, Any] | None = None, *, compat: bool = False
) -> tuple[RolloutSource, bool]:
    """Return the environment to replay a run with, and whether it was loaded here.

    Raises:
        ConfigError: no environment is given, and the run names none, or only a path.
    """
    if env is not None and not isinstance(env, str | Path):
        if env_args:
            raise ConfigError(
                "env_args were given, but the environment is an object, so they would do nothing."
            )
        return env, False
    config = run.config
    section = config.get("env")
    stored = section if isinstance(section, Mapping) else {"id": section}
    args = stored.get("args") or config.get("env_args") or {}
    name = stored.get("id")
    if env is None:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{run.path} does not say which environment its rollouts are from, so there is "
                "nothing to play them with. Name it: --env NAME_OR_PATH, or env=... in Python."
            )
        # A name refers to an installed environment; a path may be a file that came with the run.
        if "/" in name or name.endswith(".py") or name.startswith("."):
            raise ConfigError(
                f"{run.path} was made with the environment at {name}. Replaying runs its code, and "
                f"a run may come from anybody, so a path is not followed. If you trust it: "
                f"--env {name}, or env={name!r} in Python."
            )
        env = name
    made = load_environment(
        env,
        compat=compat or bool(stored.get("compat")),
        **(args if env_args is None else env_args),
    )
    return made, True


@dataclass(slots=True, init=False)
class _Replayer:
    """A run, the environment to play its rollouts with, and how they are compared."""

    run: Run
    source: RolloutSource
    session_settings: dict[str, Any]
    notes: tuple[str, ...]
    score: bool

    def __init__(self, run: Run, source: RolloutSource, options: Mapping[str, Any]) -> None:
        self.run, self.source = run, source
        self.score = options.get("score", True)
        self.notes = tuple(self._changes())
        try:
            ignored = [re.compile(pattern) for pattern in options.get("ignore") or ()]
        except re.error as error:
            raise ConfigError(f"{error.pattern!r} is not a regular expression: {error}.") from error
        self.session_settings = {"ignored": ignored}
        on_answer = options.get("on_answer")
        if on_answer is not None:
            self.session_settings["on_answer"] = partial(on_answer, source)
        if not self.score and isinstance(source, Environment):
            self.source = UnscoredSource(source)

    def _changes(self) -> Iterator[str]:
        before, now = self.run.meta.get(META), code_hashes(self.source)
        if before is not None and before != now:
            names = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
            yield f"the environment's code has changed since the run: {', '.join(names)}"
        if not self.score:
            yield "rewards and metrics were not compared"

    def recorded(self, rollout: str) -> RolloutResult:
        """Return the recorded rollout of a request.

        Raises:
            ConfigError: there is no such rollout; the message names the nearest one.
        """
        found = next(decode_results(self.run.rollouts(request_id=rollout)), None)
        if found is None:
            ids = list(dict.fromkeys(name for (name,) in self.run.columns(["request_id"])))
            raise ConfigError(
                f"{self.run.path} has no rollout {rollout!r}.{did_you_mean(rollout, ids[:5000])} "
                "`rolltree show RUN --transcripts 3` prints some with their names."
            )
        return found

    async def one(self, recorded: RolloutResult) -> ReplayReport:
        """Play one rollout; with its group, if the reward compares the members."""
        # A reward that compares members would change without the others.
        members = [recorded]
        if self._needs_groups():
            group = self.run.rollouts(
                group_id=recorded.request.group_id, phase=recorded.request.phase
            )
            members = list(decode_results(group))
        wanted = recorded.request.request_id
        async with aclosing(self.reports(members)) as reports:
            found = [report async for report in reports if report.request_id == wanted]
        return found[0]

    def _needs_groups(self) -> bool:
        return self.score and isinstance(self.source, GroupScorer) and self.source.has_group_rewards

    def whole_groups(self, where: Mapping[str, Any], num: int | None) -> Mapping[str, Any]:
        """Return filters that select whole groups, if the reward compares their members."""
        if num is None or not self._needs_groups():
            return where
        groups = dict[str, None]()
        requests = set[str]()
        for request_id, group_id in self.run.columns(["request_id", "group_id"], **where):
            requests.add(request_id)
            if len(requests) > num:
                break
            groups[group_id] = None
        return {**where, "group_id": list(groups)}

    def reports(self, recorded: Iterable[RolloutResult]) -> AsyncGenerator[ReplayReport, None]:
        """Play rollouts and yield their reports, as they finish."""
        return self._play((playable(result.request), result) for result in recorded)

    async def _play(
        self,
        played: Iterable[tuple[RolloutRequest, RolloutResult]],
        then: ModelClient | None = None,
        into: Run | None = None,
    ) -> AsyncGenerator[ReplayReport, None]:
        """Play requests, each answered from a recording, and yield reports, as they finish.

        The engine is that of evaluation and training, so concurrency, deadlines and failures are
        the same.
        """
        sessions: dict[str, ReplaySession] = {}

        def requests() -> Iterator[RolloutRequest]:
            for request, result in played:
                sessions[request.request_id] = ReplaySession(result, **self.session_settings)
                yield request

        client = ReplayClient(sessions, then)
        engine = RolloutEngine(self.source, client, max_concurrent=MAX_CONCURRENT)
        # A branch is reported once it is stored, so that a killed command never counts it twice.
        async with aclosing(run_stored(engine, requests(), into)) as batches:
            async for batch in batches:
                for live, _ in batch:
                    yield self._report(sessions.pop(live.request.request_id), live)

    async def branches(
        self, recorded: RolloutResult, client: object, num: int, into: Run | None
    ) -> ReplayReport:
        """Play one rollout `num` times, each with a model from where the recorded part ends."""
        done = set() if into is None else into.finished_ids(BRANCH_PHASE)
        every = branch_requests(playable(recorded.request), self.session_settings["until"], num)
        left = [request for request in every if request.request_id not in done]
        if not left:
            raise ConfigError(
                f"all {num} branches are in {into and into.path} already. Ask for more of them, or "
                "for another rollout or step."
            )
        played = self._play(((request, recorded) for request in left), as_client(client), into)
        async with aclosing(played) as reports:
            found = {report.live.request.request_id: report async for report in reports}
        ordered = [found[request.request_id] for request in left]
        rewards = tuple(next((s.get("reward") for s in r.live.states), None) for r in ordered)
        return replace(ordered[0], branch_rewards=rewards)

    def _report(self, session: ReplaySession, live: RolloutResult) -> ReplayReport:
        difference, failure = session.difference, _not_played(live)
        cut = session.until is not None and session.num_answered >= session.until
        # Nothing was played after a stop, so comparing that part would find false differences.
        if failure:
            difference = None
        elif difference is None and not session.stopped and not session.is_live:
            is_whole = not cut or session.num_answered == session.num_calls
            if is_whole and not _was_stopped(live):
                difference = outcome_difference(session, live, score=self.score)
        stopped = session.stopped
        if difference is None and not stopped and cut and _was_stopped(live):
            stopped = f"stopped after {session.num_answered} calls, as asked"
        return ReplayReport(
            request_id=session.recorded.request.request_id,
            num_calls=session.num_calls,
            num_replayed=session.num_answered,
            num_continued=session.num_continued,
            difference=difference,
            stopped="" if failure else stopped,
            failure=failure,
            notes=self.notes,
            recorded=session.recorded,
            live=live,
        )


def _not_played(live: RolloutResult) -> str:
    """Return what kept an environment from being played or scored; empty if nothing did.

    Such a failure is due to this machine, even if the recorded rollout failed in the same way.
    """
    error = live.error
    if error is None or error.phase in ("model", "timeout", "cancelled"):
        return ""
    if error.phase != "setup" and error.kind == "episode":
        return ""
    what = "score" if error.phase == "scoring" else "set up"
    return f"could not {what}: {error.type}: {error.message}"


def _was_stopped(live: RolloutResult) -> bool:
    return live.error is not None and live.error.type == "ReplayStopped"


def branch_requests(
    request: RolloutRequest, until: int | None, num: int
) -> Sequence[RolloutRequest]:
    """Return the requests of `num` branches of a rollout: a group with the same world."""
    stem = f"{request.request_id}@{'end' if until is None else until}"
    return [
        replace(
            request,
            request_id=f"{stem}/{index}",
            group_id=stem,
            index_in_group=index,
            # The same world with other samples: only the sampling seed is new.
            sampling_seed=derive_seed(request.sampling_seed, "branch", stem, index),
            phase=BRANCH_PHASE,
            train_step=None,
        )
        for index in range(num)
    ]


def playable(request: RolloutRequest) -> RolloutRequest:
    """Return a request whose row can be given to an environment again.

    A column that held an object is left out: a run stores only its type.

    Raises:
        ConfigError: a field that every environment gets, such as the prompt, held an object.
    """
    lost = {name: found for name, value in request.input.items() if (found := _opaque(value))}
    for name in INPUT_FIELDS:
        if name in lost:
            raise ConfigError(
                f"{name!r} of the row of {request.request_id!r} held a {lost[name]}, but a "
                "run stores only the type, so the environment cannot be given the same row. Keep "
                "rows to plain data."
            )
    kept = {name: value for name, value in request.input.items() if name not in lost}
    return replace(request, input=cast(RolloutInput, kept))


def _opaque(value: Any) -> str | None:
    if isinstance(value, Opaque):
        return value.type
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    return next((found for found in map(_opaque, parts) if found is not None), None)
