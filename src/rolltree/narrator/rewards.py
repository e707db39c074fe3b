"""Conditions of the narrator on rewards: whether they are learned, and reward what is wanted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from rolltree.narrator.facts import Facts
from rolltree.narrator.trends import (
    LEAST_STEPS,
    Trend,
    consecutive,
    ends,
    jump,
    level_change,
    mean_change,
    ratio_of,
    since,
    trend,
)
from rolltree.narrator.words import (
    Cases,
    decimals,
    equals,
    interval_text,
    percent,
    short,
    shown_rollouts,
    steps_of,
)
from rolltree.store.metric_table import metric_rows
from rolltree.values.estimate import estimate, mean

Interval = tuple[float, float, float]
ByStep = Mapping[int, Mapping[str, list[float]]]
LEAST_SPAN = 2  # consecutive steps without reward variance that are worth a sentence
# Share of the rewards' range below which there is more to earn. Most tasks have questions that
# cannot be solved, so a flat reward is reported at a lower share than a policy without variety.
UNSOLVED, UNSOLVED_FLAT = 0.9, 0.7
# Share of groups without variance from which most rollouts teach nothing.
MANY_FLAT = 0.7
# A flat run rules out a rise by this share of what is left to earn.
WORTH_HAVING = 0.2
# Mean rewards below and above which most groups have equal rewards, and so teach nothing.
LOW, HIGH = 0.05, 0.95
# An interval wider than this on either side is too wide to compare an evaluation with another.
WIDE = 0.1
# What to do, and the page of docs/ that says more.
WARM_UP: Mapping[str, Any] = {
    "advice": "Add two solved examples to the prompt (few_shot) if it has none, give partial "
    "credit, or warm the model up on good answers.",
    "page": "first-hour.md#the-reward-is-near-0",
}
HARDER: Mapping[str, Any] = {
    "advice": "Take harder rows, or a stricter rubric.",
    "page": "first-hour.md#all-groups-are-equal",
}
VARY: Mapping[str, Any] = {
    "advice": "Look at a few (rolltree show RUN --transcripts 3): does the parser find the "
    "answers, and is max_tokens long enough? Otherwise take easier or harder rows, larger groups "
    "(algorithm.group_size), a higher temperature, or algorithm.dynamic_sampling_max.",
    "page": "first-hour.md#all-groups-are-equal",
}
GO_ON: Mapping[str, Any] = {
    "advice": "If it should rise further, train for more steps, and measure against a control "
    "(algorithm.name=zero).",
    "page": "training.md",
}
RAISE_RATE: Mapping[str, Any] = {
    "advice": "Raise optim.lr two to five times, or train for more steps.",
    "page": "first-hour.md#the-reward-is-flat",
}
HALVE_RATE: Mapping[str, Any] = {
    "advice": "Halve optim.lr, and look at train/kl and entropy in `rolltree view`.",
    "page": "training.md",
}
# A fall by this share of the rewards' range is an error at 95 % confidence, a smaller at 99.9 %.
LARGE_FALL = 0.1
# The number of rollouts from which it means something that all of them earned the same.
MANY_ROLLOUTS = 200
# Unrewarded metrics whose fall does not hurt: what something costs, or how often it goes wrong. A
# rise is reported of the latter only: a policy may well take more turns to earn more.
_HARM = re.compile(
    r"err|fail|wrong|invalid|penal|viol|toxi|refus|cheat|hack|bad|dup|repe|halluc|unsafe|abuse|spam"
    r"|exploit|incorrect|mistake"
)
_COST = re.compile(
    _HARM.pattern + r"|cost|len|turn|call|token|tr(y|ies)|trunc|hint|time|step|loss|entropy|kl|num_"
    r"|count|word|char|size|miss|depth|latency"
)
# Metrics that a policy is trained to raise, whatever earns the reward.
_AIM = re.compile(r"correct|accura|exact|solved?|success|passed|right|match|win|goal")
_LEVEL = re.compile(r"level|difficult|stage|curricul")


def zero_variance(facts: Facts) -> Cases:
    """Find steps in which no group's rewards vary."""
    flat = [step for step, share in _flat_shares(facts) if share >= 0.999]
    worst, best = (facts.rewards[0], facts.rewards[-1]) if facts.rewards else (0.0, 0.0)
    spans = [
        (first, last)
        for first, last in consecutive(flat, list(facts.steps))
        if last - first + 1 >= min(LEAST_SPAN, len(facts.steps))
    ]
    shares = [share for _, share in _flat_shares(facts)]
    at = _flat_since(facts)
    # Only the last span: the flat start of a run that learned later is not reported forever.
    for first, last in spans[-1:]:
        if at and mean(shares[at:]) >= MANY_FLAT and last - first + 1 < 0.5 * (len(shares) - at):
            return  # `flat_groups` reports it, for all steps that are nearly flat
        rows = [each for each in facts.rollouts if first <= (each.train_step or 0) <= last]
        rewards = Counter(each.reward for each in rows if each.reward is not None)
        norms = [value for step, value in facts.series("train/grad_norm") if first <= step <= last]
        # A gradient without reward variance comes from a KL term or an entropy bonus.
        is_idle = not any(norms)
        # All rewards are the best of a run that had worse ones, or are 1. A reward that is always
        # 0.5 is neither, and a long run without a single worse reward has a check that accepts
        # everything, or questions that were solved before.
        is_never_worse = best == worst and len(facts.rewards) >= MANY_ROLLOUTS
        is_solved = set(rewards) == {best} and (best > worst or (best == 1 and not is_never_worse))
        # Rare rewards leave whole steps without any: a run that learns later was not broken.
        is_over = last < max(facts.steps, default=last) and reward_moves(facts) == "rises"
        # A policy does not learn everything in one step.
        before = facts.reward_means([step for step in facts.steps if step < first][-3:])
        is_sudden = is_solved and len(before) == 3 and mean(before) < (worst + best) / 2
        is_fine = is_solved or is_over or earns_most(facts, UNSOLVED_FLAT)
        more = f", and in {len(spans) - 1} spans before" if len(spans) > 1 else ""
        yield {
            "span": steps_of(first, last) + more,
            "so": f"though the mean was {mean(before):.2g} in the steps before, as if everything "
            "were accepted since"
            if is_sudden
            else "so there was nothing left to learn"
            if is_solved
            else "so nothing was learned"
            if is_idle
            else "so rewards taught nothing",
            "rewards": f": all {sum(rewards.values()):,} rewards were {next(iter(rewards)):g}"
            if len(rewards) == 1
            else "",
            "severity": "warning"
            if is_sudden or not (is_fine or is_idle)
            else "info"
            if is_fine
            else "error",
            "steps": [first, last],
            "step": last,
            **(HARDER if is_solved else {}),
        }


