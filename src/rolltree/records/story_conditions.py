"""Conditions of the narrator: what is worth telling of rollouts, and of series of numbers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rolltree.records.story_facts import Facts, StoryRollout
from rolltree.records.trends import (
    Trend,
    consecutive,
    group_estimate,
    jump,
    mean_change,
    ratio_of,
    since,
    trend,
)

Cases = Iterator[dict[str, Any]]

LEAST_SPAN = 2  # steps without reward variance, one after the other, that are worth a sentence
LEAST_SHARE = 0.2  # of rollouts that end at a limit: it is told from here on
LEAST_BREAKS = 0.05
# Nats per token by which engine and trainer must differ after a jump, and from the beginning on;
# 16-bit engines differ by about 0.01.
LEAST_DRIFT = 0.02
LEAST_CONSTANT_DRIFT = 0.05
# Steps from which on quarters of a run are compared.
LEAST_STEPS = 8
# Nats per token, and the share of the first steps' entropy, to which it must have fallen. A choice
# of two with 0.05 nats is 99 to 1; runs that learn to answer well end at 0.1 to 0.3.
LEAST_ENTROPY, ENTROPY_RATIO = 0.05, 5
# Nats per token at which KL is told if the reward falls, and if it does not rise. To go from 14 %
# right to 87 % takes 1.3 nats in a whole rollout, whatever its length (the KL of the answers'
# distributions bounds that of being right); at 1 nat each token is 2.7 times as likely as before.
LEAST_KL, RUNAWAY_KL = 0.1, 1.0
# Share of the rewards' range below which there is more to earn.
UNSOLVED = 0.9
NAME_LENGTH = 60


# -- rollouts: groups, endings, failures, tools, breaks, rewards -----------------------------------


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


# -- series of numbers: drift, entropy, KL, staleness, evaluations ---------------------------------


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
        first, were, high = series[0][0], "", median(values)
    else:
        return
    yield {
        "first": first,
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
    before, after = median(values[:size]), median(values[-size:])
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
        if max(value, median(values[i : i + size])) <= LEAST_ENTROPY
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
    yield {
        "verb": verb,
        "severity": severity,
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
