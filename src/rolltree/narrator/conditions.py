"""Conditions of the narrator on rollouts: endings, failures, limits, tools, scores, breaks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rolltree.narrator.facts import Facts, Looked
from rolltree.narrator.rewards import earns_most, reward_moves
from rolltree.narrator.trends import mean_change, ratio_of, since
from rolltree.narrator.words import Cases, equals, percent, short, shown_rollouts
from rolltree.store import StoredRollout
from rolltree.values.state import OF_CLEANUP, OF_ENVIRONMENT

LEAST_SHARE = 0.2  # of rollouts that end at a limit, from which it is reported
LEAST_BREAKS = 0.05
LEAST_WAIT_MS = 60_000.0
# Share of rollouts below which their problem is reported only as information.
FEW = 0.01
# Share of answers that are identical, or of an answer that repeats itself.
MANY_SAME = 0.5
# Share of a step's groups that repeat another group's question; with few questions, some do by
# chance.
LEAST_SAME_QUESTIONS = 0.4
# A limit of so few tokens is part of the task: an answer of one letter, a choice of four.
SHORT_LIMIT = 16


def share_of(
    holds: Callable[[StoredRollout], bool],
    facts: Facts,
    *,
    where: str,
    least: float = 0.0,
    words: Callable[[Facts], str] = lambda facts: "",
) -> Cases:
    """Report the share of rollouts for which something holds, since the step where it changed."""
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
    # A limit that is hit since step 40 is a different story from one that was always hit: the split
    # is found from the counts, and both shares are reported.
    at = since(pairs)
    share, before = ratio_of(pairs[at:]), ratio_of(pairs[:at])
    if at and share <= max(before, least):
        at, share = 0, ratio_of(pairs)  # it became rarer, so there is no "since" to warn of
    if share < least:
        return
    case: dict[str, Any] = {
        "share": share,
        "is_new": at > 0 and before < share / 2,
        "percent": percent(share),
    }
    case |= {"where": where, "since": "", "words": words(facts)}
    if at:
        case["steps"] = [steps[at], steps[-1]]
        case["where"] += f" and train_step >= {steps[at]}"
        case["since"] = f" since step {steps[at]} ({percent(before)} before)"
    yield case


def failed(rollout: StoredRollout) -> bool:
    """Whether a rollout failed."""
    return rollout.status == "error"


def hit_max_tokens(rollout: StoredRollout) -> bool:
    """Whether the model reached its token limit in the last call."""
    return rollout.finish_reason == "length"


def max_tokens(facts: Facts) -> Cases:
    """Find rollouts that reached their token limit."""
    limit = "" if facts.max_tokens is None else f" ({facts.max_tokens})"
    is_fine = earns_most(facts) or reward_moves(facts) == "rises"
    is_short = facts.max_tokens is not None and facts.max_tokens <= SHORT_LIMIT
    found = share_of(hit_max_tokens, facts, where="finish_reason = length", least=LEAST_SHARE)
    for case in found:
        case |= {"words": limit, "severity": _of_limit(facts, hit_max_tokens, case, is_short)}
        # Few rollouts may not show what it costs, but a longer limit does.
        yield {**case, "is_small": is_fine and case["severity"] == "info"}


def _of_limit(
    facts: Facts, holds: Callable[[StoredRollout], bool], case: Mapping[str, Any], is_meant: bool
) -> str:
    """Return a limit's severity: an error if it is newly hit, or costs reward."""
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for each in facts.rollouts:
        if each.reward is not None:
            rewards[holds(each)].append(each.reward)
    hit, free = rewards[True], rewards[False]
    if case["is_new"]:
        return "info" if is_meant else "error"
    if hit and free:
        # Whether answers that were cut earn less, by more than chance.
        costs = mean_change([[each] for each in free], [[each] for each in hit])[2] < 0
        return "error" if costs and not is_meant else "info"
    return "info" if is_meant or earns_most(facts) or reward_moves(facts) == "rises" else "error"


def failed_rollouts(facts: Facts) -> Cases:
    """Find rollouts that failed."""
    for case in share_of(failed, facts, where="status = error", words=_kinds_of_failures):
        if case["share"] >= 1.0:
            case["advice"] = "Nothing is measured: fix the first failure and run it again."
        yield case


def _kinds_of_failures(facts: Facts) -> str:
    """Return how many rollouts failed with which errors, as a clause."""
    kinds = Counter(
        (each.error_type or "an error", each.error_phase) for each in facts.rollouts if failed(each)
    )
    shown = ", ".join(
        f"{number:,} with {short(kind)}{f' ({phase})' if phase else ''}"
        for (kind, phase), number in kinds.most_common(3)
    )
    more = f", and {len(kinds) - 3} other kinds" if len(kinds) > 3 else ""
    return f": {shown}{more}"


