"""The notices of a run and its starts, as sentences; a repeated sentence is listed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rolltree.store import Event


def notice_sentences(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return `text`, `kind`, `times`, and `step` and `created_at` of the last time, oldest first.

    >>> [each["text"] for each in notice_sentences([Event("resumed", 0.0, None, {})])]
    ['The run was continued.']
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        say = _FORMATTERS.get(event.kind)
        if say is None:
            continue
        data = event.data if isinstance(event.data, Mapping) else {}
        text, at = say(data), data.get("last_at")
        last = found.setdefault((event.kind, text), {"text": text, "kind": event.kind, "times": 0})
        last["times"] += max(1, _whole(data, "times"))
        last |= {"step": event.step, "created_at": event.created_at if at is None else at}
    return list(found.values())


def _whole(data: Mapping[str, Any], name: str) -> int:
    found = data.get(name)
    return found if type(found) is int else 0


def _message(data: Mapping[str, Any]) -> str:
    said = str(data.get("message") or "").strip()
    return said[:1].upper() + said[1:] + ("" if said.endswith((".", "!", "?")) else ".")


def _resumed(data: Mapping[str, Any]) -> str:
    changed = data.get("changed")
    if not changed:
        return "The run was continued."
    names = ", ".join(map(str, changed if isinstance(changed, list | dict) else [changed]))
    return f"The run was continued with other settings: {names}."


def _retried(data: Mapping[str, Any]) -> str:
    cause = data.get("cause")
    known = [str(each) for each in cause] if isinstance(cause, list) else []
    if len(known) != 3:  # an older store has an event for each, without its cause
        return "A request whose rollouts had failed ran again."
    kind, phase, place = known
    where = f" in {place}" if place else f" ({phase})" if phase else ""
    return f"A request whose rollouts had failed with {kind}{where} ran again."


def _truncated(data: Mapping[str, Any]) -> str:
    return (
        f"{_whole(data, 'steps'):,} later steps and {_whole(data, 'rollouts'):,} rollouts of them "
        "were dropped, to continue from an earlier checkpoint."
    )


def _ended(data: Mapping[str, Any]) -> str:
    if data.get("state") != "failed":
        return "A start was stopped before the end."
    return f"A start ended with {data.get('error')}: {data.get('message')}"


_FORMATTERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "notice": _message,
    "retried": _retried,
    "truncated": _truncated,
    "resumed": _resumed,
    "ended": _ended,
}
