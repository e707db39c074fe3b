"""A run at a glance, as plain data: one row of a list, and the summary of one run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rolltree._helpers.redact import redact
from rolltree.records.notices import notice_sentences
from rolltree.store import Run, RunSummary, StoredEvaluation, summarize, to_plain
from rolltree.store.metric_names import number_of


def run_overview(run: Run, summary: RunSummary | None = None) -> dict[str, Any]:
    """Return one row of a list of runs; `summary` is the run's summary if it was read already.

    It reads only sums, events and the newest step, but no rollouts.
    """
    summary = summary or summarize(run)
    phases = summary.phases
    return {
        "name": summary.path.resolve().name,
        "path": str(summary.path),
        "kind": summary.kind,
        "state": summary.state,
        "error": summary.error,
        "writer": summary.writer,
        "created_at": summary.created_at,
        "last_written": summary.last_written,
        "age_s": max(0.0, time.time() - summary.last_written),
        # Steps, or the requests of the phase that is not complete.
        "progress": _progress(summary),
        "envs": list(summary.env_ids),
        "model": run.model_name or None,
        "seed": _setting(summary.config, ("run", "seed"), ("seed",)),
        "learning_rate": _setting(summary.config, ("optim", "lr")),
        "num_steps": summary.num_steps,
        "num_rollouts": sum(phase.num_rollouts for phase in phases),
        "num_failed": sum(phase.num_errors for phase in phases),
        # Rollouts by type of error.
        "failures": _failures(run, summary) if any(phase.num_errors for phase in phases) else {},
        "num_truncated": sum(phase.num_truncated for phase in phases),
        # Of the last held-out evaluation, else of the last step, else the mean of the last phase,
        # with its 95 % interval if one is stored; `of` says which.
        "reward": _reward(run, summary),
        "tokens": {
            "prompt": sum(phase.num_prompt_tokens for phase in phases),
            "sampled": sum(phase.num_completion_tokens for phase in phases),
        },
        "num_commits": run.num_commits,
    }


def run_json(run: Run) -> dict[str, Any]:
    """Return a row of the list and the whole summary, as commands print them with `--json`."""
    found = summarize(run)
    return {**run_overview(run, found), **asdict(found), "path": str(run.path)}


def run_summary(run: Run) -> dict[str, Any]:
    """Return what a run holds: its row of the list, its settings, phases, evaluations, notices."""
    found = summarize(run)
    return {
        **run_overview(run, found),
        "config": redact(to_plain(found.config)),
        "phases": [asdict(phase) for phase in found.phases],
        "evaluations": [
            {"step": done.step, "phase": done.phase, "reward": _estimate(done)}
            for done in run.evaluations()
        ],
        # The notices of the run and its starts, each sentence once, with its count.
        "notices": notice_sentences(run.events()),
    }


def _setting(config: Mapping[str, Any], *places: tuple[str, ...]) -> Any:
    """Return the first of these settings that the run has; training and evaluation differ."""
    for place in places:
        found: Any = config
        for name in place:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            return to_plain(found)
    return None


# By a run's path and creation time: its number of commits when failures were counted, and these.
_FAILURES: dict[tuple[str, float], tuple[int, dict[str, int]]] = {}


def _failures(run: Run, summary: RunSummary) -> dict[str, int]:
    """Return how many rollouts failed with which error, the most frequent first.

    Failures have no index in the database, so they are counted again only if something was stored.
    """
    # A new run may have the same path by now, so the creation time is part of the key.
    key, commits = (str(run.path), summary.created_at), run.num_commits
    stored, counted = _FAILURES.get(key, (-1, {}))
    if stored != commits:
        found = run.query(
            "SELECT error_type, count(*) AS num FROM rollouts WHERE status = 'error'"
            " GROUP BY error_type ORDER BY num DESC, error_type"
        )
        counted = {str(row["error_type"]): row["num"] for row in found}
        _FAILURES[key] = commits, counted
    return dict(counted)


def _progress(summary: RunSummary) -> dict[str, Any] | None:
    for phase in summary.phases:
        if phase.num_planned is not None and phase.num_requests < phase.num_planned:
            return {"unit": phase.phase, "done": phase.num_requests, "planned": phase.num_planned}
    if summary.num_planned_steps:
        return {"unit": "steps", "done": summary.num_steps, "planned": summary.num_planned_steps}
    return None


def _reward(run: Run, summary: RunSummary) -> dict[str, Any] | None:
    for done in reversed(run.evaluations()):
        estimate = _estimate(done)
        if estimate is not None:
            return {**estimate, "of": done.phase}
    newest = run.newest_step()
    if newest is not None and number_of(newest.metrics.get("reward/mean")) is not None:
        names = ("mean", "low", "high")
        estimate = {name: number_of(newest.metrics.get(f"reward/{name}")) for name in names}
        return {**estimate, "of": f"step {newest.step}"}
    for phase in reversed(summary.phases):
        if phase.mean_reward is not None:
            ends = {"low": phase.low, "high": phase.high}
            return {"mean": phase.mean_reward, **ends, "of": phase.phase}
    return None


def _estimate(done: StoredEvaluation) -> dict[str, Any] | None:
    if done.reward is None:
        return None
    low, high = done.interval or (None, None)
    return {"mean": done.reward, "low": low, "high": high}
