"""The narrator: what happened in a run, as plain sentences with their evidence.

Every teller is a pure function of `Facts` and stands in `TELLERS`. A sentence is a dict with
`text`, `kind` (the teller's name), `severity` (`error`, `warning`, `good`, `info`) and `evidence`:
`view` (the page's view that shows it) and what it is opened with (`phase`, `where`, `steps` as
first and last, `series`, `request_id`, `trajectory_index`, `call`, `position`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

from rolltree.records.story_facts import Facts, StoryRollout, read_facts
from rolltree.records.story_policy import drift, entropy, kl, staleness
from rolltree.records.story_words import (
    Sentence,
    Severity,
    equals,
    interval_text,
    percent,
    says,
    short,
    shown_rollouts,
    steps_of,
)
from rolltree.records.trends import (
    Trend,
    consecutive,
    group_estimate,
    mean_change,
    ratio_of,
    since,
    trend,
)
from rolltree.store import Run

_ORDER = ("error", "warning", "good", "info")

LEAST_SPAN = 2
"""Steps without reward variance, one after the other, that are worth a sentence."""
LEAST_SHARE = 0.2
"""Share of rollouts that end at a limit from which on it is told."""
LEAST_BREAKS = 0.05


def run_story(run: Run, *, quick: bool = False) -> dict[str, Any]:
    """Return `{"sentences": [...]}` of a stored run, what is most alarming first.

    With `quick`, that of a long run is told from a sample, as its last sentence says.
    """
    return {"sentences": story(read_facts(run, quick=quick))}


def story(facts: Facts) -> list[Sentence]:
    """Return what is worth telling, what is most alarming first."""
    found = [
        {"kind": kind, **sentence} for kind, tell in TELLERS.items() for sentence in tell(facts)
    ]
    return sorted(found, key=lambda each: _ORDER.index(each["severity"]))


# -- tellers ---------------------------------------------------------------------------------------


def _zero_variance(facts: Facts) -> Iterator[Sentence]:
    """Steps in which all groups' rewards were equal."""
    flat = [step for step, share in _flat_shares(facts) if share >= 0.999]
    for first, last in consecutive(flat, list(facts.steps))[-3:]:
        if last - first + 1 < min(LEAST_SPAN, len(facts.steps)):
            continue
        rows = [each for each in facts.rollouts if first <= (each.train_step or 0) <= last]
        rewards = Counter(each.reward for each in rows if each.reward is not None)
        norms = [value for step, value in facts.series("train/grad_norm") if first <= step <= last]
        best = max((each.reward for each in facts.rollouts if each.reward is not None), default=0.0)
        what = ""
        if len(rewards) == 1:
            what = f": all {sum(rewards.values()):,} rewards were {next(iter(rewards)):g}"
        is_solved = set(rewards) == {best} and best > 0
        taught = "so nothing was learned" if not any(norms) else "so rewards taught nothing"
        severity: Severity = "info" if is_solved else "error" if not any(norms) else "warning"
        yield says(
            f"No group had reward variance in {steps_of(first, last)}, {taught}{what}.",
            *(severity, "groups"),
            phase=facts.phase,
            steps=[first, last],
            step=last,
            series="train/frac_reward_zero_std",
        )


def _flat_shares(facts: Facts) -> list[tuple[int, float]]:
    """Return the share of groups without variance at each step, as logged or from the rewards."""
    logged = facts.series("train/frac_reward_zero_std")
    if logged:
        return logged
    groups: dict[tuple[int, str], set[float]] = defaultdict(set)
    for each in facts.rollouts:
        if each.train_step is not None and each.reward is not None and not each.parent_rollout:
            groups[each.train_step, each.group_id].add(each.reward)
    by_step: dict[int, list[float]] = defaultdict(list)
    for (step, _), rewards in groups.items():
        by_step[step].append(float(len(rewards) == 1))
    return [(step, fmean(flat)) for step, flat in sorted(by_step.items())]


