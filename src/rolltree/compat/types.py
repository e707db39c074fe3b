"""Type names of verifiers 0.1.8: aliases and dict shapes for annotations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias, TypedDict

from rolltree import types as rooms
from rolltree.types import ChatMessage, State

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
    """What one rollout took, in milliseconds; `start_time` is seconds since the epoch."""

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
    try:  # what clients of the openai package answer is one, too
        from openai.types import Completion
        from openai.types.chat import ChatCompletion
    except ImportError:
        return rooms.ModelResponse
    globals()[name] = made = rooms.ModelResponse | Completion | ChatCompletion | None
    return made
