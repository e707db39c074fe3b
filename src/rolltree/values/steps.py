"""The values that worlds, agents and protocols exchange: outcomes, steps and rollouts.

A world passes `StepOutcome` to a protocol, a parser `ParseResult` to an agent, an agent `AgentStep`
to a protocol, and a protocol `Rollout` to scoring and training. An `AgentStep` holds the
`TrajectoryStep` of its call (`record`), whose tokens are a view of the tree.

Each reward is in one place. Rewards of a parser or an agent (a bonus for the format, a penalty) are
`AgentStep.reward`; rewards of a world are `EnvironmentStep.reward`. Nothing is added to both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from rolltree.values.types import (
    ChatMessage,
    ErrorRecord,
    FinishReason,
    FloatArray,
    Info,
    IntArray,
    Messages,
    TrajectoryStep,
    TruncationReason,
)

ActionTarget: TypeAlias = Literal["internal", "external", "env"]
"""The addressee of a model call: the agent itself, the protocol, or the world."""

PARSE_FEEDBACK = "parse_feedback_obs"
"""Key of `AgentStep.info`: the feedback to the model after an answer without an action."""
INCOMPLETE = "incomplete_completion"
"""Key of `AgentStep.info`, True if an answer was rejected because it was cut off."""


MAX_REWARD = 1e100
"""Statistics, advantages and losses add and square rewards, in floats that end at 1.8e308."""


def as_number(
    value: Any, weight: float = 1.0, *, source: str = "a reward function returned"
) -> float:
    """Return a reward as a float.

    >>> as_number(True), as_number(2)
    (1.0, 2.0)

    Raises:
        ValueError: it is not a finite number, or with its weight too large. A function that returns
            None has scored nothing.
    """
    if isinstance(value, str) or value is None:
        raise ValueError(f"{source} {value!r}, which is not a number")
    try:
        # A bool, a numpy scalar or a one-element tensor is a number, too.
        number = float(value)
    except OverflowError:
        raise ValueError(f"{source} an integer that is too large for a float") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} a {type(value).__name__}, not a number ({error})") from error
    if not math.isfinite(number):
        raise ValueError(f"{source} {number}; rewards must be finite")
    if not abs(number * weight) <= MAX_REWARD or abs(number) > MAX_REWARD:
        with_weight = "" if weight in (0.0, 1.0) else f", with its weight {weight:g}"
        raise ValueError(
            f"{source} {number:g}{with_weight}; rewards must not exceed {MAX_REWARD:g}, so that "
            "their sums and squares are finite"
        )
    return number


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of one action in a world; `terminated` and `truncated` as in Gymnasium.

    Example: `StepOutcome("You fell into a hole.", reward=-1.0, terminated=True)`.
    """

    obs: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A number of numpy's or an integer, as worlds give them; anything else is told later.
        with contextlib.suppress(Exception):
            object.__setattr__(self, "reward", as_number(self.reward))

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class ParseResult:
    """A parsed text. `action` is None if the text holds no action.

    `reward` is the parser's reward for the format. `obs` is feedback: after a failure it replaces
    the world's observation, so that the model sees what was wrong.

    Example: `ParseResult(None, reward=-0.1, obs="Put your move between <move> and </move>.")`.
    """

    action: Any | None
    reward: float = 0.0
    obs: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the text held no action."""
        return self.action is None


ToolScope: TypeAlias = Literal["internal", "external", "unknown"]


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """One tool call that a model made.

    `arguments` are checked and converted for a known tool; None if they could not be read, and
    `problem` then says why (the model gets it as the answer). `raw` is the text of the model.
    """

    call_id: str
    name: str
    arguments: Mapping[str, Any] | None
    scope: ToolScope
    raw: str = ""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of one tool call; the model reads `text`.

    `error` is set, with its traceback, if the tool raised or took too long; `text` says so.
    """

    call_id: str
    name: str
    text: str
    error: ErrorRecord | None = None
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentStep:
    """One model call of an agent, and what happens next.

    | `action_target` | `parse_result` | what the protocol does |
    |---|---|---|
    | `"internal"` | set | nothing: the agent handled it and went on |
    | `"external"` | None | answers `tool_calls` of scope "external", calls `act()` again |
    | `"env"` | set | steps the world with `parse_result.action`, unless that is None |

    Fields:
        agent: the agent's name.
        turn: the agent's turn, from 0; external calls do not begin a new one.
        record: the `TrajectoryStep`: `record["prompt"]`, `["completion"]`, `["tokens"]` (a view of
            the token tree of the agent's `trajectory`, or None), `["extras"]["call_id"]`.
        reward: only the parser's and the agent's; without `parse_result`, that for bad calls.
        tool_calls, tool_answers: the message's calls; the answers to those the agent handled.
        truncated: the episode was cut, and this is its last step (`info["truncation_reason"]`).
        info: `finish_reason`, `incomplete_completion`, `parse_feedback_obs`, `kind`, ...
    """

    agent: str
    turn: int
    record: TrajectoryStep = field(repr=False)
    finish_reason: FinishReason
    action_target: ActionTarget
    parse_result: ParseResult | None
    reward: float = 0.0
    tool_calls: tuple[ToolRequest, ...] = ()
    tool_answers: tuple[ToolAnswer, ...] = ()
    terminated: bool = False
    truncated: bool = False
    info: Info = field(default_factory=dict)

    @property
    def message(self) -> ChatMessage:
        """The assistant message."""
        message: ChatMessage = self._peek("completion")[-1]
        return message

    @property
    def prompt(self) -> Messages:
        """The messages that were sent to the model: the record's list."""
        prompt: Messages = self.record["prompt"]
        return prompt

    @property
    def prompt_ids(self) -> IntArray | None:
        """The prompt's ids, int32 `[_P]`; None if the server returned none."""
        return self._tokens("prompt_ids")

    @property
    def completion_ids(self) -> IntArray | None:
        """The sampled ids, int32 `[_C]`, with the end token if it was sampled; None if unknown."""
        return self._tokens("completion_ids")

    @property
    def logprobs(self) -> FloatArray | None:
        """The logprobs of the sampled ids, float32 `[_C]`; None if the server returned none."""
        return self._tokens("logprobs")

    @property
    def versions(self) -> IntArray | None:
        """The policy version of each sampled token, int32 `[_C]`."""
        return self._tokens("versions")

    def _peek(self, key: str) -> Any:
        """Return `record[key]` without letting the record cache the value that it builds."""
        peek = getattr(self.record, "peek", self.record.__getitem__)
        return peek(key)

    def _tokens(self, name: str) -> NDArray[Any] | None:
        """Return one array of this call from the token tree behind `record`."""
        tokens = self._peek("tokens")
        if tokens is None:
            return None
        array: NDArray[Any] | None = getattr(tokens.tree, name)(tokens.call)
        return array

    @property
    def parse_failed(self) -> bool:
        """Whether the step was meant for the world but holds no action."""
        return self.parse_result is not None and self.parse_result.failed


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """One step of a world: the transition that an agent's turn caused.

    `agent_steps` are the indices, in `Rollout.steps`, of the model calls of that turn; the last
    one gave the action. `reward` is only the world's reward.
    """

    agent: str
    turn: int
    prev_obs: str
    action: Any
    next_obs: str
    reward: float
    terminated: bool = False
    truncated: bool = False
    info: Info = field(default_factory=dict)
    agent_steps: tuple[int, ...] = ()


