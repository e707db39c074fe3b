"""Conditions of the narrator: what is worth telling of rollouts, and of series of numbers."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rolltree.records.story_facts import Facts, StoryRollout
from rolltree.records.trends import (
    LEAST_STEPS,
    Trend,
    consecutive,
    ends,
    group_estimate,
    growth,
    jump,
    level_change,
    mean_change,
    ratio_of,
    since,
    trend,
)

Cases = Iterator[dict[str, Any]]
ByStep = Mapping[int, Mapping[str, list[float]]]

LEAST_SPAN = 2  # steps without reward variance, one after the other, that are worth a sentence
LEAST_SHARE = 0.2  # of rollouts that end at a limit: it is told from here on
LEAST_BREAKS = 0.05
# Nats per token by which engine and trainer must differ after a jump, and from the beginning on;
# 16-bit engines differ by about 0.01.
LEAST_DRIFT = 0.02
LEAST_CONSTANT_DRIFT = 0.05
# Nats per token, and the share of the first steps' entropy, to which it must have fallen. A choice
# of two with 0.05 nats is 99 to 1; runs that learn to answer well end at 0.1 to 0.3.
LEAST_ENTROPY, ENTROPY_RATIO = 0.05, 5
# Nats per token at which KL is told if the reward falls, and if it does not rise. To go from 14 %
# right to 87 % takes 1.3 nats in a whole rollout, whatever its length (the KL of the answers'
# distributions bounds that of being right); at 1 nat each token is 2.7 times as likely as before.
LEAST_KL, RUNAWAY_KL = 0.1, 1.0
# Share of the rewards' range below which there is more to earn. Some questions of most tasks cannot
# be solved, so a flat reward is told of from a lower share on than a policy without variety.
UNSOLVED, UNSOLVED_FLAT = 0.9, 0.7
# Share of groups without variance from which on most of what is played teaches nothing.
MANY_FLAT = 0.7
# Times: of what a number was, from which on it is another number.
LONGER, LONGER_WITH_REWARD, SLOWER, STEEPER = 4.0, 10.0, 5.0, 30.0
# Effective sample size, as a share.
LEAST_ESS = 0.3
LEAST_WAIT_MS = 60_000.0
LEAST_SLOW_S = 2.0
# Share of rollouts below which what befalls them is told, and alarms nobody.
FEW = 0.01
# A limit of so few tokens is part of the task: an answer of one letter, a choice of four.
SHORT_LIMIT = 16
# Unpaid metrics whose fall is no loss: what something costs, or how often it goes wrong.
_COST = re.compile(
    r"err|fail|wrong|invalid|penal|cost|len|turn|call|token|tr(y|ies)|trunc|hint|repe|viol|time|step"
    r"|loss|entropy|kl|num_|count|word|char|size|toxi|refus|miss|depth|latency|cheat|hack|bad|dup"
)
# And those that a policy is trained for, whatever it is paid for.
_AIM = re.compile(r"correct|accura|exact|solved?|success|passed|right|match|win|goal")
_LEVEL = re.compile(r"level|difficult|stage|curricul")
NAME_LENGTH = 60


# -- rollouts: groups, endings, failures, tools, breaks, rewards -----------------------------------


def zero_variance(facts: Facts) -> Cases:
    """Steps in which all groups' rewards were equal."""
    flat = [step for step, share in _flat_shares(facts) if share >= 0.999]
    known = [each.reward for each in facts.rollouts if each.reward is not None]
    best, worst = max(known, default=0.0), min(known, default=0.0)
    spans = [
        (first, last)
        for first, last in consecutive(flat, list(facts.steps))
        if last - first + 1 >= min(LEAST_SPAN, len(facts.steps))
    ]
    # The last span: a run that began flat and learned later is not told of its beginning for ever.
    for first, last in spans[-1:]:
        rows = [each for each in facts.rollouts if first <= (each.train_step or 0) <= last]
        rewards = Counter(each.reward for each in rows if each.reward is not None)
        norms = [value for step, value in facts.series("train/grad_norm") if first <= step <= last]
        # A gradient without reward variance comes from a KL term or an entropy bonus.
        is_idle = not any(norms)
        # The best of a run that had worse ones, or everything right from its first step on; a
        # reward that is 0.5 whatever happens is neither.
        is_solved = set(rewards) == {best} and (best > worst or best == 1)
        # Rare rewards leave whole steps without any: a run that learns later was not broken.
        is_over = last < max(facts.steps, default=last) and reward_moves(facts) == "rises"
        is_fine = is_solved or is_over or _is_solved(facts, UNSOLVED_FLAT)
        more = f", and in {len(spans) - 1} spans before" if len(spans) > 1 else ""
        yield {
            "span": steps_of(first, last) + more,
            "so": "so there was nothing left to learn"
            if is_solved
            else "so nothing was learned"
            if is_idle
            else "so rewards taught nothing",
            "rewards": f": all {sum(rewards.values()):,} rewards were {next(iter(rewards)):g}"
            if len(rewards) == 1
            else "",
            "severity": "info" if is_fine else "error" if is_idle else "warning",
            "phase": facts.phase,
            "steps": [first, last],
            "step": last,
        }


