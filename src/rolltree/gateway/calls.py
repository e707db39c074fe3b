"""One request and one answer inside the gateway, whatever protocol the agent speaks.

A protocol turns a request body into an `AgentCall`, and an `AgentAnswer` (whole, or preceded by an
`AnswerHead` and `AnswerDelta`s) into a response. Messages have OpenAI's shape, with text as their
content (`rolltree.gateway.messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as shown
from typing import Any

import numpy as np

from rolltree.inference.call import DEFAULT_SAMPLING
from rolltree.inference.engine import TopLogprobs
from rolltree.inference.request_fields import asks_for_form, hints_in
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A request of an agent.

    `prompt` is a list of messages (chat), a string, or ids int32 `[_P]` (completion). `options` are
    the protocol's own: the parts of the request that its writer needs. `notes` says what of the
    request was left out, by its name.
    """

    prompt: Messages | IntArray
    sampling: SamplingParams = DEFAULT_SAMPLING
    # The name that the agent uses; the session's model answers to every name.
    model: str = ""
    tools: tuple[ToolSchema, ...] = ()
    message_type: MessageType = "chat"
    stream: bool = False
    # The number of answers to each prompt.
    n: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    # Further prompts of a text completion.
    more_prompts: tuple[str | IntArray, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_answers(self) -> int:
        """The number of answers, each of which is a separate call."""
        return self.n * (1 + len(self.more_prompts))

    def singles(self) -> list[AgentCall]:
        """Return a call for each answer: `n` per prompt in turn, which have different seeds."""
        if self.num_answers == 1:
            return [self]
        seeds = answer_seeds(self.sampling.seed, self.n)
        return [
            replace(
                self,
                prompt=prompt,
                more_prompts=(),
                n=1,
                sampling=replace(self.sampling, seed=seed),
            )
            for prompt in (self.prompt, *self.more_prompts)
            for seed in seeds
        ]


def without_hints(call: AgentCall) -> AgentCall:
    """Return a call whose wishes are notes, for an engine that cannot follow them."""
    hints = hints_in(call.sampling.extra)
    if asks_for_form(call.sampling.extra):
        hints.pop("parallel_tool_calls", None)  # an answer that is held to a form can follow it
    if not hints:
        return call
    extra = {name: value for name, value in call.sampling.extra.items() if name not in hints}
    notes = {
        name: f"{shown(value)} was asked for; nothing here can follow it"
        for name, value in hints.items()
    }
    return replace(
        call, sampling=replace(call.sampling, extra=extra), notes={**call.notes, **notes}
    )


def answer_seeds(seed: int | None, n: int) -> list[int | None]:
    """Return a seed per answer: the given seed, then seeds derived from it.

    >>> answer_seeds(None, 2), answer_seeds(7, 1)
    ([None, None], [7])
    """
    if seed is None:
        return [None] * n
    # Not `seed + index`, which would give requests with neighbouring seeds the same answers.
    derived = [np.random.SeedSequence([seed % 2**64, index]) for index in range(1, n)]
    return [seed, *(int(sequence.generate_state(1, np.uint64)[0]) for sequence in derived)]


@dataclass(slots=True, eq=False)
class Connection:
    """The connection of one request; it is open until the answer was sent or the client left."""

    is_open: bool = True


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """The agent that makes a call, and what tells whether the call is repeated.

    `key` is the idempotency key. `attempt` is the number of earlier attempts that the client
    reports (0: this is the first); None if it reports none. `digest` is that of the request.
    Without a `connection`, the request lasts as long as its caller waits for the answer.
    `request_id` is the client's own id of the request, by which it recognizes the answer.
    """

    agent: str = ""
    key: str | None = None
    attempt: int | None = None
    digest: bytes = b""
    connection: Connection | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The part of an answer that is known before sampling. Protocols put a prefix before `id`.

    `num_prompt_tokens` is known at the start of a stream, if a client tells it.
    """

    id: str
    model: str
    created_s: int
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DeltaTokens:
    """The tokens of a delta, int32 and float32 `[_T]`, after the prompt's ids, int32 `[_P]`.

    Without the prompt's ids, the finished answer has them.
    """

    ids: IntArray
    logprobs: FloatArray
    prompt_ids: IntArray | None
    decode: Callable[[list[int]], str] = field(repr=False)
    top: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A new part of an answer. The deltas of an answer add up to its message.

    Reasoning comes before content; tool calls come last, each one whole and in OpenAI's shape.
    `index` is that of the answer among those to the request. Only some models report `tokens`.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ChatMessage, ...] = ()
    index: int = 0
    tokens: DeltaTokens | None = None
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """A finished answer.

    `message` has `content` (text or None), `reasoning_content` if the model reasoned, and
    `tool_calls` if it called any. `stop` is the stop string or the stop token's id that ended it.
    `response` has ids and logprobs; `decode` turns ids into text if the tokenizer is known.
    `options` are those of the call, even if the answer is looked up later. At the end of a stream,
    `rest` is what the deltas before did not have.
    """

    head: AnswerHead
    message: ChatMessage
    finish_reason: FinishReason
    response: ModelResponse
    stop: str | int | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = field(default=None, repr=False)
    index: int = 0
    rest: AnswerDelta = AnswerDelta()
    # The likeliest tokens at each place of the completion, if they were asked for.
    top: tuple[TopLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The content; empty if there is none."""
        return str(self.message.get("content") or "")

    @property
    def reasoning(self) -> str:
        """The reasoning; empty if there is none."""
        return str(self.message.get("reasoning_content") or "")

    @property
    def tool_calls(self) -> tuple[ChatMessage, ...]:
        """The tool calls, in OpenAI's shape."""
        return tuple(self.message.get("tool_calls") or ())

    def after(self, reasoning: str, content: str) -> AgentAnswer:
        """Return the answer with its `rest` after what was streamed."""
        # Streamed text cannot be taken back. If the whole differs, only the token ids are exact.
        parts = [
            whole.removeprefix(sent) if whole.startswith(sent) else ""
            for whole, sent in ((self.reasoning, reasoning), (self.text, content))
        ]
        return replace(self, rest=AnswerDelta(parts[0], parts[1], self.tool_calls, self.index))
