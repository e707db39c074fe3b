"""A recorded rollout as a model client: it returns the recorded answers, call after call.

Every call is first compared with the recorded one, so the first prompt that differs is found at its
call. After the last call, the rest of the episode is compared: its ending, rewards and metrics.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from rolltree.inference.call import ModelCall
from rolltree.inference.client import ModelClient
from rolltree.inference.client_base import ClientBase, Session
from rolltree.rollouts import current_episode
from rolltree.rollouts.decode import decode_rollout
from rolltree.rollouts.record import encode_result
from rolltree.store import dumps
from rolltree.tokens import StepTokens, peek
from rolltree.tokens.routing import recorded_routing
from rolltree.values.errors import ConfigError, ModelError, PromptTooLong
from rolltree.values.types import (
    ChatMessage,
    ErrorRecord,
    FinishReason,
    Messages,
    ModelResponse,
    RolloutResult,
    State,
    TrajectoryStep,
    TruncationReason,
)

ASIDE = (
    "the environment made a model call that is not in the recording. Calls outside the "
    "conversation are not stored, so they cannot be replayed"
)
_CUT_BY_TIME = ("timeout", "cancelled")
ENDING = ("is_completed", "stop_condition", "terminated", "truncated", "truncation_reason")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first differs from the recording, with both sides."""

    # `prompt` (the model's input), `tools`, `extra call`, `missing call`, `completion` (messages
    # after the last call included), `world`, `ending`, `error`, `reward`, `metric` or `rollouts`
    # (their number, or their agents).
    kind: str
    # The name of the rollout's agent, "" if it has none.
    agent: str
    # The index of the rollout in its episode.
    trajectory: int
    # The index of the call in the rollout; None for a difference after all calls.
    call: int | None
    # The message, field or metric, in words.
    where: str
    # The values of both sides; None if a side has none.
    recorded: Any
    live: Any


class ReplayStopped(asyncio.CancelledError):
    """Ends an episode in the middle of a call, past every `except Exception` of an environment."""


@dataclass(slots=True)
class RecordedRollout:
    """One recorded rollout of the episode, and which of its calls have been made again."""

    index: int
    state: State
    is_used: list[bool]
    has_session: bool = False
    has_failed: bool = False

    @property
    def agent(self) -> str:
        """The agent's name, empty without one."""
        return str(self.state.get("agent") or "")

    @property
    def steps(self) -> Sequence[TrajectoryStep]:
        """The recorded calls."""
        steps: Sequence[TrajectoryStep] = self.state["trajectory"]
        return steps

    def unused(self) -> list[int]:
        """Return the calls that have not been made again, in order."""
        return [index for index, used in enumerate(self.is_used) if not used]

    def difference(
        self, kind: str, call: int | None, where: str, recorded: Any, live: Any
    ) -> Difference:
        """Return a `Difference` in this rollout."""
        return Difference(kind, self.agent, self.index, call, where, recorded, live)


