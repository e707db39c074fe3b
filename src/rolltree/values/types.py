"""Every value that several rooms share: frozen dataclasses, `TypedDict`s, and `State`.

Dimensions, in every docstring of the project: `_B` batch, `_T` tokens, `_V` vocabulary, `_H` heads,
`_D` model width, `_S` segments, `_R` loss records. Units: `_s`, `_ms`, `_bytes`; `num_`: a count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, cast

from rolltree.values.state import INPUT_FIELDS as INPUT_FIELDS
from rolltree.values.state import State as State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rolltree.values.openai_shape import ResponseChoice, ResponsePart

    IntArray: TypeAlias = NDArray[np.int32]
    FloatArray: TypeAlias = NDArray[np.float32]
else:
    # Importing numpy would take longer than all the rest, so at run time these types are Any.
    IntArray = FloatArray = Any

ChatMessage: TypeAlias = dict[str, Any]
"""One OpenAI chat message: `{"role": "user", "content": "7 + 5 ="}`."""
Messages: TypeAlias = str | list[ChatMessage]
"""A chat history, or one string for the completions endpoint."""
MessageType: TypeAlias = Literal["chat", "completion"]
Info: TypeAlias = dict[str, Any]
SamplingArgs: TypeAlias = dict[str, Any]
"""OpenAI request fields, as environments pass them: `{"temperature": 1.0, "max_tokens": 4}`."""
ToolSchema: TypeAlias = dict[str, Any]
"""One OpenAI tool: `{"type": "function", "function": {"name": ..., "parameters": ...}}`."""
Scope: TypeAlias = Literal["step", "turn", "interleave", "tree"]


class FinishReason(StrEnum):
    """Why the model stopped; `TruncationReason` says why an episode was cut."""

    STOP = "stop"  # an end token or a stop string was sampled
    LENGTH = "length"  # max_tokens or the context window was reached
    TOOL_CALLS = "tool_calls"  # the model asked for a tool
    ABORT = "abort"  # the request was cancelled while it was being sampled
    CONTENT_FILTER = "content_filter"  # the server cut the answer


class TruncationReason(StrEnum):
    """Why an episode was cut before the world reached a true end."""

    MAX_STEPS = "max_steps"  # the protocol's or the environment's turn limit
    ENV = "env"  # the world itself returned `truncated`
    MAX_SEQ_LEN = "max_seq_len"  # the prompt or the sample no longer fits
    TIME_LIMIT = "time_limit"  # wall clock, without the time spent waiting for the server
    BUDGET = "budget"  # a token or call budget was spent


class TrajectoryStepTokens(TypedDict):
    """Tokens of one model call, as lists. In memory, a view of the token tree."""

    prompt_ids: list[int]
    prompt_mask: list[int]
    completion_ids: list[int]
    completion_mask: list[int]
    completion_logprobs: list[float]


class TrajectoryStep(TypedDict):
    """One model call: the prompt, the completion, the response and their tokens."""

    prompt: Messages
    completion: Messages
    response: Any
    tokens: TrajectoryStepTokens | None
    reward: float | None
    advantage: float | None
    extras: dict[str, Any]


class BaseRolloutInput(TypedDict):
    """The columns that every dataset row has."""

    prompt: Messages
    example_id: int
    task: str


class RolloutInput(BaseRolloutInput, total=False):
    """One dataset row, which is the input of one rollout."""

    answer: str
    info: Info


class RolloutTiming(TypedDict):
    """The times of one rollout, in milliseconds; `start_time` is seconds since the epoch."""

    start_time: float
    generation_ms: float
    scoring_ms: float
    total_ms: float


ErrorKind: TypeAlias = Literal["episode", "infrastructure", "machine"]
"""What failed. `"infrastructure"`: the server of the model, of a judge or of a world, or a sandbox.
It says nothing about the episode, which is run again with its seeds. `"machine"`: this machine
cannot isolate code, a setting or token data is wrong, or the engine in this process has ended; it
would fail again. `"episode"`: everything else, a result of the episode."""


INFRASTRUCTURE = frozenset(
    (
        *("ConnectionFailed", "CallTimeout", "ServerError", "BadResponse"),
        *("APIConnectionError", "APITimeoutError", "InternalServerError"),  # the openai package's
        *("SandboxError", "WorldUnavailable"),
    )
)
"""The types of failures of infrastructure, for records without a kind."""


def kind_of_type(name: str) -> ErrorKind:
    """Return the kind of a failure of which only the type is known."""
    return "infrastructure" if name in INFRASTRUCTURE else "episode"


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A failure as data, stored with the rollout that it ended.

    Example: `ErrorRecord("ServerError", "it answered 500", "...", "model", "infrastructure")`.
    """

    type: str
    message: str
    traceback: str
    phase: Literal["setup", "model", "environment", "scoring", "cleanup", "timeout", "cancelled"]
    # Without one, the record is older than kinds or made by hand, and its type decides.
    kind: ErrorKind | None = None

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", kind_of_type(self.type))

    def as_dict(self) -> dict[str, str]:
        """Return the record as JSON-ready strings."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion. Every engine obeys every field or raises `UnsupportedSetting`.

    `seed` makes this one request reproducible on its own. The logprobs of a response are always
    those of the distribution sampled from (after temperature, top_k and top_p).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int | None = None  # None: up to the context window
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # passed through to a remote server

    def with_seed(self, seed: int | None) -> SamplingParams:
        """Return a copy with a different seed."""
        # Not `replace`, which is slow: this runs for every call of every rollout.
        return SamplingParams(
            *(self.temperature, self.top_p, self.top_k, self.max_tokens, self.stop),
            *(self.stop_token_ids, seed, self.extra),
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to sample one completion after exactly these ids. `prompt_ids` is int32 `[_T]`."""

    prompt_ids: IntArray
    sampling: SamplingParams
    model: str | None = None