def flat_groups(facts: Facts) -> Cases:
    """Most groups, and not all, without reward variance, while there is more to earn."""
    shares = _flat_shares(facts)
    if len(shares) < 4:
        return
    _, at = ends(len(shares))
    last = shares[at:]
    share = fmean(value for _, value in last)
    num_all = sum(value >= 0.999 for _, value in last)
    # Rare rewards make flat groups and are learned from all the same; a solved task makes them too.
    is_fine = _is_solved(facts, UNSOLVED_FLAT) or reward_moves(facts) == "rises"
    if share < MANY_FLAT or num_all == len(last) or is_fine:
        return
    yield {
        "percent": percent(share),
        "span": steps_of(last[0][0], last[-1][0]),
        "phase": facts.phase,
        "steps": [last[0][0], last[-1][0]],
        "step": last[-1][0],
    }


def _is_solved(facts: Facts, least: float = UNSOLVED) -> bool:
    """Whether the last steps earn nearly the best reward that the run has seen."""
    by_step = facts.group_rewards()
    known = [each for groups in by_step.values() for group in groups.values() for each in group]
    if not known:
        return False
    _, at = ends(len(by_step))
    last = [fmean(group) for step in sorted(by_step)[at:] for group in by_step[step].values()]
    best, worst = max(known), min(known)
    return best > worst and fmean(last) >= worst + least * (best - worst)


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
    case: dict[str, Any] = {
        "share": share,
        "is_new": at > 0 and before < share / 2,
        "percent": percent(share),
        "phase": facts.phase,
    }
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


def max_tokens(facts: Facts) -> Cases:
    """Rollouts that ran into their limit of tokens."""
    limit = "" if facts.max_tokens is None else f" ({facts.max_tokens})"
    is_short = facts.max_tokens is not None and facts.max_tokens <= SHORT_LIMIT
    found = share_of(hit_max_tokens, facts, where="finish_reason = length", least=LEAST_SHARE)
    for case in found:
        yield {**case, "words": limit, "severity": _of_limit(facts, hit_max_tokens, case, is_short)}


def _of_limit(
    facts: Facts, holds: Callable[[StoryRollout], bool], case: Mapping[str, Any], is_meant: bool
) -> str:
    """Return how bad a limit is: one that is hit more and more, or that costs reward."""
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for each in facts.rollouts:
        if each.reward is not None:
            rewards[holds(each)].append(each.reward)
    hit, free = rewards[True], rewards[False]
    if case["is_new"]:
        return "info" if is_meant else "error"
    if hit and free:
        # Answers that were cut earn less, by more than chance.
        costs = mean_change([[each] for each in free], [[each] for each in hit])[2] < 0
        return "error" if costs and not is_meant else "info"
    return "info" if is_meant or _is_solved(facts) or reward_moves(facts) == "rises" else "error"


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
            severity = "warning" if _of_limit(facts, is_cut, case, False) == "error" else "info"
            yield {**case, "reason": short(reason), "severity": severity}


def unscored(facts: Facts) -> Cases:
    """Rollouts that ended well and that nothing scored."""
    # A run without any reward has no rubric: that is told by its numbers.
    if facts.phase != "train" and all(each.reward is None for each in facts.rollouts):
        return
    yield from share_of(is_unscored, facts, where="status = ok and reward = none")


