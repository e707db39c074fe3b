"""Conditions of the narrator on series of numbers, and on the run's own notices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from statistics import median

from rolltree.narrator.facts import Facts
from rolltree.narrator.rewards import (
    GO_ON,
    HALVE_RATE,
    RAISE_RATE,
    earns_most,
    reward_change,
    reward_moves,
    rewards_of,
)
from rolltree.narrator.trends import LEAST_STEPS, Growth, ends, growth, jump, mean_change, trend
from rolltree.narrator.words import Cases, interval_text, percent, short, steps_of
from rolltree.store import StoredEvaluation
from rolltree.values.estimate import mean

# Nats per token by which engine and trainer must differ after a jump, and from the beginning on;
# 16-bit engines differ by about 0.01.
LEAST_DRIFT = 0.02
LEAST_CONSTANT_DRIFT = 0.05
# Nats per token to which entropy must have fallen, and by what factor since the first steps. A
# choice of two with 0.05 nats is 99 to 1; runs that learn to answer well end at 0.1 to 0.3.
LEAST_ENTROPY, ENTROPY_RATIO = 0.05, 5
# Nats per token at which KL is reported if the reward falls, and if it does not rise. A move from
# 14 % right to 87 % takes 1.3 nats in a whole rollout, whatever its length (the KL of the answers'
# distributions bounds that of being right); at 1 nat each token is 2.7 times as likely as before.
LEAST_KL, RUNAWAY_KL = 0.1, 1.0
# Factors by which a number must have grown to be reported.
LONGER, LONGER_WITH_REWARD, SLOWER, STEEPER = 4.0, 10.0, 3.0, 30.0
# AdamW moves a weight by about the learning rate; float32 weights of 0.02 lose smaller moves.
LEAST_RATE = 1e-9
# Effective sample size, as a share.
LEAST_ESS = 0.3
LEAST_SLOW_S = 2.0


def sampled(facts: Facts) -> Cases:
    """Report that the numbers are those of a sample."""
    if facts.num_sampled_of is not None:
        yield {"num": len(facts.rollouts), "num_of": facts.num_sampled_of}


def not_finite(facts: Facts) -> Cases:
    """Find training metrics that are not finite."""
    found = {name: step for name, step in facts.not_finite.items() if name.startswith("train/")}
    if found:
        first = min(found.values())
        name = min(name for name, step in found.items() if step == first)
        yield {"name": name, "first": first, "series": name, "steps": [first, max(facts.steps)]}


def gradient(facts: Facts) -> Cases:
    """Find a gradient that explodes, for good or in a single step."""
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


def idle(facts: Facts) -> Cases:
    """Find steps that train nothing, though there is something to learn."""
    rates = facts.series("train/learning_rate")
    late = rates[_tail(value < LEAST_RATE for _, value in rates) :]
    # A schedule that decays ends at 0, in its last steps.
    if len(late) >= max(3, len(rates) // 8):
        since = f" since step {late[0][0]} of {rates[-1][0]}" if len(late) < len(rates) else ""
        yield {
            "text": f"The learning rate is {max(value for _, value in late):.2g}{since}, so the "
            "weights stay as they are and nothing is learned.",
            "series": "train/learning_rate",
            "steps": [late[0][0], late[-1][0]],
        }
        return
    norms = facts.series("train/grad_norm")
    flat = dict(facts.series("train/frac_reward_zero_std"))
    late = norms[_tail(value == 0.0 for _, value in norms) :]
    # Groups without reward variance have no gradient, and are reported by their own condition.
    if len(late) >= 3 and all(flat.get(step, 1.0) < 1.0 for step, _ in late):
        records = dict(facts.series("train/num_records"))
        none = ": no token has an advantage" if not any(records.get(s, 1) for s, _ in late) else ""
        yield {
            "text": f"The gradient is 0 since step {late[0][0]} though rewards differ within "
            f"groups, so nothing is learned{none}.",
            "series": "train/grad_norm",
            "steps": [late[0][0], late[-1][0]],
        }


def _tail(flags: Iterable[bool]) -> int:
    """Return the index from which all flags hold; the number of flags if the last does not."""
    return 1 + max((at for at, holds in enumerate(flags) if not holds), default=-1)


_HARMLESS = re.compile(r"train\.num_steps|checkpoint\.|eval\.|track\.|engine\.|run\.|cluster\.")


def changed(facts: Facts) -> Cases:
    """Report settings that a continued run changed, and the trend of the reward since."""
    newest = max(facts.steps, default=0)
    for step, what in facts.changes:
        spans = range(step - 8, step), range(step, newest + 1)
        before, after = (rewards_of(facts.group_rewards, span) for span in spans)
        moves = trend(mean_change(before, after)) if before and after else "is flat"
        matters = any(not _HARMLESS.match(each) for each in what.split(", "))
        then = f", and the reward {moves} since" if moves != "is flat" else ""
        yield {
            "what": short(what, 300),
            "then": then,
            "severity": "error" if matters and moves == "falls" else "info",
            "steps": [step, newest],
        }


# How sampled tokens are lost: a metric, "" or the metric that it is divided by, the share from
# which it is reported, and the reason.
_LOST = (
    ("train/clip_ratio/region_mean", "", 0.4, "clipping cuts their gradient off"),
    ("ratio/outside_share", "", 0.4, "their importance ratio is below 1/2 or above 2"),
    ("correction/masked_share", "", 0.4, "the correction masks them"),
    ("samples/skipped_tokens", "rollout/total_sampled_tokens", 0.2, "they are in no sample"),
)


def lost_tokens(facts: Facts) -> Cases:
    """Find that many sampled tokens train little or nothing."""
    for name, of, least, why in _LOST:
        whole = dict(facts.series(of)) if of else {}
        points = [
            (step, value / max(1.0, whole.get(step, 1.0))) for step, value in facts.series(name)
        ]
        if len(points) < 2:
            continue
        values = [value for _, value in points]
        if median(values[ends(len(values))[1] :]) < least:
            continue
        at = jump(values)
        low, high = median(values[:at] or [0.0]), median(values[at:])
        since = (
            f" since step {points[at][0]} ({percent(low)} before)" if low < high / 2 and at else ""
        )
        yield {"percent": percent(high), "why": why, "since": since, "series": name} | {
            "steps": [points[at if since else 0][0], points[-1][0]]
        }
        return


def ess(facts: Facts) -> Cases:
    """Find importance weights so uneven that a few tokens make the update."""
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
    """Find answers that become many times as long or as short without earning more."""
    series = facts.series("train/completions/mean_length")
    if len(series) < 4:
        return
    rises = reward_moves(facts) == "rises"
    values = [max(value, 1.0) for _, value in series]
    found = growth(values, factor=LONGER_WITH_REWARD if rises else LONGER)
    word = "long"
    if found is None and not rises:
        # Answers that shrink are found by the growth of the inverse.
        inverse = growth([1 / value for value in values], factor=LONGER)
        if inverse is not None:
            found, word = Growth(inverse.at, 1 / inverse.before, 1 / inverse.after), "short"
    if found is not None:
        yield {
            "factor": max(found.factor, 1 / found.factor),
            "word": word,
            "before": found.before,
            "after": found.after,
            "steps": [series[found.at][0], series[-1][0]],
        }


def slow(facts: Facts) -> Cases:
    """Find steps that take many times as long as before."""
    series = facts.series("time/step")
    values = [max(value, 1e-3) for _, value in series]
    rise = growth(values, factor=SLOWER) if len(values) >= 4 else None
    if rise is None or rise.after < LEAST_SLOW_S:
        return
    lengths = [value for _, value in facts.series("rollout/total_sampled_tokens")]
    first = series[rise.at][0]
    if len(lengths) == len(values):
        more = median(lengths[rise.at :]) / max(1.0, median(lengths[: rise.at]))
        # Longer answers take longer, which `length` reports.
        if rise.factor < SLOWER * max(1.0, 0.5 * more):
            return
    parts = {}
    for name in ("time/wait_for_batch", "time/train_s", "time/broadcast_weights"):
        late = [value for step, value in facts.series(name) if step >= first]
        parts[name] = median(late) if late else 0.0
    part = max(parts, key=parts.__getitem__)
    said = f", most of it {_PARTS[part]}" if parts[part] > 0.5 * rise.after else ""
    yield {
        "factor": rise.factor,
        "before": rise.before,
        "after": rise.after,
        "part": said,
        "steps": [first, series[-1][0]],
    }


_PARTS = {
    "time/wait_for_batch": "waiting for rollouts",
    "time/train_s": "training",
    "time/broadcast_weights": "handing over weights",
}


def drift(facts: Facts) -> Cases:
    """Find that engine and trainer disagree on the logprobs of sampled tokens."""
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
    """Report how old tokens are when they are trained."""
    lags = [value for _, value in facts.series("train/lag_mean")]
    if not lags or mean(lags) < 0.05:
        return
    most = max((value for _, value in facts.series("async/lag_max")), default=None)
    stale = [value for _, value in facts.series("async/stale_share")]
    share = mean(stale) if stale else 0.0
    yield {
        "lag": mean(lags),
        "share": share,
        "most": "" if most is None else f", {most:g} at most",
        "stale": f"; {percent(share)} were too old to be trained" if share else "",
    }


def entropy(facts: Facts) -> Cases:
    """Find that the policy hardly varies any more although there is more to earn."""
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
    if earns_most(facts):
        return  # solved: there is nothing more to try
    last = rewards_of(facts.group_rewards, range(series[-size][0], series[-1][0] + 1))
    said = ""
    if last:
        level = mean(map(mean, last))
        said = f" The mean reward is {level:.3g}, the best {facts.rewards[-1]:.3g}."
    at = next(
        i
        for i, value in enumerate(values)
        if max(value, median(values[i : i + few])) <= LEAST_ENTROPY
    )
    yield {
        "after": after,
        "before": before,
        "rewards": said,
        "series": name,
        "steps": [series[at][0], series[-1][0]],
    }


def kl(facts: Facts) -> Cases:
    """Find a policy that moves away from the reference without earning more."""
    yield from _strays(facts, "train/kl", LEAST_KL, RUNAWAY_KL, 1.5, _KL)


def randomness(facts: Facts) -> Cases:
    """Find a policy that becomes random without earning more."""
    name = "train/entropy" if facts.series("train/entropy") else "rollout/entropy"
    yield from _strays(facts, name, 2 * LEAST_KL, RUNAWAY_KL, 3.0, _RANDOM)


_KL = (
    "The policy moves away from the reference and earns less: the KL went",
    "The KL to the reference grows and the reward does not: it went",
)
_RANDOM = (
    "The policy becomes random and earns less: its entropy went",
    "The policy becomes random and earns no more for it: its entropy went",
)


def _strays(
    facts: Facts, name: str, least: float, runaway: float, factor: float, words: tuple[str, str]
) -> Cases:
    """Find a level in nats per token that grows while the reward falls, or does not rise."""
    series = facts.series(name)
    size = len(series) // 4
    if len(series) < LEAST_STEPS:
        return
    parts = [series[at : at + size] for at in (0, size, 2 * size, len(series) - size)]
    levels = [median(value for _, value in part) for part in parts]
    spans = [range(part[0][0], part[-1][0] + 1) for part in parts]
    rewards = [rewards_of(facts.group_rewards, span) for span in spans]
    if not all(rewards):
        return
    means = [mean(map(mean, groups)) for groups in rewards]
    best = max(range(3), key=means.__getitem__)
    if trend(mean_change(rewards[best], rewards[3])) == "falls":
        cases = [(best, "error")] if levels[3] >= max(least, 2 * levels[best]) else []
    else:
        # If the reward rose since the beginning, or still rises, the growth was worth it.
        rise = [trend(mean_change(rewards[at], rewards[3])) == "rises" for at in range(3)]
        cases = [
            (at, "warning")
            for at in (0, 2)
            if not rise[at] and levels[3] >= max(runaway, factor * levels[at])
        ]
    for at, severity in cases[:1]:
        first, last = parts[at], parts[3]
        yield {
            "text": f"{words[severity != 'error']} from {levels[at]:.2g} to {levels[3]:.2g} nats "
            f"per token and the reward from {means[at]:.3g} to {means[3]:.3g}, from "
            f"{steps_of(first[0][0], first[-1][0])} to {steps_of(last[0][0], last[-1][0])}.",
            "severity": severity,
            "series": name,
            "steps": [first[0][0], last[-1][0]],
        }


_SHARED = re.compile(r"(\d+) of (\d+) evaluation questions are also training questions")


def known_questions(facts: Facts) -> Cases:
    """Report held-out questions that are also trained on."""
    for num, num_of in _shared(facts)[:1] if facts.evaluations else ():
        yield {"num": num, "num_of": num_of, "all": "All" if num == num_of else f"{num} of"}


def _shared(facts: Facts) -> list[tuple[int, int]]:
    found = [match for each in facts.notices if (match := _SHARED.match(each))]
    return [(int(match[1]), int(match[2])) for match in found]


def held_out_change(facts: Facts) -> Cases:
    """Compare the first and the last held-out evaluation."""
    scored = [each for each in facts.evaluations if each.reward is not None]
    if len(scored) < 2 or scored[0].step == scored[-1].step:
        return
    ends = scored[0], scored[-1]
    sides = [_held_out(each, "eval/reward") for each in ends]
    verb, severity = _change(*sides)
    more = ""
    advice = {
        "rose": {} if earns_most(facts) else GO_ON,
        "fell": _STOP if reward_moves(facts) == "rises" else HALVE_RATE,
        # With more steps their own rewards say it.
        "does not clearly differ": RAISE_RATE if len(facts.group_rewards) < 4 else {},
    }[verb]
    new_high = sides[1][2]
    if verb == "does not clearly differ" and new_high is not None:
        rise = reward_change(facts)
        # Training rose by so much that a third of it would be seen in the held-out interval.
        if new_high - (scored[0].reward or 0.0) < rise[1] / 3:
            more, severity = f", while that of training rose by {rise[0]:.3g}", "warning"
    shared = _shared(facts)
    is_known = any(num == num_of for num, num_of in shared)
    case = {
        "what": "On its training questions" if is_known else "Held out",
        "first": scored[0].step,
        "last": scored[-1].step,
    }
    yield case | {
        "of": "",
        "verb": verb,
        **advice,
        # A rise on trained questions does not show that anything else was learned.
        "severity": "info" if shared and severity == "good" else severity,
        "began": interval_text(*sides[0]),
        "ended": interval_text(*sides[1]),
        "more": more,
        "series": "eval/reward",
    }
    # The mean over the environments of a group hides one that loses what it could.
    for name in ends[1].numbers:
        environment = _HELD_OUT_ENVIRONMENT.fullmatch(name)
        sides = [_held_out(each, name) for each in ends]
        if environment is None or sides[0][0] is None:
            continue
        verb, severity = _change(*sides)
        if verb == "fell":
            yield case | {
                "of": f" of {short(environment[1])}",
                "verb": verb,
                "severity": severity,
                "began": interval_text(*sides[0]),
                "ended": interval_text(*sides[1]),
                "more": "",
                "series": name,
            }


_STOP = {
    "advice": "Only the reward of training rises: train for fewer steps, or on more questions.",
    "page": "training.md",
}
_HELD_OUT_ENVIRONMENT = re.compile(r"eval/env/(.+)/reward")


def _held_out(done: StoredEvaluation, name: str) -> tuple[float | None, float | None, float | None]:
    """Return a held-out mean and the ends of its interval."""
    found = [done.numbers.get(name + end) for end in ("", "_low", "_high")]
    return found[0], found[1], found[2]


def _change(
    before: tuple[float | None, float | None, float | None],
    after: tuple[float | None, float | None, float | None],
) -> tuple[str, str]:
    """Return the verb and the severity of a change between two means with intervals."""
    (_, low, high), (_, new_low, new_high) = before, after
    # Intervals that do not overlap: stricter than a test of the difference, and seen in the curve.
    if new_low is not None and high is not None and new_low > high:
        return "rose", "good"
    if new_high is not None and low is not None and new_high < low:
        return "fell", "error"
    return "does not clearly differ", "info"


def ended(facts: Facts) -> Cases:
    """Report the error that the run ended with."""
    if facts.error is not None:
        yield {"error": short(facts.error, 300)}
