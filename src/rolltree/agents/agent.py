"""`Agent`: a model with a history and a parser. One `act()` is one turn.

Every model call is recorded, with its exact tokens, in the agent's own `trajectory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rolltree.agents.context import ContextStrategy, FullDialog
from rolltree.environments.parsers import text_of
from rolltree.environments.parsers.actions import ActionParser, as_text
from rolltree.inference.client import ModelClient, as_client, merge_sampling, sampling_from_args
from rolltree.inference.deadline import RolloutClient
from rolltree.tokens import Trajectory, record_call
from rolltree.values.errors import ConfigError, refuse_unknown
from rolltree.values.seeds import CallSeeds
from rolltree.values.steps import (
    INCOMPLETE,
    PARSE_FEEDBACK,
    ActionTarget,
    AgentStep,
    ParseResult,
    ToolAnswer,
    ToolRequest,
)
from rolltree.values.types import (
    ChatMessage,
    FinishReason,
    Info,
    ModelResponse,
    SamplingArgs,
    SamplingParams,
    ToolSchema,
    TrajectoryStep,
)

INCOMPLETE_FEEDBACK = (
    "Your answer was cut off before it was complete, so nothing was done. Answer more briefly."
)


_CUT = (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.CONTENT_FILTER)


class Agent:
    """A model that acts by text. One object plays one episode at a time.

    `reset` begins an episode, `observe` adds an observation, `act` is one turn. `steps` are
    the model calls of the episode so far, also after `act` raised; `trajectory` has them as
    `TrajectoryStep`s over one token tree; `history` has the messages.

    Args:
        client: the model, a `ModelClient` or an OpenAI client; `reset` may replace it.
        name: the agent's name, in its steps.
        system_prompt: the first message of its history.
        parser: from the text of an answer to an action.
        context: chooses the part of its history that is sent to the model.
        sampling: how to sample; `reset` may override it.
        model: the model's name in requests, if the client has several models.
        reject_incomplete_completions: an answer that was cut off (`finish_reason` "length", "abort"
            or "content_filter") counts as an answer without an action. It stays in the history; the
            feedback follows it.
        incomplete_penalty: the reward of such an answer, usually 0 or less.
        incomplete_feedback: the feedback to such an answer.
        parse_feedback: the feedback if the parser finds no action and gives none itself.

    Raises:
        ConfigError: a setting cannot be used.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        name: str = "agent",
        system_prompt: str | None = None,
        parser: ActionParser = as_text,
        context: ContextStrategy | None = None,
        sampling: SamplingParams | SamplingArgs | None = None,
        model: str | None = None,
        reject_incomplete_completions: bool = True,
        incomplete_penalty: float = 0.0,
        incomplete_feedback: str = INCOMPLETE_FEEDBACK,
        parse_feedback: str = "No action was found in your answer.",
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, type(self))
        self.name = name
        self.system_prompt = system_prompt
        self.parser = parser
        self.context: ContextStrategy = context or FullDialog()
        self.reject_incomplete_completions = reject_incomplete_completions
        self.incomplete_penalty = incomplete_penalty
        self.incomplete_feedback = incomplete_feedback
        self.parse_feedback = parse_feedback
        self.tool_schemas: list[ToolSchema] = []
        self._model = model
        self._client = client
        self._sampling = sampling
        # So that an agent can act without a `reset`, which a protocol calls for each episode.
        self._begin(client, sampling, None, ())

    # -- an episode --------------------------------------------------------------------------

    def reset(
        self,
        *,
        client: Any = None,
        sampling: SamplingParams | SamplingArgs | None = None,
        seed: int | None = None,
        messages: Sequence[ChatMessage] = (),
    ) -> None:
        """Begin an episode: clear the last one, and open a session with the model.

        Args:
            client: replaces the agent's own client for this episode.
            sampling: fields that override the agent's own.
            seed: of the episode's sampling. The first call uses the seed itself, and later calls
                seeds derived from it. None: that of `sampling`, if any.
            messages: the messages after the system prompt, say few-shot examples. If the first is a
                system message, it replaces the agent's.
        """
        sampling = merge_sampling(self._sampling, sampling)
        self._begin(client or self._client, sampling, seed, messages)

    def _begin(
        self,
        client: Any,
        sampling: SamplingParams | SamplingArgs | None,
        seed: int | None,
        messages: Sequence[ChatMessage],
    ) -> None:
        if not isinstance(sampling, SamplingParams):
            sampling = sampling_from_args(sampling or {})
        self.sampling = sampling
        seed = sampling.seed if seed is None else seed
        self._session: ModelClient | None = None
        if client is not None:
            self._session = as_client(client, self._model).session()
            # Each agent's calls are numbered separately.
            if seed is not None:
                self._session = RolloutClient(self._session, seeds=CallSeeds(seed, sampling.seed))
        self.trajectory = Trajectory()
        self.steps: list[AgentStep] = []
        self.turn = 0
        self._num_tokens = 0
        self.history: list[ChatMessage] = list(messages)
        # Some chat templates reject two system messages.
        has_own = bool(messages) and messages[0].get("role") == "system"
        if self.system_prompt is not None and not has_own:
            self.history.insert(0, {"role": "system", "content": self.system_prompt})

    @property
    def client(self) -> Any:
        """The agent's own client; None if `reset` passes one."""
        return self._client

    def observe(self, obs: str | Sequence[ChatMessage]) -> None:
        """Add an observation to the history: a text as a user message, or messages as they are."""
        if isinstance(obs, str):
            self.history.append({"role": "user", "content": obs})
        else:
            self.history.extend(obs)

    @property
    def waiting(self) -> tuple[ToolRequest, ...]:
        """The external tool calls that `answer` must answer before the next `act`."""
        return ()

    def answer(self, answers: Sequence[ToolAnswer]) -> AgentStep:
        """Pass the results of the external tool calls in `waiting`; `act` then continues the turn.

        Returns the step that made the calls, now with their answers.

        Raises:
            ValueError: the answers do not match the calls in `waiting`.
        """
        raise ValueError(
            f"agent {self.name!r} has no tools, so there is nothing to answer. Answer only after a "
            "step whose action_target is 'external'."
        )

    async def act(self) -> list[AgentStep]:
        """Take one turn; return its model calls. The `action_target` of the last says what is next.

        Raises:
            ModelError: the model gave no usable answer (`PromptTooLong`: the history is too long).
                Earlier calls are in `steps`.
        """
        first = len(self.steps)
        response, record = await self._call()
        self._finish_turn(response, record)
        return self.steps[first:]

    # -- parts of a turn ---------------------------------------------------------------------

    async def _call(self) -> tuple[ModelResponse, TrajectoryStep]:
        """Call the model for the next message, record the call, and append the message."""
        self.history = list(await self.context.prepare(self.history, self._num_tokens, self._ask))
        # The history stays whole; a strategy changes only what is sent, and the token tree has
        # each call as it was made.
        shown = self.context.view(self.history)
        response, record = await self._sample(shown)
        self.history.append(response.message)
        # The least size of the next prompt, by which context strategies decide without a tokenizer.
        self._num_tokens = response.num_prompt_tokens + response.num_completion_tokens
        return response, record

    async def _ask(
        self, messages: Sequence[ChatMessage], kind: str, *, max_tokens: int | None = None
    ) -> str:
        """Make a model call outside the dialog, recorded as an internal step of this turn."""
        response, record = await self._sample(list(messages), max_tokens)
        text = text_of(response.message) or response.text
        self._add_step(response, record, "internal", ParseResult(text), info={"kind": kind})
        return text

    async def _sample(
        self, messages: list[ChatMessage], max_tokens: int | None = None
    ) -> tuple[ModelResponse, TrajectoryStep]:
        if self._session is None:
            raise ConfigError(
                f"agent {self.name!r} has no client, so it cannot call a model. Pass client=... "
                "to the agent or to its reset()."
            )
        sampling = self.sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        response = await self._session.chat(
            messages, tools=self.tool_schemas or None, sampling=sampling, model=self._model
        )
        record = record_call(
            self.trajectory,
            prompt=messages,
            completion=[response.message],
            response=response,
            agent=self.name,
            turn=self.turn,
        )
        return response, record

    def _finish_turn(
        self,
        response: ModelResponse,
        record: TrajectoryStep,
        tool_calls: tuple[ToolRequest, ...] = (),
        parsed: ParseResult | None = None,
    ) -> None:
        """Parse the action in the final answer, unless `parsed` is given, and end the turn."""
        info: Info = {}
        if self._is_rejected(response):
            info[INCOMPLETE] = True
            parsed = ParseResult(None, self.incomplete_penalty, self.incomplete_feedback)
        elif parsed is None:
            try:
                parsed = self.parser(self._final_text(response.message))
            except Exception:
                # A bug in the parser fails the episode, but the call is kept.
                self._add_step(response, record, "env", ParseResult(None), tool_calls)
                raise
        # Every failure needs feedback, so that the model can do better.
        if parsed.failed and parsed.obs is None:
            parsed = replace(parsed, obs=self.parse_feedback)
        if parsed.failed:
            info[PARSE_FEEDBACK] = parsed.obs
        self._add_step(response, record, "env", parsed, tool_calls, info=info)
        # Only now, since the step belongs to the turn that ends.
        self.turn += 1

    def _is_rejected(self, response: ModelResponse) -> bool:
        """Whether an answer is rejected because it was cut off."""
        return self.reject_incomplete_completions and response.finish_reason in _CUT

    def _final_text(self, message: ChatMessage) -> str:
        """Return the part of an answer that the parser reads."""
        return text_of(message)

    def _add_step(
        self,
        response: ModelResponse,
        record: TrajectoryStep,
        target: ActionTarget,
        parsed: ParseResult | None,
        tool_calls: tuple[ToolRequest, ...] = (),
        tool_answers: tuple[ToolAnswer, ...] = (),
        info: Info | None = None,
        reward: float = 0.0,
    ) -> None:
        """Append a step to `steps`, and add its info to the record's extras."""
        info = {**response.to_info(), **(info or {})}
        record["extras"].update(info, action_target=target)
        step = AgentStep(
            agent=self.name,
            turn=self.turn,
            record=record,
            finish_reason=response.finish_reason,
            action_target=target,
            parse_result=parsed,
            reward=reward if parsed is None else parsed.reward,
            tool_calls=tool_calls,
            tool_answers=tool_answers,
            info=info,
        )
        self.steps.append(step)
