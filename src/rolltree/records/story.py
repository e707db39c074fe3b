"""The narrator: what happened in a run, as plain sentences with their evidence.

`DETECTORS` is the whole of it. A new detector is a row there, and a condition if none fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from rolltree.records import story_conditions as conditions
from rolltree.records.story_facts import Facts, read_facts
from rolltree.store import Run

Severity: TypeAlias = Literal["error", "warning", "good", "info"]
Sentence: TypeAlias = dict[str, Any]
Case: TypeAlias = Mapping[str, Any]
_ORDER = ("error", "warning", "good", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """One kind of sentence."""

    # What is worth telling: a pure function of the facts. It yields a case per sentence, with the
    # words and numbers that the other fields name.
    condition: Callable[[Facts], Iterable[Case]]
    sentence: str  # a format string over the case
    severity: Severity | Callable[[Case], Severity]
    view: str  # the page's view that shows the evidence; a case with a `view` has another
    shows: tuple[str, ...] = ()  # the values of the case that the view is opened with
    link: Mapping[str, Any] = field(default_factory=dict)  # and what is the same for all cases

    def sentences(self, kind: str, facts: Facts) -> Iterable[Sentence]:
        """Yield a sentence for each case."""
        for case in self.condition(facts):
            shown = {name: case[name] for name in self.shows if name in case}
            severity = self.severity if isinstance(self.severity, str) else self.severity(case)
            yield {
                "kind": kind,
                "text": self.sentence.format(**case),
                "severity": severity,
                "evidence": {"view": case.get("view", self.view), **self.link, **shown},
            }


def run_story(run: Run, *, quick: bool = False) -> dict[str, Any]:
    """Return `{"sentences": [...]}` of a stored run, what is most alarming first.

    With `quick`, that of a long run is told from a sample, as its last sentence says.
    """
    return {"sentences": story(read_facts(run, quick=quick))}


def story(facts: Facts) -> list[Sentence]:
    """Return what is worth telling, what is most alarming first.

    A sentence is a dict with `text`, `kind` (the detector's name), `severity` (`error`, `warning`,
    `good`, `info`) and `evidence`: `view` and what it is opened with (`phase`, `where`, `steps` as
    first and last, `series`, `request_id`, `trajectory_index`, `call`, `position`).
    """
    found = [
        sentence for kind, each in DETECTORS.items() for sentence in each.sentences(kind, facts)
    ]
    # A stable sort: among equally alarming sentences the order of `DETECTORS` stays.
    return sorted(found, key=lambda each: _ORDER.index(each["severity"]))


def _above(alarming: float) -> Callable[[Case], Severity]:
    """Return a severity: an error from this share of rollouts on, else a warning."""
    return lambda case: "error" if case["share"] >= alarming else "warning"


def _as_found(case: Case) -> Severity:
    severity: Severity = case["severity"]
    return severity


# What the page's views of rollouts, and of one rollout, are opened with.
_ROLLOUTS = ("phase", "where", "steps")
_ONE_ROLLOUT = ("request_id", "trajectory_index", "rollouts")

DETECTORS: Mapping[str, Detector] = {
    "ended": Detector(
        condition=conditions.ended,
        sentence="The run ended with an error: {error}",
        severity="error",
        view="curves",
        link={"series": "reward/mean"},
    ),
    "zero_variance": Detector(
        condition=conditions.zero_variance,
        sentence="No group had reward variance in {span}, {so}{rewards}.",
        severity=_as_found,
        view="groups",
        shows=("phase", "steps", "step"),
        link={"series": "train/frac_reward_zero_std"},
    ),
    "drift": Detector(
        condition=conditions.drift,
        sentence="The engine's logprobs drift from the trainer's since step {first}: they differ "
        "by {size:.2g} nats per token{before}. What is trained is not what was sampled.",
        severity="error",
        view="curves",
        shows=("series", "steps"),
    ),
    "kl": Detector(
        condition=conditions.kl,
        sentence="{text}",
        severity=_as_found,
        view="curves",
        shows=("steps",),
        link={"series": "train/kl"},
    ),
    "entropy": Detector(
        condition=conditions.entropy,
        sentence="The policy hardly varies since step {first}: its entropy is {after:.2g} nats per "
        "token ({before:.2g} at first), so little else is tried.{rewards}",
        severity="warning",
        view="curves",
        shows=("series", "steps"),
    ),
    "empty_answers": Detector(
        condition=conditions.empty_answers,
        sentence="Empty answers earn reward: of {num_read} rollouts that were looked at, {num} say "
        "nothing, and their mean reward is {mean:.3g} (all: {mean_of_all:.3g}).",
        severity="error",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "timeouts": Detector(
        condition=conditions.timeouts,
        sentence="{text}",
        severity=_above(0.1),
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase", "where"),
    ),
    "failures": Detector(
        condition=partial(
            conditions.share_of,
            conditions.failed,
            where="status = error",
            words=conditions.kinds_of_failures,
        ),
        sentence="{percent} of rollouts failed{since}{words}.",
        severity=_above(0.1),
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "scoring": Detector(
        condition=conditions.scoring,
        sentence="The reward function {function} raised in {num} of {num_read} rollouts that were "
        "looked at, the first time {message}.",
        severity=_above(0.1),
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "breaks": Detector(
        condition=conditions.breaks,
        sentence="In {percent} of later calls the prompt does not extend the call before, because "
        "{why}; what follows is computed again.",
        severity=lambda case: "info" if case["cause"] == "compaction" else "warning",
        view="curves",
        shows=("series", *_ONE_ROLLOUT, "call", "position"),
    ),
    "max_tokens": Detector(
        condition=partial(
            conditions.share_of,
            conditions.hit_max_tokens,
            where="finish_reason = length",
            least=conditions.LEAST_SHARE,
            words=conditions.limit_of_tokens,
        ),
        sentence="{percent} of rollouts hit max_tokens{words}{since}.",
        severity="error",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "truncated": Detector(
        condition=conditions.truncated,
        sentence="{percent} of rollouts were cut by {reason}{since}.",
        severity="warning",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "reward": Detector(
        condition=conditions.reward_trend,
        sentence="The reward {trend}: {began} in {first_steps}, {ended} in {last_steps}.{now}",
        severity=_as_found,
        view="curves",
        shows=("steps",),
        link={"series": "reward/mean"},
    ),
    "held_out": Detector(
        condition=conditions.held_out_change,
        sentence="Held out, the reward {verb}: {began} after {first} steps, {ended} after {last}.",
        severity=_as_found,
        view="curves",
        link={"series": "eval/reward"},
    ),
    "staleness": Detector(
        condition=conditions.staleness,
        sentence="Tokens are trained {lag:.2g} versions after they were sampled on average{most}"
        "{stale}.",
        severity=lambda case: "warning" if case["share"] >= 0.05 else "info",
        view="curves",
        link={"series": "train/lag_mean"},
    ),
    "sampled": Detector(
        condition=conditions.sampled,
        sentence="This is told from {num:,} of {num_of:,} rollouts, spread over the run, without "
        "their tokens; `rolltree view` reads all.",
        severity="info",
        view="rollouts",
        shows=("phase",),
    ),
}
"""Kind of sentence to its detector; among equally alarming ones the first comes first."""
