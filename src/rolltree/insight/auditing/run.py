"""The function `audit`: opens a run for reading, checks its rows, and builds the report."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from rolltree._helpers.files import read_regular
from rolltree._helpers.workers import WorkerCallError, WorkerPool
from rolltree.inference.models.load import local_model_folder
from rolltree.insight.auditing.report import CHECKS, AuditReport, Ledger, Place, grouped, some
from rolltree.insight.auditing.rollout import Expected, RolloutAudit, RolloutFacts
from rolltree.insight.auditing.rules import RUN_RULES, PlannedSettings, Stored
from rolltree.insight.auditing.step_rules import STEP_RULES
from rolltree.insight.auditing.text import TextCheck
from rolltree.insight.auditing.training import MOST_ENTROPY, TrainingAudit
from rolltree.records.tokenizer import RunTokenizer, local_tokenizer
from rolltree.store import Run, StoredRollout
from rolltree.store.database import WriterLock
from rolltree.store.settings import without
from rolltree.store.weights import META as REWARD_WEIGHTS
from rolltree.training.config import REMOVED, as_started, ignored_settings, load_train_config
from rolltree.training.plan import PHASE
from rolltree.values.errors import ConfigError, StoreError
from rolltree.values.estimate import mean

# The rollouts that justify another process: about 2 s of work, and half a second to start it.
LEAST_PART = 2_500
_PAGE_ROWS = 64
MAX_PROCESSES = 16
_SECTIONS = ("run", "model", "sampling", "algorithm", "train", "eval", "optim", "checkpoint")
_EVALUATION = "evaluation."
_SUMS = (
    *("num_rollouts", "num_errors", "num_truncated", "num_scored", "sum_reward"),
    *("num_prompt_tokens", "num_completion_tokens"),
)


def audit(
    path: str | Path,
    *,
    recompute: int = 0,
    tokenizer: str | Path | None = None,
    num_processes: int | None = None,
) -> AuditReport:
    """Check a stored run for consistency: each thing that it stores against the others.

    It only reads the run: no environment is loaded and no code of the run is executed, so runs from
    untrusted sources can be audited. In a run that is in progress, finished parts are checked.

    Args:
        path: the run's directory.
        recompute: the number of rollouts whose engine logprobs are compared with a recomputation;
            needs torch, and the weights that sampled them: a checkpoint, or the model that
            training began with.
        tokenizer: a folder with `tokenizer.json`, to compare text with ids; None looks in the run
            and for the model that its settings name, but downloads nothing.
        num_processes: how many processes share the rollouts; None: one per core if there are many.

    Raises:
        StoreError: there is no run at `path`, or it cannot be opened.
        ConfigError: `tokenizer` is not a tokenizer; or nothing can be recomputed.
    """
    began = time.monotonic()
    with Run.open(path, mode="r") as run, run.snapshot():
        ledger = Ledger()
        audited = _Audit(run, ledger, tokenizer)
        recomputed: Mapping[str, float] = {}
        num_rollouts = num_steps = 0
        try:
            audited.check_rollouts(num_processes)
            num_rollouts, num_steps = len(audited.facts), len(run.steps())
            audited.check_run()
            if recompute:
                from rolltree.insight.auditing.recompute import recompute_logprobs

                recomputed = recompute_logprobs(run, ledger, recompute)
        except StoreError as error:
            # In a damaged file nothing else can be trusted, including what was found so far.
            ledger.find("storage", "damaged", str(error))
            for name in CHECKS:
                ledger.skip(name, "the file is damaged")
        return AuditReport(
            run=str(run.path),
            checks=ledger.results(),
            findings=ledger.ordered(),
            num_rollouts=num_rollouts,
            num_steps=num_steps,
            num_sampled_tokens=ledger.num_sampled_tokens,
            breaks=dict(ledger.breaks.most_common()),
            recomputed=recomputed,
            elapsed_s=time.monotonic() - began,
        )


def processes_for(num_rollouts: int) -> int:
    """Return how many processes share the rollouts of a run."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(num_cores or 1, MAX_PROCESSES, num_rollouts // LEAST_PART))


@dataclass(slots=True)
class _Part:
    """What the checks of some rollouts of a run found."""

    ledger: Ledger = field(default_factory=Ledger)
    facts: list[RolloutFacts] = field(default_factory=list)


def check_part(request: Mapping[str, Any]) -> str:
    """Check a part of a run in a worker process; return a `_Part` as JSON."""
    part = _Part()
    with Run.open(request["path"], mode="r") as run:
        audited = _Audit(run, part.ledger, request["tokenizer"])
        audited.check_some(request["offset"], request["limit"])
        part.facts = audited.facts
    return msgspec.json.encode(part, enc_hook=_plain).decode()


def _plain(value: Any) -> Any:
    return len(value) if isinstance(value, range) else value.item()  # else a numpy scalar


def _counter(kind: type, value: dict[str, int]) -> Counter[str]:
    return Counter(value)  # msgspec decodes mappings to plain dicts only