def flat_groups(facts: Facts) -> Cases:
    """Find that most groups, but not all, lack reward variance while there is more to earn."""
    shares = _flat_shares(facts)
    if len(shares) < 4:
        return
    at = _flat_since(facts) or ends(len(shares))[1]
    last = shares[at:]
    share = mean(value for _, value in last)
    num_all = sum(value >= 0.999 for _, value in last)
    # Rare rewards make groups flat and are learned nevertheless; a solved task makes them flat too.
    is_fine = earns_most(facts, UNSOLVED_FLAT) or reward_moves(facts) == "rises"
    if share < MANY_FLAT or num_all == len(last) or is_fine:
        return
    yield {
        "percent": percent(share),
        "span": steps_of(last[0][0], last[-1][0]),
        "before": percent(mean(value for _, value in shares[:at])),
        "meanwhile": meanwhile(facts, last[0][0]),
        "steps": [last[0][0], last[-1][0]],
        "step": last[-1][0],
    }


def earns_most(facts: Facts, least: float = UNSOLVED) -> bool:
    """Whether the last steps earn nearly the best reward of the run, over all of its tasks."""
    wholes, parts = [], []
    for by_step in facts.task_rewards.values() or [facts.group_rewards]:
        known = [each for groups in by_step.values() for group in groups.values() for each in group]
        at = ends(len(by_step))[1]
        last = [mean(group) for step in sorted(by_step)[at:] for group in by_step[step].values()]
        if last:
            wholes.append(max(known) - min(known))
            parts.append(mean(last) - min(known))
    return sum(wholes) > 0 and sum(parts) >= least * sum(wholes)


