"""`repair_state`: replaces what is odd in a state, and says so in it.

A run without anything odd does not load this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from rolltree._helpers.tasks import contained
from rolltree._helpers.untrusted import well_formed
from rolltree.inference.client import may_follow
from rolltree.rollouts.settle import FLAGS, NUMBERS, TEXTS, TIMES, is_finite
from rolltree.store import dumps, loads
from rolltree.tokens import Trajectory, assigned_value, is_plain_step, peek
from rolltree.tokens.step import RecordedStep, odd_extras
from rolltree.values.errors import record_error
from rolltree.values.state import INPUT_FIELDS, OF_ENVIRONMENT, RAISED
from rolltree.values.steps import as_number
from rolltree.values.types import ErrorRecord, RolloutTiming, State


def repair_state(state: State, row: Mapping[str, Any] | None, calls: list[Any] | None) -> None:
    """Do what `settle_state` says to a state that may need it."""
    settled = _Settled(state)
    settled.drop_unreadable()
    if row is not None:
        settled.restore(row, calls)
    settled.calls()
    settled.values()
    settled.error()
    if settled.odd:
        message = f"{', '.join(settled.odd[:8])}: not what belongs there, so it was replaced."
        settled.note(ErrorRecord("ValueError", message, "", "environment", "episode"))


class _Settled:
    """One state that is being repaired, and what was odd in it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.odd: list[str] = []
        # Not `State.get`, which looks into an input that may be anything.
        self.get: Callable[[str], Any] = partial(dict.get, state)

    def put(self, key: str, value: Any) -> None:
        self.odd.append(f"state[{key!r}] was {_shown(self.get(key))}")
        dict.__setitem__(self.state, key, value)

    def note(self, error: ErrorRecord) -> None:
        raised = {**(self.get("environment_errors") or {})}
        # The first error may have caused the others.
        raised.setdefault(OF_ENVIRONMENT, error.as_dict())
        dict.__setitem__(self.state, "environment_errors", raised)

    def drop_unreadable(self) -> None:
        """Replace values of rolltree's own keys that raise when somebody reads them."""
        for key in _OWN_KEYS:
            if not _can_be_read(self.get(key)):
                self.put(key, None)
        source = self.get("input")
        if isinstance(source, dict):
            for key in INPUT_FIELDS:
                if not _can_be_read(source.get(key)):
                    self.odd.append(f"state[{key!r}] was {_shown(source[key])}")
                    source[key] = loads(dumps(source[key]))

    def restore(self, row: Mapping[str, Any], calls: list[Any] | None) -> None:
        source = self.get("input")
        if not isinstance(source, dict):
            self.put("input", deepcopy(dict(row)))
        else:
            for key in INPUT_FIELDS:
                if key in row and key not in source:
                    source[key] = deepcopy(row[key])
            # Messages cannot follow a text, nor a text messages.
            if type(source.get("prompt")) is not type(row.get("prompt")):
                self.odd.append(f"state['prompt'] was {_shown(source.get('prompt'))}")
                source["prompt"] = deepcopy(row.get("prompt"))
        steps: Any = self.get("trajectory")
        if not isinstance(steps, list):
            self.put("trajectory", Trajectory() if calls is None else calls)
        elif not all(map(_is_step, steps)):
            self.put("trajectory", Trajectory.of([*filter(_is_step, steps)]))
        timing = self.get("timing")
        if not isinstance(timing, dict) or not all(is_finite(timing.get(key)) for key in TIMES):
            fresh = RolloutTiming(
                start_time=time.time(), generation_ms=0.0, scoring_ms=0.0, total_ms=0.0
            )
            self.put("timing", fresh)

    def is_text(self) -> bool:
        """Whether the conversation is a text and not messages."""
        source = self.get("input")
        return isinstance(source, Mapping) and isinstance(source.get("prompt"), str)

    def has_step_rewards(self) -> bool:
        """Whether some step has a reward of its own, so that the others have earned nothing."""
        steps = filter(_is_step, self.get("trajectory"))
        return any(_number(assigned_value(step, "reward")) is not None for step in steps)

    def calls(self) -> None:
        steps = self.get("trajectory")
        for index, step in enumerate(steps if isinstance(steps, list) else ()):
            if _is_step(step) and not is_plain_step(step):
                self._call(index, step)

    def _call(self, index: int, step: dict[str, Any]) -> None:
        def put(key: str, value: Any) -> None:
            self.odd.append(f"step {index}'s {key} was {_shown(assigned_value(step, key))}")
            step[key] = value

        for key in ("prompt", "completion", "extras"):
            if not _can_be_read(assigned_value(step, key)):
                put(key, None)
        for key, role in (("prompt", "user"), ("completion", "assistant")):
            said = peek(step, key)
            # A text where messages belong is one, as in `env_response`.
            if isinstance(said, str) and not self.is_text():
                put(key, [{"role": role, "content": said}])
            elif not isinstance(said, str if self.is_text() else list):
                put(key, "" if self.is_text() else [])
        extras = assigned_value(step, "extras")
        if not isinstance(extras, Mapping | None):
            put("extras", {})
        elif isinstance(extras, dict):
            recorded = step.recorded_extras() if isinstance(step, RecordedStep) else {}
            for key in odd_extras(extras):
                self.odd.append(f"step {index}'s extras had {key} {_shown(extras[key])}")
                extras[key] = recorded.get(key)
        for key in ("reward", "advantage"):
            value = assigned_value(step, key)
            number = _number(value)
            if number is not value:
                if number is None:
                    put(key, 0.0 if key == "reward" and self.has_step_rewards() else None)
                else:
                    step[key] = number
            step.setdefault(key, None)

    def values(self) -> None:
        for key in RAISED:
            errors = self.get(key)
            if errors is not None and not _are_errors(errors):
                self.put(key, _texts_of(errors))
        for key in NUMBERS:
            value = self.get(key)
            number = _number(value)
            if number is not value:
                if number is None:
                    self.put(key, 0.0 if key == "reward" else None)
                else:
                    dict.__setitem__(self.state, key, number)
        for key in TEXTS:
            value = self.get(key)
            if isinstance(value, str):
                dict.__setitem__(self.state, key, well_formed(str.__str__(value)))
            elif value is not None:
                self.put(key, _shown(value))
        depth = self.get("depth")
        if depth is not None and not isinstance(depth, int):
            self.put("depth", 0)
        for key in FLAGS:
            flag = self.get(key)
            if isinstance(flag, np.bool_ | int):
                dict.__setitem__(self.state, key, bool(flag))
            elif flag is not None:
                self.put(key, None)
        self._metrics()
        self._messages()

    def _metrics(self) -> None:
        metrics = self.get("metrics")
        if metrics is None:
            return
        if not isinstance(metrics, dict):
            self.put("metrics", {})
            return
        numbers = {_name(name): _number(value) for name, value in metrics.items()}
        lost = [n for n, value in metrics.items() if value is not None and not _is_number(value)]
        if lost:
            self.put("metrics", numbers)
        elif [*numbers] != [*metrics] or any(
            type(value) not in (int, float) for value in metrics.values() if value is not None
        ):
            dict.__setitem__(self.state, "metrics", numbers)

    def _messages(self) -> None:
        is_text = self.is_text()
        said = self.get("completion")
        if isinstance(said, list | tuple) and not _are_messages(said):
            self.put("completion", [each for each in said if _is_message(each)])
        elif not isinstance(said, str | list | None):
            self.put("completion", None)
        said = self.get("final_env_response")
        if said is None or (isinstance(said, str) if is_text else _are_messages(said)):
            return
        text = said if isinstance(said, str) else _shown(said)
        self.put("final_env_response", text if is_text else [{"role": "user", "content": text}])

    def error(self) -> None:
        error = self.get("error")
        if error is None or isinstance(error, ErrorRecord):
            return
        if isinstance(error, BaseException):
            record = record_error(error, "environment")
            is_scored = may_follow(error) if isinstance(error, Exception) else True
        else:
            told: dict[str, Any] = loads(dumps(error)) if isinstance(error, Mapping) else {}
            name, message = (
                told[key] if isinstance(told.get(key), str) else "" for key in ("type", "message")
            )
            record = ErrorRecord(
                name or type(error).__name__,
                (message or (error if isinstance(error, str) else _shown(error)))[:10_000],
                "",
                "environment",
                "episode",
            )
            is_scored = True
        # What it wrote after an answer must not decide whether the rollout has a reward.
        if is_scored and self.get("trajectory"):
            dict.__setitem__(self.state, "error", None)
            self.note(record)
        else:
            dict.__setitem__(self.state, "error", record)
            dict.__setitem__(self.state, "reward", None)


