"""What the narrator tells of the policy: drift of the engine, entropy, KL, staleness."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, median

from rolltree.records.story_facts import Facts
from rolltree.records.story_words import Sentence, percent, says, steps_of
from rolltree.records.trends import jump, mean_change, trend

LEAST_DRIFT = 0.02
LEAST_CONSTANT_DRIFT = 0.05
"""Nats per token by which engine and trainer must differ after a jump, and from the beginning on;
16-bit engines differ by about 0.01."""
LEAST_STEPS = 8
"""Steps from which on quarters of a run are compared."""
LEAST_ENTROPY, ENTROPY_RATIO = 0.05, 5
"""Nats per token, and the share of the first steps' entropy, to which it must have fallen. A choice
of two with 0.05 nats is 99 to 1; runs that learn to answer well end at 0.1 to 0.3."""
LEAST_KL, RUNAWAY_KL = 0.1, 1.0
"""Nats per token at which KL is told where the reward falls, and where it does not rise. To go from
14 % right to 87 % takes 1.3 nats in a whole rollout, whatever its length (the KL of the answers'
distributions bounds that of being right); at 1 nat each token is 2.7 times as likely as before."""
UNSOLVED = 0.9
"""Share of the rewards' range below which there is more to earn."""


def drift(facts: Facts) -> Iterator[Sentence]:
    """Engine and trainer disagree on what was sampled."""
    name = "train/sampling/sampling_logp_difference/mean"
    series = facts.series(name)
    if not series:
        return
    values = [value for _, value in series]
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
    yield says(
        f"The engine's logprobs drift from the trainer's since step {first}: they differ by "
        f"{high:.2g} nats per token{were}. What is trained is not what was sampled.",
        *("error", "curves"),
        series=name,
        steps=[first, series[-1][0]],
    )


def staleness(facts: Facts) -> Iterator[Sentence]:
    """How old tokens are when they are trained."""
    lags = [value for _, value in facts.series("train/lag_mean")]
    if not lags or fmean(lags) < 0.05:
        return
    most = max((value for _, value in facts.series("async/lag_max")), default=None)
    stale = [value for _, value in facts.series("async/stale_share")]
    share = fmean(stale) if stale else 0.0
    text = f"Tokens are trained {fmean(lags):.2g} versions after they were sampled on average"
    text += "" if most is None else f", {most:g} at most"
    text += f"; {percent(share)} were too old to be trained" if share else ""
    yield says(
        f"{text}.", "warning" if share >= 0.05 else "info", "curves", series="train/lag_mean"
    )


def entropy(facts: Facts) -> Iterator[Sentence]:
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
            return  # solved: there is nothing more to try
        said = f" The mean reward is {fmean(last):.3g}, the best {best:.3g}."
    at = next(
        i
        for i, value in enumerate(values)
        if max(value, median(values[i : i + size])) <= LEAST_ENTROPY
    )
    yield says(
        f"The policy hardly varies since step {series[at][0]}: its entropy is {after:.2g} nats per "
        f"token ({before:.2g} at first), so little else is tried.{said}",
        *("warning", "curves"),
        series=name,
        steps=[series[at][0], series[-1][0]],
    )


def kl(facts: Facts) -> Iterator[Sentence]:
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
        yield says(
            "The policy moves away from the reference and earns less: the KL went from "
            f"{levels[at]:.2g} to {levels[3]:.2g} nats per token and the reward from "
            f"{means[at]:.3g} to {means[3]:.3g}, from {steps_of(first[0][0], first[-1][0])} to "
            f"{steps_of(last[0][0], last[-1][0])}.",
            *("error", "curves"),
            series="train/kl",
            steps=[first[0][0], last[-1][0]],
        )
        return
    for at in (0, 2):
        rises = trend(mean_change(rewards[at], rewards[3])) == "rises"
        if rises or levels[3] < max(RUNAWAY_KL, 1.5 * levels[at]):
            continue
        first = parts[at]
        yield says(
            f"The KL to the reference grows and the reward does not: {levels[at]:.2g} nats per "
            f"token in {steps_of(first[0][0], first[-1][0])}, {levels[3]:.2g} in "
            f"{steps_of(last[0][0], last[-1][0])}.",
            *("warning", "curves"),
            series="train/kl",
            steps=[first[0][0], last[-1][0]],
        )
        return


def _rewards(facts: Facts, first: int, last: int) -> list[list[float]]:
    """Return the rewards of each group of some steps; those of delegated rollouts do not count."""
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for each in facts.rollouts:
        step, reward = each.train_step, each.reward
        if step is None or reward is None or each.parent_rollout:
            continue
        if first <= step <= last:
            groups[step, each.group_id].append(reward)
    return list(groups.values())