@dataclass(slots=True)
class ReplaySession:
    """The recorded episode that a live one is compared with, and how far the live one has come."""

    recorded: RolloutResult
    # How many calls are answered from the recording.
    until: int | None = None
    # Text that matches is not compared: times, addresses, names of temporary files.
    ignored: Sequence[re.Pattern[str]] = ()
    # Called with the number of an answer, from 0, before it is given.
    on_answer: Callable[[int], None] | None = None
    # After the recorded part a model answers; otherwise the replay ends there.
    goes_on: bool = False
    difference: Difference | None = None
    stopped: str = ""
    num_answered: int = 0
    num_continued: int = 0
    is_live: bool = False
    rollouts: list[RecordedRollout] = field(init=False)

    def __post_init__(self) -> None:
        self.rollouts = [
            RecordedRollout(index, state, [False] * len(state.get("trajectory") or ()))
            for index, state in enumerate(self.recorded.states)
        ]

    @property
    def num_calls(self) -> int:
        """The number of calls in all rollouts of the recording."""
        return sum(len(rollout.is_used) for rollout in self.rollouts)

    def is_same(self, recorded: Any, live: Any) -> bool:
        """Whether both sides are equal as they are stored, without the ignored parts."""
        # As stored: objects that JSON cannot hold were recorded as their type, and would differ.
        if recorded == live:
            return True
        return self._comparable(recorded) == self._comparable(live)

    def _comparable(self, value: Any) -> str:
        text = dumps(value)
        for pattern in self.ignored:
            text = pattern.sub("", text)
        return text

    def find(
        self, call: ModelCall, rollout: RecordedRollout | None, *, in_session: bool = True
    ) -> tuple[RecordedRollout, int] | None:
        """Return the recorded call that a live one repeats; None if a model has to answer it.

        `rollout` is the one that the call's session has followed so far, if the call is
        `in_session` and the session has made a call.

        Raises:
            ReplayStopped: no recorded call matches, or the replay is over; `difference` and
                `stopped` say why.
            ModelError: the recorded call failed, and this one fails the same way.
        """
        if self.is_live:
            return None
        rollouts = (
            [rollout] if rollout is not None else sorted(self.rollouts, key=lambda t: t.has_session)
        )
        # A session keeps to its rollout, but may make the calls in any order, as agents may call
        # concurrently. A call without a rollout must match the next call of one; rollouts without a
        # session come first.
        ahead = [(each, each.unused()) for each in rollouts]
        for each, unused in ahead:
            for index in unused[: None if rollout is not None else 1]:
                if self._is_call(each.steps[index], call):
                    return self._matched(each, index, call)
        if not in_session and any(each.has_session for each in rollouts):
            self._end("", _aside(call))
            return None
        silent = next((t for t in rollouts if rollout is None and _was_asked(t, call)), None)
        if silent is not None:
            silent.has_session = True
            self._past_the_end([silent], call, is_own=True)
        waiting = [(each, unused[0]) for each, unused in ahead if unused]
        if not waiting:
            self._past_the_end(rollouts, call, is_own=rollout is not None)
            return None
        each, index = waiting[0]
        asked = peek(each.steps[index], "prompt")
        self._end("", self.in_messages("prompt", each, index, asked, call.prompt))
        return None

    def _matched(
        self, rollout: RecordedRollout, index: int, call: ModelCall
    ) -> tuple[RecordedRollout, int] | None:
        tools = rollout.state.get("oai_tools")
        # Agents of a protocol have tools of their own, which the state does not list.
        if tools is not None and "rollout_id" not in rollout.state:
            given = list(call.tools or ())
            if not self.is_same(tools, given):
                names = [_names(tools), _names(given)]
                sides = names if names[0] != names[1] else [tools, given]
                where = "the tools that the model is offered"
                self._end("", rollout.difference("tools", index, where, *sides))
                return None
        if self.until is not None and self.num_answered >= self.until:
            self._end("")
            return None
        rollout.is_used[index] = True
        if self.on_answer is not None:
            self.on_answer(self.num_answered)
        self.num_answered += 1
        return rollout, index

    def _past_the_end(
        self, rollouts: list[RecordedRollout], call: ModelCall, *, is_own: bool
    ) -> None:
        """End a call after the last recorded one as the recording ended, or pass it on."""
        for rollout in rollouts:
            error: ErrorRecord | None = rollout.state.get("error") or self.recorded.error
            reason, phase = rollout.state.get("truncation_reason"), getattr(error, "phase", "")
            if error is not None and phase in _CUT_BY_TIME:
                return self._end(f"the recording ends here: {error.type}: {error.message}")
            if reason == TruncationReason.TIME_LIMIT:
                return self._end("the recording ends here, at the time limit of its rollout")
            if self.goes_on:
                continue
            if error is not None and phase == "model" and not rollout.has_failed:
                rollout.has_failed = True
                raise _failure(error)
            if reason == TruncationReason.MAX_SEQ_LEN:
                raise PromptTooLong("this prompt did not fit the model when it was recorded")
        if not self.rollouts and self.recorded.error is not None:
            return self._end(f"the recording has no calls: {self.recorded.error.message}")
        if self.goes_on:
            return self._end("")
        if not is_own:
            return self._end("", _aside(call))
        own, where = rollouts[0], "the model is asked once more"
        last = _last(call.prompt)
        return self._end("", own.difference("extra call", len(own.is_used), where, None, last))

    def _end(self, why: str, difference: Difference | None = None) -> None:
        self.difference = self.difference or difference
        self.stopped = self.stopped or why
        if self.goes_on:
            self.is_live = True
            return
        # Environments catch `Exception` and go on; a `CancelledError` gets past them.
        raise ReplayStopped("the replay is over")

    def _is_call(self, step: TrajectoryStep, call: ModelCall) -> bool:
        if isinstance(call.prompt, np.ndarray):
            tokens = peek(step, "tokens")
            return tokens is not None and np.array_equal(tokens["prompt_ids"], call.prompt)
        return self.is_same(peek(step, "prompt"), call.prompt)

    def in_messages(
        self, kind: str, rollout: RecordedRollout, call: int | None, recorded: Any, live: Any
    ) -> Difference:
        """Return the first message that differs in a prompt or a completion, which is `kind`."""
        where = f"the {kind}"
        if isinstance(recorded, list) and isinstance(live, list):
            pairs = enumerate(zip_longest(recorded, live))
            differing = ((at, *pair) for at, pair in pairs if not self.is_same(*pair))
            at, recorded, live = next(differing, (len(live), None, None))
            where = f"message {at} of the {kind} ({(live or recorded or {}).get('role', '?')})"
        elif isinstance(live, np.ndarray):
            live = live.tolist()
        return rollout.difference(kind, call, where, recorded, live)