def _max_tokens(facts: Facts) -> Iterator[Sentence]:
    """Rollouts that ended because the model ran into its limit of tokens."""
    said = "" if facts.max_tokens is None else f" ({facts.max_tokens})"
    yield from _share(
        facts,
        lambda each: each.finish_reason == "length",
        lambda share: f"{share} of rollouts hit max_tokens{said}",
        where="finish_reason = length",
        least=LEAST_SHARE,
        alarming=LEAST_SHARE,
    )


def _truncated(facts: Facts) -> Iterator[Sentence]:
    """Rollouts that were cut by something else than time and tokens."""
    reasons = Counter(
        each.truncation_reason
        for each in facts.rollouts
        if each.truncated and each.truncation_reason not in (None, "time_limit", "max_tokens")
    )
    for reason, _ in reasons.most_common(2):
        yield from _share(
            facts,
            lambda each, reason=reason: each.truncated and each.truncation_reason == reason,  # type: ignore[misc]
            lambda share, reason=reason: f"{share} of rollouts were cut by {short(reason)}",  # type: ignore[misc]
            where=equals("truncation_reason", reason),
            least=LEAST_SHARE,
            alarming=math.inf,
        )


def _failures(facts: Facts) -> Iterator[Sentence]:
    """Rollouts that failed, by kind."""
    failed = [each for each in facts.rollouts if each.status == "error"]
    kinds = Counter((each.error_type or "an error", each.error_phase or "?") for each in failed)
    shown = ", ".join(
        f"{number:,} with {short(kind)} ({phase})" for (kind, phase), number in kinds.most_common(3)
    )
    more = f", and {len(kinds) - 3} other kinds" if len(kinds) > 3 else ""
    yield from _share(
        facts,
        lambda each: each.status == "error",
        lambda share: f"{share} of rollouts failed",
        where="status = error",
        least=0.0,
        alarming=0.1,
        more=f": {shown}{more}",
    )


def _scoring(facts: Facts) -> Iterator[Sentence]:
    """Reward functions that raise, with where: some rubrics score 0 then, and go on."""
    found: dict[str, list[tuple[StoryRollout, str]]] = defaultdict(list)
    for looked in facts.looked:
        for function, said in looked.scoring_errors:
            found[function].append((looked.rollout, said))
    for function, raised in found.items():
        share = len(raised) / len(facts.looked)
        yield says(
            f"The reward function {short(function)} raised in {len(raised)} of "
            f"{len(facts.looked)} rollouts that were looked at, the first time "
            f"{short(raised[0][1], 300)}.",
            *("error" if share >= 0.1 else "warning", "rollout"),
            **shown_rollouts([rollout for rollout, _ in raised]),
            phase=facts.phase,
        )


def _timeouts(facts: Facts) -> Iterator[Sentence]:
    """Rollouts that ran out of time, and tools that do."""
    late = [each for each in facts.rollouts if _is_late(each)]
    if late:
        share = len(late) / len(facts.rollouts)
        types = Counter(each.error_type or "a time limit" for each in late)
        kinds = ", ".join(f"{short(kind)} ({n:,})" for kind, n in types.most_common(3))
        first = late[0]
        where = (
            equals("error_type", first.error_type)
            if first.error_type
            else "truncation_reason = time_limit"
        )
        yield says(
            f"{percent(share)} of rollouts ran out of time: {kinds}.",
            *("error" if share >= 0.1 else "warning", "rollouts"),
            phase=facts.phase,
            where=where,
        )
    calls: dict[str, list[StoryRollout]] = defaultdict(list)
    for looked in facts.looked:
        for tool, kind in looked.tool_errors:
            if _is_time(kind):
                calls[tool].append(looked.rollout)
    for tool, rollouts in sorted(calls.items(), key=lambda item: -len(item[1])):
        names = {(each.request_id, each.trajectory_index) for each in rollouts}
        share = len(names) / len(facts.looked)
        yield says(
            f"The tool {short(tool)} times out: {len(rollouts):,} calls in {len(names)} of "
            f"{len(facts.looked)} rollouts that were looked at.",
            *("error" if share >= 0.1 else "warning", "rollout"),
            **shown_rollouts(rollouts),
        )


