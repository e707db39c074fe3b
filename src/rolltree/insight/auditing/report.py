"""The results of an audit: checks with counts, and findings that name the cause and the place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from statistics import median
from typing import Any, TypeAlias, TypeVar

from rolltree._helpers.html_view import html_table

CHECKS: dict[str, str] = {
    "storage": "checksums, counts, sums of each phase",
    "columns": "columns against the rollout's record",
    "counted_once": "each planned rollout there once, trained once",
    "groups": "one task and environment; parents fit",
    "times": "never negative, never backwards",
    "tokens": "token trees whole, a call of its own per step",
    "alignment": "a logprob, mask and loss weight per token",
    "text": "ids decode to what was read and said",
    "sampler": "temperature, limits, seeds, endings",
    "spans": "no span twice, changed, or past its end",
    "versions": "sampled by the policy of phase or step",
    "rewards": "none for failures; functions and steps add up",
    "steps": "no step missing, metrics fit the rollouts",
    "advantages": "recomputed from rewards",
    "logprobs": "the engine's against the trainer's",
}
"""The checks, in the order of the table."""

Place: TypeAlias = tuple[str | None, int]
"""A rollout: the name of its request, and which of its trajectories it is."""
_RUN: Place = (None, 0)
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
# The most findings of a check that a report keeps; `CheckResult.num_problems` counts all.
MAX_FINDINGS = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    check: str  # a row of `CHECKS`
    cause: str  # a word for scripts; `docs/records.md` lists them
    message: str  # for a person
    # The rollout and the training step, if it is about one.
    request_id: str | None = None
    trajectory_index: int = 0
    step: int | None = None

    @property
    def where(self) -> str:
        """The rollout, the step, or the run."""
        if self.request_id is not None:
            part = f" [{self.trajectory_index}]" if self.trajectory_index else ""
            return f"{self.request_id}{part}"
        return "run" if self.step is None else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One row of the table."""

    name: str
    num_checked: int
    num_problems: int
    # Why a check, or a part of it, could not run; None if it ran.
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The report that `rolltree.audit` returns."""

    run: str
    checks: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]
    num_rollouts: int
    num_steps: int
    num_sampled_tokens: int
    # Broken prefixes by cause; they do not count as problems.
    breaks: Mapping[str, int] = field(default_factory=dict)
    # The figures of `recompute`: `num_tokens`, the mean and the largest absolute difference.
    recomputed: Mapping[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no check found anything."""
        return not any(check.num_problems for check in self.checks)

    def _repr_html_(self) -> str:
        """Return the checks as a table for a notebook."""
        heads = ("check", "checked", "problems", "skipped")
        rows = [astuple(check) for check in self.checks]
        return html_table(f"audit of {self.run}", heads, rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data, `ok` included."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(slots=True)
class Ledger:
    """Collects counts and findings during an audit.

    Several processes may audit parts of a run; `add` joins their ledgers.
    """

    checked: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    breaks: Counter[str] = field(default_factory=Counter)
    num_sampled_tokens: int = 0

    def count(self, check: str, number: int = 1) -> None:
        """Note that a check looked at `number` more things."""
        self.checked[check] += number

    def find(
        self, check: str, cause: str, message: str, place: Place = _RUN, step: int | None = None
    ) -> None:
        """Keep a finding, and count it; `place` names its rollout, if it is about one."""
        self.keep(Finding(check, cause, message, *place, step))

    def keep(self, finding: Finding) -> None:
        """Keep a finding, and count it."""
        self.problems[finding.check] += 1
        if self.problems[finding.check] <= MAX_FINDINGS:
            self.findings.append(finding)

    def skip(self, check: str, why: str) -> None:
        """Note why a check could not run; the first reason is kept."""
        self.skipped.setdefault(check, why)

    def add(self, other: Ledger) -> None:
        """Add the counts and findings of another ledger."""
        self.checked.update(other.checked)
        self.breaks.update(other.breaks)
        self.num_sampled_tokens += other.num_sampled_tokens
        for check, why in other.skipped.items():
            self.skip(check, why)
        # A ledger keeps `MAX_FINDINGS` of a check and counts them all: count the dropped ones too.
        hidden = other.problems - Counter(finding.check for finding in other.findings)
        for finding in other.findings:
            self.keep(finding)
        self.problems.update(hidden)

    def results(self) -> tuple[CheckResult, ...]:
        """Return a row for each check."""
        return tuple(
            CheckResult(name, self.checked[name], self.problems[name], self.skipped.get(name))
            for name in CHECKS
        )

    def ordered(self) -> tuple[Finding, ...]:
        """Return the findings in the order of the checks."""
        names = list(CHECKS)
        return tuple(sorted(self.findings, key=lambda finding: names.index(finding.check)))


def tolerance(sizes: Iterable[float], most: float) -> tuple[float, float]:
    """Return the usual distance between logprobs of two sources, and the largest allowed one.

    How much 16-bit engines differ depends on model and length. Most rollouts of a run are sound, so
    the limit is 20 times their median, but at least 0.001 and at most `most`.
    """
    noise = median(sizes)
    return noise, min(max(1e-3, 20.0 * noise), most)


def some(names: Iterable[object]) -> str:
    """Return the first three of `names` as text."""
    known = [str(name) for name in names]
    more = f" and {len(known) - 3} more" if len(known) > 3 else ""
    return ", ".join(known[:3]) + more


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Return the second values of pairs by the first ones, both in the order they came."""
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found
