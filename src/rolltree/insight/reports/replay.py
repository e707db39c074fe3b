"""Shows replays as lines of text: the first difference, with one side below the other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rolltree.insight.recorded import Difference
from rolltree.insight.replaying import ReplayReport
from rolltree.store import to_plain

MOST_CHARACTERS = 1200
_BEFORE = 60
_MOST_CAUSES = 5
_WHAT_TO_DO = (
    "Nothing was compared. Give the environment what it lacks: its files and packages, its "
    "sandbox, its servers, or other arguments (-a); a judge can be left out with --no-score."
)


def replay_lines(report: ReplayReport) -> list[str]:
    """Return one replay as lines: how far it came, the first difference, and the notes."""
    calls = f"{report.num_replayed} of {report.num_calls} recorded calls"
    if report.failure:
        return [f"{report.request_id}: {report.failure}", f"  {_WHAT_TO_DO}"]
    lines = [f"{report.request_id}: {'equal' if report.is_equal else 'DIFFERENT'}, {calls}"]
    if report.num_continued:
        lines[0] += f", then {report.num_continued} calls of a model"
    if report.stopped:
        lines.append(f"  {report.stopped}")
    if report.difference is not None:
        lines += difference_lines(report.difference)
    if report.branch_rewards:
        rewards = ", ".join(map(_number, report.branch_rewards))
        recorded = next((state.reward for state in report.recorded.states), None)
        lines.append(f"  rewards {rewards}; recorded {_number(recorded)}")
    return [*lines, *(f"  note: {note}" for note in report.notes)]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def difference_lines(difference: Difference) -> list[str]:
    """Return a difference as lines: where it is, and the text of each side."""
    where = [difference.agent] if difference.agent else []
    if difference.call is not None:
        where.append(f"call {difference.call}")
    sides = [_text(side) for side in (difference.recorded, difference.live)]
    # Both sides are cut around the same place.
    start = _first_difference(*sides)
    lines = [f"  {', '.join((*where, difference.where))} ({difference.kind})"]
    for name, text in zip(("recorded", "live"), sides, strict=True):
        shown = _cut(text, start).split("\n")
        lines.append(f"    {name + ':':9} {shown[0]}")
        lines += [f"    {'':9} {line}" for line in shown[1:]]
    return lines


def replays_summary(reports: Sequence[ReplayReport]) -> list[str]:
    """Return several replays as lines: first the different ones in full, then the counts."""
    lines: list[str] = []
    kinds = Counter(each.difference.kind for each in reports if each.difference is not None)
    failures = Counter(each.failure for each in reports if each.failure)
    for report in reports:
        # Equal replays are only counted, and failures are counted by cause.
        if report.difference is not None:
            lines += replay_lines(report)
    num_equal = sum(each.is_equal for each in reports)
    for failure, number in failures.most_common(_MOST_CAUSES):
        what, _, reason = failure.partition(": ")
        lines.append(f"{what} {number} of {len(reports)}: {reason}")
    lines += [_WHAT_TO_DO] * bool(failures)
    lines.append(f"{num_equal} of {len(reports)} rollouts replay equal")
    if kinds:
        found = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
        lines.append(f"first differences: {found}")
    partial = sum(bool(report.stopped) for report in reports)
    if partial:
        lines.append(f"{partial} were compared up to where their recording ends")
    # The notes of replays that differ are beside their differences.
    notes = Counter(note for each in reports if each.is_equal for note in each.notes)
    lines += [f"note: {note}" for note, _ in notes.most_common(_MOST_CAUSES)]
    return lines


def _text(value: Any) -> str:
    if value is None:
        return "(nothing)"
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        rest = {key: item for key, item in value.items() if key not in ("role", "content")}
        more = f"\n{json.dumps(to_plain(rest))}" if rest else ""
        # A message is shown as its text, with its other fields after it.
        return (value["content"] or "(empty)") + more
    return json.dumps(to_plain(value))


def _first_difference(one: str, other: str) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def _cut(text: str, start: int) -> str:
    """Return the part of a long text around `start`, where it differs."""
    if len(text) <= MOST_CHARACTERS:
        return text
    begin = max(0, start - _BEFORE)
    end = begin + MOST_CHARACTERS - _BEFORE
    return ("… " if begin else "") + text[begin:end] + (" …" if end < len(text) else "")