def _is_late(each: StoryRollout) -> bool:
    if each.status == "error":
        return each.error_phase == "timeout" or _is_time(each.error_type or "")
    return each.truncation_reason == "time_limit"


def _is_time(kind: str) -> bool:
    return "timeout" in kind.lower() or "timelimit" in kind.lower()


def _empty_answers(facts: Facts) -> Iterator[Sentence]:
    """Answers that say nothing and earn as much reward as others."""
    rewards = [each.reward for each in facts.rollouts if each.reward is not None]
    empty = [each.rollout for each in facts.looked if each.is_empty and each.rollout.reward]
    if len(empty) < 2 or not rewards:
        return
    paid, middle = fmean(each.reward or 0.0 for each in empty), fmean(rewards)
    if paid > 0 and paid >= middle:
        yield says(
            f"Empty answers earn reward: of {len(facts.looked)} rollouts that were looked at, "
            f"{len(empty)} say nothing, and their mean reward is {paid:.3g} (all: {middle:.3g}).",
            *("error", "rollout"),
            **shown_rollouts(empty),
            phase=facts.phase,
        )


_WHY = {
    "reasoning_stripped": "the chat template strips the reasoning of earlier turns",
    "retokenized": "earlier answers are tokenized anew",
    "system_or_tools_changed": "the system message or the tools change within a rollout",
    "history_rewritten": "earlier messages are rewritten",
    "compaction": "history is summarized or dropped",
}


def _breaks(facts: Facts) -> Iterator[Sentence]:
    """Prompts that do not extend what came before, by cause."""
    num_later = sum(each.num_later_calls for each in facts.looked)
    for cause, why in _WHY.items():
        logged = [value for _, value in facts.series(f"samples/breaks/{cause}")]
        seen = [
            (each.rollout, call, position)
            for each in facts.looked
            for call, position, found in each.breaks
            if found == cause
        ]
        share = len(seen) / num_later if num_later else 0.0
        if logged:
            share = sum(logged) / len(facts.steps)
        if share < LEAST_BREAKS:
            continue
        evidence: dict[str, Any] = {"view": "curves", "series": f"samples/breaks/{cause}"}
        if seen:
            rollout, call, position = seen[-1]
            evidence = {
                "view": "tokens",
                **shown_rollouts([rollout]),
                "call": call,
                "position": position,
            }
        yield says(
            f"In {percent(share)} of later calls the prompt does not extend the call before, "
            f"because {why}; what follows is computed again.",
            "info" if cause == "compaction" else "warning",
            **evidence,
        )


_SEVERITY: Mapping[Trend, Severity] = {"rises": "good", "is flat": "warning", "falls": "error"}


def _reward(facts: Facts) -> Iterator[Sentence]:
    """Whether the reward of training rises, and still does."""
    by_step: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in facts.rollouts:
        if each.train_step is not None and each.reward is not None and not each.parent_rollout:
            by_step[each.train_step][each.group_id].append(each.reward)
    steps = sorted(by_step)
    if len(steps) < 4:
        return
    size = len(steps) // (4 if len(steps) >= 8 else 2)
    spans = [steps[:size], steps[-2 * size : -size], steps[-size:]]
    first, before, last = ([g for step in span for g in by_step[step].values()] for span in spans)
    began, ended = group_estimate(first), group_estimate(last)
    if began is None or ended is None:
        return
    change, recent = mean_change(first, last), mean_change(before, last)
    severity = _SEVERITY[trend(change)]
    text = (
        f"The reward {trend(change)}: {interval_text(began)} in "
        f"{steps_of(spans[0][0], spans[0][-1])}, {interval_text(ended)} in "
        f"{steps_of(spans[2][0], spans[2][-1])}."
    )
    if len(steps) >= 8:
        now = "still rises" if trend(recent) == "rises" else trend(recent)
        bounds = f"{recent[0]:+.2g} [{recent[1]:+.2g}, {recent[2]:+.2g}]"
        text += f" At the end it {now}: {bounds} beside the {size} steps before."
    highest = max(reward for group in last for reward in group)
    if severity == "warning" and (len(steps) < 8 or ended.mean >= 0.9 * highest > 0):
        severity = "info"  # too early to say, or there is not much to gain
    yield says(text, severity, "curves", series="reward/mean", steps=[steps[0], steps[-1]])


