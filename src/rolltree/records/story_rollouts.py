"""Conditions of the narrator on rollouts: groups, endings, failures, tools, breaks, rewards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any

from rolltree.records.story_facts import Facts, StoryRollout
from rolltree.records.story_words import (
    equals,
    interval_text,
    percent,
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

Cases = Iterator[dict[str, Any]]

LEAST_SPAN = 2  # steps without reward variance, one after the other, that are worth a sentence
LEAST_SHARE = 0.2  # of rollouts that end at a limit: it is told from here on
LEAST_BREAKS = 0.05


def zero_variance(facts: Facts) -> Cases:
    """Steps in which all groups' rewards were equal."""
    flat = [step for step, share in _flat_shares(facts) if share >= 0.999]
    best = max((each.reward for each in facts.rollouts if each.reward is not None), default=0.0)
    # The last spans: a run that began flat and learned later is not told of its beginning for ever.
    for first, last in consecutive(flat, list(facts.steps))[-3:]:
        if last - first + 1 < min(LEAST_SPAN, len(facts.steps)):
            continue
        rows = [each for each in facts.rollouts if first <= (each.train_step or 0) <= last]
        rewards = Counter(each.reward for each in rows if each.reward is not None)
        norms = [value for step, value in facts.series("train/grad_norm") if first <= step <= last]
        # A gradient without reward variance comes from a KL term or an entropy bonus.
        is_idle = not any(norms)
        is_solved = set(rewards) == {best} and best > 0
        yield {
            "span": steps_of(first, last),
            "so": "so nothing was learned" if is_idle else "so rewards taught nothing",
            "rewards": f": all {sum(rewards.values()):,} rewards were {next(iter(rewards)):g}"
            if len(rewards) == 1
            else "",
            "severity": "info" if is_solved else "error" if is_idle else "warning",
            "phase": facts.phase,
            "steps": [first, last],
            "step": last,
        }


def _flat_shares(facts: Facts) -> list[tuple[int, float]]:
    """Return the share of groups without variance at each step, as logged or from the rewards."""
    if logged := facts.series("train/frac_reward_zero_std"):
        return logged
    return [
        (step, fmean(float(len(set(rewards)) == 1) for rewards in groups.values()))
        for step, groups in sorted(facts.group_rewards().items())
    ]


def share_of(
    holds: Callable[[StoryRollout], bool],
    facts: Facts,
    *,
    where: str,
    least: float = 0.0,
    words: Callable[[Facts], str] = lambda facts: "",
) -> Cases:
    """Of how many rollouts something holds, since the step from which on it is otherwise."""
    counts: dict[int | None, list[int]] = defaultdict(lambda: [0, 0])
    for each in facts.rollouts:
        count = counts[each.train_step]
        count[0] += holds(each)
        count[1] += 1
    if not any(hits for hits, _ in counts.values()):
        return
    steps = sorted(step for step in counts if step is not None)
    places: list[int | None] = [*steps] or [None]  # an evaluation has no steps
    pairs = [(hits, num) for hits, num in map(counts.__getitem__, places)]
    # A limit that is hit since step 40 is another story than one that was always hit: the split is
    # found from the counts, and both shares are told.
    at = since(pairs)
    share, before = ratio_of(pairs[at:]), ratio_of(pairs[:at])
    if at and share <= max(before, least):
        at, share = 0, ratio_of(pairs)  # it has become rarer: there is no "since" to warn of
    if share < least:
        return
    case: dict[str, Any] = {"share": share, "percent": percent(share), "phase": facts.phase}
    case |= {"where": where, "since": "", "words": words(facts)}
    if at:
        case["steps"] = [steps[at], steps[-1]]
        case["where"] += f" and train_step >= {steps[at]}"
        case["since"] = f" since step {steps[at]} ({percent(before)} before)"
    yield case


def failed(rollout: StoryRollout) -> bool:
    """Whether a rollout failed."""
    return rollout.status == "error"