Step: TypeAlias = AgentStep | EnvironmentStep


@dataclass(frozen=True, slots=True)
class Rollout:
    """The steps of one agent in one episode, in order.

    `meta` has `episode_truncated`, `truncation_reason` and whatever a protocol adds. A delegated
    rollout names its parent rollout and the index of the step there that requested it; `depth` is
    0 for the episode's own agents. `error` is set if it failed; its steps are kept.
    """

    rollout_id: str
    agent: str
    steps: tuple[Step, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    parent_rollout: str | None = None
    parent_step: int | None = None
    depth: int = 0
    error: ErrorRecord | None = None

    @property
    def agent_steps(self) -> tuple[AgentStep, ...]:
        """The model calls."""
        return tuple(step for step in self.steps if isinstance(step, AgentStep))

    @property
    def environment_steps(self) -> tuple[EnvironmentStep, ...]:
        """The world's steps."""
        return tuple(step for step in self.steps if isinstance(step, EnvironmentStep))

    @property
    def reward(self) -> float:
        """The sum of all rewards, undiscounted."""
        return sum(step.reward for step in self.steps)

    @property
    def turn_rewards(self) -> dict[int, float]:
        """The rewards per turn of the agent, in order; returns are computed from them."""
        rewards: dict[int, float] = {}
        for step in self.steps:
            rewards[step.turn] = rewards.get(step.turn, 0.0) + step.reward
        return rewards

    @property
    def terminated(self) -> bool:
        """Whether the episode ended by itself and was not cut."""
        return bool(self.steps) and self.steps[-1].terminated

    @property
    def truncated(self) -> bool:
        """Whether the episode was cut."""
        return bool(self.meta.get("episode_truncated", False))

    @property
    def truncation_reason(self) -> TruncationReason | None:
        """Why the episode was cut; None if it was not."""
        reason = self.meta.get("truncation_reason")
        return None if reason is None else TruncationReason(reason)
