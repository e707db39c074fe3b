"""`State`: the dict that one rollout fills; it forwards the fields of its input."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

_Messages: TypeAlias = str | list[dict[str, Any]]
INPUT_FIELDS: tuple[str, ...] = ("prompt", "answer", "task", "info", "example_id")
_FORWARDED = frozenset(INPUT_FIELDS)
_MISSING = object()
OF_ENVIRONMENT = "environment"
"""The name, among the errors of a scored rollout, of one that the environment's own code raised."""
OF_CLEANUP = "cleanup"
"""The same of one that its `@cleanup` raised."""
RAISED = ("scoring_errors", "environment_errors")
"""Keys of the errors that are scored: name -> type and message."""
OWN_KEYS = frozenset(
    [
        *("input", "client", "model", "sampling_args", "oai_tools", "seed", "trajectory", "timing"),
        *("completion", "reward", "advantage", "metrics", "credit", "has_step_rewards"),
        *("is_completed", "stop_condition", "terminated", "truncated", "truncation_reason"),
        *(
            "error",
            "environment_errors",
            "scoring_errors",
            "cleanup_errors",
            "cleaned_up",
            "tool_errors",
        ),
        *(
            "final_env_response",
            "prompt_too_long",
            "overlong_prompt",
            "refused_request",
            "bootstrap_value",
        ),
        *("agent", "rollout_id", "request_id", "parent_rollout", "parent_step", "depth", "seat"),
        *("subtask", "result", "rollout_meta", "environment_steps", "world_info"),
        *("sandbox_id", "sandbox_level", "judge_response", "math_gave_up", "game_completed"),
        *("python_env", "ta_env", "harbor", "harbor_world"),
    ]
)
"""Keys that rolltree uses itself: a column of such a name is only in `state["input"]`."""


@dataclass(frozen=True, slots=True)
class UnscoredSnapshot:
    """The values that scoring may change in a state, as they were before scoring.

    `keys` are the state's own keys; `step_rewards` has one entry per step. `State.unscored` and the
    store keep a snapshot, so that a stored rollout can be scored again as if for the first time.
    """

    keys: frozenset[str]
    reward: float | None
    metrics: Mapping[str, Any] | None
    step_rewards: tuple[float | None, ...]
    has_step_rewards: bool | None

    @classmethod
    def of(cls, state: State) -> UnscoredSnapshot:
        """Return a snapshot of the present values of a state."""
        metrics = state.get("metrics")
        return cls(
            keys=frozenset(dict.keys(state)),
            reward=state.get("reward"),
            metrics=dict(metrics) if metrics else metrics,
            step_rewards=tuple(step.get("reward") for step in state.get("trajectory") or ()),
            has_step_rewards=state.get("has_step_rewards"),
        )