def _with_tokens(facts: RolloutFacts) -> RolloutFacts:
    """Turn the token counts of a rollout's steps, as they come from JSON, back into ranges."""
    for step in (facts.state or {}).get("trajectory", ()):
        if step["tokens"] is not None:
            step["tokens"] = {name: range(size) for name, size in step["tokens"].items()}
    return facts


def _most_entropy(model: Path | None) -> float:
    """Return the largest possible entropy of a token, in nats: the log of the vocabulary size."""
    try:
        # Read with a size limit: the folder may have come with the run.
        data = json.loads(read_regular(Path(model or "") / "config.json", 2**20, follow=True))
        size = data.get("vocab_size") or data["text_config"]["vocab_size"]
        return math.log(size) if size > 1 else MOST_ENTROPY
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return MOST_ENTROPY


class _Audit:
    """The audit of one open run."""

    def __init__(self, run: Run, ledger: Ledger, tokenizer: str | Path | None) -> None:
        self.run, self.ledger = run, ledger
        self.facts: list[RolloutFacts] = []
        self.training = self._training()
        self.text = self._text(tokenizer)
        self.settings = self._settings()
        self.expected = self._expected()
        if self.training is not None:
            folder = self.text and self.text.folder
            folder = folder or local_model_folder(self.training.config.model.name)
            self.training.most_entropy = _most_entropy(folder)

    def _training(self) -> TrainingAudit | None:
        meta = self.run.meta
        if meta["kind"] != "train":
            self._skip_training("the run trained nothing")
            return None
        known = meta.get("config") or {}
        # Nothing else that was removed decides a number that the audit computes again.
        for message in ignored_settings({"algorithm": known.get("algorithm")}):
            self._skip_training(message)
            return None
        known = without(known, REMOVED)
        try:  # only sections that affect training; a newer rolltree may reject other settings
            config = load_train_config({name: known.get(name, {}) for name in _SECTIONS})
            config = as_started(config, known)
        except ConfigError as error:
            # Else a wrong setting would hide whatever else is wrong.
            self.ledger.find(
                *("steps", "settings_unreadable"),
                "this rolltree cannot read the run's settings, so it cannot check what follows "
                f"from them; did a newer one write them? {error}",
            )
            self._skip_training("the run's settings cannot be read")
            return None
        first = int((meta.get("forked_from") or {}).get("step", 0))
        training = TrainingAudit(self.run, config, self.ledger, first)
        if not training.records_tokens:
            self.ledger.skip("advantages", "trained tokens were not recorded; see steps")
            self.ledger.skip("logprobs", "not recorded; see --recompute")
        return training

    def _skip_training(self, why: str) -> None:
        for name in ("steps", "advantages"):
            self.ledger.skip(name, why)
        self.ledger.skip("logprobs", "not recorded; see --recompute")

    def _text(self, tokenizer: str | Path | None) -> TextCheck | None:
        if tokenizer is not None:
            return TextCheck(RunTokenizer(Path(tokenizer)))
        try:
            found = local_tokenizer(self.run)
        except ConfigError as error:
            self.ledger.skip("text", str(error))
            return None
        if found is None:
            self.ledger.skip("text", "no tokenizer found; see --tokenizer")
            return None
        return TextCheck(found)

    def _expected(self) -> Expected:
        ends = frozenset() if self.text is None else self.text.end_ids
        if self.training is None:
            return Expected(end_ids=ends, settings=self.settings)
        versions = {
            str(event.data["phase"]): int(event.step)
            for kind in ("evaluation_begun", "evaluation")
            for event in self.run.events(kind)
            if event.step is not None
        }
        config = self.training.config
        is_async = config.train.async_steps > 0
        return Expected(versions, config.run.seed, True, is_async, ends, self.settings)

    def _settings(self) -> PlannedSettings:
        meta, training = self.run.meta, self.training
        sampling: Mapping[str, Any] = {}
        if training is not None:
            given = msgspec.to_builtins(training.config.sampling)
            sampling = {name: value for name, value in given.items() if value is not None}
        return PlannedSettings(
            evaluations={
                name.removeprefix(_EVALUATION): value
                for name, value in meta.items()
                if name.startswith(_EVALUATION) and isinstance(value, Mapping)
            },
            sampling=sampling,
            weights=meta.get(REWARD_WEIGHTS),
        )

    # -- every rollout on its own ------------------------------------------------------------------

    def check_rollouts(self, num_processes: int | None) -> None:
        """Check every rollout on its own, after the checksums of all tables."""
        self.ledger.count("storage")
        self.run.query("SELECT 1")
        size = self.run.num_rollouts()
        num = processes_for(size) if num_processes is None else num_processes
        # Each process sees the run at another moment, and what is written meanwhile would not fit.
        if num == 1 or WriterLock.holder(self.run.path / "run.lock") is not None:
            self.check_some()
        else:
            self._check_in_parts(size, num)

    def check_some(self, offset: int = 0, limit: int | None = None) -> None:
        """Check `limit` rollouts, beginning with number `offset`, counted from 0."""
        rows = self.run.rollouts(offset=offset, limit=limit)
        while page := list(islice(rows, _PAGE_ROWS)):
            trained = self._trained(page)
            for row in page:
                one = RolloutAudit(self.expected, self.ledger, self.text, row)
                one.run()
                found = trained.get(one.facts.place)
                if found and self.training is not None:
                    self.training.check_trained(one.facts, one.calls, found)
                self.facts.append(one.facts)

    def _trained(self, page: Sequence[StoredRollout]) -> dict[Place, list[Any]]:
        """Return the rows of the table `trained` that belong to some rollouts."""
        if self.training is None or not self.training.records_tokens:
            return {}
        # One query for a page: a query for each rollout took a tenth of an audit's time.
        named = dict.fromkeys(row.request_id for row in page if row.phase == PHASE)
        rows = self.run.trained(request_id=list(named))
        return grouped(((row.request_id, row.trajectory_index), row) for row in rows)

    def _check_in_parts(self, size: int, num: int) -> None:
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
            # A worker sends only the exception's name. Damage is a finding, all else a bug.
            if error.kind != StoreError.__name__:
                raise
            raise StoreError(str(error)) from error
        for text in found:
            part = msgspec.json.decode(text, type=_Part, dec_hook=_counter)
            self.ledger.add(part.ledger)
            self.facts.extend(map(_with_tokens, part.facts))

    # -- the run -----------------------------------------------------------------------------------

    def check_run(self) -> None:
        """Check rollouts, steps and events against each other."""
        self._sums()
        self._trajectories()
        self._copies()
        self._group_advantages()
        config = None if self.training is None else self.training.config
        stored = Stored(self.run, self.settings, config, self.facts)
        for rule in (*RUN_RULES, *STEP_RULES):
            for found in rule.find(stored):
                self.ledger.find(rule.check, rule.cause, found.message, found.place, found.step)
        if self.training is not None:
            self.training.check_steps([item for item in self.facts if item.row.phase == PHASE])

    def _sums(self) -> None:
        """Compare the stored sums of each phase with its rows."""
        for stored, summed in self.run.totals_with_sums():
            self.ledger.count("storage")
            for name in _SUMS:
                one, other = getattr(stored, name), getattr(summed, name)
                if not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6):
                    self.ledger.find(
                        *("storage", "sums_differ"),
                        f"the sums of phase {stored.phase} say {name} = {one:g}, but its "
                        f"rollouts give {other:g}",
                    )

    def _trajectories(self) -> None:
        """Check that each request has all of its trajectories, and that their parents exist."""
        by_request = grouped((item.row.request_id, item) for item in self.facts)
        self.ledger.count("counted_once", len(by_request))
        for request_id, items in by_request.items():
            wanted = max(item.row.num_trajectories for item in items)
            there = {item.row.trajectory_index for item in items}
            missing = sorted(set(range(wanted)) - there)
            if missing:
                self.ledger.find(
                    *("counted_once", "missing_trajectory"),
                    f"trajectory {some(missing)} of its {wanted} is missing",
                    (request_id, 0),
                )
                continue
            names = {item.rollout_id for item in items if item.rollout_id is not None}
            for item in items:
                if item.row.parent_rollout is not None and item.row.parent_rollout not in names:
                    self.ledger.find(
                        *("counted_once", "unknown_parent"),
                        f"its parent {item.row.parent_rollout!r} is not a rollout of the episode",
                        item.place,
                    )

    def _copies(self) -> None:
        known: dict[tuple[Any, ...], RolloutFacts] = {}
        for item in self.facts:
            if item.fingerprint is None:
                continue
            # Trajectories of one request share their times; those of two requests never do.
            first = known.setdefault(item.fingerprint, item)
            if first is not item and first.row.request_id != item.row.request_id:
                self.ledger.find(
                    *("counted_once", "duplicate_rollout"),
                    f"it is a copy of {first.row.request_id}: begun at the same moment, with the "
                    "same time in the engine",
                    item.place,
                )

    def _group_advantages(self) -> None:
        """Check the advantages that a rubric wrote: the reward minus the mean of the group."""
        groups = grouped(
            (item.row.group_id, (item, item.row.reward, item.advantage))
            for item in self.facts
            if item.advantage is not None and item.row.reward is not None
        )
        for members in groups.values():
            self.ledger.count("advantages", len(members))
            # Advantages of several agents follow the environment's own rules.
            if len({item.row.parent_rollout for item, _, _ in members}) > 1:
                continue
            level = mean(reward for _, reward, _ in members)
            for item, reward, advantage in members:
                right = reward - level
                if not math.isclose(advantage, right, rel_tol=1e-6, abs_tol=1e-6):
                    self.ledger.find(
                        *("advantages", "advantage_differs"),
                        f"its advantage is {advantage:g}, but its reward minus the mean of its "
                        f"group is {right:g}",
                        item.place,
                    )
