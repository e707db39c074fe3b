"""Stores the reward functions of a source and their weights in a run, and reads them.

Each note has the time from which it applies, so that rollouts which were scored with earlier
weights are told apart from later ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolltree.store.run import Run

META = "reward_weights"


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """The names and weights of the functions that score rollouts of one task and one agent.

    `task` is that of an environment group's member, `agent` that of an agent with its own rubric;
    empty means all others. `is_sum`: the reward is exactly the functions' weighted sum, so that an
    audit can compare it; False for a rubric with its own scoring method. `kinds` are the kinds of
    the functions ("rollout", "step", "group"); empty if the rewards of the steps and the advantages
    are not those that `Rubric` writes, because a subclass has its own scoring method.
    """

    functions: tuple[tuple[str, float], ...]
    task: str = ""
    agent: str = ""
    is_sum: bool = False
    kinds: tuple[str, ...] = ()


def environments_of(source: object) -> tuple[str, ...]:
    """Return the names of a group's environments, those of groups in it as `group/name`.

    Empty for a source that is not a group, or has no `scored_parts`.
    """
    return _tasks({"task": part.task} for part in _scored_parts(source) or ())


def noted_environments(run: Run, phase: str) -> tuple[str, ...]:
    """Return the environments of the group that played a phase of a run, else nothing."""
    return _tasks(phase_parts(run, phase) or ())


def _tasks(parts: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(part["task"]) for part in parts if part["task"]))


def task_environment(task: str, names: Iterable[str]) -> str | None:
    """Return which environment of a group plays rows of this task; None: none of `names`.

    >>> task_environment("math/hard/7", ["math", "math/hard"])
    'math/hard'
    """
    fitting = [name for name in names if f"{task}/".startswith(f"{name}/")]
    # A name may begin with another environment's: "math/hard" is not a task of "math".
    return max(fitting, key=len, default=None)


def _scored_parts(source: object) -> list[ScoredPart] | None:
    method = getattr(getattr(source, "rubric", None), "scored_parts", None)
    return None if method is None else method()


def note_weights(source: object, run: Run) -> None:
    """Note the weights of a source's reward functions in a run, if they differ from the last note.

    Nothing is noted for a source whose rubric has no `scored_parts`.
    """
    scored_parts = _scored_parts(source)
    if scored_parts is None:
        return
    env_id = str(getattr(source, "env_id", ""))
    # Functions as pairs, since redaction could take the keys of a mapping for names of secrets.
    parts = [
        {
            "task": p.task,
            "agent": p.agent,
            "functions": [list(pair) for pair in p.functions],
            "is_sum": p.is_sum,
            "kinds": list(p.kinds),
        }
        for p in scored_parts
    ]
    notes = list(run.meta.get(META) or ())
    last = next((note for note in reversed(notes) if note.get("env_id") == env_id), None)
    if last is None or last.get("parts") != parts:
        note = {"env_id": env_id, "since": time.time(), "parts": parts}
        run.set_meta(META, [*notes, note])


def noted_weights(
    notes: Any, *, env_id: str, task: str, agent: str, created_at: float
) -> dict[str, float] | None:
    """Return the weights by function of a rollout stored at `created_at`; None: none were noted.

    `notes` is the run's value under `META`; a note without an environment applies to all of them.
    """
    part = noted_part(notes, env_id=env_id, task=task, agent=agent, created_at=created_at)
    return None if part is None else dict(part.functions)


def noted_part(
    notes: Any, *, env_id: str, task: str, agent: str, created_at: float
) -> ScoredPart | None:
    """Return the functions that scored a rollout; the arguments are those of `noted_weights`."""
    parts = _noted_parts(notes, env_id, created_at)
    environment = task_environment(task, _tasks(parts or ()))
    for each in parts or ():
        if each["task"] in ("", environment) and each["agent"] == agent:
            functions = tuple((name, weight) for name, weight in each["functions"])
            # Notes of older versions lack these.
            is_sum = bool(each.get("is_sum"))
            kinds = tuple(each.get("kinds") or ["rollout"] * is_sum)
            return ScoredPart(functions, each["task"], each["agent"], is_sum, kinds)
    if parts is None:
        return None
    if agent:
        return noted_part(notes, env_id=env_id, task=task, agent="", created_at=created_at)
    return ScoredPart(())


def phase_parts(run: Run, phase: str) -> list[Mapping[str, Any]] | None:
    """Return the noted parts that scored the last rollouts of a phase; None: none were noted."""
    notes = run.meta.get(META)
    noted = [
        _noted_parts(notes, each.env_id, each.last_created_at)
        for each in run.totals()
        if each.phase == phase
    ]
    known = [parts for parts in noted if parts is not None]
    return [part for parts in known for part in parts] if known else None


def _noted_parts(notes: Any, env_id: str, created_at: float) -> list[Mapping[str, Any]] | None:
    """Return the parts of the last note by then, since a continued run may change weights."""
    parts: list[Mapping[str, Any]] | None = None
    for note in notes if isinstance(notes, Sequence) else ():
        if note.get("env_id") in ("", env_id) and note.get("since", 0.0) <= created_at:
            parts = note["parts"]
    return parts