def truncated(facts: Facts) -> Cases:
    """Find rollouts that were cut by something other than the time and token limits."""
    reasons = Counter(
        each.truncation_reason
        for each in facts.rollouts
        if each.truncated and each.truncation_reason not in (None, "time_limit", "max_tokens")
    )
    for reason, _ in reasons.most_common(2):

        def is_cut(each: StoredRollout, reason: str | None = reason) -> bool:
            return each.truncated and each.truncation_reason == reason

        where = equals("truncation_reason", reason)
        for case in share_of(is_cut, facts, where=where, least=LEAST_SHARE):
            severity = "warning" if _of_limit(facts, is_cut, case, False) == "error" else "info"
            yield {**case, "reason": short(reason), "severity": severity}


def unscored(facts: Facts) -> Cases:
    """Find rollouts that ended well but were not scored."""
    # A run without any reward has no rubric, which deserves advice but does not alarm.
    is_all = facts.phase != "train" and all(each.reward is None for each in facts.rollouts)
    for case in share_of(is_unscored, facts, where="status = ok and reward = none"):
        yield {**case, "share": 0.0, "is_small": False} if is_all else case


def is_unscored(rollout: StoredRollout) -> bool:
    """Whether a rollout should have a reward but has none."""
    return rollout.status == "ok" and rollout.reward is None and not rollout.parent_rollout


def waits(facts: Facts) -> Cases:
    """Find long waits: for a judge that does not answer, or for a step that cannot begin."""
    slow = [each for each in facts.rollouts if each.scoring_ms >= LEAST_WAIT_MS]
    if slow:
        longest = max(slow, key=lambda each: each.scoring_ms)
        steps = sorted({each.train_step for each in slow if each.train_step is not None})
        yield {
            "text": f"Scoring takes minutes: {len(slow):,} of {len(facts.rollouts):,} rollouts "
            f"waited up to {longest.scoring_ms / 60_000:.1f} min for their reward"
            f"{f', from step {steps[0]} on' if steps else ''}.",
            **shown_rollouts([longest]),
        }
    elif facts.waits:
        yield {
            "text": f"The run is stuck: {short(facts.waits[-1], 300)}",
            "view": "rollouts",
        }


def _since_among(
    looked: Sequence[Looked], flags: Sequence[bool]
) -> tuple[Sequence[Looked], float, float, str]:
    """Return the rollouts that are flagged now, the share now and before, and since when."""
    at = since([(int(each), 1) for each in flags])
    share, before = fmean(flags[at:]), fmean(flags[:at]) if at else 0.0
    step = looked[at].rollout.train_step
    words = f" since step {step} ({percent(before)} before)" if at and step else ""
    late = [each for each, holds in zip(looked[at:], flags[at:], strict=True) if holds]
    return late, share, before, words


def tools(facts: Facts) -> Cases:
    """Find tools that raise in most rollouts at the end."""
    last = [each for each in facts.looked if each.num_tools or each.tool_errors]
    names = {tool for each in last for tool, kind in each.tool_errors if not is_time(kind)}
    for tool in sorted(names):
        raised = [any(name == tool for name, _ in each.tool_errors) for each in last]
        late, share, before, words = _since_among(last, raised)
        # A model learns to call a tool correctly, but a tool that always fails does not improve.
        if share < 0.5 or share < before or len(late) < 3:
            continue
        kinds = Counter(k for each in last for name, k in each.tool_errors if name == tool)
        yield {
            "tool": short(tool),
            "percent": percent(share),
            "error": short(kinds.most_common(1)[0][0]),
            "since": words,
            **shown_rollouts([each.rollout for each in late]),
        }


def programs(facts: Facts) -> Cases:
    """Find programs that fail in most rollouts at the end, and are scored all the same."""
    flags = [bool(each.program_failure) for each in facts.looked]
    if sum(flags) < 3:
        return
    late, share, before, words = _since_among(facts.looked, flags)
    if share >= 0.5 and share >= before and len(late) >= 3:
        kinds = Counter(each.program_failure for each in late)
        yield {
            "percent": percent(share),
            "how": short(kinds.most_common(1)[0][0]),
            "since": words,
            **shown_rollouts([each.rollout for each in late]),
        }