def _aside(call: ModelCall) -> Difference:
    return Difference("extra call", "", 0, None, ASIDE, None, _last(call.prompt))


def _names(tools: Sequence[Any]) -> list[str]:
    return [str(tool.get("function", {}).get("name")) for tool in tools]


def _was_asked(rollout: RecordedRollout, call: ModelCall) -> bool:
    """Whether a call may be the one that failed in a rollout without a single answer."""
    if rollout.has_session or rollout.is_used or rollout.state.get("error") is None:
        return False
    task = rollout.state.get("subtask")
    last = _last(call.prompt)
    return task is None or (isinstance(last, dict) and last.get("content") == task)


def _last(prompt: Any) -> Any:
    if isinstance(prompt, np.ndarray):
        return prompt.tolist()
    return prompt if isinstance(prompt, str) or not prompt else prompt[-1]


def _failure(error: ErrorRecord) -> ModelError:
    """Return the recorded failure of a call, of a new class with the recorded name and kind."""
    made: ModelError = type(error.type, (ModelError,), {"kind": error.kind})(error.message)
    return made


def recorded_response(step: TrajectoryStep, *, exact: bool = True) -> ModelResponse:
    """Return the recorded answer of a step as a new response, without ids unless `exact`."""
    completion, response = peek(step, "completion"), peek(step, "response")
    extras = peek(step, "extras") or {}
    message, text = _message_and_text(completion)
    fields: dict[str, Any] = {
        "message": message,
        "text": text,
        "finish_reason": FinishReason(extras.get("finish_reason") or FinishReason.STOP),
        "temperature": float(extras.get("temperature", 1.0)),
        "num_prompt_tokens": int(extras.get("num_prompt_tokens") or 0),
        "num_completion_tokens": int(extras.get("num_completion_tokens") or 0),
    }
    if isinstance(response, ModelResponse):
        names = ("message", "text", "finish_reason", "temperature", "info", "id", "model")
        fields |= {name: getattr(response, name) for name in names}
    tokens = peek(step, "tokens")
    if exact and isinstance(tokens, StepTokens):
        tree, call = tokens.tree, tokens.call
        fields |= {
            "prompt_ids": tree.prompt_ids(call),
            "completion_ids": tree.completion_ids(call),
            "logprobs": tree.logprobs(call),
            "versions": tree.versions(call),
            "routed_experts": recorded_routing(tree, call),
        }
    return ModelResponse(**fields)


def _message_and_text(completion: Messages) -> tuple[ChatMessage, str]:
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}, completion
    message = completion[-1] if completion else {"role": "assistant", "content": ""}
    content = message.get("content")
    return message, content if isinstance(content, str) else ""


# -- what follows the calls ------------------------------------------------------------------------


def outcome_difference(
    session: ReplaySession, live: RolloutResult, *, score: bool
) -> Difference | None:
    """Return the first difference of two episodes that made the same calls, if there is one.

    Both are compared as they are stored. In order: calls that were not made again, the completion,
    the world's steps, how each rollout ended, its rewards and metrics.
    """
    for rollout in session.rollouts:
        for index in rollout.unused()[:1]:
            recorded = peek(rollout.steps[index], "prompt")
            asked = recorded[-1] if isinstance(recorded, list) and recorded else recorded
            where = "the model is not asked again"
            return rollout.difference("missing call", index, where, asked, None)
    # Through the codec, as the recording went, so that storing has changed tuples, objects and
    # floats in the same way on both sides.
    states = [state for row in encode_result(live) for state in decode_rollout(row).states]
    if len(states) != len(session.rollouts):
        num = (len(session.rollouts), len(states))
        return Difference("rollouts", "", 0, None, "how many rollouts the episode has", *num)
    pairs = list(zip(session.rollouts, states, strict=True))
    for rollout, state in pairs:
        agent = str(state.get("agent") or "")
        if rollout.agent != agent:
            return rollout.difference("rollouts", None, "whose it is", rollout.agent, agent)
    # Causes before effects: a different answer of the world explains a different reward.
    compared = (_completed, _world, _ended, _scored)
    for compare in compared if score else compared[:-1]:
        for rollout, state in pairs:
            for found in compare(session, rollout, state):
                return found
    return None


def _completed(
    session: ReplaySession, rollout: RecordedRollout, state: State
) -> Iterator[Difference]:
    recorded, live = rollout.state.get("completion"), state.get("completion")
    if not session.is_same(recorded, live):
        yield session.in_messages("completion", rollout, None, recorded, live)