OVERLONG_PROMPT = "overlong-prompt"
"""The `id` of the response to a prompt that does not fit the model."""


_next_call_id = count().__next__


# It defines its own `__eq__`, because arrays have no single truth value.
@dataclass(frozen=True, slots=True, eq=False)
class ModelResponse:
    """One model call: the engine's prompt, what it sampled, and the logprobs.

    Shapes: `prompt_ids` int32 `[_P]`, `completion_ids` int32 `[_C]`, `logprobs` float32 `[_C]`,
    `versions` int32 `[_C]` (policy version per sampled token). The ids are None if the server
    returned none: such a call can be evaluated but not trained. If the end token was sampled, it is
    the last completion id.

    `call_id` is unique in the process. `extends` names the earlier call whose prompt and completion
    are, id for id, a prefix of this prompt; it is a hint that makes storing cost O(new tokens).
    `raw` is the original response object of a client that wraps another one (the openai package's).
    `routed_experts`, integers `[n, layers, experts per token]`, belong to the n tokens before
    the last one, if the engine records them; after the call is stored in a tree, they are in the
    tree's stream instead.

    It also has the attributes of OpenAI's response objects (`choices[0].message`, `usage`,
    `model_dump()`), with vLLM's fields for token ids, all built when they are read.
    """

    message: ChatMessage
    text: str
    finish_reason: FinishReason
    prompt_ids: IntArray | None = None
    completion_ids: IntArray | None = None
    logprobs: FloatArray | None = None
    versions: IntArray | None = None
    temperature: float = 1.0
    # Counted per process, so that ids of different sessions never collide.
    call_id: int = field(default_factory=_next_call_id)
    extends: int | None = None
    raw: Any = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    wait_s: float = 0.0  # time in queues and retries, excluded from time limits
    sent_s: float = field(default=0.0, repr=False)  # when it was sent, from the episode's start
    time_s: float = field(default=0.0, repr=False)  # how long the call took, with `wait_s`
    info: Mapping[str, Any] = field(default_factory=dict)  # `num_retries`, `rerendered`: why, ...
    id: str = ""
    model: str | None = None
    routed_experts: Any = None
    # Where the session that made the response stored it: a `TokenTree` and the call's index there.
    # `replace` does not pass the place on, since a copy may have other ids; `at` does.
    place: InitVar[tuple[Any, int] | None] = None
    tree: Any = field(default=None, init=False, repr=False)
    call: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self, place: tuple[Any, int] | None) -> None:
        if place is None:
            return
        tree, call = place
        # The record is frozen, but not yet complete here.
        known = self.prompt_ids
        for name, value in (
            ("tree", tree),
            ("call", call),
            # The logprobs after the tree's checks.
            ("logprobs", tree.logprobs(call)),
            # The tree's stream has them.
            ("routed_experts", None),
        ):
            object.__setattr__(self, name, value)
        # A writable array belongs to the caller and may still change.
        if known is None or known.flags.writeable:
            object.__setattr__(self, "prompt_ids", tree.prompt_view(call))

    @classmethod
    def overlong_prompt(cls, problem: str | None = None) -> ModelResponse:
        """Return the response to a prompt that does not fit: empty, with `OVERLONG_PROMPT` as id.

        `info["problem"]` is the server's message.
        """
        empty = {"role": "assistant", "content": ""}
        info = {} if problem is None else {"problem": problem}
        return cls(empty, "", FinishReason.LENGTH, id=OVERLONG_PROMPT, info=info)

    def at(self, place: tuple[Any, int] | None, **changes: Any) -> ModelResponse:
        """Return a copy with `changes`, stored at `place`: a `TokenTree` and a call in it."""
        return replace(self, place=place, **changes)

    def renewed(self, **changes: Any) -> ModelResponse:
        """Return a copy with `changes` and an id of this process, for a call of an earlier one."""
        return replace(self, call_id=_next_call_id(), extends=None, **changes)

    def to_info(self) -> dict[str, Any]:
        """Return the entries of a step's `info` for this call: its `finish_reason`."""
        return {"finish_reason": str(self.finish_reason)}

    def annotated(self, *, wait_s: float = 0.0, **info: Any) -> ModelResponse:
        """Return a copy with more `wait_s` and more `info`, at the same place in the tree."""
        # The ids are the same, so the copy may keep the place.
        place = None if self.call is None else (self.tree, self.call)
        return self.at(place, wait_s=self.wait_s + wait_s, info={**self.info, **info})

    def without_logprobs(self, why: str) -> ModelResponse:
        """Return a copy without logprobs, in no tree: it counts, and training masks it."""
        info = {**self.info, "unusable_logprobs": why}
        return replace(self, logprobs=None, routed_experts=None, info=info)

    def timed(self, sent_s: float, time_s: float) -> ModelResponse:
        """Return a copy with the times of the call, at the same place in the tree.

        For clients that make their own records; rolltree's clients set the times themselves.
        """
        place = None if self.call is None else (self.tree, self.call)
        return self.at(place, sent_s=round(sent_s, 6), time_s=round(time_s, 6))

    @property
    def choices(self) -> list[ResponseChoice]:
        """The one choice."""
        from rolltree.values.openai_shape import ResponseChoice, ResponseList

        return ResponseList([ResponseChoice(self)])

    @property
    def object(self) -> str:
        """The OpenAI object type that this response resembles."""
        return "chat.completion"

    @property
    def created(self) -> int:
        """Zero: the time is not recorded."""
        return 0

    @property
    def usage(self) -> ResponsePart:
        """Token counts as OpenAI names them."""
        from rolltree.values.openai_shape import ResponsePart

        prompt, sampled = self.num_prompt_tokens, self.num_completion_tokens
        total = prompt + sampled
        return ResponsePart(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=total)

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt's ids, as vLLM names them."""
        from rolltree.values.openai_shape import ResponseList

        return None if self.prompt_ids is None else ResponseList(self.prompt_ids.tolist())

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False) -> dict[str, Any]:
        """Return the response as a dict in OpenAI's format, with vLLM's fields for token ids."""
        from rolltree.values.openai_shape import dump_response, without_nones

        dumped = dump_response(self)
        return without_nones(dumped) if exclude_none else dumped

    def to_dict(self, **settings: Any) -> dict[str, Any]:
        """Return `model_dump`."""
        return self.model_dump(**settings)

    def model_dump_json(self, **settings: Any) -> str:
        """Return `model_dump` as JSON."""
        return json.dumps(self.model_dump(**settings))

    def __eq__(self, other: Any) -> bool:
        if type(other) is not ModelResponse:
            return NotImplemented
        from rolltree.values.openai_shape import same_value

        mine, theirs = self._values(), other._values()
        # `extends` is a hint for storing, and `raw` may be any object of another client.
        return all(
            same_value(mine[name], theirs[name]) for name in mine if name not in ("raw", "extends")
        )

    def __hash__(self) -> int:
        return hash((self.call_id, self.id))

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled record has its arrays, but not the tree.
        return partial(ModelResponse, **self._values()), ()

    def _values(self) -> dict[str, Any]:
        names = (each.name for each in fields(self) if each.init)
        return {name: getattr(self, name) for name in names}