def is_unscored(rollout: StoryRollout) -> bool:
    """Whether a rollout should have a reward and has none."""
    return rollout.status == "ok" and rollout.reward is None and not rollout.parent_rollout


def waits(facts: Facts) -> Cases:
    """Minutes in which nothing happened: a judge that does not answer, a step that cannot begin."""
    slow = [each for each in facts.rollouts if each.scoring_ms >= LEAST_WAIT_MS]
    if slow:
        longest = max(slow, key=lambda each: each.scoring_ms)
        steps = sorted({each.train_step for each in slow if each.train_step is not None})
        yield {
            "text": f"Scoring takes minutes: {len(slow):,} of {len(facts.rollouts):,} rollouts "
            f"waited {longest.scoring_ms / 60_000:.1f} min at most for their reward"
            f"{f', from step {steps[0]} on' if steps else ''}.",
            "phase": facts.phase,
            **shown_rollouts([longest]),
        }
    elif facts.waits:
        yield {
            "text": f"The run does not go on: {short(facts.waits[-1], 300)}",
            "view": "rollouts",
            "phase": facts.phase,
        }


def tools(facts: Facts) -> Cases:
    """Tools that raise in most rollouts at the end."""
    last = [each for each in facts.looked if each.num_tools or each.tool_errors]
    names = {tool for each in last for tool, kind in each.tool_errors if not is_time(kind)}
    for tool in sorted(names):
        raised = [any(name == tool for name, _ in each.tool_errors) for each in last]
        at = since([(int(each), 1) for each in raised])
        share, before = fmean(raised[at:]), fmean(raised[:at]) if at else 0.0
        # A model learns to call a tool rightly; one that fails whoever calls it does not become
        # better.
        if share < 0.5 or share < before or len(raised[at:]) < 3:
            continue
        rows = [each.rollout for each, bad in zip(last[at:], raised[at:], strict=True) if bad]
        kinds = Counter(k for each in last for name, k in each.tool_errors if name == tool)
        step = last[at].rollout.train_step
        yield {
            "tool": short(tool),
            "percent": percent(share),
            "error": short(kinds.most_common(1)[0][0]),
            "since": f" since step {step} ({percent(before)} before)" if at and step else "",
            "phase": facts.phase,
            **shown_rollouts(rows),
        }


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
            if is_time(kind):
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
        return each.error_phase == "timeout" or is_time(each.error_type or "")
    return each.truncation_reason == "time_limit"


def is_time(kind: str) -> bool:
    """Whether a kind of error says that time ran out."""
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
# An environment that does it says so in its code; a template does it behind its back.
_MEANT = ("compaction", "history_rewritten")


def breaks(facts: Facts) -> Cases:
    """Prompts that do not extend what came before, by cause."""
    num_later = sum(each.num_later_calls for each in facts.looked)
    # Of all rollouts if it is logged, and the causes of those that were looked at, which are read
    # with a tokenizer as the page reads them.
    logged = facts.average("samples/break_rate")
    num_seen = sum(len(each.breaks) for each in facts.looked)
    for cause, why in _WHY.items():
        series = f"samples/breaks/{cause}"
        seen = [
            (each.rollout, call, position)
            for each in facts.looked
            for call, position, found in each.breaks
            if found == cause
        ]
        share = len(seen) / num_later if num_later else 0.0
        if not num_seen:
            share = facts.average(series)
        elif logged:
            share = logged * len(seen) / num_seen
        if share < LEAST_BREAKS:
            continue
        case: dict[str, Any] = {"series": series} if facts.series(series) else {}
        if seen:
            rollout, call, position = seen[-1]
            case |= {"view": "tokens", **shown_rollouts([rollout])}
            case |= {"call": call, "position": position}
        severity = "info" if cause in _MEANT else "warning"
        yield {"percent": percent(share), "why": why, "severity": severity, **case}


_SEVERITY: Mapping[Trend, str] = {"rises": "good", "is flat": "warning", "falls": "error"}


def reward_moves(facts: Facts) -> Trend:
    """Return whether the reward rises from the beginning of the run to its end."""
    by_step = facts.group_rewards()
    steps = sorted(by_step)
    if len(steps) < 4:
        return "is flat"
    size, last = ends(len(steps))
    return trend(mean_change(*(_of_steps(by_step, part) for part in (steps[:size], steps[last:]))))


