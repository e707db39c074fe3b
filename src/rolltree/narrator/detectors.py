"""The narrator: what happened in a run and what to do next, as sentences with their evidence.

Its rules are the table `DETECTORS`. A new detector is a row, a new condition if none fits, and two
runs in `benchmarks/planted`. The story of a run, the advice of reports and the notices of the loop
about learning are made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rolltree.narrator import conditions
from rolltree.narrator import rewards as of_rewards
from rolltree.narrator import series as of_series
from rolltree.narrator.facts import Facts

Severity: TypeAlias = Literal["error", "warning", "good", "info"]
Sentence: TypeAlias = dict[str, Any]
Case: TypeAlias = Mapping[str, Any]
_ORDER = ("error", "warning", "good", "info")
MOST = 2
"""How many pieces of advice are given at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """One kind of sentence."""

    # A pure function of the facts. It yields a case per sentence, with the words and numbers that
    # the other fields name, except `phase` and `first`, the first of its steps.
    condition: Callable[[Facts], Iterable[Case]]
    sentence: str  # a format string over the case
    severity: Severity | Callable[[Case], Severity] = field(default=lambda case: case["severity"])
    view: str = "curves"  # the page's view of the evidence, unless the case has its own
    shows: tuple[str, ...] = ()  # the values of the case that the view is opened with
    series: str = ""  # and the metric, if it is the same for all cases
    advice: str = ""  # what to do, unless the case has its own
    page: str = ""  # the page below docs/ that says more, likewise

    def sentences(self, kind: str, facts: Facts) -> Iterable[Sentence]:
        """Yield a sentence for each case."""
        link = {"series": self.series} if self.series else {}
        for found in self.condition(facts):
            case = {"phase": facts.phase, "first": found.get("steps", [None])[0], **found}
            shown = {name: case[name] for name in self.shows if name in case}
            severity = self.severity if isinstance(self.severity, str) else self.severity(case)
            # A problem that is too small to alarm needs no advice, unless its case says so.
            is_small = severity == "info" and not isinstance(self.severity, str)
            advice = "" if case.get("is_small", is_small) else self.advice
            yield {
                "kind": kind,
                "text": self.sentence.format(**case),
                "severity": severity,
                "evidence": {"view": case.get("view", self.view), **link, **shown},
                "advice": case.get("advice", advice),
                "page": case.get("page", self.page),
            }


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do next, and why."""

    rule: str  # the detector's name
    text: str
    page: str  # below docs/

    def __str__(self) -> str:
        return f"{self.text} (rolltree docs {self.page.replace('.md', '')})"


def story(facts: Facts) -> list[Sentence]:
    """Return the sentences that follow from the facts, the most alarming first.

    A sentence is a dict with `text`, `kind` (the detector's name), `severity` (`error`, `warning`,
    `good`, `info`), `evidence`: `view` and what it is opened with (`phase`, `where`, `steps` as
    first and last, `series`, `request_id`, `trajectory_index`, `call`, `position`), `advice`: what
    to do, if anything, and `page`: where the docs say more.
    """
    sentences = [
        sentence for kind, each in DETECTORS.items() for sentence in each.sentences(kind, facts)
    ]
    if {each["kind"] for each in sentences} & _DOUBTS:
        # If the reward is not what is wanted, its rise is not good news.
        good = [each for each in sentences if each["severity"] == "good"]
        sentences = [each | {"severity": "info"} if each in good else each for each in sentences]
    # A stable sort: among equally alarming sentences the order of `DETECTORS` stays.
    sentences.sort(key=lambda each: _ORDER.index(each["severity"]))
    # Nothing is advised twice, and nobody should go on as before who has a problem.
    is_alarmed = bool(sentences) and sentences[0]["severity"] in ("error", "warning")
    said = {of_rewards.GO_ON["advice"]} if is_alarmed else set()
    for each in sentences:
        if each["advice"] in said:
            each["advice"] = ""
        said.add(each["advice"])
    return sentences


def advised(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Return the first sentences that have advice, at most `MOST`."""
    return [each for each in sentences if each["advice"]][:MOST]


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Return what to do next, the most important first."""
    return tuple(
        Advice(each["kind"], f"{each['text']} {each['advice']}", each["page"])
        for each in advised(story(facts))
    )


_DOUBTS = {"gaming", "form", "empty_answers", "scale", "same_answer", "not_finite"}


def _above(alarming: float) -> Callable[[Case], Severity]:
    """Return a severity: an error from this share of rollouts, info if few, else a warning."""

    def severity(case: Case) -> Severity:
        if case["share"] < conditions.FEW:
            return "info"
        return "error" if case["share"] >= alarming else "warning"

    return severity


# What the page's views of rollouts, and of one rollout, are opened with.
_OF_PHASE: Mapping[str, Any] = {"view": "rollouts", "shows": ("phase",)}
_ROLLOUTS = ("phase", "where", "steps")
_ONE_ROLLOUT = ("request_id", "trajectory_index", "rollouts")

DETECTORS: Mapping[str, Detector] = {
    "ended": Detector(
        condition=of_series.ended,
        sentence="The run ended with an error: {error}",
        severity="error",
        series="reward/mean",
    ),
    "not_finite": Detector(
        condition=of_series.not_finite,
        sentence="{name} is not a number since step {first}, so the weights may be lost.",
        severity="error",
        shows=("series", "steps"),
    ),
    "idle": Detector(
        condition=of_series.idle,
        sentence="{text}",
        severity="error",
        shows=("series", "steps"),
    ),
    "settings": Detector(
        condition=of_series.changed,
        sentence="The run was continued at step {first} with other settings: {what}{then}.",
        shows=("steps",),
        series="reward/mean",
    ),
    "scale": Detector(
        condition=of_rewards.other_scale,
        sentence="Rewards have a different scale since step {first}: the largest was {before} "
        "before and is {after} since. What looks like a rise there is not one.",
        severity="error",
        shows=("steps",),
        series="reward/mean",
    ),
    "same_answer": Detector(
        condition=conditions.same_answer,
        sentence="{percent} of answers are identical{since}, to {num} different questions"
        "{paid}: “{answer}”",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "repeats": Detector(
        condition=conditions.repeats,
        sentence="{percent} of answers repeat themselves{since}: most of what they say, they have "
        "said before.",
        severity="warning",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "same_questions": Detector(
        condition=conditions.same_questions,
        sentence="{percent} of a step's groups repeat the question of another group, though there "
        "are {num} questions: {most}.",
        severity="warning",
        **_OF_PHASE,
    ),
    "gaming": Detector(
        condition=of_rewards.gaming,
        sentence="The reward rises while {what} {name} {verb}: the reward went from "
        "{reward_began} to {reward_ended}, {name} from {began} to {ended}. What earns reward is "
        "not what is wanted.",
        shows=("series", "beside", "steps"),
    ),
    "form": Detector(
        condition=of_rewards.form,
        sentence="The reward rises by {best} ({best_began} to {best_ended}), while {name} does not "
        "({began} to {ended}).",
        severity="warning",
        shows=("series", "beside"),
    ),
    "collapse": Detector(
        condition=of_rewards.collapse,
        sentence="The reward collapsed at step {first}: its mean was {before} before and is "
        "{after} since, the lowest there is{meanwhile}.",
        severity="error",
        shows=("steps",),
        series="reward/mean",
    ),
    "dead_function": Detector(
        condition=of_rewards.dead_function,
        sentence="The reward function {name} gives {value} to every rollout since step {first} "
        "({before} on average before).",
        severity="error",
        shows=("series", "steps"),
    ),
    "zero_variance": Detector(
        condition=of_rewards.zero_variance,
        sentence="No group had reward variance in {span}, {so}{rewards}.",
        **of_rewards.VARY,
        view="groups",
        shows=("phase", "steps", "step"),
        series="train/frac_reward_zero_std",
    ),
    "flat_groups": Detector(
        condition=of_rewards.flat_groups,
        sentence="{percent} of groups had no reward variance in {span} ({before} before)"
        "{meanwhile}, so most of what was played taught nothing.",
        severity="warning",
        **of_rewards.VARY,
        view="groups",
        shows=("phase", "steps", "step"),
        series="train/frac_reward_zero_std",
    ),
    "task": Detector(
        condition=of_rewards.task_loss,
        sentence="{text}",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "drift": Detector(
        condition=of_series.drift,
        sentence="The engine's logprobs drift from the trainer's {since}: they differ "
        "by {size:.2g} nats per token{before}. What is trained is not what was sampled.",
        severity="error",
        shows=("series", "steps"),
    ),
    "gradient": Detector(
        condition=of_series.gradient,
        sentence="The gradient explodes at step {first}: its norm is {size:.3g}, up from "
        "{before:.3g}.",
        severity="error",
        shows=("steps",),
        series="train/grad_norm",
    ),
    "lost_tokens": Detector(
        condition=of_series.lost_tokens,
        sentence="{percent} of the sampled tokens train little or nothing{since}: {why}.",
        severity="warning",
        shows=("series", "steps"),
    ),
    "ess": Detector(
        condition=of_series.ess,
        sentence="A few tokens make the updates: the effective sample size is {percent} of the "
        "tokens at the end.",
        shows=("steps",),
        series="ratio/ess",
    ),
    "kl": Detector(
        condition=of_series.kl,
        sentence="{text}",
        shows=("steps",),
        series="train/kl",
    ),
    "randomness": Detector(
        condition=of_series.randomness,
        sentence="{text}",
        shows=("series", "steps"),
    ),
    "entropy": Detector(
        condition=of_series.entropy,
        sentence="The policy hardly varies since step {first}: its entropy is {after:.2g} nats per "
        "token ({before:.2g} at first), so little else is tried.{rewards}",
        severity="warning",
        shows=("series", "steps"),
    ),
    "empty_answers": Detector(
        condition=of_rewards.empty_answers,
        sentence="Empty answers earn reward: of {num_read} rollouts that were looked at, {num} say "
        "nothing, and their mean reward is {mean:.3g} (all: {mean_of_all:.3g}).",
        severity="error",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "unscored": Detector(
        condition=conditions.unscored,
        sentence="{percent} of rollouts were not scored{since}, so they have no reward.",
        severity=_above(0.1),
        advice="Make the rubric score every rollout, however it ends.",
        page="environments.md#rubrics",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "waits": Detector(
        condition=conditions.waits,
        sentence="{text}",
        severity="warning",
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
    "tools": Detector(
        condition=conditions.tools,
        sentence="The tool {tool} raises {error} in {percent} of rollouts{since}.",
        severity="error",
        advice="The model is told, and the rollouts count: if their calls do not explain it, fix "
        "the tool.",
        page="first-hour.md#something-fails",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "programs": Detector(
        condition=conditions.programs,
        sentence="The program {how} in {percent} of rollouts{since}.",
        severity="error",
        advice="The rollouts count with what they earned: if no answer explains it, read stderr in "
        "state['program'] and fix the program.",
        page="gateway.md#a-reward-or-a-failed-rollout",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "failures": Detector(
        condition=conditions.failed_rollouts,
        sentence="{percent} of rollouts failed{since}{words}.",
        severity=_above(0.1),
        advice="They are not in the means, and failures are rarely random: read them before the "
        "reward.",
        page="first-hour.md#something-fails",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "scoring": Detector(
        condition=conditions.scoring,
        sentence="{function} raised in {num} of {num_read} rollouts that were looked "
        "at, the first time{step} ({message}).",
        severity=_above(0.1),
        advice="These rollouts count with what they earned otherwise: if no answer explains that, "
        "fix the code.",
        page="first-hour.md#something-fails",
        view="rollout",
        shows=(*_ONE_ROLLOUT, "phase"),
    ),
    "breaks": Detector(
        condition=conditions.breaks,
        sentence="In {percent} of later calls the prompt does not extend the call before, because "
        "{why}; what follows is computed again.",
        shows=("series", *_ONE_ROLLOUT, "call", "position"),
    ),
    "max_tokens": Detector(
        condition=conditions.max_tokens,
        sentence="{percent} of rollouts hit max_tokens{words}{since}.",
        advice="Allow more tokens, or ask for shorter answers and put an example into the prompt.",
        page="first-hour.md#answers-are-cut",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "length": Detector(
        condition=of_series.length,
        sentence="Answers became {factor:.0f} times as {word}, from step {first} on: {before:.3g} "
        "tokens per rollout at first, {after:.3g} at the end.",
        severity="warning",
        shows=("steps",),
        series="train/completions/mean_length",
    ),
    "slow": Detector(
        condition=of_series.slow,
        sentence="Steps take {factor:.0f} times as long since step {first}: {after:.3g} s, up from "
        "{before:.3g} s{part}.",
        severity="warning",
        shows=("steps",),
        series="time/step",
    ),
    "truncated": Detector(
        condition=conditions.truncated,
        sentence="{percent} of rollouts were cut by {reason}{since}.",
        view="rollouts",
        shows=_ROLLOUTS,
    ),
    "shared_questions": Detector(
        condition=of_series.known_questions,
        sentence="{all} {num_of} held-out questions are also training questions, so the held-out "
        "reward includes memorization.",
        severity="warning",
        series="eval/reward",
    ),
    "staleness": Detector(
        condition=of_series.staleness,
        sentence="Tokens are trained {lag:.2g} versions after they were sampled on average{most}"
        "{stale}.",
        severity=lambda case: "warning" if case["share"] >= 0.05 or case["lag"] >= 8 else "info",
        series="train/lag_mean",
    ),
    "reward": Detector(
        condition=of_rewards.reward_trend,
        sentence="The reward {trend}: {began} in {first_steps}, {ended} in {last_steps}.{now}",
        shows=("steps",),
        series="reward/mean",
    ),
    "held_out": Detector(
        condition=of_series.held_out_change,
        sentence="{what}, the reward{of} {verb}: {began} after {first} steps, {ended} after {last}"
        "{more}.",
        shows=("series",),
    ),
    "level": Detector(
        condition=of_rewards.level,
        sentence="{text}",
        severity="info",
        **_OF_PHASE,
    ),
    "idle_gpu": Detector(
        condition=lambda facts: [{}] if facts.idle_gpu else [],
        sentence="This machine has a GPU, and the model ran on the CPU.",
        severity="info",
        advice="`rolltree doctor` says which torch to install and which settings use it "
        "(model.device = 'cuda').",
        page="gpu.md",
    ),
    "few_examples": Detector(
        condition=of_rewards.few_examples,
        sentence="With {examples} the reward is known only to ±{half_width}.",
        severity="info",
        advice="Measure more (-n 100) before you compare it with anything.",
        page="evaluation.md",
        **_OF_PHASE,
    ),
    "learnable": Detector(
        condition=of_rewards.learnable,
        sentence="A mean reward of {reward:.3f} leaves room and has something to learn from.",
        severity="info",
        advice="Train on it (rolltree train).",
        page="training.md",
        **_OF_PHASE,
    ),
    "sampled": Detector(
        condition=of_series.sampled,
        sentence="This story is based on {num:,} of {num_of:,} rollouts, spread over the run, "
        "without their tokens; `rolltree view` reads all of them.",
        severity="info",
        **_OF_PHASE,
    ),
}
"""Kind of sentence to its detector; among equally alarming ones the first comes first."""
