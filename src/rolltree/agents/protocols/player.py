"""One agent in one episode: its turns, the external tool calls in them, and its rollout.

Every protocol plays its agents through a `Player`. What happens next depends on `action_target`:
after "internal" the agent has continued by itself, "external" calls are answered here and the agent
acts again, "env" ends the turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from rolltree._helpers.tasks import contained
from rolltree._helpers.threads import run_in_thread
from rolltree.agents import Agent
from rolltree.agents.protocols.budget import Budget, BudgetedClient
from rolltree.agents.protocols.episode import EpisodeContext, RolloutBuilder
from rolltree.environments.tools import answer_of, side_by_side
from rolltree.inference.call import ModelCall
from rolltree.inference.client import (
    ModelClient,
    answers_for_all,
    as_client,
    is_refusal,
    may_follow,
)
from rolltree.inference.client_base import DelegatingClient
from rolltree.inference.deadline import RolloutClient
from rolltree.tokens import num_call_tokens
from rolltree.values.errors import BudgetSpent, ModelError, PromptTooLong, message_of, record_error
from rolltree.values.steps import (
    PARSE_FEEDBACK,
    AgentStep,
    EnvironmentStep,
    StepOutcome,
    ToolAnswer,
    ToolRequest,
)
from rolltree.values.types import ChatMessage, ModelResponse, TruncationReason

T = TypeVar("T")

ExternalToolHandler: TypeAlias = Callable[
    [ToolRequest], str | ToolAnswer | Awaitable[str | ToolAnswer]
]
"""Answers an external tool call. A plain function runs in a thread; an error that it raises becomes
the answer."""

NO_MORE_CALLS = "No more tool calls are answered. Give your final answer now."


class EpisodeCut(Exception):
    """The episode of one agent is over for `reason`; caught by the protocol."""

    def __init__(self, reason: TruncationReason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Player:
    """An agent, its rollout, and how its external tool calls are answered.

    Args:
        agent: an agent that `begin` resets.
        builder: records its steps.
        context: that of the episode, or of the part of it that this agent plays.
        handler: answers external tool calls. None: every call is refused.
        max_external_calls: how many are answered in the episode. Later ones are refused; if the
            agent calls again after a refusal, its episode is cut for "budget".
        budget: the limits of its model calls.
    """

    def __init__(
        self,
        agent: Agent,
        builder: RolloutBuilder,
        context: EpisodeContext,
        *,
        handler: ExternalToolHandler | None = None,
        max_external_calls: int = 32,
        budget: Budget | None = None,
    ) -> None:
        self.agent = agent
        self.builder = builder
        self.context = context
        self.handler = handler
        self.max_external_calls = max_external_calls
        self.budget = budget
        # Shown to the agent with its next observation.
        self.notice = ""
        self._num_external = 0
        self._was_refused = False
        self._turn_steps: tuple[int, ...] = ()

    @property
    def over(self) -> bool:
        """Whether this agent's rollout has ended."""
        return self.builder.over

    def begin(self, messages: Sequence[ChatMessage] = ()) -> None:
        """Begin the agent's episode with its own model, or with the context's.

        In a replay, the context's recorded answers are used for all agents.
        """
        context, client = self.context, self.agent.client
        # The context's client is timed already; an agent's own is put under the same clocks here.
        if client is None or answers_for_all(context.client):
            client = context.client
        else:
            for clock in context.clocks:
                client = RolloutClient(as_client(client), clock)
        if client is not None and self.budget is not None:
            client = BudgetedClient(as_client(client), self.budget)
        if client is not None and (context.clocks or context.max_seq_len is not None):
            client = _CheckedClient(as_client(client), self._check_limits)
        self.agent.reset(
            client=client,
            sampling=context.sampling,
            seed=context.sampling_seed,
            messages=messages,
        )

    async def take_turn(self) -> AgentStep:
        """Let the agent act until its turn ends; return the step meant for the world.

        Raises:
            EpisodeCut: time, tokens or calls are spent, or the prompt no longer fits.
            Exception: the agent or its model (`ModelError`) failed; the rollout's error says so.
        """
        first = len(self.builder.steps)
        while True:
            # Between calls, not during one: how long a call waited is known only when it returns.
            self._check_limits()
            try:
                with contained():
                    await self.agent.act()
            except EpisodeCut:
                raise
            except PromptTooLong as error:
                raise EpisodeCut(TruncationReason.MAX_SEQ_LEN) from error
            except BudgetSpent as error:
                raise EpisodeCut(TruncationReason.BUDGET) from error
            except Exception as error:  # an agent's code may raise anything
                # A request may be refused because of what it quotes of earlier answers.
                if self.agent.steps and is_refusal(error):
                    self.builder.meta["refused_request"] = message_of(error)
                    raise EpisodeCut(TruncationReason.ENV) from error
                if self.agent.trajectory and may_follow(error):
                    raise
                is_model = isinstance(error, ModelError)
                self.builder.fail(record_error(error, "model" if is_model else "environment"))
                raise
            finally:
                # Even if the turn failed: calls that were made are kept and trained.
                self.builder.take()
                self._turn_steps = tuple(range(first, len(self.builder.steps)))
            last = self.builder.steps[-1]
            assert isinstance(last, AgentStep)
            if last.action_target != "external":
                return last
            await self._answer(self.agent.waiting)

    def _check_limits(self) -> None:
        if any(clock.expired for clock in self.context.clocks):
            raise EpisodeCut(TruncationReason.TIME_LIMIT)
        limit, steps = self.context.max_seq_len, self.agent.trajectory
        if limit is not None and steps and num_call_tokens(steps[-1]) >= limit:
            raise EpisodeCut(TruncationReason.MAX_SEQ_LEN)

    async def _answer(self, requests: Sequence[ToolRequest]) -> None:
        left = self.max_external_calls - self._num_external
        self._num_external += len(requests)
        refused = requests[max(left, 0) :]
        # The agent was told that no more calls are answered; it might call again forever.
        if refused and self._was_refused:
            raise EpisodeCut(TruncationReason.BUDGET)
        self._was_refused = bool(refused)
        answers = await side_by_side(
            [self.answer_one(each, number) for number, each in enumerate(requests[: max(left, 0)])]
        )
        answers += [ToolAnswer(r.call_id, r.name, NO_MORE_CALLS) for r in refused]
        self.builder.steps[-1] = self.agent.answer(answers)

    async def answer_one(self, request: ToolRequest, position: int) -> ToolAnswer:
        """Return the answer to one call. An error of the handler becomes an answer, too."""
        if request.problem is not None:
            return ToolAnswer(request.call_id, request.name, request.problem)
        if self.handler is None:
            return ToolAnswer(
                request.call_id,
                request.name,
                f"{request.name!r} is not available here. Continue without it.",
            )
        return await answer_of(
            request,
            call_handler(self.handler, request),
            lambda error: f"{request.name} failed: {type(error).__name__}: {error}",
        )

    # -- the world's part of a turn -------------------------------------------------------------

    def no_action(self, step: AgentStep) -> str:
        """Return the feedback on an answer without an action."""
        return str(step.info.get(PARSE_FEEDBACK) or "")

    def record_outcome(self, action: Any, prev_obs: str, outcome: StepOutcome) -> None:
        """Append the world's outcome of the turn just taken; end the rollout if the world ended."""
        reason = TruncationReason.ENV if outcome.truncated and not outcome.terminated else None
        self.builder.steps.append(
            EnvironmentStep(
                agent=self.agent.name,
                # The agent has ended its turn, and counts the next one already.
                turn=self.agent.turn - 1,
                prev_obs=prev_obs,
                action=action,
                next_obs=outcome.obs,
                reward=outcome.reward,
                terminated=outcome.terminated,
                truncated=outcome.truncated,
                info=dict(outcome.info),
                agent_steps=self._turn_steps,
            )
        )
        if outcome.done:
            self.builder.end(terminated=outcome.terminated, reason=reason)


class _CheckedClient(DelegatingClient):
    """A client that checks limits before each call: an agent may make several in one `act`."""

    def __init__(self, inner: ModelClient, check: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check = check

    async def call(self, call: ModelCall) -> ModelResponse:
        """Pass the call on unless a limit is reached."""
        self._check()
        return await super().call(call)


async def call_handler(handler: Callable[..., Any], request: ToolRequest) -> Any:
    """Return a handler's answer to a call; a plain function runs in a thread."""
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004  an object with an async __call__
    ):
        return await handler(request)
    result = await run_in_thread(lambda: handler(request), name="rolltree-handler")
    return await result if inspect.isawaitable(result) else result
