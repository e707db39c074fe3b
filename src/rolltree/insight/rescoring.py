"""`rescore`: new rewards for stored rollouts, without calling the model that wrote them.

A stored rollout is turned back into the state before its scoring, and goes through the rollout
engine and the same scoring as a new one: judges, groups, deadlines, failures and storing included.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from rolltree._helpers.tasks import run_sync
from rolltree.environments import (
    EnvGroup,
    Environment,
    ProtocolEnvironment,
    changed_code,
    load_environment,
    load_object,
    score_episode,
)
from rolltree.environments.rubrics import PerAgentRubric, Rubric, as_rubric, reset_scores
from rolltree.evaluation import EvalProgress
from rolltree.evaluation.runner import ProgressCounts
from rolltree.inference.call import ModelCall
from rolltree.inference.client import sampling_to_args
from rolltree.inference.client_base import ClientBase
from rolltree.insight.rescored import RescoreReport, rescore_report
from rolltree.rollouts import RolloutEngine, current_episode
from rolltree.rollouts.decode import decode_results
from rolltree.rollouts.record import encode_result, run_stored
from rolltree.store import Run, is_lost
from rolltree.store.weights import note_weights
from rolltree.values.errors import ConfigError
from rolltree.values.types import ModelResponse, RolloutRequest, RolloutResult, State

_READ_AT_ONCE = 256
# Model calls whose rollouts are in memory at once; groups are never divided.
_BATCH_CALLS = 4096


def rescore(run: str | Path, **settings: Any) -> RescoreReport:
    """Run `rescore_async` for callers without an event loop, or in a notebook."""
    return run_sync(rescore_async(run, **settings))


async def rescore_async(
    run: str | Path,
    *,
    environment: Environment | str | None = None,
    env_args: Mapping[str, Any] | None = None,
    compat: bool = False,
    rubric: Rubric | Callable[..., Any] | str | None = None,
    run_dir: str | Path | None = None,
    phase: str | None = None,
    max_concurrent: int = 64,
    deadline_s: float | None = None,
    retries: int = 0,
    on_notice: Callable[[str], object] | None = None,
    on_progress: Callable[[EvalProgress], None] | None = None,
) -> RescoreReport:
    """Score the rollouts of a run again, store them as a new run, and report what changed.

        report = rt.rescore("runs/demo", rubric=my_rubric)

    What the model did stays as it is, tokens included, and so do the rows, answers, groups and ids;
    a rollout that failed before it was scored stays failed. Rewards, metrics, step rewards and
    advantages are those that a new evaluation with the same answers would have. The same call
    again continues, and scores again what a judge's server failed or the run has played again.

    Args:
        run: the directory of the run, which is only read.
        environment: the environment whose rubric scores, or its name for `load_environment` with
            `env_args` and `compat`.
        rubric: instead of an environment: a rubric, a reward function, a function without
            arguments that returns a rubric, or `module:name` (`file.py:name`) of one of these.
        run_dir: where the new run is stored; `<run>-rescored` when left out.
        phase: only the rollouts of this phase.
        max_concurrent: most episodes that are scored at once, which limits a judge's requests.
        deadline_s: most seconds that scoring one rollout, or one group, may take.
        retries: how often scoring is tried again after a judge's server failed.
        on_notice: called with notices for the user, such as that the rewards' code changed.
        on_progress: called after each batch that is stored; tokens are not counted.

    Raises:
        ConfigError: neither an environment nor a rubric, or both; nothing to score; or `run_dir`
            holds something else, or rollouts that the run no longer has.
        StoreError: there is no run, or it is damaged.
    """
    scorer = _scorer(environment, env_args, compat, rubric)
    source_dir, target_dir = _directories(run, run_dir)
    began = time.monotonic()
    with Run.open(source_dir, "r") as source:
        where = {} if phase is None else {"phase": phase}
        plan = await asyncio.to_thread(_plan, source, where)
        if not plan:
            what = "no rollouts" if phase is None else f"no rollouts of the phase {phase!r}"
            raise ConfigError(f"{source_dir} holds {what}, so there is nothing to score.")
        scorer.model = source.model_name
        rescored = {"run": str(source.path.resolve()), "phase": phase, **scorer.settings}
        config = {"model": scorer.model, "rescored": rescored}
        with Run.open_or_create(target_dir, config=config, kind="rescore") as target:
            note_weights(scorer, target)
            changed = changed_code(scorer, target)
            if changed is not None:
                target.announce(changed, on_notice or (lambda _: None))
            await _score_all(
                source,
                target,
                plan,
                scorer,
                on_progress=on_progress,
                max_concurrent=max_concurrent,
                deadline_s=deadline_s,
                retries=retries,
            )
            return await asyncio.to_thread(
                rescore_report, source, target, scorer.name, where, time.monotonic() - began
            )


def _directories(run: str | Path, run_dir: str | Path | None) -> tuple[Path, Path]:
    """Return the run and the directory of the new one.

    Raises:
        ConfigError: they are the same.
    """
    source = Path(run)
    named = source if source.name else source.resolve()
    target = named.with_name(f"{named.name}-rescored") if run_dir is None else Path(run_dir)
    # Resolved: a link to the source is the source.
    if target.resolve() == source.resolve():
        raise ConfigError(
            f"run_dir is {target}, the run that is scored again; its rewards would be lost. "
            "Choose another directory."
        )
    return source, target


# -- what scores ---------------------------------------------------------------------------------


def _scorer(
    environment: Environment | str | None,
    env_args: Mapping[str, Any] | None,
    compat: bool,
    rubric: Rubric | Callable[..., Any] | str | None,
) -> _Scorer:
    """Return the rollout source that scores.

    Raises:
        ConfigError: not exactly one of environment and rubric, or an object that is neither.
    """
    if (environment is None) == (rubric is None):
        raise ConfigError(
            "rescoring needs an environment or a rubric, but not both: one of them says what a "
            "rollout is worth. Pass environment=... (--env NAME) or rubric=... (--rubric "
            "module:name)."
        )
    if (env_args or compat) and not isinstance(environment, str):
        raise ConfigError(
            "env_args and compat are for an environment that is loaded by name, so they would be "
            "ignored. Leave them out, or name an environment."
        )
    if rubric is not None:
        name = rubric if isinstance(rubric, str) else _name_of(rubric)
        given = _given_rubric(load_object(rubric) if isinstance(rubric, str) else rubric)
        knows = isinstance(given, PerAgentRubric)
        return _Scorer(given, name, {"rubric": name}, knows_agents=knows)
    assert environment is not None, "checked above"
    settings: dict[str, Any]
    if isinstance(environment, str):
        settings = {"env": environment, "env_args": dict(env_args or {}), "compat": compat}
        environment = load_environment(environment, compat=compat, **settings["env_args"])
    else:
        settings = {"env": environment.env_id, "env_args": dict(environment.env_args)}
    knows = isinstance(environment, ProtocolEnvironment | EnvGroup)
    return _Scorer(environment.rubric, settings["env"], settings, environment.loaded_by, knows)


def _name_of(rubric: object) -> str:
    return str(getattr(rubric, "__name__", type(rubric).__name__))


def _given_rubric(given: Any) -> Rubric:
    """Return the rubric of an object, which may also be a function or class that makes one."""
    # A reward function has parameters; a function without any can only be a factory.
    is_factory = callable(given) and not hasattr(given, "score_group")
    if isinstance(given, type) or (is_factory and not signature(given).parameters):
        given = given()
        if given is None:
            raise ConfigError("the function that makes the rubric returned None. Return a rubric.")
    rubric: Rubric = as_rubric(given)
    return rubric


@dataclass(slots=True)
class _Scorer:
    """A rollout source that scores stored episodes instead of playing new ones."""

    rubric: Rubric
    name: str
    settings: dict[str, Any]
    loaded_by: object = None  # for `changed_code`
    knows_agents: bool = False
    env_id: str = ""
    model: str = ""
    # Request id to the result to score.
    stored: dict[str, RolloutResult] = field(default_factory=dict)

    def num_examples(self, split: str) -> int:
        """Return how many stored episodes it holds."""
        return len(self.stored)

    def example(self, split: str, index: int) -> Any:
        """Return the dataset row of one of them."""
        return next(itertools.islice(self.stored.values(), index, None)).request.input

    async def run_request(self, request: RolloutRequest, client: object) -> Sequence[State]:
        """Score the stored rollouts of one request."""
        states = list(self.stored[request.request_id].states)
        # If a deadline passes during a judge's request, the states stay as they were played.
        episode = current_episode()
        if episode is not None:
            episode.states[:] = states
        for state in states:
            reset_scores(state)
            state["model"], state["sampling_args"] = self.model, sampling_to_args(request.sampling)
        await score_episode(self._rubric_of(states), states)
        return states

    @property
    def has_group_rewards(self) -> bool:
        """Whether the rubric compares the members of a group."""
        return self.rubric.has_group_rewards

    async def score_group(self, states: Sequence[State]) -> None:
        """Score the rollouts of one group together."""
        await self._rubric_of(states).score_group(states)

    def _rubric_of(self, states: Sequence[State]) -> Rubric:
        """Return the rubric; without rubrics per agent it does not score delegated rollouts."""
        has_agents = any("environment_steps" in state for state in states)
        if has_agents and not self.knows_agents:
            return PerAgentRubric(self.rubric, {})
        return self.rubric


class _NoModel(ClientBase):
    """The client of an engine that only scores: it has the model's name but refuses calls."""

    def __init__(self, model: str) -> None:
        self._model = model

    @property
    def model(self) -> str:
        """The name of the model that wrote the rollouts."""
        return self._model

    def session(self) -> _NoModel:
        """Return itself."""
        return self

    async def call(self, call: ModelCall) -> ModelResponse:
        """Refuse the call."""
        raise ConfigError(
            "rescoring does not run the model that wrote the rollouts, but the scoring called it. "
            "Give a JudgeRubric its own judge_client."
        )