def same_answer(facts: Facts) -> Cases:
    """Find identical answers to different questions."""
    said = [each for each in facts.looked if each.answer and not each.tool_errors]
    if len(said) < 12:
        return
    text, _ = Counter(each.answer for each in said[-len(said) // 2 :]).most_common(1)[0]
    late, share, before, words = _since_among(said, [each.answer == text for each in said])
    questions = {(each.rollout.env_id, each.rollout.example_id) for each in late}
    if share < MANY_SAME or before > share / 2 or min(len(late), len(questions)) < 4:
        return
    # A word or two may be the right answer to most questions; then its share is that of those.
    right = Counter(each.expected for each in said).most_common(1)[0][1] / len(said)
    is_phrase = len(text.split()) >= 4
    moves = reward_moves(facts)
    is_sought = moves == "rises" or earns_most(facts)
    if not is_phrase and (right > share / 2 or is_sought or not late[0].expected):
        return
    yield {
        "percent": percent(share),
        "answer": short(text, 80),
        "num": len(questions),
        "since": words,
        "paid": ", and the reward rises" if is_phrase and moves == "rises" else "",
        "severity": "error" if is_phrase and is_sought else "warning",
        **shown_rollouts([each.rollout for each in late]),
    }


def repeats(facts: Facts) -> Cases:
    """Find answers that repeat the same words again and again."""
    flags = [each.repeated >= MANY_SAME for each in facts.looked]
    if sum(flags) < 4:
        return
    late, share, before, words = _since_among(facts.looked, flags)
    if share >= max(LEAST_SHARE, 2 * before):
        yield {
            "percent": percent(share),
            "since": words,
            **shown_rollouts([each.rollout for each in late]),
        }


def same_questions(facts: Facts) -> Cases:
    """Find steps in which groups share a question, though there are enough questions."""
    by_step: dict[int, dict[str, Any]] = defaultdict(dict)
    for each in facts.rollouts:
        if each.train_step is not None and each.example_id is not None and not each.parent_rollout:
            by_step[each.train_step][each.group_id] = (each.env_id, each.example_id)
    asked = Counter(question for groups in by_step.values() for question in groups.values())
    sizes = [(len(groups), len(set(groups.values()))) for groups in by_step.values()]
    num = sum(groups for groups, _ in sizes)
    if len(sizes) < 3 or facts.num_sampled_of or len(asked) < max(groups for groups, _ in sizes):
        return
    share = 1 - sum(different for _, different in sizes) / num
    if share >= LEAST_SAME_QUESTIONS and num >= 4 * len(sizes):
        (_, example), most = asked.most_common(1)[0]
        yield {
            "percent": percent(share),
            "num": len(asked),
            "most": f"question {short(str(example))} makes {percent(most / num)} of all groups",
        }


_WHO = {OF_ENVIRONMENT: "The environment", OF_CLEANUP: "A cleanup of the environment"}


def scoring(facts: Facts) -> Cases:
    """Find reward functions and environments that raise, since the rollouts are scored."""
    found: dict[str, list[tuple[StoredRollout, str]]] = defaultdict(list)
    for looked in facts.looked:
        first: dict[str, str] = {}  # several cleanups may raise in one rollout
        for function, message in looked.scoring_errors:
            first.setdefault(function, message)
        for function, message in first.items():
            found[function].append((looked.rollout, message))
    for function, raised in found.items():
        yield {
            "function": _WHO.get(function, f"The reward function {short(function)}"),
            "num": len(raised),
            "num_read": len(facts.looked),
            "share": len(raised) / len(facts.looked),
            "is_small": False,
            "step": "" if (step := raised[0][0].train_step) is None else f" in step {step}",
            "message": short(raised[0][1], 300),
            **shown_rollouts([rollout for rollout, _ in raised]),
        }


def timeouts(facts: Facts) -> Cases:
    """Find rollouts that ran out of time, and tools that time out."""
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
            "where": equals("error_type", first) if first else "truncation_reason = time_limit",
        }
    calls: dict[str, list[StoredRollout]] = defaultdict(list)
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


def _is_late(each: StoredRollout) -> bool:
    if failed(each):
        return each.error_phase == "timeout" or is_time(each.error_type or "")
    return each.truncation_reason == "time_limit"


def is_time(kind: str) -> bool:
    """Whether a kind of error says that time ran out."""
    return "timeout" in kind.lower() or "timelimit" in kind.lower()


_WHY = {
    "reasoning_stripped": "the chat template strips the reasoning of earlier turns",
    "retokenized": "earlier answers are tokenized anew",
    "system_or_tools_changed": "the system message or the tools change within a rollout",
    "history_rewritten": "earlier messages are rewritten",
    "compaction": "history is summarized or dropped",
}
# An environment does these on purpose; a chat template acts without the environment's knowledge.
_MEANT = ("compaction", "history_rewritten")


def breaks(facts: Facts) -> Cases:
    """Find prompts that do not extend the call before, by cause."""
    num_later = sum(each.num_later_calls for each in facts.looked)
    # The rate is that of all rollouts if it is logged; the causes are those of rollouts that were
    # read whole, with a tokenizer, as the page does.
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
