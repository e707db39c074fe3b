"""`audit`: opens a run for reading, sends its rows through the checks, and makes the report."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rolltree.errors import StoreError
from rolltree.records.auditing.facts import RolloutFacts
from rolltree.records.auditing.parts import PHASE, RolloutPass
from rolltree.records.auditing.report import CHECKS, AuditReport, Finding, Ledger, some
from rolltree.records.auditing.training import TrainingAudit
from rolltree.store import Run
from rolltree.store.integrity import Totals

_SUMS = (
    *("num_requests", "num_rollouts", "num_errors", "num_truncated", "num_scored", "sum_reward"),
    *("num_prompt_tokens", "num_completion_tokens"),
)


def audit(
    path: str | Path, *, recompute: int = 0, tokenizer: str | Path | None = None
) -> AuditReport:
    """Check everything that a stored run says against everything else that it says.

    It reads the run only: no environment is loaded and no code of the run's maker is run, so runs
    of others can be audited. Another process may be writing the run; what is finished is checked.

    Args:
        path: the run's directory.
        recompute: on how many rollouts the engine's logprobs are compared with those that a
            checkpoint's weights give; needs torch, and a checkpoint (or the model that training
            began with) of a version that sampled them. 0: none.
        tokenizer: a folder with `tokenizer.json`, to compare text with ids; None looks into the
            run and for the model that its settings name, and asks no hub.

    Raises:
        StoreError: there is no run at `path`, or it cannot be opened.
        ConfigError: `tokenizer` is not a tokenizer; or nothing can be recomputed.
    """
    began = time.monotonic()
    with Run.open(path, mode="r") as run:
        ledger = Ledger()
        audited = _Audit(run, ledger, tokenizer)
        recomputed: Mapping[str, float] = {}
        num_rollouts = num_steps = 0
        try:
            audited.check_rollouts()
            num_rollouts, num_steps = len(audited.facts), len(run.steps())
            audited.check_run()
            if recompute:
                from rolltree.records.auditing.recompute import recompute_logprobs

                recomputed = recompute_logprobs(run, ledger, recompute)
        except StoreError as error:  # without the whole file nothing else can be believed
            ledger.find(Finding("storage", "damaged", str(error)))
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


class _Audit:
    """The audit of one open run."""

    def __init__(self, run: Run, ledger: Ledger, tokenizer: str | Path | None) -> None:
        self.run, self.ledger = run, ledger
        self.tokenizer = tokenizer
        self.facts: list[RolloutFacts] = []
        self.totals: dict[tuple[str, str], Totals] = {}
        self.training: TrainingAudit | None = None

    def find(self, check: str, cause: str, message: str, **where: Any) -> None:
        self.ledger.find(Finding(check, cause, message, **where))

    def check_rollouts(self) -> None:
        """Check every rollout on its own, after the checksums of all tables."""
        self.ledger.count("storage")
        self.run.query("SELECT 1")
        rollouts = RolloutPass(self.run, self.ledger, self.tokenizer)
        rollouts.check_all()
        self.facts, self.totals = rollouts.facts, rollouts.totals
        self.training = rollouts.training

    # -- the run -----------------------------------------------------------------------------------

    def check_run(self) -> None:
        """Check what rollouts say together."""
        self._sums()
        self._trajectories()
        self._copies()
        self._evaluations()
        self._group_advantages()
        if self.training is not None:
            self.training.check_steps([item for item in self.facts if item.phase == PHASE])

    def _sums(self) -> None:
        for stored in self.run.totals(as_stored=True):
            found = self.totals.pop((stored.phase, stored.env_id), Totals("", ""))
            self.ledger.count("storage")
            for name in _SUMS:
                one, other = getattr(stored, name), getattr(found, name)
                if name == "num_requests":
                    continue  # of one phase, whatever the environment: `_trajectories` has them
                if not math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-6):
                    self.find(
                        *("storage", "sums_differ"),
                        f"the sums of phase {stored.phase} say {name} = {one:g}, and its "
                        f"rollouts give {other:g}",
                    )

    def _trajectories(self) -> None:
        """Check that each request has all of its trajectories, and that parents are there."""
        by_request: dict[str, list[RolloutFacts]] = {}
        for item in self.facts:
            by_request.setdefault(item.request_id, []).append(item)
        self.ledger.count("counted_once", len(by_request))
        for request_id, items in by_request.items():
            wanted = max(item.num_trajectories for item in items)
            there = {item.trajectory_index for item in items}
            missing = sorted(set(range(wanted)) - there)
            if missing:
                self.find(
                    *("counted_once", "missing_trajectory"),
                    f"trajectory {some(missing)} of its {wanted} is not there",
                    request_id=request_id,
                )
                continue
            names = {item.rollout_id for item in items if item.rollout_id is not None}
            for item in items:
                if item.parent_rollout is not None and item.parent_rollout not in names:
                    self.find(
                        *("counted_once", "unknown_parent"),
                        f"its parent {item.parent_rollout!r} is not a rollout of the episode",
                        request_id=request_id,
                        trajectory_index=item.trajectory_index,
                    )

    def _copies(self) -> None:
        known: dict[tuple[Any, ...], RolloutFacts] = {}
        for item in self.facts:
            if item.fingerprint is None:
                continue
            first = known.setdefault(item.fingerprint, item)
            if first is not item and first.request_id != item.request_id:
                self.find(
                    *("counted_once", "duplicate_rollout"),
                    f"it is a copy of {first.request_id}: begun at the same moment, with the same "
                    "time in the engine",
                    request_id=item.request_id,
                    trajectory_index=item.trajectory_index,
                )

    def _evaluations(self) -> None:
        """Compare what evaluations reported with their rollouts."""
        by_phase: dict[str, dict[str, list[RolloutFacts]]] = {}
        for item in self.facts:
            if item.parent_rollout is None:
                by_phase.setdefault(item.phase, {}).setdefault(item.group_id, []).append(item)
        for event in self.run.events("evaluation"):
            phase, metrics = event.data["phase"], event.data["metrics"]
            groups = by_phase.get(phase, {})
            requests = {item.request_id for items in groups.values() for item in items}
            self.ledger.count("counted_once")
            number = metrics.get("num_rollouts")
            if number is not None and number != len(requests):
                self.find(
                    *("counted_once", "evaluation_differs"),
                    f"the evaluation {phase} reported {number} rollouts and {len(requests)} are "
                    "there",
                    step=event.step,
                )
                continue
            reward = metrics.get("reward") or {}
            mean = _mean_of_means(groups.values())
            if mean is None or not isinstance(reward, Mapping) or reward.get("mean") is None:
                continue
            self.ledger.count("rewards")
            if not math.isclose(float(reward["mean"]), mean, rel_tol=1e-6, abs_tol=1e-9):
                self.find(
                    *("rewards", "evaluation_differs"),
                    f"the evaluation {phase} reported the mean reward {reward['mean']:g}, and its "
                    f"rollouts give {mean:g}: a reward was changed",
                    step=event.step,
                )

    def _group_advantages(self) -> None:
        """Check the advantages that a rubric wrote: the reward minus the mean of the group."""
        groups: dict[str, list[RolloutFacts]] = {}
        for item in self.facts:
            if item.advantage is not None and item.reward is not None:
                groups.setdefault(item.group_id, []).append(item)
        for items in groups.values():
            self.ledger.count("advantages", len(items))
            rewards = [item.reward for item in items if item.reward is not None]
            agents = Counter(item.parent_rollout for item in items)
            if len(agents) > 1:  # agents are compared among themselves
                continue
            mean = fmean(rewards)
            for item in items:
                right = (item.reward or 0.0) - mean
                if not math.isclose(
                    float(item.advantage or 0.0), right, rel_tol=1e-6, abs_tol=1e-6
                ):
                    self.find(
                        *("advantages", "advantage_differs"),
                        f"its advantage is {item.advantage:g}, and its reward minus the mean of "
                        f"its group is {right:g}",
                        request_id=item.request_id,
                        trajectory_index=item.trajectory_index,
                    )


def _mean_of_means(groups: Iterable[Sequence[RolloutFacts]]) -> float | None:
    """Return the mean over examples of the mean reward of their scored rollouts."""
    means = [
        fmean(rewards)
        for items in groups
        if (rewards := [item.reward for item in items if item.reward is not None])
    ]
    return fmean(means) if means else None
