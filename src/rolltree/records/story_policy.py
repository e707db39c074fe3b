"""Conditions of the narrator on series of numbers: drift, entropy, KL, staleness, evaluations."""

from __future__ import annotations

import math
from statistics import fmean, median

from rolltree.records.story_facts import Facts
from rolltree.records.story_rollouts import Cases
from rolltree.records.story_words import interval_text, percent, short, steps_of
from rolltree.records.trends import jump, mean_change, trend

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
