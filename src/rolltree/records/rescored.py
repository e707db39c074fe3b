"""What rescoring changed: rewards, group advantages, and the rollouts that changed most.

Both runs are read from the store, a group or a training step at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, TypeAlias

from rolltree.errors import ConfigError, RolltreeError, record_error
from rolltree.evaluation import Comparison, compare_reports, stored_report
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run
from rolltree.training import CreditPolicy, assign_credit, load_train_config
from rolltree.types import RolloutResult, State

NUM_KEPT = 100
"""Rollouts of a report: those whose reward changed most."""

Place: TypeAlias = tuple[str, int]  # request_id, trajectory_index


@dataclass(frozen=True, slots=True)
class RolloutChange:
    """One rollout whose reward is another one now; None stands for no reward."""

    request_id: str
    trajectory_index: int
    phase: str
    agent: str
    before: float | None
    after: float | None
    advantage_before: float | None = None
    advantage_after: float | None = None

    @property
    def difference(self) -> float:
        """After minus before; infinite where one of them is missing."""
        if self.before is None or self.after is None:
            return math.inf
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """What became of the episodes of one phase.

    `num_lost` had a reward and have none now, `num_gained` the other way round. `rewards` compares
    the means, paired by example; None if no example has a reward in both.
    """

    phase: str
    num_rollouts: int
    num_changed: int
    num_lost: int
    num_gained: int
    rewards: Comparison | None


@dataclass(frozen=True, slots=True)
class CreditChange:
    """What the new rewards do to the advantages of the groups, by the run's own credit.

    `name`: the credit, that of the run's training, or GRPO. `num_flat_before` and `_after`: groups
    in which every advantage is 0, so that they teach nothing. `num_turned`: rollouts that were
    reinforced and are now discouraged, or the other way round. `mean_change` is the mean of the
    absolute differences over the rollouts that have an advantage in both.
    """

    name: str
    num_groups: int
    num_flat_before: int
    num_flat_after: int
    num_rollouts: int
    num_turned: int
    mean_change: float


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """What rescoring did. `changes` are the rollouts that changed most, at most `NUM_KEPT`."""

    source: str
    run: str
    scored_by: str
    num_rollouts: int
    num_changed: int
    num_failed: int
    failure: str | None
    phases: tuple[PhaseChange, ...]
    credit: CreditChange | None
    changes: tuple[RolloutChange, ...]
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return asdict(self)


def rescore_report(
    source: Run, target: Run, scored_by: str, where: Mapping[str, Any], elapsed_s: float
) -> RescoreReport:
    """Compare the rollouts of a run with the same ones after rescoring."""
    before = {
        (request_id, index): (phase, agent, reward)
        for request_id, index, phase, agent, reward in source.columns(_REWARDS, **where)
    }
    phases: dict[str, tuple[int, int, int, int]] = {}
    kept: list[tuple[float, int, RolloutChange]] = []
    numbers = count()
    num_rollouts = num_changed = 0
    for request_id, index, phase, agent, reward in target.columns(_REWARDS, **where):
        old = before[request_id, index][2]
        changed = not _equal(old, reward)
        num, num_other, num_lost, num_gained = phases.get(phase, (0, 0, 0, 0))
        phases[phase] = (
            num + 1,
            num_other + changed,
            num_lost + (old is not None and reward is None),
            num_gained + (old is None and reward is not None),
        )
        num_rollouts += 1
        num_changed += changed
        if changed:
            change = RolloutChange(request_id, index, phase, agent, old, reward)
            entry = (abs(change.difference), -next(numbers), change)
            (heapq.heappush if len(kept) < NUM_KEPT else heapq.heappushpop)(kept, entry)
    failures = [
        errors[0]["message"]
        for _, errors in target.columns(("status", "errors"), **where, error_phase="scoring")
        if errors
    ]
    changes = [change for _, _, change in sorted(kept, reverse=True, key=lambda entry: entry[:2])]
    credit, advantages = _credit_change(
        source, target, where, {(change.request_id, change.trajectory_index) for change in changes}
    )
    return RescoreReport(
        source=str(source.path),
        run=str(target.path),
        scored_by=scored_by,
        num_rollouts=num_rollouts,
        num_changed=num_changed,
        num_failed=len(failures),
        failure=failures[0] if failures else None,
        phases=tuple(
            PhaseChange(phase, *counts, rewards=_compared(source, target, phase))
            for phase, counts in phases.items()
        ),
        credit=credit,
        changes=tuple(_with_advantages(change, advantages) for change in changes),
        elapsed_s=elapsed_s,
    )


_REWARDS = ("request_id", "trajectory_index", "phase", "agent", "reward")


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def _compared(source: Run, target: Run, phase: str) -> Comparison | None:
    try:
        return compare_reports(stored_report(source, phase), stored_report(target, phase))
    except ConfigError:  # nothing was scored in both
        return None


def _with_advantages(
    change: RolloutChange, advantages: Mapping[Place, tuple[float | None, float | None]]
) -> RolloutChange:
    before, after = advantages.get((change.request_id, change.trajectory_index), (None, None))
    values = {name: getattr(change, name) for name in RolloutChange.__slots__}
    return RolloutChange(**{**values, "advantage_before": before, "advantage_after": after})


# -- advantages ----------------------------------------------------------------------------------


def _credit_change(
    source: Run, target: Run, where: Mapping[str, Any], wanted: set[Place]
) -> tuple[CreditChange | None, dict[Place, tuple[float | None, float | None]]]:
    """Return what changed in the advantages, and the advantages of the wanted rollouts."""
    name, policy = _credit_of(source)
    units = _units(source, where)
    old_units, new_units = (_read_units(run, units, where) for run in (source, target))
    found: dict[Place, tuple[float | None, float | None]] = {}
    num_groups = num_flat_before = num_flat_after = num_rollouts = num_turned = 0
    total = 0.0
    for old, new in _together(old_units, new_units):
        before, after = (_advantages(results, name, policy) for results in (old, new))
        groups: dict[str, list[Place]] = {}
        for result in old:
            places = groups.setdefault(result.request.group_id, [])
            places += [(result.request.request_id, at) for at in range(len(result.states))]
        for places in groups.values():
            num_groups += 1
            num_flat_before += not any(before.get(place) for place in places)
            num_flat_after += not any(after.get(place) for place in places)
        for place in before.keys() | after.keys():
            one, other = before.get(place), after.get(place)
            if place in wanted:
                found[place] = (one, other)
            if one is not None and other is not None:
                num_rollouts += 1
                num_turned += one * other < 0
                total += abs(other - one)
    if not num_groups:
        return None, found
    mean = total / max(1, num_rollouts)
    return CreditChange(
        name, num_groups, num_flat_before, num_flat_after, num_rollouts, num_turned, mean
    ), found


def _credit_of(run: Run) -> tuple[str, CreditPolicy]:
    """Return the credit of a training run; GRPO's for one that was not trained on."""
    if run.meta.get("kind") == "train":
        try:
            algorithm = load_train_config(run.config).algorithm
            return algorithm.resolve().credit, algorithm.policy(None)
        except RolltreeError:  # settings of another version
            pass
    return "grpo", CreditPolicy()