def _world(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    sides = [each.get("environment_steps") or () for each in (rollout.state, state)]
    for number, (one, other) in enumerate(zip_longest(*sides)):
        if one is None or other is None:
            yield rollout.difference("world", None, f"step {number} of the world", one, other)
            return
        for name in one:
            if not _equal(session, one[name], other.get(name)):
                where = f"{name} of the world's step {number}"
                yield rollout.difference("world", None, where, one[name], other.get(name))


def _ended(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    errors = [_error_text(each.get("error")) for each in (rollout.state, state)]
    if not session.is_same(*errors):
        yield rollout.difference("error", None, "how the rollout failed", *errors)
    for name in ENDING:
        one, other = rollout.state.get(name), state.get(name)
        if one != other:
            yield rollout.difference("ending", None, name, one, other)


def _scored(session: ReplaySession, rollout: RecordedRollout, state: State) -> Iterator[Difference]:
    recorded, live = rollout.state.get("metrics") or {}, state.get("metrics") or {}
    values: list[tuple[str, int | None, str, Any, Any]] = [
        ("metric", None, name, recorded.get(name), live.get(name))
        for name in dict.fromkeys((*recorded, *live))
    ]
    values.append(("reward", None, "reward", rollout.state.get("reward"), state.get("reward")))
    values += [
        ("reward", index, f"reward of call {index}", step.get("reward"), again.get("reward"))
        for index, (step, again) in enumerate(zip(rollout.steps, state["trajectory"], strict=False))
    ]
    for kind, call, where, one, other in values:
        if not _equal(session, one, other):
            yield rollout.difference(kind, call, where, one, other)


def _error_text(error: Any) -> str | None:
    """Return type and message; messages may contain times and addresses, which `ignore` removes."""
    if isinstance(error, ErrorRecord):
        return f"{error.type}: {error.message}"
    return None if error is None else str(error)


def _equal(session: ReplaySession, one: Any, other: Any) -> bool:
    # Rewards are sums, and the order of addition may change their last bits.
    if isinstance(one, float) and isinstance(other, float | int):
        # As stored, nan equals nan.
        is_near = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
        return is_near or session.is_same(one, other)
    return session.is_same(one, other)


# -- the client ------------------------------------------------------------------------------------


class ReplayClient(ClientBase):
    """A `ModelClient` that returns recorded answers, for all episodes in `sessions`.

    Args:
        sessions: request id to session.
        then: the model that answers after the recorded part.
    """

    answers_for_all = True

    def __init__(self, sessions: dict[str, ReplaySession], then: ModelClient | None = None) -> None:
        self._sessions = sessions
        self._then = then

    @property
    def clients(self) -> list[Any]:
        """The client of the model that answers after the recorded part, if there is one."""
        return [] if self._then is None else [self._then]

    @property
    def model(self) -> str:
        """The name of the model that answers after the recorded part, or "recorded"."""
        return "recorded" if self._then is None else self._then.model

    def session(self) -> _AgentClient:
        """Return a client for one rollout of the episode."""
        live = None if self._then is None else self._then.session()
        return _AgentClient(self, self._replayed(), live)

    async def call(self, call: ModelCall) -> ModelResponse:
        """Answer a call outside a session."""
        return await _AgentClient(self, self._replayed(), self._then, is_lasting=False).call(call)

    def _replayed(self) -> ReplaySession:
        episode = current_episode()
        if episode is None:
            raise ConfigError(
                "the model is called outside an episode, so it is unknown which recorded rollout "
                "the call belongs to. Replay environments that call the model in their rollouts."
            )
        return self._sessions[episode.request.request_id]


class _AgentClient(ClientBase):
    """The calls of one agent: recorded ones, then the model's."""

    def __init__(
        self, client: ReplayClient, session: ReplaySession, live: Any, *, is_lasting: bool = True
    ) -> None:
        self._client, self._session, self._live = client, session, live
        self._is_lasting = is_lasting
        self._rollout: RecordedRollout | None = None

    @property
    def model(self) -> str:
        """The name of the model that answers after the recorded part, or "recorded"."""
        return self._client.model

    def session(self) -> ModelClient:
        """Return a new session."""
        return self._client.session()

    async def call(self, call: ModelCall) -> ModelResponse:
        """Return the recorded answer, or the model's after the recorded part."""
        found = self._session.find(call, self._rollout, in_session=self._is_lasting)
        if found is None:
            self._session.num_continued += 1
            response: ModelResponse = await call.to(self._live)
            return response
        rollout, index = found
        if self._is_lasting:
            self._rollout, rollout.has_session = rollout, True
        if self._live is None:
            return recorded_response(rollout.steps[index])
        # A `Session` can take in recorded ids; other clients get the text only, or the next prompt
        # would mix recorded ids with their own.
        if not isinstance(self._live, Session):
            return recorded_response(rollout.steps[index], exact=False)
        return self._live.remember(call, recorded_response(rollout.steps[index]))
