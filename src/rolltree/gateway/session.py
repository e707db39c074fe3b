"""A session: the calls of one agent program, which become one trajectory.

Calls may overlap. Each enters the token tree at its longest exact prefix and, if the session has a
journal, is on disk before the answer's last byte is sent. A repeated request is sampled once, and a
call is cancelled when no client waits for it any more (design/0027-gateway.md). The module is long
because the steps of a call, from its request to the disk, share their state.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, cast

import msgspec
import numpy as np

from rolltree._helpers.tasks import being_cancelled
from rolltree.environments.completion import render_completion
from rolltree.environments.tools import side_by_side
from rolltree.gateway.calls import (
    AgentAnswer,
    AgentCall,
    AnswerDelta,
    AnswerHead,
    CallOrigin,
    Connection,
    DeltaTokens,
    without_hints,
)
from rolltree.gateway.fields import checked_names
from rolltree.gateway.journal import JournalFile, KeptCall, KeptSession
from rolltree.gateway.messages import chat_messages, rejoined
from rolltree.gateway.trained_calls import (
    FinishedCall,
    TrainCalls,
    calls_left_out,
    checked_rule,
)
from rolltree.inference.call import ModelCall
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client import ModelClient, merge_sampling, sampling_to_args, with_inner
from rolltree.inference.engine import TopLogprobs
from rolltree.inference.retry import PATIENCE_S
from rolltree.inference.session import TokenSession
from rolltree.samples import build_samples
from rolltree.tokens import Break, Trajectory, peek, recorded_routing
from rolltree.values.errors import ConfigError, StoreError, record_error
from rolltree.values.seeds import CallSeeds, asked_seed
from rolltree.values.types import (
    ChatMessage,
    IntArray,
    Messages,
    MessageType,
    ModelResponse,
    RolloutTiming,
    SamplingArgs,
    SamplingParams,
    State,
    ToolSchema,
    TrajectoryStep,
    TruncationReason,
)
from rolltree.web.guard import RequestError, digest_of, has_digest


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The most that one session may use; None: no limit.

    `max_calls` counts calls that fail or are cancelled, too; a restarted gateway does not know of
    those that began after the last recorded call. Sampled tokens are counted when a call ends, so
    overlapping calls may together exceed `max_tokens`. `time_limit_s` counts from when the session
    was opened.

    Raises:
        ConfigError: a limit is not above 0.
    """

    max_calls: int | None = None
    max_tokens: int | None = None
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_tokens", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; a session could make no call. Raise it.")


NO_LIMITS = SessionLimits()