def hit_max_tokens(rollout: StoryRollout) -> bool:
    """Whether the model ran into its limit of tokens in the last call."""
    return rollout.finish_reason == "length"


def limit_of_tokens(facts: Facts) -> str:
    """Return ` (64)`, the limit, if it is known."""
    return "" if facts.max_tokens is None else f" ({facts.max_tokens})"


def kinds_of_failures(facts: Facts) -> str:
    """Return how many rollouts failed with what."""
    kinds = Counter(
        (each.error_type or "an error", each.error_phase or "?")
        for each in facts.rollouts
        if failed(each)
    )
    shown = ", ".join(
        f"{number:,} with {short(kind)} ({phase})" for (kind, phase), number in kinds.most_common(3)
    )
    more = f", and {len(kinds) - 3} other kinds" if len(kinds) > 3 else ""
    return f": {shown}{more}"


def truncated(facts: Facts) -> Cases:
    """Rollouts that were cut by something else than time and tokens."""
    reasons = Counter(
        each.truncation_reason
        for each in facts.rollouts
        if each.truncated and each.truncation_reason not in (None, "time_limit", "max_tokens")
    )
    for reason, _ in reasons.most_common(2):

        def is_cut(each: StoryRollout, reason: str | None = reason) -> bool:
            return each.truncated and each.truncation_reason == reason

        where = equals("truncation_reason", reason)
        for case in share_of(is_cut, facts, where=where, least=LEAST_SHARE):
            yield {**case, "reason": short(reason)}


def scoring(facts: Facts) -> Cases:
    """Reward functions that raise, with where: some rubrics score 0 then, and go on."""
    found: dict[str, list[tuple[StoryRollout, str]]] = defaultdict(list)
    for looked in facts.looked:
        for function, message in looked.scoring_errors:
            found[function].append((looked.rollout, message))
    for function, raised in found.items():
        yield {
            "function": short(function),
            "num": len(raised),
            "num_read": len(facts.looked),
            "share": len(raised) / len(facts.looked),
            "message": short(raised[0][1], 300),
            "phase": facts.phase,
            **shown_rollouts([rollout for rollout, _ in raised]),
        }


def timeouts(facts: Facts) -> Cases:
    """Rollouts that ran out of time, and tools that do."""
    # A time limit ends a rollout as a failure or, if the environment says so, as a truncation.
    late = [each for each in facts.rollouts if _is_late(each)]
    if late:
        share = len(late) / len(facts.rollouts)
        types = Counter(each.error_type or "a time limit" for each in late)
        kinds = ", ".join(f"{short(kind)} ({n:,})" for kind, n in types.most_common(3))
        first = late[0].error_type
        yield {
            "text": f"{percent(share)} of rollouts ran out of time: {kinds}.",
            "share": share,
            "view": "rollouts",
            "phase": facts.phase,
            "where": equals("error_type", first) if first else "truncation_reason = time_limit",
        }
    calls: dict[str, list[StoryRollout]] = defaultdict(list)
    for looked in facts.looked:
        for tool, kind in looked.tool_errors:
            if _is_time(kind):
                calls[tool].append(looked.rollout)
    for tool, rollouts in sorted(calls.items(), key=lambda item: -len(item[1])):
        names = {(each.request_id, each.trajectory_index) for each in rollouts}
        yield {
            "text": f"The tool {short(tool)} times out: {len(rollouts):,} calls in {len(names)} of "
            f"{len(facts.looked)} rollouts that were looked at.",
            "share": len(names) / len(facts.looked),
            **shown_rollouts(rollouts),
        }


def _is_late(each: StoryRollout) -> bool:
    if failed(each):
        return each.error_phase == "timeout" or _is_time(each.error_type or "")
    return each.truncation_reason == "time_limit"


def _is_time(kind: str) -> bool:
    return "timeout" in kind.lower() or "timelimit" in kind.lower()