# -- what is scored ------------------------------------------------------------------------------


_Plan: TypeAlias = Mapping[str, Mapping[str, int]]
"""The requests of each group, and how many model calls each made."""


def _plan(run: Run, where: Mapping[str, Any]) -> _Plan:
    plan: dict[str, Counter[str]] = {}
    for group, request_id, calls in run.columns(("group_id", "request_id", "num_calls"), **where):
        plan.setdefault(group, Counter())[request_id] += max(1, calls)
    return plan


def _finished(
    source: Run, target: Run, plan: _Plan, whole_groups: bool
) -> tuple[set[str], set[str]]:
    """Return the requests that are scored already, and those that are stored and scored again.

    Scored again are rollouts that a judge's server failed, those that the source played again
    since, and, if members are compared, groups that are not whole.

    Raises:
        ConfigError: the target holds rollouts that the source no longer has.
    """
    # A server's failure says nothing about the rollout; a reward function that raised would raise
    # again.
    done, again = set(), set()
    names = ("request_id", "trajectory_index", "started_at")  # the last one tells replays apart
    played = set(map(tuple, source.columns(names)))
    for *rollout, errors, phase in target.columns((*names, "errors", "error_phase")):
        done.add(rollout[0])
        if tuple(rollout) not in played or (phase == "scoring" and is_lost(errors)):
            again.add(rollout[0])
    if gone := sorted(done.difference(*plan.values())):
        raise ConfigError(
            f"{target.path} holds scores of rollouts that {source.path} no longer has "
            f"({len(gone)}, such as {gone[0]}): that run was rolled back or replaced. Delete "
            f"{target.path}, or choose another directory with run_dir=... (--run DIR)."
        )
    if whole_groups:
        for members in plan.values():
            if any(member in again or member not in done for member in members):
                again.update(done.intersection(members))
    return done - again, again


