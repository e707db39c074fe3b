"""One model call: the request, the answer, and the record that is made of both.

Every client reads its server's answer into an `Answer`; `CallTree.record` puts the ids into the
rollout's token tree and makes the `ModelResponse`, which does not change afterwards
(design/0013-model-call-path.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltree.inference.request_fields import distribution_changes
from rolltree.tokens import TokenTree, routing_streams
from rolltree.tokens.buffers import UnusableLogprobs
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    FloatArray,
    GenerateRequest,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    SamplingParams,
    ToolSchema,
)

if TYPE_CHECKING:
    from rolltree.inference.retry import Outcome

DEFAULT_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of a model client: messages, a string, or token ids (int32 `[_P]`) to continue."""

    prompt: Messages | IntArray
    sampling: SamplingParams = DEFAULT_SAMPLING
    model: str | None = None
    tools: Sequence[ToolSchema] | None = None
    message_type: MessageType = "chat"
    # When it was made: seconds after its episode's start (0 without one), and `time.monotonic`.
    sent_s: float = 0.0
    began_s: float = 0.0
    # Called in the event loop with the new part of the answer's message, as OpenAI's `delta`, by
    # clients that see tokens while they are sampled. Other clients never call it. The delta has
    # `num_prompt_tokens` if it is known and, with `reports_tokens`, `tokens`: (id, logprob) pairs.
    on_delta: Callable[[ChatMessage], None] | None = None
    reports_tokens: bool = False

    def with_prompt(self, prompt: Messages) -> ModelCall:
        """Return the same call with a different prompt."""
        # Not `replace`, which is slow: this runs for every call of every rollout.
        return ModelCall(
            *(prompt, self.sampling, self.model, self.tools, self.message_type, self.sent_s),
            *(self.began_s, self.on_delta, self.reports_tokens),
        )

    async def to(self, client: Any) -> ModelResponse:
        """Make the call on a `ModelClient`."""
        # rolltree's own clients take the call as it is. With `chat`, every client on the way would
        # take it apart and put it together again.
        if getattr(client, "takes_calls", None) is True:
            response: ModelResponse = await client.call(self)
        elif isinstance(self.prompt, np.ndarray):
            request = GenerateRequest(self.prompt, self.sampling, self.model)
            response = await client.generate(request)
        else:
            response = await client.chat(
                self.prompt,
                tools=self.tools,
                sampling=self.sampling,
                model=self.model,
                message_type=self.message_type,
            )
        return response


class DeltaListener:
    """A call's `on_delta`, and whether it was called: deltas cannot be taken back."""

    __slots__ = ("_pass_on", "has_begun")

    def __init__(self, on_delta: Callable[[ChatMessage], None]) -> None:
        self._pass_on, self.has_begun = on_delta, False

    def __call__(self, delta: ChatMessage) -> None:
        """Pass a delta on, unless it is empty."""
        if delta.get("content") or delta.get("reasoning_content") or delta.get("tokens"):
            self.has_begun = True
            self._pass_on(delta)


@dataclass(slots=True)
class Answer:
    """A server's or engine's answer to one call, as far as it has been parsed."""

    finish_reason: FinishReason
    # None: the session decodes the ids, and parses the text into a message.
    text: str | None = None
    message: ChatMessage | None = None
    # None if the session rendered the prompt, and so knows its ids.
    prompt_ids: IntArray | None = None  # int32 [_P]
    completion_ids: IntArray | None = None  # int32 [_C], the end token included
    logprobs: FloatArray | None = None  # float32 [_C]
    versions: IntArray | None = None  # int32 [_C]
    routed_experts: Any = None
    # Without ids, these come from the server's usage.
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    id: str = ""
    model: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    wait_s: float = 0.0
    raw: Any = None

    def add_outcome(self, outcome: Outcome[Any]) -> None:
        """Record how long the request waited and how often it was retried."""
        self.wait_s = outcome.wait_s
        if outcome.num_retries:
            self.info = {**self.info, "num_retries": outcome.num_retries}

    def drop_logprobs(self, why: UnusableLogprobs) -> None:
        """Keep the answer without its logprobs: it counts, and training masks it."""
        self.logprobs, self.info = None, {**self.info, "unusable_logprobs": str(why)}
        # They were of use for these logprobs only.
        self.routed_experts = None


