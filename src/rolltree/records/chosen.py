"""Which rollouts of a run are shown: filtered, in an order, the first few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolltree.errors import ConfigError, did_you_mean
from rolltree.store import Run


@dataclass(frozen=True, slots=True)
class ChosenRollouts:
    """Requests to show: `request_ids` are the first of `num_found` rollouts that pass `words`."""

    request_ids: tuple[str, ...]
    num_found: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        noun = "rollout" if self.num_found == 1 else "rollouts"
        return f"{self.num_found} {noun}: {', '.join(self.words)}"


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

    `step` is a training step, -1 the last one that has rollouts. `where` and `sort` are those of
    `Run.rollouts`.

    Raises:
        ConfigError: no such phase, no rollouts at that step, or a filter that cannot be read.
    """
    words: list[str] = []
    filters: dict[str, Any] = {}
    if phase is not None:
        phases = list(dict.fromkeys(item.phase for item in run.totals()))
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
            f"{sort.removeprefix('-')}, the {'greatest' if sort[0] == '-' else 'least'} first"
        )
    ids: dict[str, None] = {}
    for (request_id,) in run.columns(("request_id",), sort=sort, **filters) if num else ():
        ids[request_id] = None
        if len(ids) == num:
            break
    return ChosenRollouts(tuple(ids), run.num_rollouts(**filters) if words else 0, tuple(words))


def _step(run: Run, step: int) -> int:
    """Return a step that has training rollouts; a negative one counts from the last."""
    found = {at for (at,) in run.columns(("train_step",)) if at is not None}
    wanted = max(found, default=0) + 1 + step if step < 0 else step
    if wanted not in found:
        known = f"has them for steps {min(found)} to {max(found)}" if found else "has none"
        raise ConfigError(
            f"{run.path} has no training rollouts of step {wanted}; it {known}. Evaluations are "
            "chosen by --phase."
        )
    return wanted
