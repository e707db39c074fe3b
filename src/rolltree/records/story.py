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
    # Runs of `benchmarks/planted`: one that it names, and a healthy one that looks much like it.
    planted: str = ""
    healthy: str = ""

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
    if {each["kind"] for each in found} & _DOUBTS:
        # What is earned is not what is wanted: then it is no good news that it rises.
        good = [each for each in found if each["severity"] == "good"]
        found = [each | {"severity": "info"} if each in good else each for each in found]
    # A stable sort: among equally alarming sentences the order of `DETECTORS` stays.
    return sorted(found, key=lambda each: _ORDER.index(each["severity"]))


_DOUBTS = {"gaming", "form", "empty_answers"}


def _above(alarming: float) -> Callable[[Case], Severity]:
    """Return a severity: an error from this share of rollouts on, else a warning, of few none."""

    def severity(case: Case) -> Severity:
        if case["share"] < conditions.FEW:
            return "info"
        return "error" if case["share"] >= alarming else "warning"

    return severity


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
        planted="ended",
        healthy="stopped_early",
    ),
    "not_finite": Detector(
        condition=conditions.not_finite,
        sentence="{name} is not a number since step {first}, so the weights may be lost.",
        severity="error",
        view="curves",
        shows=("series", "steps"),
        planted="nan_loss",
        healthy="loss_near_zero",
    ),
    "gaming": Detector(
        condition=conditions.gaming,
        sentence="The reward rises while {what} {name} falls: the reward went from {reward_began} "
        "to {reward_ended}, {name} from {began} to {ended}. What is paid is not what is wanted.",
        severity=_as_found,
        view="curves",
        shows=("series", "beside", "steps"),
        planted="gaming",
        healthy="cost_falls",
    ),
    "form": Detector(
        condition=conditions.form,
        sentence="The reward rises by {best} ({best_began} to {best_ended}), while {name} does not "
        "({began} to {ended}).",
        severity="warning",
        view="curves",
        shows=("series", "beside"),
        planted="format_only",
        healthy="format_first",
    ),
    "collapse": Detector(
        condition=conditions.collapse,
        sentence="The reward collapsed at step {first}: its mean was {before} before and is "
        "{after} since, the least there is.",
        severity="error",
        view="curves",
        shows=("steps",),
        link={"series": "reward/mean"},
        planted="collapse",
        healthy="reward_dips",
    ),
    "zero_variance": Detector(
        condition=conditions.zero_variance,
        sentence="No group had reward variance in {span}, {so}{rewards}.",
        severity=_as_found,
        view="groups",
        shows=("phase", "steps", "step"),
        link={"series": "train/frac_reward_zero_std"},
        planted="constant_reward",
        healthy="solved_below_zero",
    ),
    "flat_groups": Detector(
        condition=conditions.flat_groups,
        sentence="{percent} of groups had no reward variance in {span}, so most of what was played "
        "taught nothing.",
        severity="warning",
        view="groups",
        shows=("phase", "steps", "step"),
        link={"series": "train/frac_reward_zero_std"},
        planted="flat_groups",
        healthy="sparse",
    ),
    "task": Detector(
        condition=conditions.tasks,
        sentence="The task {task} gets worse: {began} in {first_steps}, {ended} in {last_steps}.",
        severity="error",
        view="rollouts",
        shows=_ROLLOUTS,
        planted="one_task_lost",
        healthy="several_tasks",
    ),
    "drift": Detector(
        condition=conditions.drift,
        sentence="The engine's logprobs drift from the trainer's {since}: they differ "
        "by {size:.2g} nats per token{before}. What is trained is not what was sampled.",
        severity="error",
        view="curves",
        shows=("series", "steps"),
        planted="drift",
        healthy="bfloat16",
    ),
    "gradient": Detector(
        condition=conditions.gradient,
        sentence="The gradient explodes at step {first}: its norm is {size:.3g}, and was "
        "{before:.3g}.",
        severity="error",
        view="curves",
        shows=("steps",),
        link={"series": "train/grad_norm"},
        planted="gradient",
        healthy="gradient_noise",
    ),
    "ess": Detector(
        condition=conditions.ess,
        sentence="A few tokens make the updates: the effective sample size is {percent} of the "
        "tokens at the end.",
        severity=_as_found,
        view="curves",
        shows=("steps",),
        link={"series": "ratio/ess"},
        planted="ess",
        healthy="asynchronous",
    ),
    "kl": Detector(
        condition=conditions.kl,
        sentence="{text}",
        severity=_as_found,
        view="curves",
        shows=("steps",),
        link={"series": "train/kl"},
        planted="kl",
        healthy="kl_is_spent",
    ),
    "entropy": Detector(
        condition=conditions.entropy,
        sentence="The policy hardly varies since step {first}: its entropy is {after:.2g} nats per "
        "token ({before:.2g} at first), so little else is tried.{rewards}",
        severity="warning",
        view="curves",
        shows=("series", "steps"),
        planted="entropy",
        healthy="confident",
    ),
    "empty_answers": Detector(
        condition=conditions.empty_answers,
        sentence="Empty answers earn reward: of {num_read} rollouts that were looked at, {num} say "
        "nothing, and their mean reward is {mean:.3g} (all: {mean_of_all:.3g}).",
        severity="error",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
        planted="empty_answers",
        healthy="empty_answers_lose",
    ),
    "unscored": Detector(
        condition=conditions.unscored,
        sentence="Nothing scored {percent} of rollouts{since}, so they have no reward.",
        severity=_above(0.1),
        view="rollouts",
        shows=_ROLLOUTS,
        planted="unscored",
        healthy="delegation",
    ),
    "waits": Detector(
        condition=conditions.waits,
        sentence="{text}",
        severity="warning",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
        planted="dead_judge",
        healthy="slow_judge",
    ),
    "timeouts": Detector(
        condition=conditions.timeouts,
        sentence="{text}",
        severity=_above(0.1),
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase", "where"),
        planted="timeouts",
        healthy="rare_failure",
    ),
    "tools": Detector(
        condition=conditions.tools,
        sentence="The tool {tool} raises {error} in {percent} of rollouts{since}.",
        severity="error",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
        planted="tool_raises",
        healthy="tool_is_learned",
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
        planted="failures",
        healthy="rare_failure",
    ),
    "scoring": Detector(
        condition=conditions.scoring,
        sentence="The reward function {function} raised in {num} of {num_read} rollouts that were "
        "looked at, the first time {message}.",
        severity=_above(0.1),
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
        planted="scoring",
        healthy="plain",
    ),
    "breaks": Detector(
        condition=conditions.breaks,
        sentence="In {percent} of later calls the prompt does not extend the call before, because "
        "{why}; what follows is computed again.",
        severity=_as_found,
        view="curves",
        shows=("series", *_ONE_ROLLOUT, "call", "position"),
        planted="breaks",
        healthy="sliding_window",
    ),
    "max_tokens": Detector(
        condition=conditions.max_tokens,
        sentence="{percent} of rollouts hit max_tokens{words}{since}.",
        severity=_as_found,
        view="rollouts",
        shows=_ROLLOUTS,
        planted="max_tokens",
        healthy="one_token",
    ),
    "length": Detector(
        condition=conditions.length,
        sentence="Answers became {factor:.0f} times as long, from step {first} on: {before:.3g} "
        "tokens per rollout at first, {after:.3g} at the end.",
        severity="warning",
        view="curves",
        shows=("steps",),
        link={"series": "train/completions/mean_length"},
        planted="length",
        healthy="learns_to_think",
    ),
    "slow": Detector(
        condition=conditions.slow,
        sentence="Steps take {factor:.0f} times as long since step {first}: {after:.3g} s, and "
        "{before:.3g} s before{part}.",
        severity="warning",
        view="curves",
        shows=("steps",),
        link={"series": "time/step"},
        planted="slow",
        healthy="learns_to_think",
    ),
    "truncated": Detector(
        condition=conditions.truncated,
        sentence="{percent} of rollouts were cut by {reason}{since}.",
        severity=_as_found,
        view="rollouts",
        shows=_ROLLOUTS,
        planted="truncated",
        healthy="fixed_turns",
    ),
    "shared_questions": Detector(
        condition=conditions.shared_questions,
        sentence="{all} {num_of} held-out questions are also training questions, so the held-out "
        "reward includes memorization.",
        severity="warning",
        view="curves",
        link={"series": "eval/reward"},
        planted="shared_questions",
        healthy="held_out",
    ),
    "staleness": Detector(
        condition=conditions.staleness,
        sentence="Tokens are trained {lag:.2g} versions after they were sampled on average{most}"
        "{stale}.",
        severity=lambda case: "warning" if case["share"] >= 0.05 or case["lag"] >= 8 else "info",
        view="curves",
        link={"series": "train/lag_mean"},
        planted="stale",
        healthy="asynchronous",
    ),
    "reward": Detector(
        condition=conditions.reward_trend,
        sentence="The reward {trend}: {began} in {first_steps}, {ended} in {last_steps}.{now}",
        severity=_as_found,
        view="curves",
        shows=("steps",),
        link={"series": "reward/mean"},
        planted="reward_falls",
        healthy="curriculum",
    ),
    "held_out": Detector(
        condition=conditions.held_out_change,
        sentence="{what}, the reward {verb}: {began} after {first} steps, {ended} after {last}.",
        severity=_as_found,
        view="curves",
        link={"series": "eval/reward"},
        planted="overfit",
        healthy="held_out",
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