def _flat_shares(facts: Facts) -> list[tuple[int, float]]:
    """Return the share of groups without variance at each step, as logged or from the rewards."""
    if logged := facts.series("train/frac_reward_zero_std"):
        return logged
    return [
        (step, mean(float(len(set(rewards)) == 1) for rewards in groups.values()))
        for step, groups in sorted(facts.group_rewards.items())
    ]


def _flat_since(facts: Facts) -> int:
    """Return the index of the step from which clearly more groups are flat, 0 if there is none."""
    by_step, shares = facts.group_rewards, _flat_shares(facts)
    nums = [max(1, len(by_step.get(step, ()))) for step, _ in shares]
    pairs = [(round(share * num), num) for (_, share), num in zip(shares, nums, strict=True)]
    at = since(pairs)
    return at if ratio_of(pairs[at:]) > ratio_of(pairs[:at]) and len(pairs) - at >= 4 else 0


def empty_answers(facts: Facts) -> Cases:
    """Find empty answers that earn as much reward as others."""
    empty = [each.rollout for each in facts.looked if each.is_empty and each.rollout.reward]
    if len(empty) < 2:
        return
    own, of_all = mean(each.reward or 0.0 for each in empty), mean(facts.rewards)
    # An empty answer may be right now and then; if empty answers earn the average or more, the
    # reward has a hole.
    if own > 0 and own >= of_all:
        yield {
            "num": len(empty),
            "num_read": len(facts.looked),
            "mean": own,
            "mean_of_all": of_all,
            **shown_rollouts(empty),
        }


_SEVERITY: Mapping[Trend, str] = {"rises": "good", "is flat": "warning", "falls": "error"}


def reward_moves(facts: Facts) -> Trend:
    """Return the trend of the reward from the beginning of the run to its end."""
    return trend(reward_change(facts))


def reward_change(facts: Facts) -> tuple[float, float, float]:
    """Return how much the reward rises from the beginning to the end, with its interval."""
    by_step = facts.group_rewards
    steps = sorted(by_step)
    if len(steps) < 4:
        return 0.0, -math.inf, math.inf
    size, last = ends(len(steps))
    return mean_change(rewards_of(by_step, steps[:size]), rewards_of(by_step, steps[last:]))


def rewards_of(by_step: ByStep, steps: Iterable[int]) -> list[list[float]]:
    """Return the rewards of each group of some steps."""
    return [group for step in steps for group in by_step.get(step, {}).values()]


def reward_trend(facts: Facts) -> Cases:
    """Report whether the training reward rises, and whether it still does at the end."""
    by_step = facts.group_rewards
    steps = sorted(by_step)
    if len(steps) < 4:
        return
    # Quarters of a long run, halves of a short one: a single step is too noisy to compare.
    size, at = ends(len(steps))
    spans = [steps[:size], steps[at - size : at], steps[at:]]
    first, before, last = (rewards_of(by_step, span) for span in spans)
    began, ended = (estimate(dict(enumerate(groups))) for groups in (first, last))
    if began is None or ended is None:
        return
    change, recent = mean_change(first, last), mean_change(before, last)
    severity, now = _reward_severity(facts, change, recent), ""
    # Some of many healthy runs fall a little by chance, so a small fall must be clearer than 95 %.
    is_large = -change[0] >= LARGE_FALL * (facts.rewards[-1] - facts.rewards[0])
    if severity == "error" and not is_large and trend(mean_change(first, last, 0.999)) != "falls":
        severity = "info"
    if len(steps) >= LEAST_STEPS:
        verb = "still rises" if trend(recent) == "rises" else trend(recent)
        bounds = f"{recent[0]:+.2g} [{recent[1]:+.2g}, {recent[2]:+.2g}]"
        now = f" At the end it {verb}: {bounds} beside the {size} steps before."
    is_fine = earns_most(facts, UNSOLVED_FLAT) or _is_curriculum(facts)
    advice = {
        "rises": {} if earns_most(facts) else GO_ON,
        "is flat": {} if is_fine or any(level(facts)) else RAISE_RATE,
        "falls": HALVE_RATE if severity == "error" else {},
    }
    yield {
        **advice[trend(change)],
        "trend": trend(change),
        "began": interval_text(began.mean, began.low, began.high),
        "ended": interval_text(ended.mean, ended.low, ended.high),
        "first_steps": steps_of(spans[0][0], spans[0][-1]),
        "last_steps": steps_of(spans[2][0], spans[2][-1]),
        "now": now + _of_trend(facts, trend(change), severity),
        "severity": severity,
        "steps": [steps[0], steps[-1]],
    }


