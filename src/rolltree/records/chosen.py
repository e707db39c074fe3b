"""Chooses the rollouts of a run to show: by filters and an order, or the most telling ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolltree.store import Run
from rolltree.values.errors import ConfigError, did_you_mean

MAX_TELLING = 64
_MAX_GROUP = 16


@dataclass(frozen=True, slots=True)
class ChosenRollouts:
    """The requests to show: the first of `num_matches` rollouts that pass `words`."""

    request_ids: tuple[str, ...]
    num_matches: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        noun = "rollout" if self.num_matches == 1 else "rollouts"
        return f"{self.num_matches} {noun}: {', '.join(self.words)}"


def shown_requests(
    run: Run,
    *,
    num: int = 1,
    phase: str | None = None,
    step: int | None = None,
    failed: bool = False,
    where: str | Sequence[str] = (),
    sort: str | None = None,
) -> ChosenRollouts:
    """Return the first requests whose rollouts pass the filters, in the order of their rollouts.

    `step` is a training step, or -1 for the last one that has rollouts. `where` and `sort` are
    those of `Run.rollouts`.

    Raises:
        ConfigError: no such phase, no rollouts at that step, or a filter that cannot be read.
    """
    words: list[str] = []
    filters: dict[str, Any] = {}
    if phase is not None:
        phases = run.phases()
        if phase not in phases:
            raise ConfigError(f"{run.path} has no phase {phase!r}.{did_you_mean(phase, phases)}")
        filters["phase"] = phase
    if step is not None:
        filters["train_step"] = _step(run, step)
        words.append(f"step {filters['train_step']}")
    if failed:
        filters["status"] = "error"
        words.append("failed")
    if texts := [where] if isinstance(where, str) else list(where):
        filters["where"] = " and ".join(texts)
        words.append(filters["where"])
    if sort == "-id":
        words.append("the last first")
    elif sort is not None:
        words.append(
            f"{sort.removeprefix('-')}, the {'greatest' if sort[:1] == '-' else 'least'} first"
        )
    ids: dict[str, None] = {}
    for (request_id,) in run.columns(("request_id",), sort=sort, **filters):
        if len(ids) >= num:
            break
        ids[request_id] = None
    return ChosenRollouts(tuple(ids), run.num_rollouts(**filters) if words else 0, tuple(words))


def _step(run: Run, step: int) -> int:
    """Return a step that has training rollouts; a negative one counts from the last."""
    found = {at for (at,) in run.columns(("train_step",)) if at is not None}
    wanted = max(found, default=0) + 1 + step if step < 0 else step
    if wanted not in found:
        known = f"has them for steps {min(found)} to {max(found)}" if found else "has none at all"
        raise ConfigError(
            f"{run.path} has no training rollouts of step {wanted}; it {known}. Evaluations are "
            "chosen by --phase."
        )
    return wanted


def telling_requests(
    run: Run, sentences: Sequence[Mapping[str, Any]], *, num: int = MAX_TELLING
) -> dict[str, str]:
    """Return the most telling requests of a run, at most `num`, each with the reason for it.

    They are those that the story's `sentences` rest on, the groups whose rewards differ most (the
    last one and the first one, each whole), the best, the worst, the failed, the cut, the longest
    and, for the rest, some from all over the run. A run of at most `num` rollouts returns all of
    them, with the reason "".

    Raises:
        StoreError: the file is damaged.
    """
    if run.num_rollouts() <= num:
        return {name: "" for (name,) in run.columns(("request_id",))}
    found: dict[str, str] = {}
    for why, names in _telling(run, sentences):
        for name in names:
            if len(found) < num:
                found.setdefault(name, why)
    return found


def _telling(
    run: Run, sentences: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Sequence[str]]]:
    def first(num: int, sort: str | None = "-id", **filters: Any) -> list[str]:
        rows = run.columns(("request_id",), sort=sort, limit=num, **filters)
        return [name for (name,) in rows]

    for sentence in sentences:
        evidence = sentence["evidence"]
        names: Sequence[str] = ()
        if "request_id" in evidence:
            names = [name for name, _ in evidence["rollouts"][:3]]
        elif "where" in evidence:
            names = first(2, phase=evidence["phase"], where=evidence["where"])
        elif evidence["view"] == "groups":
            names = first(2, phase=evidence["phase"], train_step=evidence["step"])
        yield "the story points to", names
    for order in ("DESC", "ASC"):
        yield "of whole groups", _widest_group(run, order)
    # The last phases: in a run of a hundred evaluations, these are the ones of interest.
    for phase in run.phases()[-4:]:
        for sort, why in (("-reward", "best"), ("reward", "worst")):
            yield why, first(2, sort, phase=phase, where="reward != none")
    types = run.query(
        "SELECT error_type FROM rollouts WHERE status = 'error' GROUP BY error_type"
        " ORDER BY count(*) DESC LIMIT 4"
    )
    for row in types:
        yield "failed", first(2, status="error", error_type=row["error_type"])
    yield "cut", first(2, truncated=1)
    yield "longest", [*first(1, "-num_calls"), *first(1, "-num_completion_tokens")]
    # From the end in even steps: the newest is always among them.
    names = list(dict.fromkeys(name for (name,) in run.columns(("request_id",))))
    yield "from all over the run", names[-1 :: -max(1, len(names) // MAX_TELLING)]


def _widest_group(run: Run, order: str) -> list[str]:
    """Return the requests of the group whose rewards differ most; of equals, the last or first."""
    rows = run.query(
        "SELECT group_id FROM rollouts WHERE group_id <> '' GROUP BY group_id"
        f" HAVING count(*) BETWEEN 2 AND {_MAX_GROUP} AND max(reward) > min(reward)"
        f" ORDER BY max(reward) - min(reward) DESC, min(id) {order} LIMIT 1"
    )
    return [
        name for row in rows for (name,) in run.columns(("request_id",), group_id=row["group_id"])
    ]