ChatResponse: TypeAlias = ModelResponse
"""An alias of `ModelResponse`, for agents."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One episode to run, as pure data.

    `seed` seeds the world and is the same for all members of a group; `sampling_seed` differs.
    Requests with one `group_id` are compared with each other; `index_in_group` numbers them.
    """

    request_id: str
    env_id: str
    input: RolloutInput
    seed: int
    sampling_seed: int
    group_id: str
    index_in_group: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    phase: str = "eval"  # the store groups rollouts by it: "eval", "train", "eval_before", ...
    train_step: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The outcome of one request: its states (several for a protocol with several agents).

    A failed request has `error` set and keeps what its states hold.
    """

    request: RolloutRequest
    states: tuple[State, ...]
    error: ErrorRecord | None
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class Records:
    """Loss records, one per trained token, as arrays of length `_R`.

    Record r: `target[r]` was sampled from the logits at packed position `source[r]`, with behaviour
    logprob `logprob[r]` at `temperature[r]` under policy `version[r]`, and the rollout
    `rollout[r]` credits it with `advantage[r]`. `weight` scales its loss (0 drops it). `call` is
    the index of the model call in its rollout, `offset` the token's index in its completion.
    `extra` has further inputs of a loss by name, each float32 `[_R]`; NaN means unknown.
    """

    source: IntArray
    target: IntArray
    logprob: FloatArray
    temperature: FloatArray
    advantage: FloatArray
    weight: FloatArray
    version: IntArray
    rollout: IntArray
    call: IntArray
    offset: IntArray
    extra: Mapping[str, FloatArray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """The rollout, calls and agent that a sample comes from, and how that episode ended."""

    rollout_id: str
    calls: tuple[int, ...]
    agent: str
    reward: float | None
    terminated: bool
    truncated: bool
    truncation_reason: str | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens in depth-first order plus the records to train on them.

    Token i attends to exactly those j with `j <= i < subtree_end[j]`; its position id is
    `positions[i]`, its depth. A flat sequence is a tree with a single path:
    `positions = arange(_T)`, `subtree_end = full(_T)`. Arrays are int32 `[_T]`.

    Example, prompt `[5, 6]` and two sampled siblings `[7]` and `[8, 9]`:
    `ids [5 6 7 8 9]`, `positions [0 1 2 2 3]`, `subtree_end [5 5 3 5 5]`,
    `records.source [1 1 3]`, `records.target [7 8 9]`.
    """

    ids: IntArray
    positions: IntArray
    subtree_end: IntArray
    records: Records
    origins: tuple[SampleOrigin, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in one forward pass over this sample."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One flat training row, with lists of equal length `_T`."""

    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    reward: float | None
    advantage: float | None = None


def as_input(row: Mapping[str, Any]) -> RolloutInput:
    """Return the input of one dataset row, a fresh dict with all columns.

    An input field that is None counts as missing.

    Raises:
        ValueError: `prompt` or `example_id` is missing.
    """
    missing = [key for key in ("prompt", "example_id") if key not in row]
    if missing:
        raise ValueError(
            f"a dataset row has no {' and no '.join(map(repr, missing))}; a rollout needs both to "
            f"know what to ask and to count it once. The row has: {', '.join(map(repr, row))}."
        )
    # Tables fill a column with None in the rows that have no value there.
    known = {k: v for k, v in row.items() if v is not None or k not in INPUT_FIELDS}
    known.setdefault("task", "default")
    return cast(RolloutInput, known)


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of one chat message; the texts of a list of content parts are joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(
            part if isinstance(part, str) else str(part.get("text") or "")
            for part in content
            if isinstance(part, str | Mapping)
        )
    return ""


def concat_messages(parts: Sequence[Messages]) -> Messages:
    """Join chat histories (or completion strings) in order, without copying the messages."""
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    joined: list[ChatMessage] = []
    for part in parts:
        # A string cannot be joined with messages, since it has no role.
        if isinstance(part, str):
            raise TypeError(
                "cannot join a completion string with chat messages; use one message_type"
            )
        joined.extend(part)
    return joined