def level(facts: Facts) -> Cases:
    """Find that hardly anything is earned at the end, or nearly everything in an evaluation."""
    # Where code raises everywhere, the reward says nothing about the model.
    if facts.is_broken:
        return
    played, steps = facts.played_reward, sorted(facts.group_rewards)
    last = rewards_of(facts.group_rewards, steps[ends(len(steps))[1] :] or steps)
    if played is None and not last:
        return
    reward = mean(map(mean, last)) if played is None else played.mean
    said = f"The mean reward{' at the end' if steps else ''} is {reward:.3f}"
    if 0 <= reward < LOW and reward_moves(facts) != "rises":
        yield {"text": f"{said}, too little for reinforcement learning to learn from.", **WARM_UP}
    elif played is not None and HIGH < reward <= 1:
        yield {"text": f"{said}: training would find little to improve.", **HARDER}


def learnable(facts: Facts) -> Cases:
    """Find that an evaluation earns something, but not everything."""
    if (reward := facts.played_reward) is not None and LOW <= reward.mean <= HIGH:
        yield {"reward": reward.mean}


def few_examples(facts: Facts) -> Cases:
    """Find that an evaluation's interval is wide."""
    reward = facts.played_reward
    if reward is not None and reward.low is not None and reward.high is not None:
        half_width = (reward.high - reward.low) / 2
        if half_width > WIDE:
            num = reward.num_examples
            examples = f"{num} example" if num == 1 else f"{num} examples"
            yield {"examples": examples, "half_width": decimals(half_width, 2)}


def _of_trend(facts: Facts, found: Trend, severity: str) -> str:
    """Return what may explain a reward that does not rise: harder questions, other changes."""
    if _is_curriculum(facts):
        return " The questions became harder meanwhile."
    if found == "falls":
        steps = sorted(facts.group_rewards)
        step = steps[jump(facts.reward_means(steps))]
        words = meanwhile(facts, step)
        return f" It fell most at step {step}{words}." if words else ""
    rates = [value for _, value in facts.series("train/learning_rate")]
    is_told = severity == "warning" and rates
    return f" The learning rate is {max(rates):.2g}." if is_told else ""


def _reward_severity(facts: Facts, change: Interval, recent: Interval) -> str:
    found = _SEVERITY[trend(change)]
    worst, best = facts.rewards[0], facts.rewards[-1]
    # If the interval includes a rise worth having, it is too early to call the reward flat.
    by_step = facts.group_rewards
    means = [mean(group) for step in by_step for group in by_step[step].values()]
    is_open = change[2] > WORTH_HAVING * (best - mean(means))
    is_early = len(by_step) < LEAST_STEPS or trend(recent) == "rises"
    # In self-play one side wins what the other loses, and the mean stays at 0.
    _, low, high = mean_change([[0.0], [0.0]], [[each] for each in means])
    is_early |= best == -worst > 0 and low <= 0 <= high
    if found == "warning" and (is_open or is_early or earns_most(facts, UNSOLVED_FLAT)):
        return "info"
    # Rewards of harder questions cannot be compared with those of easy ones.
    return "info" if found != "good" and _is_curriculum(facts) else found