def _batches(source: Run, plan: _Plan, done: set[str]) -> Iterator[list[RolloutResult]]:
    """Yield stored results that are left to score, whole groups, a bounded number at a time."""
    batch: list[str] = []
    size = 0
    for members in plan.values():
        missing = {member: calls for member, calls in members.items() if member not in done}
        batch += missing
        size += sum(missing.values())
        if size >= _BATCH_CALLS:
            yield list(_read(source, batch))
            batch, size = [], 0
    if batch:
        yield list(_read(source, batch))


def _read(source: Run, request_ids: Sequence[str]) -> Iterator[RolloutResult]:
    # SQLite looks all names up again for every page of rows, so few names go into a query.
    for at in range(0, len(request_ids), _READ_AT_ONCE):
        part = request_ids[at : at + _READ_AT_ONCE]
        yield from decode_results(source.rollouts(request_id=part))


async def _score_all(
    source: Run,
    target: Run,
    plan: _Plan,
    scorer: _Scorer,
    *,
    on_progress: Callable[[EvalProgress], None] | None,
    **limits: Any,
) -> None:
    """Score what is missing in `target`, and store it there."""
    done, again = await asyncio.to_thread(_finished, source, target, plan, scorer.has_group_rewards)
    num_total = sum(map(len, plan.values()))
    counts = ProgressCounts(num_total, num_resumed=len(done), num_done=len(done))
    client = _NoModel(scorer.model)
    batches = _batches(source, plan, done)
    following = asyncio.create_task(asyncio.to_thread(next, batches, None))
    try:
        # The next batch is decoded in a thread while judges answer this one.
        while (batch := await following) is not None:
            following = asyncio.create_task(asyncio.to_thread(next, batches, None))
            empty = [result for result in batch if not result.states]  # failed before a state
            if empty:
                rows = [row for result in empty for row in encode_result(result)]
                await asyncio.to_thread(target.add_rollouts, rows, replaced=again)
            scorer.stored = {r.request.request_id: r for r in batch if r.states}
            requests = [result.request for result in scorer.stored.values()]
            _count(counts, empty)
            engine = RolloutEngine(scorer, client, **limits)
            async with aclosing(run_stored(engine, requests, target, replaced=again)) as stored:
                async for ready in stored:
                    _count(counts, [result for result, _ in ready])
                    if on_progress is not None:
                        on_progress(counts.progress())
    finally:
        await asyncio.gather(following, return_exceptions=True)


def _count(counts: ProgressCounts, results: Sequence[RolloutResult]) -> None:
    """Count results that are stored; the mean reward is that of this start's rollouts."""
    for result in results:
        first = result.states[0] if result.states else State()
        failed, truncated = result.error is not None, bool(first.truncated)
        counts.add(failed=failed, truncated=truncated, reward=first.reward)