def empty_answers(facts: Facts) -> Cases:
    """Answers that say nothing and earn as much reward as others."""
    rewards = [each.reward for each in facts.rollouts if each.reward is not None]
    empty = [each.rollout for each in facts.looked if each.is_empty and each.rollout.reward]
    if len(empty) < 2 or not rewards:
        return
    mean, mean_of_all = fmean(each.reward or 0.0 for each in empty), fmean(rewards)
    # Silence may be the right answer now and then; as good as speech on average it is a hole in the
    # reward.
    if mean > 0 and mean >= mean_of_all:
        yield {
            "num": len(empty),
            "num_read": len(facts.looked),
            "mean": mean,
            "mean_of_all": mean_of_all,
            "phase": facts.phase,
            **shown_rollouts(empty),
        }


_WHY = {
    "reasoning_stripped": "the chat template strips the reasoning of earlier turns",
    "retokenized": "earlier answers are tokenized anew",
    "system_or_tools_changed": "the system message or the tools change within a rollout",
    "history_rewritten": "earlier messages are rewritten",
    "compaction": "history is summarized or dropped",
}


def breaks(facts: Facts) -> Cases:
    """Prompts that do not extend what came before, by cause."""
    num_later = sum(each.num_later_calls for each in facts.looked)
    for cause, why in _WHY.items():
        series = f"samples/breaks/{cause}"
        logged = [value for _, value in facts.series(series)]
        seen = [
            (each.rollout, call, position)
            for each in facts.looked
            for call, position, found in each.breaks
            if found == cause
        ]
        share = len(seen) / num_later if num_later else 0.0
        if logged:  # all calls of the run, not of the rollouts that were looked at
            share = sum(logged) / len(facts.steps)
        if share < LEAST_BREAKS:
            continue
        case: dict[str, Any] = {"series": series}
        if seen:
            rollout, call, position = seen[-1]
            case = {"view": "tokens", **shown_rollouts([rollout])}
            case |= {"call": call, "position": position}
        yield {"percent": percent(share), "cause": cause, "why": why, **case}


_SEVERITY: Mapping[Trend, str] = {"rises": "good", "is flat": "warning", "falls": "error"}


def reward_trend(facts: Facts) -> Cases:
    """Whether the reward of training rises, and still does."""
    by_step = facts.group_rewards()
    steps = sorted(by_step)
    if len(steps) < 4:
        return
    # Quarters of a long run, halves of a short one: a single step is too noisy to compare.
    size = len(steps) // (4 if len(steps) >= 8 else 2)
    spans = [steps[:size], steps[-2 * size : -size], steps[-size:]]
    first, before, last = ([g for step in span for g in by_step[step].values()] for span in spans)
    began, ended = group_estimate(first), group_estimate(last)
    if began is None or ended is None:
        return
    change, recent = mean_change(first, last), mean_change(before, last)
    now = ""
    if len(steps) >= 8:
        verb = "still rises" if trend(recent) == "rises" else trend(recent)
        bounds = f"{recent[0]:+.2g} [{recent[1]:+.2g}, {recent[2]:+.2g}]"
        now = f" At the end it {verb}: {bounds} beside the {size} steps before."
    highest = max(each for group in last for each in group)
    severity = _SEVERITY[trend(change)]
    if severity == "warning" and (len(steps) < 8 or ended.mean >= 0.9 * highest > 0):
        severity = "info"  # too early to say, or there is not much to gain
    yield {
        "trend": trend(change),
        "began": interval_text(began.mean, began.low, began.high),
        "ended": interval_text(ended.mean, ended.low, ended.high),
        "first_steps": steps_of(spans[0][0], spans[0][-1]),
        "last_steps": steps_of(spans[2][0], spans[2][-1]),
        "now": now,
        "severity": severity,
        "steps": [steps[0], steps[-1]],
    }


def sampled(facts: Facts) -> Cases:
    """That numbers are those of a sample."""
    if facts.num_sampled_of is not None:
        num = len(facts.rollouts)
        yield {"num": num, "num_of": facts.num_sampled_of, "phase": facts.phase}
