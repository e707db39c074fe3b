"""What is shown of an agent that somebody else wrote: how its program ended, what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def program_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how the program of a rollout ended, `state["program"]`; None if none was run."""
    found = state.get("program")
    # Other environments may have anything under that name.
    return found if isinstance(found, Mapping) and isinstance(found.get("ended"), str) else None


def program_ending(program: Mapping[str, Any]) -> str:
    """Return how a program ended, in words.

    >>> program_ending({"ended": "exit", "exit_status": 3})
    'exit status 3'
    """
    ended = program["ended"]
    known = {
        "exit": f"exit status {program.get('exit_status')}",
        "signal": f"signal {program.get('signal')}",
        "time": "ended at its time limit",
        "output": "ended because it printed too much",
        "lost": "its supervisor was killed",
        "closed": "ended with its rollout",
    }
    return known.get(ended, f"ended at the limit {ended}")


def why_left_out(step: Mapping[str, Any]) -> str | None:
    """Return why a step's call is not to be trained, or None."""
    # Not `peek`: lists of rollouts are shown without importing what reads tokens.
    why = (step.get("extras") or {}).get("left_out")
    return None if why is None else str(why)
