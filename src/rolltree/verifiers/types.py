"""Type names of verifiers 0.1.8, and its states, including those that environments make by hand."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias, TypedDict, cast

from rolltree.environments.batch_runner import AT_THE_BEGINNING
from rolltree.rollouts import current_episode
from rolltree.tokens import Trajectory
from rolltree.values import types as rooms
from rolltree.values.types import ChatMessage, State

ChatMessages: TypeAlias = list[ChatMessage]
Message: TypeAlias = str | ChatMessage
IndividualRewardFunc: TypeAlias = Callable[..., float | Awaitable[float]]
GroupRewardFunc: TypeAlias = Callable[..., list[float] | Awaitable[list[float]]]
StopCondition: TypeAlias = Callable[[State], Awaitable[bool]]
RolloutCleanup: TypeAlias = Callable[[State], Awaitable[None]]
EnvironmentTeardown: TypeAlias = Callable[[], Awaitable[None]]
JsonPrimitive: TypeAlias = Literal["string", "number", "integer", "boolean", "array", "object"]


class TrajectoryStepTokens(rooms.TrajectoryStepTokens):
    """Tokens of one model call, and whether `max_seq_len` cut its prompt or its end."""

    overlong_prompt: bool
    is_truncated: bool


class RolloutTiming(TypedDict, total=False):
    """The times of one rollout, in milliseconds; `start_time` is seconds since the epoch."""

    start_time: float
    generation_ms: float
    scoring_ms: float
    total_ms: float


class RolloutScore(TypedDict):
    """The scores of one rollout."""

    reward: float
    metrics: dict[str, float]


class RolloutScores(TypedDict):
    """The scores of several rollouts, by column."""

    reward: list[float]
    metrics: dict[str, list[float]]


class ProcessedOutputs(TypedDict):
    """Token columns of several rollouts."""

    prompt_ids: list[list[int]]
    prompt_mask: list[list[int]]
    completion_ids: list[list[int]]
    completion_mask: list[list[int]]
    completion_logprobs: list[list[float]]
    rewards: list[float]
    is_truncated: list[bool]


class Endpoint(TypedDict):
    """Where a model is served."""

    key: str
    url: str
    model: str


Endpoints: TypeAlias = dict[str, Endpoint]


def __getattr__(name: str) -> Any:
    if name != "ModelResponse":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Authors annotate with it and use it in isinstance, so it covers both kinds of responses.
    try:
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        return rooms.ModelResponse
    globals()[name] = made = rooms.ModelResponse | Completion | ChatCompletion | None
    return made


AT_THE_END = ("completion", "advantage", "stop_condition")
"""Keys that a state gets when its rollout is over."""


class CompatState(State):
    """A state in which columns other than the input's fields are only in `state["input"]`."""

    reads_columns = False


# Error messages name the class of a state, and authors know it as `State`.
CompatState.__name__ = "State"


class PlainState(CompatState):
    """A dict that an author passed as a state: its input's fields are not its keys."""

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self, key)

    def _forwards(self, key: object) -> bool:
        return False


def as_engine_state(state: Any) -> State:
    """Return a state, which an environment may have made by hand, as the engine needs it."""
    if not isinstance(state, State):
        state = CompatState(state)
    # The engine shares prefixes through a `Trajectory`; an author's plain list is converted.
    state["trajectory"] = Trajectory.of(state.get("trajectory"))
    for key, value in AT_THE_BEGINNING.items():
        if key not in AT_THE_END:
            state.setdefault(key, value)
    if state.get("timing") is None:
        state["timing"] = RolloutTiming(
            generation_ms=0.0, scoring_ms=0.0, total_ms=0.0, start_time=time.time()
        )
    episode = current_episode()
    # A failure must be recorded in its state, even if an author made that by hand.
    if episode is not None and not any(known is state for known in episode.states):
        episode.states.append(state)
    return cast(State, state)