def _is_curriculum(facts: Facts) -> bool:
    """Whether the last steps have harder questions than the first, or mostly new tasks."""
    for name in facts.names("metrics/"):
        values = [value for _, value in facts.series(name)]
        if _LEVEL.search(name.lower()) and len(values) >= 4 and level_change(values)[2][1] > 0:
            return True
    steps = sorted(facts.group_rewards)
    size, at = ends(len(steps))
    # The groups of the last steps, and how many of them are of tasks that the first did not have.
    num = num_new = 0
    for by_step in facts.task_rewards.values():
        last = len(rewards_of(by_step, steps[at:]))
        num, num_new = num + last, num_new + (last if not by_step.keys() & set(steps[:size]) else 0)
    return num_new > num / 2


def collapse(facts: Facts) -> Cases:
    """Find that rewards collapsed: the last steps have almost only the worst one."""
    by_step = facts.group_rewards
    steps = sorted(by_step)
    if len(steps) < 4 or facts.rewards[0] == facts.rewards[-1]:
        return
    worst = facts.rewards[0]
    pairs = []
    for step in steps:
        groups = by_step[step].values()
        pairs.append((sum(max(group) > worst for group in groups), len(groups)))
    at = since(pairs)
    if not at or ratio_of(pairs[at:]) > 0.1 * ratio_of(pairs[:at]):
        return
    means = [mean(map(mean, rewards_of(by_step, part))) for part in (steps[:at], steps[at:])]
    yield {
        "before": f"{means[0]:.2g}",
        "after": f"{means[1]:.2g}",
        "meanwhile": meanwhile(facts, steps[at]),
        "steps": [steps[at], steps[-1]],
    }