def _of_steps(by_step: ByStep, steps: Sequence[int]) -> list[list[float]]:
    return [group for step in steps for group in by_step.get(step, {}).values()]


def reward_trend(facts: Facts) -> Cases:
    """Whether the reward of training rises, and still does."""
    by_step = facts.group_rewards()
    steps = sorted(by_step)
    if len(steps) < 4:
        return
    # Quarters of a long run, halves of a short one: a single step is too noisy to compare.
    size, at = ends(len(steps))
    spans = [steps[:size], steps[at - size : at], steps[at:]]
    first, before, last = (_of_steps(by_step, span) for span in spans)
    began, ended = group_estimate(first), group_estimate(last)
    if began is None or ended is None:
        return
    change, recent = mean_change(first, last), mean_change(before, last)
    now = ""
    if len(steps) >= LEAST_STEPS:
        verb = "still rises" if trend(recent) == "rises" else trend(recent)
        bounds = f"{recent[0]:+.2g} [{recent[1]:+.2g}, {recent[2]:+.2g}]"
        now = f" At the end it {verb}: {bounds} beside the {size} steps before."
    yield {
        "trend": trend(change),
        "began": interval_text(began.mean, began.low, began.high),
        "ended": interval_text(ended.mean, ended.low, ended.high),
        "first_steps": steps_of(spans[0][0], spans[0][-1]),
        "last_steps": steps_of(spans[2][0], spans[2][-1]),
        "now": now + (" The questions became harder meanwhile." if _is_curriculum(facts) else ""),
        "severity": _reward_severity(facts, change),
        "steps": [steps[0], steps[-1]],
    }


def _reward_severity(facts: Facts, change: tuple[float, float, float]) -> str:
    found = _SEVERITY[trend(change)]
    known = [each.reward for each in facts.rollouts if each.reward is not None]
    # An interval that holds a rise worth having says that it is too early, and not that it is flat.
    is_open = change[2] > 0.25 * (max(known) - min(known)) > 0
    by_step = facts.group_rewards()
    is_early = len(by_step) < LEAST_STEPS
    # In a game against oneself one wins what the other loses, and the mean stays where it is.
    means = [fmean(group) for step in by_step for group in by_step[step].values()]
    is_early |= max(known) > min(known) and max(means) - min(means) < 1e-9
    if found == "warning" and (is_open or is_early or _is_solved(facts, UNSOLVED_FLAT)):
        return "info"
    # What is earned of harder questions does not compare with what was earned of easy ones.
    return "info" if found != "good" and _is_curriculum(facts) else found


def _is_curriculum(facts: Facts) -> bool:
    """Whether the questions of the end are others than those of the beginning, and harder."""
    for name in facts.names("metrics/"):
        values = [value for _, value in facts.series(name)]
        if _LEVEL.search(name.lower()) and len(values) >= 4 and level_change(values)[2][1] > 0:
            return True
    by_task = facts.task_rewards()
    steps = sorted(facts.group_rewards())
    size, at = ends(len(steps))
    first, last = (
        {task for task, by_step in by_task.items() if by_step.keys() & set(span)}
        for span in (steps[:size], steps[at:])
    )
    return bool(first and last) and not first & last


def collapse(facts: Facts) -> Cases:
    """Rewards that were earned, and are not any more: the last steps have only the worst one."""
    by_step = facts.group_rewards()
    steps = sorted(by_step)
    known = [each for groups in by_step.values() for group in groups.values() for each in group]
    if len(steps) < 4 or max(known) == min(known) or _is_curriculum(facts):
        return
    worst = min(known)
    pairs = []
    for step in steps:
        groups = by_step[step].values()
        pairs.append((sum(max(group) > worst for group in groups), len(groups)))
    at = since(pairs)
    if not at or ratio_of(pairs[at:]) > 0.1 * ratio_of(pairs[:at]):
        return
    means = [fmean(map(fmean, _of_steps(by_step, part))) for part in (steps[:at], steps[at:])]
    yield {
        "first": steps[at],
        "before": f"{means[0]:.2g}",
        "after": f"{means[1]:.2g}",
        "steps": [steps[at], steps[-1]],
    }