class CallTree:
    """The token tree of one rollout's calls, and the handle of each `call_id`."""

    def __init__(self) -> None:
        self.tree = TokenTree()
        self._handles: dict[int, int] = {}

    def path(self, call_id: int) -> IntArray:
        """Return the prompt and completion of a call, int32 `[_P + _C]`, read-only."""
        return self.tree.path_view(self._handles[call_id])

    def record(self, answer: Answer, call: ModelCall, extends: int | None = None) -> ModelResponse:
        """Put an answer's ids into the tree and return its record.

        Placeholders in place of logprobs are dropped, and `info["unusable_logprobs"]` says why.

        Raises:
            TokenError: the arrays contradict each other.
        """
        assert answer.prompt_ids is not None
        assert answer.completion_ids is not None
        temperature = call.sampling.temperature
        try:
            place = self._insert(answer, temperature, extends)
        except UnusableLogprobs as error:
            answer.drop_logprobs(error)
            place = self._insert(answer, temperature, extends)
        made = record_of(answer, call, extends=extends, place=place)
        self._handles[made.call_id] = place[1]
        return made

    def adopt(self, response: ModelResponse, extends: int | None) -> ModelResponse:
        """Add a call that was made elsewhere to this tree; return its record.

        Placeholders in place of logprobs are dropped, as by `record`.

        Raises:
            TokenError: the arrays contradict each other.
        """
        try:
            place = self._insert(response, response.temperature, extends)
        except UnusableLogprobs as error:
            response = response.without_logprobs(str(error))
            place = self._insert(response, response.temperature, extends)
        made = response.at(place, extends=extends)
        self._handles[made.call_id] = place[1]
        return made

    def _insert(
        self, source: Answer | ModelResponse, temperature: float, extends: int | None
    ) -> tuple[TokenTree, int]:
        prompt, completion = source.prompt_ids, source.completion_ids
        assert prompt is not None
        assert completion is not None
        parent = None if extends is None else self._handles[extends]
        size = len(prompt) + len(completion)
        versions = 0 if source.versions is None else source.versions
        number = self.tree.insert(
            prompt,
            completion,
            logprobs=source.logprobs,
            temperature=temperature,
            versions=versions,
            parent=parent,
            streams=routing_streams(source.routed_experts, size, self.tree, parent, versions),
        )
        return self.tree, number


def record_of(
    answer: Answer,
    call: ModelCall,
    *,
    extends: int | None = None,
    place: tuple[TokenTree, int] | None = None,
) -> ModelResponse:
    """Return the record of an answer; `place` is its tree and its number there, if any."""
    assert answer.message is not None
    assert answer.text is not None
    return ModelResponse(
        message=answer.message,
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_ids=answer.prompt_ids,
        completion_ids=answer.completion_ids,
        logprobs=answer.logprobs,
        versions=answer.versions,
        temperature=call.sampling.temperature,
        extends=extends,
        raw=answer.raw,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_completion_tokens=answer.num_completion_tokens,
        wait_s=answer.wait_s,
        sent_s=call.sent_s,
        time_s=round(time.monotonic() - call.began_s, 6) if call.began_s else 0.0,
        info={**answer.info, **sampling_info(call.sampling)},
        id=answer.id,
        model=answer.model,
        routed_experts=answer.routed_experts,
        place=place,
    )


def sampling_info(sampling: SamplingParams) -> dict[str, Any]:
    """Return settings that changed the distribution, as `info["sampling"]` of a record.

    Training leaves such calls out of the loss: it computes probabilities under the full softmax.
    """
    changes = distribution_changes(sampling)
    if not changes:
        return {}
    # `info` is stored as JSON.
    plain = (bool, int, float, str)
    return {
        "sampling": {k: v if isinstance(v, plain) else repr(v)[:80] for k, v in changes.items()}
    }