class State(dict[str, Any]):
    """The dict that one rollout fills. It forwards the input's fields.

    `state["prompt"]` reads `state["input"]["prompt"]` if there is an input. Forwarding is the
    same for reading, writing, `in`, `get`, `pop`, `setdefault` and `del`; iteration, `len`, `keys`
    and `==` see the dict's own keys only. Other columns of the row are read the same way, unless
    the state has a key of that name or rolltree uses the name itself (`OWN_KEYS`); writing such a
    key stores it in the state. A copy, and `state | other`, has its own copy of the input.
    A deep copy shares `state["client"]`; a pickled state has None there.

    Keys after a rollout: `input`, `is_completed`, `stop_condition`, `oai_tools`, `trajectory`,
    `completion`, `reward`, `advantage`, `metrics`, `timing`, `error`, `terminated`, `truncated`,
    `truncation_reason`, and whatever an environment adds. `advantage` is the reward minus the
    group's mean until training assigns credit, which `credit` then names.
    """

    # The keys as typed attributes, for rolltree's own code: `state.reward` is `state["reward"]`.
    # `_typed_keys` makes the properties. These first four raise KeyError if the key is missing; the
    # others read as None, for states that authors make by hand. `rolltree.values.types` imports
    # this module, so its types are Any here.
    prompt: _Messages
    task: str
    example_id: int
    # `TrajectoryStep`s, usually in a `rolltree.tokens.Trajectory`.
    trajectory: list[Any]

    completion: _Messages | None
    reward: float | None
    advantage: float | None
    metrics: dict[str, float | None] | None
    # `RolloutTiming`, in milliseconds.
    timing: Any
    # `ErrorRecord`, or whatever an author put there; None if nothing failed.
    error: Any
    oai_tools: list[dict[str, Any]] | None
    seed: int | None
    is_completed: bool | None
    stop_condition: str | None
    terminated: bool | None
    truncated: bool | None
    truncation_reason: str | None
    # Set by an environment to end the rollout with its own message.
    final_env_response: _Messages | None
    # Whether the engine refused a prompt that does not fit; that call added no step.
    prompt_too_long: bool | None
    # Whether the steps have their own rewards instead of the rollout's.
    has_step_rewards: bool | None
    # True after the `@cleanup` methods ran, so that they run only once.
    cleaned_up: bool | None
    # For a rollout of a protocol: its agent, and the rollout that delegated to it.
    agent: str | None
    parent_rollout: str | None

    INPUT_FIELDS = list(INPUT_FIELDS)
    reads_columns: ClassVar[bool] = True
    """Whether other columns than the input's fields are readable, too; False in verifiers 0.1.8."""
    began_s: float | None = None
    """`time.monotonic()` when the rollout began, for its durations; it is not stored."""
    unscored: UnscoredSnapshot | None = None
    """The state's values before scoring; None if they were not recorded."""
    was_answered: bool = False
    """Whether a model has answered a call of the rollout, even if no step says so."""

    @property
    def is_answered(self) -> bool:
        """Whether what follows may follow from something that a model wrote."""
        return self.was_answered or bool(dict.get(self, "trajectory"))

    def _forwards(self, key: object) -> bool:
        return key in _FORWARDED and dict.__contains__(self, "input")

    def __missing__(self, key: str) -> Any:
        if self._is_column(key):
            return dict.__getitem__(self, "input")[key]
        raise KeyError(key)

    def _is_column(self, key: object) -> bool:
        """Whether `key` is a column of the row and not one of the state's own keys."""
        if key in OWN_KEYS or not self.reads_columns or dict.__contains__(self, key):
            return False
        return key in dict.get(self, "input", ())

    @property
    def columns(self) -> dict[str, Any]:
        """The row's columns except the input's fields, even those with the name of a key."""
        row = dict.get(self, "input") or {}
        return {key: row[key] for key in row if key not in _FORWARDED}

    def __getitem__(self, key: str) -> Any:
        if key in _FORWARDED and dict.__contains__(self, "input"):
            source = dict.__getitem__(self, "input")
            if key in source:
                return source[key]
        return dict.__getitem__(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if self._forwards(key) and key in dict.__getitem__(self, "input"):
            dict.__getitem__(self, "input")[key] = value
        else:
            dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        if (self._forwards(key) and key in dict.__getitem__(self, "input")) or self._is_column(key):
            del dict.__getitem__(self, "input")[key]
        else:
            dict.__delitem__(self, key)

    def __contains__(self, key: object) -> bool:
        if self._forwards(key) and key in dict.__getitem__(self, "input"):
            return True
        return dict.__contains__(self, key) or self._is_column(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return `state[key]`, forwarded, or `default`."""
        if key in _FORWARDED:
            try:
                return self[key]
            except KeyError:
                return default
        # About half of the lookups miss, and raising an exception would cost most of the time.
        value = dict.get(self, key, _MISSING)
        if value is not _MISSING:
            return value
        return dict.__getitem__(self, "input")[key] if self._is_column(key) else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return `state[key]`, forwarded, after setting it to `default` if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Remove `key`, forwarded, and return its value; if it is missing, `default` if given."""
        if key in self:
            value = self[key]
            del self[key]
            return value
        if default:
            return default[0]
        raise KeyError(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several keys, forwarded."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:  # type: ignore[override]
        self.update(other)
        return self

    def __or__(self, other: Any) -> State:  # type: ignore[override]
        twin = self.copy()
        twin.update(other)
        return twin

    def copy(self) -> State:
        """Return a shallow copy that is still a `State`.

        The input is copied as well, since its fields are keys of the state, too.
        """
        twin = type(self)(dict.items(self))
        if "input" in twin:
            dict.__setitem__(twin, "input", copy(twin["input"]))
        return twin

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        twin = type(self)()
        memo[id(self)] = twin
        for key, value in dict.items(self):
            dict.__setitem__(twin, key, value if key == "client" else deepcopy(value, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kept = dict(dict.items(self))
        if "client" in kept:
            kept["client"] = None
        return type(self), (kept,)


def _typed_keys() -> None:
    """Give `State` a property for each key that it declares."""

    def forwarded(key: str) -> property:
        return property(
            lambda state: state[key], lambda state, value: state.__setitem__(key, value)
        )

    def own(key: str) -> property:
        # The methods of `dict`, in half the time of `State.get`: these keys are never forwarded.
        read = dict.__getitem__ if key == "trajectory" else dict.get
        return property(
            lambda state: read(state, key),
            lambda state, value: dict.__setitem__(state, key, value),
        )

    plain = {"began_s", "unscored", "was_answered", "reads_columns"}
    for key in State.__annotations__.keys() - plain:
        setattr(State, key, forwarded(key) if key in _FORWARDED else own(key))


_typed_keys()


def tool_errors(state: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the errors of a rollout's tools: `tool`, `type`, `message`, `traceback`."""
    errors = state.get("tool_errors")
    names = ("tool", "type", "message", "traceback")
    return [
        {name: str(error.get(name) or "") for name in names}
        for error in (errors if isinstance(errors, list) else ())
        if isinstance(error, Mapping)
    ]