def tasks(facts: Facts) -> Cases:
    """One task of several that gets worse, which the mean over all hides."""
    by_task, steps = facts.task_rewards(), sorted(facts.group_rewards())
    for task, by_step in by_task.items():
        size, at = ends(len(steps))
        first, last = (_of_steps(by_step, part) for part in (steps[:size], steps[at:]))
        if min(len(first), len(last)) < 3:
            continue
        began, ended = fmean(map(fmean, first)), fmean(map(fmean, last))
        known = [each for step in by_step for each in by_step[step].values()]
        worst = min(min(group) for group in known)
        # By half of what it earned, and by more than the worst of several tasks does by chance.
        change = mean_change(first, last, confidence=1 - 0.05 / len(by_task))
        if trend(change) == "falls" and ended - worst <= 0.5 * (began - worst):
            yield {
                "task": short(task),
                "began": f"{began:.3g}",
                "ended": f"{ended:.3g}",
                "first_steps": steps_of(steps[0], steps[size - 1]),
                "last_steps": steps_of(steps[at], steps[-1]),
                "phase": facts.phase,
                "where": f"{equals('task', task)} and train_step >= {steps[at]}",
            }


# -- what is paid against what is wanted -----------------------------------------------------------


def gaming(facts: Facts) -> Cases:
    """A function or a metric that falls while the reward rises."""
    if reward_moves(facts) != "rises":
        return
    paid = {name: weight for name, weight in facts.weights.items() if weight}
    most = max(paid.values(), default=0.0)
    for series in facts.names("metrics/"):
        name = series.removeprefix("metrics/")
        points = facts.series(series)
        values = [value for _, value in points]
        if len(values) < 4:
            continue
        began, ended, change = level_change(values)
        is_main = paid.get(name, 0.0) >= 0.5 * most > 0
        is_share = min(values) >= 0.0 and max(values) <= 1.0 and not _COST.search(name.lower())
        # A small part of a reward is traded for a large one as its weights say; what nobody pays
        # counts if it reads like a share of something good.
        if not (is_main or (name not in paid and is_share)):
            continue
        if trend(change) != "falls" or ended > 0.75 * began > 0:
            continue
        rewards = facts.reward_means([step for step, _ in points])
        size, at = ends(len(points))
        yield {
            "name": short(name),
            "what": "the reward function" if name in paid else "the metric",
            "began": f"{began:.2g}",
            "ended": f"{ended:.2g}",
            "reward_began": f"{fmean(rewards[:size]):.2g}",
            "reward_ended": f"{fmean(rewards[at:]):.2g}",
            "severity": "error" if is_main or ended <= 0.5 * began else "warning",
            "series": series,
            "beside": "reward/mean",
            "steps": [points[0][0], points[-1][0]],
        }


def form(facts: Facts) -> Cases:
    """A reward that rises by the form of answers alone, while what is wanted does not."""
    if reward_moves(facts) != "rises":
        return
    changes = {}
    for series in facts.names("metrics/"):
        values = [value for _, value in facts.series(series)]
        if len(values) >= 4:
            changes[series.removeprefix("metrics/")] = level_change(values)
    paid = {name: w for name, w in facts.weights.items() if w > 0 and name in changes}
    gained = {name: w * (changes[name][1] - changes[name][0]) for name, w in paid.items()}
    most = max(paid.values(), default=0.0)
    aims = [
        name for name in changes if _AIM.search(name.lower()) and not _COST.search(name.lower())
    ]
    for name in dict.fromkeys([*(n for n in paid if paid[n] == most and len(paid) > 1), *aims]):
        began, ended, change = changes[name]
        best = max(gained, key=gained.__getitem__, default=name)
        # It had room to rise and rose little or not at all, as far as its noise can say, while
        # another function earned what was gained.
        if best == name or _AIM.search(best.lower()) or ended > UNSOLVED_FLAT:
            continue
        other = changes[best][1] - changes[best][0]
        if trend(change) != "is flat" or change[0] > 0.25 * other or change[2] > 0.5 * other:
            continue
        yield {
            "name": short(name),
            "best": short(best),
            "began": f"{began:.2g}",
            "ended": f"{ended:.2g}",
            "best_began": f"{changes[best][0]:.2g}",
            "best_ended": f"{changes[best][1]:.2g}",
            "series": f"metrics/{name}",
            "beside": f"metrics/{best}",
        }