def _held_out(facts: Facts) -> Iterator[Sentence]:
    """The first and the last held-out evaluation."""
    found = [each for each in facts.evaluations if each.reward is not None]
    if len(found) < 2 or found[0].step == found[-1].step:
        return
    sides = [(each.reward, *(each.interval or (None, None))) for each in (found[0], found[-1])]
    (_, low, high), (_, new_low, new_high) = sides
    verb, severity = "does not clearly differ", "info"
    if new_low is not None and high is not None and new_low > high:
        verb, severity = "rose", "good"
    if new_high is not None and low is not None and new_high < low:
        verb, severity = "fell", "error"
    one, other = (
        f"{mean:.3g}" + ("" if low is None else f" [{low:.3g}, {high:.3g}]")
        for mean, low, high in sides
    )
    yield {
        "text": f"Held out, the reward {verb}: {one} after {found[0].step} steps, {other} after "
        f"{found[-1].step}.",
        "severity": severity,
        "evidence": {"view": "curves", "series": "eval/reward"},
    }


def _ended(facts: Facts) -> Iterator[Sentence]:
    """The error that the run ended with."""
    if facts.error is not None:
        said = short(facts.error, 300)
        yield says(f"The run ended with an error: {said}", "error", "curves", series="reward/mean")


def _sampled(facts: Facts) -> Iterator[Sentence]:
    """That numbers are those of a sample."""
    if facts.num_sampled_of is not None:
        yield says(
            f"This is told from {len(facts.rollouts):,} of {facts.num_sampled_of:,} rollouts, "
            "spread over the run, without their tokens; `rolltree view` reads all.",
            *("info", "rollouts"),
            phase=facts.phase,
        )


TELLERS: Mapping[str, Callable[[Facts], Iterator[Sentence]]] = {
    "ended": _ended,
    "zero_variance": _zero_variance,
    "drift": drift,
    "kl": kl,
    "entropy": entropy,
    "empty_answers": _empty_answers,
    "timeouts": _timeouts,
    "failures": _failures,
    "scoring": _scoring,
    "breaks": _breaks,
    "max_tokens": _max_tokens,
    "truncated": _truncated,
    "reward": _reward,
    "held_out": _held_out,
    "staleness": staleness,
    "sampled": _sampled,
}
"""Kind of sentence to the function that tells it."""


# -- shares ----------------------------------------------------------------------------------------


def _share(
    facts: Facts,
    holds: Callable[[StoryRollout], bool],
    text: Callable[[str], str],
    *,
    where: str,
    least: float,
    alarming: float,
    more: str = "",
) -> Iterator[Sentence]:
    """Tell of how many rollouts something holds, since the step from which on it is otherwise."""
    counts: dict[int | None, list[int]] = defaultdict(lambda: [0, 0])
    for each in facts.rollouts:
        count = counts[each.train_step]
        count[0] += holds(each)
        count[1] += 1
    if not sum(hits for hits, _ in counts.values()):
        return
    steps = sorted(step for step in counts if step is not None)
    pairs = [(counts[step][0], counts[step][1]) for step in steps] or [
        (counts[None][0], counts[None][1])
    ]
    at = since(pairs)
    share, before = ratio_of(pairs[at:]), ratio_of(pairs[:at])
    if at and share <= max(before, least):  # it has become rarer
        at, share, before = 0, ratio_of(pairs), 0.0
    if share < least:
        return
    evidence: dict[str, Any] = {"phase": facts.phase, "where": where}
    if at:
        evidence["steps"] = [steps[at], steps[-1]]
        evidence["where"] += f" and train_step >= {steps[at]}"
        more = f" since step {steps[at]} ({percent(before)} before){more}"
    severity: Severity = "error" if share >= alarming else "warning"
    yield says(f"{text(percent(share))}{more}.", severity, "rollouts", **evidence)