Unit: TypeAlias = tuple[str, "int | str"]  # phase, and a training step or a group


def _unit_of(phase: str, train_step: int | None, group_id: str) -> Unit:
    """Return what credit is assigned to at once: a training step, or else a group."""
    return phase, group_id if train_step is None else train_step


def _units(run: Run, where: Mapping[str, Any]) -> dict[Unit, int]:
    """Return how many requests each unit has; only those of training where there are any."""
    names = ("phase", "train_step", "group_id", "trajectory_index")
    units: dict[Unit, int] = {}
    for phase, step, group, index in run.columns(names, **where):
        unit = _unit_of(phase, step, group)
        units[unit] = units.get(unit, 0) + (index == 0)
    trained = {unit: number for unit, number in units.items() if isinstance(unit[1], int)}
    return trained or units


def _read_units(
    run: Run, units: Mapping[Unit, int], where: Mapping[str, Any]
) -> Iterator[tuple[Unit, list[RolloutResult]]]:
    """Yield units with the results of all their requests, without tokens."""
    missing = dict(units)
    waiting: dict[Unit, list[RolloutResult]] = {}
    for result in decode_results(run.rollouts(**where), tokens=False):
        request = result.request
        unit = _unit_of(request.phase, request.train_step, request.group_id)
        if not missing.get(unit):
            continue
        waiting.setdefault(unit, []).append(_for_credit(result))
        missing[unit] -= 1
        if not missing[unit]:
            yield unit, waiting.pop(unit)


def _together(
    one: Iterator[tuple[Unit, list[RolloutResult]]], other: Iterator[tuple[Unit, list[Any]]]
) -> Iterator[tuple[list[RolloutResult], list[RolloutResult]]]:
    """Pair the units of two runs, which may come in other orders."""
    left: dict[Unit, list[RolloutResult]] = {}
    right: dict[Unit, list[RolloutResult]] = {}
    for unit, results in one:
        left[unit] = results
        while unit not in right:
            found = next(other, None)
            if found is None:
                break
            right[found[0]] = found[1]
        if unit in right:
            yield left.pop(unit), right.pop(unit)


_READ_BY_CREDIT = (
    *("agent", "rollout_id", "parent_rollout", "parent_step", "subtask", "reward", "error"),
    *("has_step_rewards", "truncated", "truncation_reason", "bootstrap_value"),
)


def _for_credit(result: RolloutResult) -> RolloutResult:
    """Return a result with what credit reads; a rollout that nothing scored counts as failed."""
    unscored = record_error(ValueError("no reward"), "scoring")
    states = []
    for state in result.states:
        light = State({key: state[key] for key in _READ_BY_CREDIT if key in state})
        light["trajectory"] = [
            {"reward": step["reward"], "extras": step["extras"], "advantage": None}
            for step in state["trajectory"]
        ]
        if light.get("error") is None and light.get("reward") is None:
            light["error"] = unscored
        states.append(light)
    return RolloutResult(result.request, tuple(states), result.error)


def _advantages(
    results: list[RolloutResult], credit: str, policy: CreditPolicy
) -> dict[Place, float | None]:
    report = assign_credit(results, credit, policy)
    first = {
        id(state): float(values[0]) if len(values) else None
        for state, values in zip(report.trained, report.advantages, strict=True)
    }
    return {
        (result.request.request_id, index): first.get(id(state))
        for result in results
        for index, state in enumerate(result.states)
    }