_OWN_KEYS = (
    *("input", "trajectory", "timing", "metrics", "completion", "final_env_response", "error"),
    *("oai_tools", "depth", "cleaned_up", *RAISED, *NUMBERS, *TEXTS, *FLAGS),
)
_PLAIN = frozenset((type(None), bool, int, float, str, dict, list, tuple, Trajectory, ErrorRecord))


def _can_be_read(value: Any) -> bool:
    """Whether a value can be read without an exception of its class's own code."""
    if type(value) in _PLAIN:
        return True
    try:
        with contained():
            if isinstance(value, Mapping):
                [*value.keys(), *value.values(), len(value)]
            elif isinstance(value, list | tuple | set | frozenset):
                [*value, len(value)]
            elif isinstance(value, str):
                str(value)
            elif isinstance(value, BaseException):
                record_error(value, "environment")
    except Exception:  # noqa: BLE001  it may raise anything
        return False
    return True


def _is_a(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except Exception:  # noqa: BLE001  a dead `weakref.proxy` raises here
        return False


def _is_step(value: Any) -> bool:
    return _is_a(value, dict) and _can_be_read(value)


def _is_message(value: Any) -> bool:
    return _is_a(value, Mapping) and _can_be_read(value)


def _are_errors(value: Any) -> bool:
    """Whether a value has the shape of errors by name: dicts of texts."""
    return type(value) is dict and all(
        type(error) is dict and all(type(each) in _OF_ERROR for each in error.values())
        for error in value.values()
    )


_OF_ERROR = (str, type(None))


def _texts_of(errors: Any) -> dict[str, Any]:
    """Return errors by name with texts for other values; nothing if they are no such dict."""
    read = loads(dumps(errors))
    if not isinstance(read, dict) or not all(isinstance(error, dict) for error in read.values()):
        return {}
    return {
        _name(name): {
            _name(key): each if type(each) in _OF_ERROR else _shown(each)
            for key, each in error.items()
        }
        for name, error in read.items()
    }


def _name(value: Any) -> str:
    """Return what is a key of texts or numbers as a text that UTF-8 can hold."""
    name: str = well_formed(value if type(value) is str else _shown(value))
    return name


def _is_number(value: Any) -> bool:
    return _number(value) is not None


def _number(value: Any) -> float | None:
    """Return a value as a float, as itself if it is one already; None if it is not a number."""
    if value is None:
        return None
    try:
        with contained():
            return as_number(value)
    except Exception:  # noqa: BLE001  a `__float__` may raise anything
        return None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_message, value))


def _shown(value: Any) -> str:
    try:
        with contained():
            text = repr(value)
    except Exception:  # noqa: BLE001  a `__repr__` may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
