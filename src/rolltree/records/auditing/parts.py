"""The pass over the rollouts of a run: in this process, or in parts by several at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rolltree.errors import ConfigError, StoreError
from rolltree.records.auditing.facts import RolloutFacts
from rolltree.records.auditing.report import Finding, Ledger
from rolltree.records.auditing.rollout import Expected, RolloutAudit
from rolltree.records.auditing.text import TextCheck
from rolltree.records.auditing.training import Trained, TrainingAudit
from rolltree.records.tokenizer import RunTokenizer, found_tokenizer
from rolltree.store import Run, StoredRollout
from rolltree.store.integrity import Totals
from rolltree.training.config import load_train_config
from rolltree.workers import WorkerCallError, WorkerPool

PHASE = "train"
LEAST_PART = 5_000
"""Rollouts for which another process is worth starting."""
MAX_PROCESSES = 16
_SECTIONS = ("run", "algorithm", "train")


def num_processes(num_rollouts: int) -> int:
    """Return how many processes share the rollouts of a run."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(num_cores or 1, MAX_PROCESSES, num_rollouts // LEAST_PART))


class RolloutPass:
    """Checks rollouts, and keeps what the checks of the whole run need of them."""

    def __init__(self, run: Run, ledger: Ledger, tokenizer: str | Path | None) -> None:
        self.run, self.ledger = run, ledger
        self.tokenizer = tokenizer
        self.facts: list[RolloutFacts] = []
        self.totals: dict[tuple[str, str], Totals] = {}
        meta = run.meta
        self.training = self._training(meta)
        self.text = self._text()
        self.expected = self._expected(meta)
        self.has_trained = self.training is not None and any(True for _ in run.trained())

    def check_all(self) -> None:
        """Check every rollout on its own; with several processes where there are many."""
        size = self.run.num_rollouts()
        num = num_processes(size)
        if num == 1:
            self.check()
        else:
            self.check_in_parts(size, num)
        if self.training is None:
            for name in ("steps", "advantages"):
                self.ledger.skip(name, "the run trained nothing")
        elif not self.has_trained:
            self.ledger.skip("advantages", "trained tokens were not recorded; see steps")
        if not self.has_trained:
            self.ledger.skip("logprobs", "not recorded; see --recompute")

    def check(self, offset: int = 0, limit: int | None = None) -> None:
        """Check `limit` rollouts from the `offset`th on."""
        run, training = self.run, self.training
        rollouts = RolloutAudit(self.expected, self.ledger, self.text)
        for row in run.rollouts(offset=offset, limit=limit):
            facts = rollouts.check(row)
            self._count(row)
            if self.has_trained and row.phase == PHASE and training is not None:
                found = run.trained(
                    request_id=row.request_id, trajectory_index=row.trajectory_index
                )
                training.check_trained(facts, found)
            facts.calls = ()
            self.facts.append(facts)

    def check_in_parts(self, size: int, num: int) -> None:
        """Share the rollouts among processes; rows that are stored meanwhile are left out."""
        edges = [size * part // num for part in range(num + 1)]
        tokenizer = None if self.text is None else str(self.text.folder)
        requests = [
            {"path": str(self.run.path), "tokenizer": tokenizer, "offset": low, "limit": high - low}
            for low, high in pairwise(edges)
        ]
        pool = WorkerPool(f"{__name__}:check_part", max_idle=0)
        try:
            with ThreadPoolExecutor(num) as threads:
                found = list(threads.map(pool.call, requests))
        except WorkerCallError as error:
            if error.kind != StoreError.__name__:
                raise
            raise StoreError(str(error)) from error
        for text in found:
            self._add(msgspec.json.decode(text, type=_Part))

    def _add(self, part: _Part) -> None:
        self.ledger.add(part.to_ledger())
        self.facts.extend(map(_with_tokens, part.facts))
        for item in part.totals:
            known = self.totals.setdefault(
                (item.phase, item.env_id), Totals(item.phase, item.env_id)
            )
            for name in _SUMMED:
                setattr(known, name, getattr(known, name) + getattr(item, name))
        if self.training is not None:
            self.training.num_trained += part.num_trained
            self.training.mismatch.extend(part.mismatch)
            for request_id, index, step, advantages in part.trained:
                values = [np.nan if value is None else value for value in advantages]
                known_rows = self.training.trained.setdefault((request_id, index), [])
                known_rows.append(Trained(step, values))

    def _training(self, meta: Mapping[str, Any]) -> TrainingAudit | None:
        if meta["kind"] != "train":
            return None
        known = meta.get("config") or {}
        try:  # only what decides what is trained; a newer rolltree may refuse other settings
            config = load_train_config({name: known.get(name, {}) for name in _SECTIONS})
        except ConfigError as error:
            for name in ("steps", "advantages"):
                self.ledger.skip(name, f"this rolltree cannot read the run's settings: {error}")
            return None
        first = int((meta.get("forked_from") or {}).get("step", 0))
        return TrainingAudit(self.run, config, self.ledger, first)

    def _expected(self, meta: Mapping[str, Any]) -> Expected:
        ends = frozenset() if self.text is None else self.text.end_ids
        if self.training is None:
            return Expected(end_ids=ends)
        versions = {
            str(event.data["phase"]): int(event.step)
            for kind in ("evaluation_begun", "evaluation")
            for event in self.run.events(kind)
            if event.step is not None
        }
        config = self.training.config
        return Expected(versions, config.run.seed, True, config.train.async_steps > 0, ends)

    def _text(self) -> TextCheck | None:
        if self.tokenizer is not None:
            return TextCheck(RunTokenizer(Path(self.tokenizer)))
        try:
            found = found_tokenizer(self.run)
        except ConfigError as error:
            self.ledger.skip("text", str(error))
            return None
        if found is None:
            self.ledger.skip("text", "no tokenizer found; see --tokenizer")
            return None
        return TextCheck(found)

    def _count(self, row: StoredRollout) -> None:
        key = row.phase, row.env_id or ""
        found = self.totals.setdefault(key, Totals(*key))
        found.num_rollouts += 1
        found.num_errors += row.status == "error"
        found.num_truncated += row.truncated
        if not (row.depth and self.run.sums_own_rewards):
            found.num_scored += row.reward is not None
            found.sum_reward += row.reward or 0.0
        found.num_prompt_tokens += row.num_prompt_tokens
        found.num_completion_tokens += row.num_completion_tokens


_SUMMED = [item.name for item in fields(Totals) if item.name.startswith(("num_", "sum_"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one process found, as JSON takes it: lengths for ranges, None for NaN."""

    facts: list[RolloutFacts]
    totals: list[Totals]
    trained: list[tuple[str, int, int, list[float | None]]]
    mismatch: list[tuple[float, Finding]]
    num_trained: int
    checked: dict[str, int]
    problems: dict[str, int]
    skipped: dict[str, str]
    findings: list[Finding]
    breaks: dict[str, int]
    num_sampled_tokens: int

    def to_ledger(self) -> Ledger:
        """Return what the process's ledger had."""
        ledger = Ledger()
        ledger.checked.update(self.checked)
        ledger.problems.update(self.problems)
        ledger.skipped.update(self.skipped)
        ledger.findings.extend(self.findings)
        ledger.breaks.update(self.breaks)
        ledger.num_sampled_tokens = self.num_sampled_tokens
        return ledger


def check_part(request: Mapping[str, Any]) -> str:
    """Check a part of a run in a worker process; return a `_Part` as JSON."""
    ledger = Ledger()
    with Run.open(request["path"], mode="r") as run:
        one = RolloutPass(run, ledger, request["tokenizer"])
        one.check(request["offset"], request["limit"])
    training = one.training
    part = _Part(
        facts=one.facts,
        totals=list(one.totals.values()),
        trained=list(_trained(training)),
        mismatch=[] if training is None else training.mismatch,
        num_trained=0 if training is None else training.num_trained,
        checked=ledger.checked,
        problems=ledger.problems,
        skipped=ledger.skipped,
        findings=ledger.findings,
        breaks=ledger.breaks,
        num_sampled_tokens=ledger.num_sampled_tokens,
    )
    return msgspec.json.encode(part, enc_hook=_plain).decode()


def _trained(training: TrainingAudit | None) -> Iterator[tuple[str, int, int, list[float | None]]]:
    for (request_id, index), rows in (training.trained if training else {}).items():
        for row in rows:
            yield request_id, index, row.step, list(row.advantages)


def _plain(value: Any) -> Any:
    return len(value) if isinstance(value, range) else value.item()  # else numpy's


def _with_tokens(facts: RolloutFacts) -> RolloutFacts:
    """Give the steps of a rollout their tokens' lengths as `credit_state` made them."""
    for step in (facts.state or {}).get("trajectory", ()):
        if step["tokens"] is not None:
            step["tokens"] = {name: range(size) for name, size in step["tokens"].items()}
    return facts