def sampled(facts: Facts) -> Cases:
    """That numbers are those of a sample."""
    if facts.num_sampled_of is not None:
        num = len(facts.rollouts)
        yield {"num": num, "num_of": facts.num_sampled_of, "phase": facts.phase}


# -- series of numbers: drift, entropy, KL, staleness, evaluations ---------------------------------


def not_finite(facts: Facts) -> Cases:
    """Numbers of the optimizer that are none."""
    found = {name: step for name, step in facts.not_finite.items() if name.startswith("train/")}
    if found:
        first = min(found.values())
        name = min(name for name, step in found.items() if step == first)
        yield {"name": name, "first": first, "series": name, "steps": [first, max(facts.steps)]}


def gradient(facts: Facts) -> Cases:
    """A gradient that explodes: for good, or in single steps."""
    series = [(step, value) for step, value in facts.series("train/grad_norm") if value > 0]
    values = [value for _, value in series]
    if len(values) < 4:
        return
    found, middle = growth(values, factor=STEEPER), median(values)
    first, size = None, 0.0
    if found is not None:
        first, middle, size = series[found.at][0], found.before, found.after
    elif max(values) >= STEEPER**2 * middle:
        first, size = max(series, key=lambda each: each[1])
    if first is not None:
        last = series[-1][0] if found else first
        # Small gradients may grow large without harm: the optimizer divides by their size.
        yield {"first": first, "size": size, "before": middle, "steps": [first, last]}


def ess(facts: Facts) -> Cases:
    """Importance weights so uneven that a few tokens make the update."""
    series = facts.series("ratio/ess")
    if len(series) < 2:
        return
    _, at = ends(len(series))
    level = median(value for _, value in series[at:])
    if level < LEAST_ESS:
        yield {
            "percent": percent(level),
            "severity": "error" if level < 0.1 else "warning",
            "steps": [series[at][0], series[-1][0]],
        }


def length(facts: Facts) -> Cases:
    """Answers that become many times as long, and earn no more for it."""
    series = facts.series("train/completions/mean_length")
    if len(series) < 4:
        return
    least = LONGER_WITH_REWARD if reward_moves(facts) == "rises" else LONGER
    found = growth([max(value, 1.0) for _, value in series], factor=least)
    if found is not None:
        yield {
            "factor": found.factor,
            "before": found.before,
            "after": found.after,
            "first": series[found.at][0],
            "steps": [series[found.at][0], series[-1][0]],
        }


def slow(facts: Facts) -> Cases:
    """Steps that take many times as long as before."""
    series = facts.series("time/step")
    values = [max(value, 1e-3) for _, value in series]
    found = growth(values, factor=SLOWER) if len(values) >= 4 else None
    if found is None or found.after < LEAST_SLOW_S:
        return
    lengths = [value for _, value in facts.series("rollout/total_sampled_tokens")]
    first = series[found.at][0]
    if len(lengths) == len(values):
        more = median(lengths[found.at :]) / max(1.0, median(lengths[: found.at]))
        # Longer answers take longer: that is told by their length.
        if found.factor < SLOWER / 2 * more:
            return
    parts = {}
    for name in ("time/wait_for_batch", "time/train_s", "time/broadcast_weights"):
        late = [value for step, value in facts.series(name) if step >= first]
        parts[name] = median(late) if late else 0.0
    part = max(parts, key=parts.__getitem__)
    said = f", most of it {_PARTS[part]}" if parts[part] > 0.5 * found.after else ""
    yield {
        "factor": found.factor,
        "before": found.before,
        "after": found.after,
        "first": first,
        "part": said,
        "steps": [first, series[-1][0]],
    }


_PARTS = {
    "time/wait_for_batch": "waiting for rollouts",
    "time/train_s": "training",
    "time/broadcast_weights": "handing over weights",
}