def meanwhile(facts: Facts, step: int) -> str:
    """Return which possible causes changed at a step, as a clause; "" if none did."""
    levels = {n: n.removeprefix("metrics/") for n in facts.names("metrics/") if _LEVEL.search(n)}
    causes = {metric.name: metric.cause for metric in metric_rows().values() if metric.cause}
    said = []
    for name, label in {**levels, **causes}.items():
        points = facts.series(name)
        before = sorted(value for at, value in points if step - 12 <= at < step - 1)
        after = sorted(value for at, value in points if step <= at < step + 12)
        if min(len(before), len(after)) < 3:
            continue
        low, high = median(before), median(after)
        # Nearly all values of one side lie beyond nearly all of the other, by a factor of two.
        apart = before[-1 - len(before) // 8] < after[len(after) // 8]
        apart |= after[-1 - len(after) // 8] < before[len(before) // 8]
        if apart and max(low, high) >= 2 * min(low, high):
            said.append(f"{label} went from {low:.2g} to {high:.2g}")
    return f", when {' and '.join(said[:3])}" if said else ""


def task_loss(facts: Facts) -> Cases:
    """Find tasks that get worse or never earn, which the mean over all tasks hides."""
    by_task, steps = facts.task_rewards, sorted(facts.group_rewards)
    size, at = ends(len(steps))
    for (column, task), by_step in by_task.items():
        first, last = (rewards_of(by_step, part) for part in (steps[:size], steps[at:]))
        if min(len(first), len(last)) < 3:
            continue
        began, ended = mean(map(mean, first)), mean(map(mean, last))
        known = [each for step in by_step for each in by_step[step].values()]
        worst = min(min(group) for group in known)
        # It lost half of what it earned, and more than the worst of several tasks does by chance.
        change = mean_change(first, last, confidence=1 - 0.05 / len(by_task))
        if trend(change) == "falls" and ended - worst <= 0.5 * (began - worst):
            yield {
                "text": f"The {_PART[column]} {short(task)} gets worse: {began:.3g} in "
                f"{steps_of(steps[0], steps[size - 1])}, {ended:.3g} in "
                f"{steps_of(steps[at], steps[-1])}.",
                "severity": "error",
                "where": f"{equals(column, task)} and train_step >= {steps[at]}",
            }
    # Tasks that never earn more than the lowest reward in many rollouts, while others do.
    earned = {
        name: [each for groups in by_step.values() for group in groups.values() for each in group]
        for name, by_step in by_task.items()
    }
    worst = min((min(rewards) for rewards in earned.values() if rewards), default=0.0)
    idle = {name for name, rewards in earned.items() if rewards and max(rewards) == worst}
    rest = [each for name, rewards in earned.items() if name not in idle for each in rewards]
    for column, task in sorted(idle):
        if rest and len(earned[column, task]) >= MANY_ROLLOUTS / 4:
            yield {
                "text": f"The {_PART[column]} {short(task)} never earned more than {worst:g} in "
                f"{len(earned[column, task]):,} rollouts, the others {mean(rest):.3g} on average: "
                "it is too hard, or its answers are wrong.",
                "severity": "warning",
                "where": equals(column, task),
            }


_PART = {"task": "task", "env_id": "environment"}


def other_scale(facts: Facts) -> Cases:
    """Find rewards that have a larger scale from one step on."""
    by_step = facts.group_rewards
    steps = sorted(by_step)
    sizes = [[abs(x) for group in by_step[s].values() for x in group if x] for s in steps]
    most, num = 0.0, 0
    for at, step in enumerate(steps):
        late = [each for part in sizes[at : at + 2] for each in part] if at > 5 < num else []
        # A policy does not learn in one step to earn in nearly all rollouts what none earned
        # before, except for a small model in its first few steps.
        if len(late) >= 6 and sum(each > 2 * most for each in late) >= 0.75 * len(late):
            yield {
                "before": f"{most:.3g}",
                "after": f"{max(late):.3g}",
                "steps": [step, steps[-1]],
            }
            return
        most, num = max([most, *sizes[at]]), num + len(sizes[at])


def dead_function(facts: Facts) -> Cases:
    """Find rewarded functions that return only their lowest value from a step on."""
    for name, weight in facts.weights.items():
        points = facts.series(f"metrics/{name}")
        values = [value for _, value in points]
        at = next((i for i, value in enumerate(values) if set(values[i:]) == {value}), 0)
        # Exactly the same mean at every step is not chance; only a mean at its lowest is reported.
        if weight <= 0 or not 3 <= at <= len(values) - max(4, len(values) // 8):
            continue
        if values[at] <= min(values) and mean(values[:at]) > values[at]:
            yield {
                "name": short(name),
                "value": f"{values[at]:g}",
                "before": f"{mean(values[:at]):.2g}",
                "series": f"metrics/{name}",
                "steps": [points[at][0], points[-1][0]],
            }


def gaming(facts: Facts) -> Cases:
    """Find functions and metrics that get worse while the reward rises."""
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
        is_share = min(values) >= 0.0 and max(values) <= 1.0
        is_harm = is_share and bool(_HARM.search(name.lower()))
        # A small part of a reward may be traded for a large one, as the weights say; an unrewarded
        # metric counts if it is a share, of something good or of harm.
        if not (is_main or (name not in paid and is_share)):
            continue
        is_more = ended >= max(2 * began, 0.1) or 1 - ended <= (1 - began) / 2
        rises = is_harm and trend(change) == "rises" and is_more
        falls = trend(change) == "falls" and (began <= 0 or ended <= 0.75 * began)
        if not (rises or (falls and (is_main or not _COST.search(name.lower())))):
            continue
        rewards = facts.reward_means([step for step, _ in points])
        size, at = ends(len(points))
        yield {
            "name": short(name),
            "what": "the reward function" if name in paid else "the metric",
            "verb": "rises" if rises else "falls",
            "began": f"{began:.2g}",
            "ended": f"{ended:.2g}",
            "reward_began": f"{mean(rewards[:size]):.2g}",
            "reward_ended": f"{mean(rewards[at:]):.2g}",
            "severity": "error" if is_main or rises or ended <= 0.5 * began else "warning",
            "series": series,
            "beside": "reward/mean",
            "steps": [points[0][0], points[-1][0]],
        }


def form(facts: Facts) -> Cases:
    """Find a reward that rises by something else, such as form, while the aim does not rise."""
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
        # It had room to rise but rose little or not at all, as far as noise lets us tell, while
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
