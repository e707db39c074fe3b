"""Type names of verifiers 0.1.8: aliases and dict shapes for annotations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias, TypedDict

from rolltree.types import ChatMessage
from rolltree.types import TrajectoryStepTokens as Tokens

ChatMessages: TypeAlias = list[ChatMessage]
Message: TypeAlias = str | ChatMessage
IndividualRewardFunc: TypeAlias = Callable[..., float | Awaitable[float]]
GroupRewardFunc: TypeAlias = Callable[..., list[float] | Awaitable[list[float]]]
JsonPrimitive: TypeAlias = Literal["string", "number", "integer", "boolean", "array", "object"]


class TrajectoryStepTokens(Tokens):
    """Tokens of one model call, and whether `max_seq_len` cut its prompt or its end."""

    overlong_prompt: bool
    is_truncated: bool


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