def drift(facts: Facts) -> Cases:
    """Engine and trainer disagree on what was sampled."""
    name = "train/sampling/sampling_logp_difference/mean"
    series = facts.series(name)
    if not series:
        return
    values = [value for _, value in series]
    # In logarithms: a jump from 0.001 to 0.01 is as large as one from 0.01 to 0.1.
    at = jump([math.log(max(value, 1e-7)) for value in values])
    before, after = values[:at], values[at:]
    low = median(before) if before else 0.0
    high = median(after)
    if before and high >= 10 * low and high >= LEAST_DRIFT:
        first, were = series[at][0], f" ({low:.2g} before)"
    elif median(values) >= LEAST_CONSTANT_DRIFT:
        first = next(step for step, value in series if value >= LEAST_DRIFT)
        were, high = "", median(values)
    else:
        at, middle = max(range(len(values)), key=values.__getitem__), median(values)
        if values[at] >= max(LEAST_CONSTANT_DRIFT, 10 * middle) and len(values) >= 4:
            step = series[at][0]
            words = {"since": f"in step {step}", "size": values[at]}
            words |= {"before": f" ({middle:.2g} otherwise)", "steps": [step, step]}
            yield {"series": name, **words}
        return
    yield {
        "since": f"since step {first}",
        "size": high,
        "before": were,
        "series": name,
        "steps": [first, series[-1][0]],
    }


def staleness(facts: Facts) -> Cases:
    """How old tokens are when they are trained."""
    lags = [value for _, value in facts.series("train/lag_mean")]
    if not lags or fmean(lags) < 0.05:
        return
    most = max((value for _, value in facts.series("async/lag_max")), default=None)
    stale = [value for _, value in facts.series("async/stale_share")]
    share = fmean(stale) if stale else 0.0
    yield {
        "lag": fmean(lags),
        "share": share,
        "most": "" if most is None else f", {most:g} at most",
        "stale": f"; {percent(share)} were too old to be trained" if share else "",
    }