@dataclass(slots=True, eq=False)
class _Flight:
    """One call, from its request to its answer, and whether it was recorded and delivered."""

    head: AnswerHead
    origin: CallOrigin
    options: Mapping[str, Any] = field(default_factory=dict)
    task: asyncio.Task[AgentAnswer] | None = None
    deltas: list[AnswerDelta] = field(default_factory=list)
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    num_waiting: int = 0
    is_sampled: bool = False
    # The index of its step in the trajectory, once recorded; `is_kept`: and in the journal, if any.
    step: int | None = None
    is_kept: bool = False
    # Whether a client was sent the whole answer.
    is_delivered: bool = False
    # The likeliest tokens at each place, until they are delivered: the trajectory has none.
    top: tuple[TopLogprobs, ...] = ()
    # Of the requests that it answers: their connections, and the highest count of attempts.
    connections: list[Connection] = field(default_factory=list)
    attempt: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether all who asked have left without the whole answer."""
        is_awaited = self.num_waiting or any(each.is_open for each in self.connections)
        return not is_awaited and not self.is_delivered

    def join(self, origin: CallOrigin) -> None:
        """Note a request that this flight answers."""
        self.attempt = max(self.attempt, origin.attempt or 0)
        if origin.connection is not None:
            self.connections.append(origin.connection)


class GatewaySession:
    """One program's calls, made through `Gateway.session`.

    Args:
        session_id: its name, which is part of its URL.
        client: answers the calls, in a separate session of the client.
        base_url: the gateway's URL, without a path.
        api_key: the secret that requests must carry; None generates one. Only its digest is stored.
        key_digest: the digest of a restored session's secret.
        state: the state whose trajectory records the calls; None creates one.
        sampling: settings that override the agent's, field by field; the smaller of two
            `max_tokens` applies.
        seed: the seed from which every call's is derived; a seed that the agent asks for is mixed
            with it.
        limits: the most that it may use.
        drop_fields: names of fields that are taken out of its requests, and noted
            (`reasoning.context` is a field of the object `reasoning`).
        train_calls: which calls are trained: `task` (not those beside the task), `all`, conditions
            as a dict, or a function of a `FinishedCall` (docs/gateway.md, What is trained).
        info: JSON data to keep with the session.
        opened_s: when it was opened, in seconds since the epoch.
        journal: the file that finished calls are written to.
        patience_s: how long a model server that cannot be reached is tried again; None: as the
            client's retry policy says.
        on_close: is called with the session when it is closed.
    """

    def __init__(
        self,
        session_id: str,
        client: ModelClient,
        base_url: str,
        *,
        api_key: str | None = None,
        key_digest: str | None = None,
        state: State | None = None,
        sampling: SamplingArgs | SamplingParams | None = None,
        seed: int | None = None,
        limits: SessionLimits = NO_LIMITS,
        drop_fields: Sequence[str] = (),
        train_calls: TrainCalls = "task",
        info: Mapping[str, Any] | None = None,
        opened_s: float | None = None,
        journal: JournalFile | None = None,
        patience_s: float | None = None,
        on_close: Callable[[GatewaySession], None] | None = None,
    ) -> None:
        self.id, self.limits, self.info = session_id, limits, dict(info or {})
        self.root_url = f"{base_url}/s/{session_id}"
        """The base URL for Anthropic's clients, which add `/v1` themselves."""
        self.base_url = f"{self.root_url}/v1"
        self.api_key = None
        if key_digest is None:
            self.api_key = api_key or secrets.token_urlsafe(24)
            key_digest = digest_of(self.api_key)
        self.key_digest = key_digest
        self.sampling = (
            sampling_to_args(sampling)
            if isinstance(sampling, SamplingParams)
            else dict(sampling or {})
        )
        merge_sampling(self.sampling, None)  # raises now rather than in every call
        self.seed, self.drop_fields = seed, checked_names(drop_fields)
        self.train_calls = checked_rule(train_calls)
        self.opened_s = time.time() if opened_s is None else opened_s
        self.state = new_state(session_id, self.opened_s) if state is None else state
        self.ended: TruncationReason | None = None
        """The limit that was reached; later calls are refused."""
        self.is_closed = False
        self.ending = asyncio.Lock()
        """Held by a request that closes the session and stores or deletes it; others wait."""
        self.num_sampled_tokens = 0
        self.num_cancelled = 0
        self._began_s = time.monotonic() - (time.time() - self.opened_s)
        self._root, self._client = client, client.session()
        self._seeds = None if seed is None else CallSeeds(seed)
        self.journal, self._on_close = journal, on_close
        self._messages: dict[bytes, ChatMessage] = {}
        self._last_prompt: list[ChatMessage] = []
        # Maps a tool call's id to the id of the first answer that has it.
        self._tool_calls: dict[str, str] = {}
        self._options: dict[bytes, Any] = {}
        # Of each recorded call: its number, its step, the model that it asked for, and the names of
        # its tools. A program in this process may put steps of its own into the trajectory.
        self._asked: list[tuple[int, TrajectoryStep, str, tuple[str, ...]]] = []
        self._tool_names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._flights: dict[str, _Flight] = {}
        self._by_key: dict[str, _Flight] = {}
        # Those of equal requests that were not delivered, and the one that was delivered last.
        self._by_content: dict[bytes, list[_Flight]] = {}
        # How many calls of a content ended without an answer; a retry may be that of one of them.
        self._unanswered: Counter[bytes] = Counter()
        self._num_begun = 0
        # Those of forgotten flights, too, which may still be ending.
        self._running: set[asyncio.Task[AgentAnswer]] = set()
        self._finishing, self._is_finished = asyncio.Lock(), False
        # The context variables of its opener, in which an episode's client finds its clock.
        self._context = contextvars.copy_context()
        self._context.run(PATIENCE_S.set, patience_s)
        renderer = renderer_of(self._root)
        self._decode = None if renderer is None else renderer.decode
        self._renders = renderer is not None
        self._noted: set[str] = set()  # names of the notes that were taken
        self._timer: asyncio.TimerHandle | None = None
        self._failure: StoreError | None = None

    async def __aenter__(self) -> GatewaySession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
        self.release()

    def __repr__(self) -> str:
        return f"GatewaySession({self.id!r}, {len(self.trajectory)} calls)"

    # -- properties ------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name of the model that answers."""
        return self._root.model

    @property
    def trajectory(self) -> Trajectory:
        """The finished calls, in the order in which they ended."""
        return cast(Trajectory, self.state.trajectory)

    @property
    def breaks(self) -> tuple[Break, ...]:
        """The places at which a prompt did not continue an earlier call, and why."""
        return build_samples([self.state], decode=self._decode).breaks

    @property
    def changed_sampling(self) -> dict[int, dict[str, Any]]:
        """The fields of calls that asked for a distribution other than the model's, by step.

        Training refuses these calls (docs/inference.md).
        """
        found = {}
        for index, step in enumerate(self.trajectory):
            changes = (peek(step, "extras") or {}).get("sampling")
            if changes:
                found[index] = changes
        return found

    @property
    def left_out(self) -> dict[int, str]:
        """The calls that `train_calls` leaves out as far as it is known now, and why, by step."""
        calls = [
            FinishedCall(index, _agent_of(step), model, tools, step)
            for index, step, model, tools in self._asked
        ]
        return calls_left_out(calls, self.train_calls)

    @property
    def notes(self) -> dict[str, str]:
        """What of the agent's requests was taken without effect, by name: the first of each."""
        notes: dict[str, str] = {}
        for step in self.trajectory:
            response = cast(ModelResponse, peek(step, "response"))
            notes = {**response.info.get("notes", {}), **notes}
        return notes

    @property
    def num_in_flight(self) -> int:
        """How many calls are being answered."""
        return sum(flight.step is None for flight in self._flights.values())

    def has_key(self, given: str) -> bool:
        """Whether `given` is the session's secret."""
        return has_digest(given, self.key_digest)

    def settings(self) -> dict[str, Any]:
        """Return the settings from which a restarted gateway rebuilds the session."""
        return {
            "key_digest": self.key_digest,
            "sampling": self.sampling,
            "seed": self.seed,
            "limits": asdict(self.limits),
            "drop_fields": self.drop_fields,
            "train_calls": None if callable(self.train_calls) else self.train_calls,
            "info": self.info,
            "opened_s": self.opened_s,
        }

    def summary(self) -> dict[str, Any]:
        """Return the session's address, status and progress, as JSON."""
        return {
            "id": self.id,
            "base_url": self.base_url,
            "is_closed": self.is_closed,
            "ended": self.ended,
            "num_calls": len(self.trajectory),
            "num_in_flight": self.num_in_flight,
            "num_cancelled": self.num_cancelled,
            "num_sampled_tokens": self.num_sampled_tokens,
            "num_unique_tokens": self.trajectory.tree.num_tokens,
            "breaks": [
                {"call": each.call, "agent": each.agent, "position": each.position}
                | {"cause": each.cause.value}
                for each in self.breaks
            ],
            "changed_sampling": {str(k): v for k, v in self.changed_sampling.items()},
            "left_out": {str(k): v for k, v in self.left_out.items()},
            "notes": self.notes,
            "info": self.info,
        }

    # -- calls -----------------------------------------------------------------------------------

    async def complete(self, call: AgentCall, origin: CallOrigin | None = None) -> AgentAnswer:
        """Answer a call.

        Cancelling this cancels the sampling, unless a repeated request waits for it, too.

        Raises:
            RequestError: the session is closed, a limit is reached, or the request differs from an
                earlier one with the same idempotency key.
            ModelError: the client raised it.
            StoreError: the journal cannot be written.
        """
        flight = self._begin(call, origin or CallOrigin())
        with self._waiting(flight):
            return await self._answer(flight)

    async def answers(self, call: AgentCall, origin: CallOrigin) -> list[AgentAnswer]:
        """Answer a call that may ask for several answers; raises as `complete` does."""
        if call.num_answers == 1:
            return [await self.complete(call, origin)]
        calls = zip(call.singles(), _origins(call, origin), strict=True)
        return await side_by_side([self.complete(each, own) for each, own in calls])

    async def stream(
        self, call: AgentCall, origin: CallOrigin | None = None
    ) -> AsyncGenerator[AnswerHead | AnswerDelta | AgentAnswer, None]:
        """Yield the head of the answer, its deltas as they are sampled, and the whole answer.

        The deltas and the answer's `rest` add up to the message. Several answers are sampled side
        by side, and have the head of the first. Closing the generator cancels the sampling, as in
        `complete`.

        Raises:
            RequestError, ModelError, StoreError: as in `complete`.
        """
        origin = origin or CallOrigin()
        if call.num_answers == 1:
            async with contextlib.aclosing(self._stream(call, origin)) as parts:
                async for part in parts:
                    yield part
            return
        coming: asyncio.Queue[AnswerHead | AnswerDelta | AgentAnswer | None] = asyncio.Queue()

        async def follow(index: int, each: AgentCall, own: CallOrigin) -> None:
            async with contextlib.aclosing(self._stream(each, own, index)) as parts:
                async for part in parts:
                    if not (index and isinstance(part, AnswerHead)):
                        coming.put_nowait(part)

        calls = zip(call.singles(), _origins(call, origin), strict=True)
        work = [follow(index, *pair) for index, pair in enumerate(calls)]
        task = asyncio.ensure_future(side_by_side(work))
        task.add_done_callback(lambda _: coming.put_nowait(None))
        try:
            while (known := await coming.get()) is not None:
                yield known
            await task
        finally:
            task.cancel()
            await asyncio.wait((task,))
            # Nobody is left who would be told of its failure.
            _ = task.cancelled() or task.exception()

    async def _stream(
        self, call: AgentCall, origin: CallOrigin, index: int = 0
    ) -> AsyncGenerator[AnswerHead | AnswerDelta | AgentAnswer, None]:
        """Yield the parts of one answer, which is the request's answer at `index`."""
        flight = self._begin(call, origin)
        reasoning = content = ""
        with self._waiting(flight):
            yield flight.head
            num_seen = 0
            while True:
                while num_seen < len(flight.deltas):
                    delta = flight.deltas[num_seen]
                    num_seen += 1
                    reasoning += delta.reasoning
                    content += delta.content
                    yield replace(delta, index=index) if index else delta
                if flight.task is None or flight.task.done():
                    break
                flight.progress.clear()
                await flight.progress.wait()
            answer = replace(await self._answer(flight), index=index)
            yield answer.after(reasoning, content)

    def delivered(self, answer: AgentAnswer) -> None:
        """Note that an answer was sent in full, so that an equal request is a new call."""
        flight = self._flights.get(answer.head.id)
        if flight is not None and not flight.is_delivered:
            flight.is_delivered, flight.top = True, ()
            flight.connections.clear()
            equal = self._by_content.get(flight.origin.digest, [])
            equal[:] = [each for each in equal if each is flight or not each.is_delivered]
            if self.journal is not None and flight.step is not None:
                self.journal.note_delivered(flight.step)

    # -- for protocols ---------------------------------------------------------------------------

    keeps_answers: ClassVar[bool] = True

    @property
    def gives_top_logprobs(self) -> bool:
        """Whether the model's engine is one of this process that can."""
        engines = (getattr(part, "engine", None) for part in with_inner(self._root))
        return any("top_logprobs" in getattr(each, "extra_settings", ()) for each in engines)

    def messages(self, value: object) -> list[ChatMessage]:
        """Return OpenAI's chat messages in the gateway's form: equal histories compare equal."""
        return chat_messages(value)

    def check_size(self, size: int, what: str) -> None:
        """Raise `PromptTooLong` for so many "ids" if they are known to be too many."""
        renderer, limit = renderer_of(self._root), getattr(self._root, "max_context", None)
        if renderer is not None and limit is not None:
            renderer.vocabulary.check_size(size, limit, what, longest=1)

    async def write(self, call: AgentCall, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the body that `work` writes."""
        return work()

    def conversation(self, answer_id: str) -> list[ChatMessage]:
        """Return the messages of an earlier call and its answer.

        Raises:
            RequestError: this session gave no such answer (404), or it answers a text prompt.
        """
        step = self.trajectory[self._step_of(answer_id)]
        said = [*peek(step, "prompt"), *peek(step, "completion")]
        if not all(isinstance(message, dict) for message in said):
            raise RequestError(f"{answer_id} answers a text prompt, not a conversation.")
        return said

    def answer(self, answer_id: str) -> AgentAnswer:
        """Return an earlier answer; raises as `conversation` does."""
        self._step_of(answer_id)
        return self._answer_of(self._flights[answer_id])

    async def count_tokens(self, call: AgentCall) -> int:
        """Return how many tokens the prompt of a call has if it is rendered from scratch.

        Raises:
            RequestError: the model's server renders prompts, so the number is not known here.
        """
        renderer = renderer_of(self._root)
        if renderer is None:
            raise RequestError(
                "the model's server renders the prompts, so their tokens cannot be counted here. "
                "Give the gateway's client a renderer.",
                status=501,
            )
        if isinstance(call.prompt, np.ndarray):
            return len(call.prompt)
        # In a separate session, since counting must not change what later prompts continue.
        asked = ModelCall(
            call.prompt, call.sampling, tools=call.tools or None, message_type=call.message_type
        )
        prompt, _ = TokenSession(renderer).prepare_call(asked)
        return len(prompt.ids)

    def _step_of(self, answer_id: str) -> int:
        flight = self._flights.get(answer_id)
        if flight is None or flight.step is None:
            raise RequestError(f"this session gave no answer {answer_id!r}.", status=404)
        return flight.step

    # -- the steps of a call ---------------------------------------------------------------------

    def _begin(self, call: AgentCall, origin: CallOrigin) -> _Flight:
        """Return the flight of the request that this one repeats, or a new flight."""
        if self.is_closed:
            raise RequestError("the session is closed and answers no more calls.", status=403)
        repeated = self._repeated(origin)
        if repeated is not None:
            repeated.join(origin)
            return repeated
        if self._failure is not None:
            raise self._failure
        self._check_limits()
        head = AnswerHead(secrets.token_hex(12), call.model or self.model_name, int(time.time()))
        flight = _Flight(head, origin, self._interned_options(call.options))
        flight.join(origin)
        self._num_begun += 1
        self._index(flight)
        loop = asyncio.get_running_loop()
        self._watch_time(loop)
        work = self._run(flight, call)
        flight.task = loop.create_task(work, context=self._context.copy())
        self._running.add(flight.task)
        flight.task.add_done_callback(lambda task: self._done(flight, task))
        return flight

    def _repeated(self, origin: CallOrigin) -> _Flight | None:
        if origin.key is not None:
            known = self._by_key.get(origin.key)
            if known is not None and known.origin.digest != origin.digest:
                raise RequestError(
                    "the idempotency key was used with a different request, so it is unclear which "
                    "of the two is meant. Use a new key.",
                    status=422,
                )
            return known
        # Two equal requests of clients that still wait are two samples, as a majority vote needs.
        # A client that counts its attempts marks its retries, so its first attempt is a new call.
        if not origin.digest or origin.attempt == 0:
            return None
        equal = self._by_content.get(origin.digest, [])
        lost = next((each for each in equal if each.is_lost), None)
        if lost is not None or origin.attempt is None:
            return lost
        if self._unanswered[origin.digest]:
            self._unanswered[origin.digest] -= 1
            return None
        # Its answer was lost on its way, or the loss of the connection has not been noticed.
        return next((each for each in equal if each.attempt < origin.attempt), None)

    def _index(self, flight: _Flight) -> None:
        """Make a flight one that a later request may repeat."""
        self._flights[flight.head.id] = flight
        if flight.origin.key is not None:
            self._by_key[flight.origin.key] = flight
        if flight.origin.digest:
            self._by_content.setdefault(flight.origin.digest, []).append(flight)

    def _check_limits(self) -> None:
        limits = self.limits
        spent_s = time.monotonic() - self._began_s
        if limits.max_calls is not None and self._num_begun >= limits.max_calls:
            self._end(TruncationReason.MAX_STEPS)
        elif limits.max_tokens is not None and self.num_sampled_tokens >= limits.max_tokens:
            self._end(TruncationReason.BUDGET)
        elif limits.time_limit_s is not None and spent_s >= limits.time_limit_s:
            self._end(TruncationReason.TIME_LIMIT)
        if self.ended is not None:
            raise self._limit_error()

    def _tokens_left(self, max_tokens: int) -> int:
        """Return how many tokens a call may sample; others were recorded since it was begun."""
        left = max_tokens - self.num_sampled_tokens
        if left <= 0:
            self._end(TruncationReason.BUDGET)
            raise self._limit_error()
        return left

    def _limit_error(self) -> RequestError:
        return RequestError(
            f"the session has reached its limit ({self.ended}); no further call is answered.",
            status=403,
        )

    def _end(self, reason: TruncationReason) -> None:
        if self.ended is None:
            self.ended = reason
            self.state.truncated, self.state.truncation_reason = True, reason.value

    def _watch_time(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None and self.limits.time_limit_s is not None:
            left_s = self._began_s + self.limits.time_limit_s - time.monotonic()
            self._timer = loop.call_later(max(left_s, 0.0), self._time_is_over)

    def _time_is_over(self) -> None:
        self._end(TruncationReason.TIME_LIMIT)
        for flight in list(self._flights.values()):
            self._cancel(flight)

    def _cancel(self, flight: _Flight) -> None:
        """End the sampling of a call; a call that has been sampled is recorded all the same."""
        if flight.task is None or flight.is_sampled:
            return
        # A repeated request that comes now must not join the cancelled call.
        self._forget(flight)
        flight.task.cancel()

    @contextlib.contextmanager
    def _waiting(self, flight: _Flight) -> Iterator[None]:
        """Count a caller that waits for a flight; when the last leaves, cancel the sampling."""
        flight.num_waiting += 1
        try:
            yield
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting and flight.task is not None:
                if flight.task.done():
                    self._release(flight)
                else:
                    self._cancel(flight)

    async def _answer(self, flight: _Flight) -> AgentAnswer:
        if flight.task is None:
            if not flight.is_kept and self._failure is not None:
                raise self._failure
            return self._answer_of(flight)
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            # Cancelled from within: by a limit or the end of the session, not by a caller.
            if not flight.task.cancelled():
                raise
            if self.ended is not None:
                raise self._limit_error() from None
            if self.is_closed:
                raise RequestError("the session was closed during this call.", status=403) from None
            if being_cancelled():
                raise
            # The client stopped, as a replay does at its end.
            raise RequestError("no call is answered any more.", status=403) from None

    def _done(self, flight: _Flight, task: asyncio.Task[AgentAnswer]) -> None:
        flight.progress.set()
        self._running.discard(task)
        failed = task.cancelled() or task.exception() is not None
        if flight.step is None and failed:
            self.num_cancelled += task.cancelled()
            self._forget(flight)
        elif not flight.num_waiting:
            self._release(flight)

    def _release(self, flight: _Flight) -> None:
        """Drop what the trajectory also holds; a kept task would keep the answer's arrays alive."""
        flight.task, flight.deltas = None, []

    def _forget(self, flight: _Flight) -> None:
        """Forget a call that was not recorded, so that the same request starts a new one."""
        if flight.step is not None:
            return
        if self._flights.pop(flight.head.id, None) is None:
            return
        digest = flight.origin.digest
        if digest:
            self._unanswered[digest] += 1
            self._by_content[digest].remove(flight)
            if not self._by_content[digest]:
                del self._by_content[digest]
        if flight.origin.key is not None and self._by_key.get(flight.origin.key) is flight:
            del self._by_key[flight.origin.key]

    async def _run(self, flight: _Flight, call: AgentCall) -> AgentAnswer:
        if self._renders:  # the model's server sees ids only
            call = without_hints(call)
        prompt = call.prompt
        if isinstance(prompt, list):
            prompt = self._interned(rejoined(prompt, self._tool_calls))

        def listen(delta: ChatMessage) -> None:
            new = AnswerDelta(
                delta.get("reasoning_content") or "",
                delta.get("content") or "",
                tokens=self._tokens_in(delta),
                num_prompt_tokens=delta.get("num_prompt_tokens"),
            )
            if new.reasoning or new.content or new.tokens is not None:
                flight.deltas.append(new)
                flight.progress.set()

        now = time.monotonic()
        asked = ModelCall(
            prompt,
            self._sampling_of(call.sampling),
            None,
            call.tools or None,
            call.message_type,
            round(now - self._began_s, 6),
            now,
            on_delta=listen if call.stream else None,
            # The likeliest tokens beside them are known when the answer is whole, and come with it.
            reports_tokens=bool(call.options.keys() & {"logprobs", "token_ids"})
            and not call.sampling.extra.get("top_logprobs"),
        )
        response = self._with_own_ids(await asked.to(self._client), flight.head.id)
        if "top_logprobs" in response.info:
            info = dict(response.info)
            flight.top = info.pop("top_logprobs")
            place = None if response.call is None else (response.tree, response.call)
            response = response.at(place, info=info)
        # Agents send the same fields with every call; the first that has one keeps its note.
        if new := {name: call.notes[name] for name in call.notes.keys() - self._noted}:
            self._noted |= new.keys()
            response = response.annotated(notes={**response.info.get("notes", {}), **new})
        # From here on it cannot be cancelled: sampled tokens are recorded, even if no caller waits.
        flight.is_sampled = True
        return await self._keep(flight, call, prompt, response)

    def _tokens_in(self, delta: ChatMessage) -> DeltaTokens | None:
        tokens = delta.get("tokens")
        if not tokens or self._decode is None:
            return None
        ids, values = zip(*tokens, strict=True)
        return DeltaTokens(
            np.array(ids, np.int32), np.array(values, np.float32), None, self._decode
        )

    def sampling_for(self, asked: SamplingParams) -> SamplingParams:
        """Return an agent's settings, overridden by the session's."""
        merged = merge_sampling(asked, self.sampling) if self.sampling else asked
        limits = [each for each in (asked.max_tokens, merged.max_tokens) if each is not None]
        return replace(merged, max_tokens=min(limits, default=None))

    def _sampling_of(self, asked: SamplingParams) -> SamplingParams:
        """Return a call's settings: within what the session has left, with a seed if it has one."""
        merged = self.sampling_for(asked)
        max_tokens, seed = merged.max_tokens, merged.seed
        if self.limits.max_tokens is not None:
            left = self._tokens_left(self.limits.max_tokens)
            max_tokens = left if max_tokens is None else min(left, max_tokens)
        if self._seeds is not None and self.seed is not None:
            mixed = None if asked.seed is None else asked_seed(self.seed, asked.seed)
            seed = self._seeds.next(mixed)
        return replace(merged, max_tokens=max_tokens, seed=seed)

    def _with_own_ids(self, response: ModelResponse, answer_id: str) -> ModelResponse:
        """Return a response whose tool calls have ids that no earlier answer uses.

        Ids are derived from the sampled text, so equal tool calls would share one, and agents could
        not tell their outputs apart.
        """
        calls = response.message.get("tool_calls") or ()
        if not any(self._tool_calls.get(call["id"], answer_id) != answer_id for call in calls):
            self._note_calls(response, answer_id)
            return response
        # Nine letters and digits, which some templates insist on.
        made = [
            {**call, "id": hashlib.blake2b(f"{answer_id}:{index}".encode()).hexdigest()[:9]}
            for index, call in enumerate(calls)
        ]
        place = None if response.call is None else (response.tree, response.call)
        changed = response.at(place, message={**response.message, "tool_calls": made})
        self._note_calls(changed, answer_id)
        return changed

    def _note_calls(self, response: ModelResponse, answer_id: str) -> None:
        for call in response.message.get("tool_calls") or ():
            self._tool_calls.setdefault(call["id"], answer_id)

    def _interned(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return the messages; those that were seen before are the same objects."""
        # Agents send their whole history with every call, and it must be kept only once. Most of it
        # equals the previous call's, and comparing is faster than computing digests.
        known, before = self._messages, self._last_prompt
        num_same = next(
            (
                at
                for at, pair in enumerate(zip(before, messages, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(before), len(messages)),
        )
        new = (known.setdefault(_content_digest(each), each) for each in messages[num_same:])
        self._last_prompt = [*before[:num_same], *new]
        return self._last_prompt

    def _interned_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options; values that were seen before are the same objects."""
        known = self._options
        return {
            name: known.setdefault(_content_digest(value), value) for name, value in options.items()
        }

    async def _keep(
        self,
        flight: _Flight,
        call: AgentCall,
        prompt: Messages | IntArray,
        response: ModelResponse,
    ) -> AgentAnswer:
        is_chat = isinstance(prompt, list)
        if isinstance(prompt, np.ndarray):
            prompt = self._spelled(prompt)
        step = self._record(
            prompt, is_chat, response, flight.origin.agent, flight.head.model, call.tools
        )
        flight.step = step
        if self.journal is not None:
            origin = flight.origin
            kept = KeptCall(
                flight.head,
                origin.agent,
                origin.key,
                origin.digest,
                call.tools,
                flight.options,
                self._num_begun,
            )
            try:
                await self.journal.append(self.trajectory, step, kept)
            except StoreError as error:
                self._failure = error
                self.state.error = record_error(error, "environment")
                raise
        flight.is_kept = True
        return self._answer_of(flight, response)

    def _record(
        self,
        prompt: Messages,
        is_chat: bool,
        response: ModelResponse,
        agent: str,
        model: str,
        tools: Sequence[ToolSchema],
    ) -> int:
        """Append a finished call to the trajectory; return its step."""
        completion: Messages = [response.message] if is_chat else response.text
        number = len(self.trajectory)
        step = self.trajectory.append_call(
            prompt=prompt, completion=completion, response=response, agent=agent, turn=number
        )
        names = tuple(str(tool.get("function", tool).get("name")) for tool in tools)
        self._asked.append((number, step, model, self._tool_names.setdefault(names, names)))
        self.num_sampled_tokens += response.num_completion_tokens
        return number

    def _spelled(self, ids: IntArray) -> str:
        renderer = renderer_of(self._root)
        return " ".join(map(str, ids.tolist())) if renderer is None else renderer.decode(ids)

    def _answer_of(self, flight: _Flight, response: ModelResponse | None = None) -> AgentAnswer:
        """Return the answer of a recorded call."""
        assert flight.step is not None
        step = self.trajectory[flight.step]
        if response is None:
            response = cast(ModelResponse, peek(step, "response"))
        stop = response.info.get("stop_reason")
        return AgentAnswer(
            flight.head,
            response.message,
            response.finish_reason,
            response,
            stop=stop if isinstance(stop, str | int) else None,
            num_prompt_tokens=response.num_prompt_tokens,
            num_completion_tokens=response.num_completion_tokens,
            num_cached_tokens=int(response.info.get("num_cached_tokens", 0)),
            options=flight.options,
            decode=self._decode,
            top=flight.top,
        )

    # -- closing, and restoring after a restart --------------------------------------------------

    async def aclose(self) -> None:
        """End the session: cancel calls in flight, and complete the state.

        The journal's file stays until `release`, so that nothing is lost before the state is
        stored elsewhere. `async with` does both. A second call waits for the first, and does its
        work if it was cancelled.
        """
        self.is_closed = True
        async with self._finishing:
            if not self._is_finished:
                await self._finish()
                self._is_finished = True

    async def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for flight in list(self._flights.values()):
            self._cancel(flight)
        if self._running:
            await asyncio.wait(self._running)
        if self.journal is not None:
            self.journal.close()
        self._finish_state()
        if self._on_close is not None:
            self._on_close(self)

    def release(self) -> None:
        """Delete the journal, if the state is stored elsewhere or not needed."""
        if self.journal is not None:
            self.journal.delete()
            # A second release would delete the file of the next session with this id.
            self.journal = None

    def _finish_state(self) -> None:
        state, steps = self.state, self.trajectory
        left_out = self.left_out
        for index, step, *_ in self._asked:
            if index in left_out:
                step["extras"]["left_out"] = left_out[index]
        # A title must not pass for the agent's answer; what a rule leaves out is a part of it.
        beside = left_out if self.train_calls == "task" else {}
        kept = [step for index, step in enumerate(steps) if index not in beside]
        if not state.prompt and kept:
            state.prompt = peek(kept[0], "prompt")
        if state.get("completion") is None:
            # Without a copy where nothing is left out: the trajectory knows its conversation.
            state.completion = self._completion(kept if beside else steps)
        timing = cast(RolloutTiming, state.timing)
        timing["generation_ms"] = (time.monotonic() - self._began_s) * 1000.0
        timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
        state.is_completed = True
        state.truncated = bool(state.truncated)
        state.terminated = not state.truncated
        steps.trim()

    def _completion(self, steps: Sequence[TrajectoryStep]) -> Messages:
        """Return the completion in the prompt's form: messages or text.

        A program may use chat and text completions concurrently. Calls in the other form stay in
        the trajectory; they appear here only if no call has the prompt's form.
        """
        prompt = self.state.prompt
        is_text = isinstance(prompt, str)
        same = [step for step in steps if isinstance(peek(step, "prompt"), str) is is_text]
        if len(same) == len(steps):
            return render_completion(prompt, steps)
        if same:
            return render_completion(prompt, same)
        answers = [peek(step, "completion") for step in steps]
        if is_text:
            return "".join(
                str(message.get("content") or "") for each in answers for message in each
            )
        return [{"role": "assistant", "content": text} for text in answers]

    def restore(self, kept_session: KeptSession) -> None:
        """Restore the calls of a journal; later prompts can continue them."""
        remember = getattr(self._client, "remember", None)
        for kept, step in kept_session.calls:
            prompt, response = peek(step, "prompt"), cast(ModelResponse, peek(step, "response"))
            # Its tokens are in the file's tree: they are put into the session's.
            call, tree = response.call, response.tree
            experts = None if call is None else recorded_routing(tree, call)
            response = response.renewed(routed_experts=experts)
            is_chat = isinstance(prompt, list)
            if is_chat:
                prompt = self._interned(prompt)
            if remember is not None:
                kind: MessageType = "chat" if is_chat else "completion"
                asked = ModelCall(prompt, tools=kept.tools or None, message_type=kind)
                known = remember(asked, response)
                # `known` has none if this model renders other ids: keep the sampled ones.
                response = response if known.completion_ids is None else known
            self._note_calls(response, kept.head.id)
            number = self._record(
                prompt, is_chat, response, kept.agent, kept.head.model, kept.tools
            )
            origin = CallOrigin(kept.agent, kept.key, None, kept.digest)
            flight = _Flight(kept.head, origin, self._interned_options(kept.options))
            flight.step, flight.is_kept = number, True
            flight.is_delivered = number in kept_session.delivered
            if self.journal is not None:
                if flight.is_delivered:
                    self.journal.note_delivered(number)
                self.journal.append_now(self.trajectory, number, kept)
            self._index(flight)
            self._noted |= response.info.get("notes", {}).keys()
            self._num_begun = max(self._num_begun + 1, kept.num_begun)
        if self._seeds is not None:
            # A kept call's seed may be that of any call that had begun, so all of them are used up.
            for _ in range(self._num_begun):
                self._seeds.next(None)
        if self.journal is not None:
            self.journal.publish()


def _origins(call: AgentCall, origin: CallOrigin) -> list[CallOrigin]:
    """Return the origin of each answer, which is a call of its own: a repeated request finds it."""
    return [
        replace(
            origin,
            key=None if origin.key is None else f"{origin.key}#{index}",
            digest=hashlib.blake2b(origin.digest + bytes([index % 256]), digest_size=16).digest(),
        )
        for index in range(call.num_answers)
    ]


def _agent_of(step: TrajectoryStep) -> str:
    return str((peek(step, "extras") or {}).get("agent") or "")


def _content_digest(value: object) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16).digest()


def renderer_of(client: object) -> ChatRenderer | None:
    """Return the renderer of a client, or of one behind it; None: its server renders prompts."""
    found = getattr(client, "renderer", None)
    if isinstance(found, ChatRenderer):
        return found
    for part in getattr(client, "clients", ()):
        if (found := renderer_of(part)) is not None:
            return found
    return None


def new_state(name: str, opened_s: float | None = None) -> State:
    """Return the state of a session without an environment, opened at `opened_s` (default: now)."""
    began_s = time.time() if opened_s is None else opened_s
    state = State(input={"prompt": [], "example_id": 0, "task": name})
    state.update(
        is_completed=False,
        stop_condition=None,
        oai_tools=[],
        trajectory=Trajectory(),
        completion=None,
        reward=None,
        advantage=None,
        metrics=None,
        timing=RolloutTiming(generation_ms=0.0, scoring_ms=0.0, total_ms=0.0, start_time=began_s),
        error=None,
        terminated=False,
        truncated=False,
        truncation_reason=None,
    )
    return state