def entropy(facts: Facts) -> Cases:
    """The policy hardly varies any more, and there is more to earn."""
    name = "train/entropy" if facts.series("train/entropy") else "rollout/entropy"
    series = facts.series(name)
    size = len(series) // 4
    if len(series) < LEAST_STEPS:
        return
    values = [value for _, value in series]
    few = max(2, len(values) // 8)
    before, after = median(values[:size]), median(values[-few:])
    if after > LEAST_ENTROPY or after * ENTROPY_RATIO > before:
        return
    rewards = [each.reward for each in facts.rollouts if each.reward is not None]
    last = [
        reward for groups in _rewards(facts, series[-size][0], series[-1][0]) for reward in groups
    ]
    said = ""
    if rewards and last:
        best, worst = max(rewards), min(rewards)
        if fmean(last) >= worst + UNSOLVED * (best - worst):
            # Solved: there is nothing more to try.
            return
        said = f" The mean reward is {fmean(last):.3g}, the best {best:.3g}."
    at = next(
        i
        for i, value in enumerate(values)
        if max(value, median(values[i : i + few])) <= LEAST_ENTROPY
    )
    yield {
        "first": series[at][0],
        "after": after,
        "before": before,
        "rewards": said,
        "series": name,
        "steps": [series[at][0], series[-1][0]],
    }


def kl(facts: Facts) -> Cases:
    """The policy moves away from the reference, and earns no more or less for it."""
    series = facts.series("train/kl")
    size = len(series) // 4
    if len(series) < LEAST_STEPS:
        return
    parts = [series[at : at + size] for at in (0, size, 2 * size, len(series) - size)]
    levels = [median(value for _, value in part) for part in parts]
    rewards = [_rewards(facts, part[0][0], part[-1][0]) for part in parts]
    if not all(rewards):
        return
    means = [fmean(map(fmean, groups)) for groups in rewards]
    at = max(range(3), key=means.__getitem__)
    first, last = parts[at], parts[3]
    falls = trend(mean_change(rewards[at], rewards[3])) == "falls"
    if falls and levels[3] >= max(LEAST_KL, 2 * levels[at]):
        yield {
            "text": "The policy moves away from the reference and earns less: the KL went from "
            f"{levels[at]:.2g} to {levels[3]:.2g} nats per token and the reward from "
            f"{means[at]:.3g} to {means[3]:.3g}, from {steps_of(first[0][0], first[-1][0])} to "
            f"{steps_of(last[0][0], last[-1][0])}.",
            "severity": "error",
            "steps": [first[0][0], last[-1][0]],
        }
        return
    # A reward that rose since the beginning, or that still does, is what the KL was spent on.
    for at in (0, 2):
        rises = trend(mean_change(rewards[at], rewards[3])) == "rises"
        if rises or levels[3] < max(RUNAWAY_KL, 1.5 * levels[at]):
            continue
        first = parts[at]
        yield {
            "text": f"The KL to the reference grows and the reward does not: {levels[at]:.2g} nats "
            f"per token in {steps_of(first[0][0], first[-1][0])}, {levels[3]:.2g} in "
            f"{steps_of(last[0][0], last[-1][0])}.",
            "severity": "warning",
            "steps": [first[0][0], last[-1][0]],
        }
        return


def _rewards(facts: Facts, first: int, last: int) -> list[list[float]]:
    """Return the rewards of each group of some steps."""
    by_step = facts.group_rewards()
    return [
        rewards
        for step, groups in by_step.items()
        if first <= step <= last
        for rewards in groups.values()
    ]


_SHARED = re.compile(r"(\d+) of (\d+) evaluation questions are also training questions")


def shared_questions(facts: Facts) -> Cases:
    """Held-out questions that are trained on."""
    for num, num_of in _shared(facts)[:1]:
        yield {"num": num, "num_of": num_of, "all": "All" if num == num_of else f"{num} of"}


def _shared(facts: Facts) -> list[tuple[int, int]]:
    found = [match for each in facts.notices if (match := _SHARED.match(each))]
    return [(int(match[1]), int(match[2])) for match in found]


def held_out_change(facts: Facts) -> Cases:
    """The first and the last held-out evaluation."""
    found = [each for each in facts.evaluations if each.reward is not None]
    if len(found) < 2 or found[0].step == found[-1].step:
        return
    sides = [(each.reward, *(each.interval or (None, None))) for each in (found[0], found[-1])]
    (_, low, high), (_, new_low, new_high) = sides
    # Intervals that do not touch: stricter than a test of the difference, and seen in the curve.
    verb, severity = "does not clearly differ", "info"
    if new_low is not None and high is not None and new_low > high:
        verb, severity = "rose", "good"
    if new_high is not None and low is not None and new_high < low:
        verb, severity = "fell", "error"
    began, ended = (interval_text(*side) for side in sides)
    shared = _shared(facts)
    is_known = any(num == num_of for num, num_of in shared)
    yield {
        "verb": verb,
        # A rise on questions that were trained is no sign of learning more than them.
        "severity": "info" if shared and severity == "good" else severity,
        "what": "On its training questions" if is_known else "Held out",
        "began": began,
        "ended": ended,
        "first": found[0].step,
        "last": found[-1].step,
    }


def ended(facts: Facts) -> Cases:
    """The error that the run ended with."""
    if facts.error is not None:
        yield {"error": short(facts.error, 300)}


# -- words -----------------------------------------------------------------------------------------


def steps_of(first: int, last: int) -> str:
    """Return `steps 3 to 7`, or `step 3`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def interval_text(mean: float | None, low: float | None, high: float | None) -> str:
    """Return a mean with its interval if there is one: `0.5 [0.4, 0.6]`."""
    return f"{mean:.3g}" if low is None or high is None else f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def percent(share: float) -> str:
    """Return a share as `38 %`."""
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.2g} %"


def short(text: str | None, limit: int = NAME_LENGTH) -> str:
    """Return a text that a run wrote, in one line and cut where it is long."""
    said = " ".join(str(text).split())
    return said if len(said) <= limit else said[: limit - 1] + "…"


def equals(column: str, text: str | None) -> str:
    """Return the condition that a column is this text, for `where`.

    A text with both kinds of quotes cannot be written there: then it is that there is a text.
    """
    quote = next((each for each in "\"'" if each not in str(text)), None)
    return f"{column} != none" if quote is None else f"{column} = {quote}{text}{quote}"


def shown_rollouts(rollouts: Sequence[StoryRollout]) -> dict[str, Any]:
    """Return the first of some rollouts as evidence, with the names of the first ten."""
    return {
        "request_id": rollouts[0].request_id,
        "trajectory_index": rollouts[0].trajectory_index,
        "rollouts": [[each.request_id, each.trajectory_index] for each in rollouts[:10]],
    }
