"""Budgets of delegated agents: model calls, sampled tokens, seconds.

`BudgetedClient` sits between an agent and its model, so that it sees every call, including those
that an agent makes outside its dialog.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from rolltree.inference.call import ModelCall
from rolltree.inference.client import ModelClient
from rolltree.inference.client_base import DelegatingClient
from rolltree.values.errors import BudgetSpent, ConfigError
from rolltree.values.types import ModelResponse


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of one delegated agent; None means unlimited.

    Agents to which it delegates have their own budgets.

    Raises:
        ConfigError: a limit is not positive.
    """

    # Model calls.
    max_calls: int | None = 16
    # Sampled tokens; prompts are not counted.
    max_tokens: int | None = None
    # Seconds, without waiting for the server.
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_tokens", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(
                    f"a budget has {name} = {value}, so the agent could not act. Give a positive "
                    "number, or None for no limit."
                )


class BudgetedClient(DelegatingClient):
    """A client that counts its calls and tokens, and rejects calls beyond a budget.

    Its sessions share the counts. The last call may be shorter than requested, so that no token is
    sampled beyond `max_tokens`. Concurrent calls whose limits add up to more wait for each other.
    """

    def __init__(self, inner: ModelClient, budget: Budget) -> None:
        super().__init__(inner)
        self._budget = budget
        self.spent = Spent()

    async def call(self, call: ModelCall) -> ModelResponse:
        """Count the call and pass it on.

        Raises:
            BudgetSpent: nothing of the budget is left.
        """
        spent, limit, size = self.spent, self._budget.max_tokens, 0
        if limit is not None:
            size = await self._share(limit, call.sampling.max_tokens)
            call = replace(call, sampling=replace(call.sampling, max_tokens=size))
        self._check_left()
        # Counted before the call, so that concurrent calls cannot all take the last one.
        spent.calls += 1
        spent.reserved += size
        try:
            response = await super().call(call)
            # Sampled tokens only: the prompt is restated in every call.
            spent.tokens += response.num_completion_tokens
            return response
        finally:
            spent.reserved -= size
            spent.freed.set()
            spent.freed.clear()

    async def _share(self, limit: int, asked: int | None) -> int:
        """Return how many tokens a call may sample, once those in flight cannot need them."""
        spent = self.spent
        while True:
            left = limit - spent.tokens
            size = min(left, asked or left)
            if spent.reserved + size <= left:
                return size
            await spent.freed.wait()

    def _check_left(self) -> None:
        budget, spent = self._budget, self.spent
        for name, limit, used in (
            ("model calls", budget.max_calls, spent.calls),
            ("sampled tokens", budget.max_tokens, spent.tokens),
        ):
            if limit is not None and used >= limit:
                raise BudgetSpent(
                    f"all {limit} {name} of this agent's budget are spent. Raise its Budget, or "
                    "give it smaller tasks."
                )


@dataclass(slots=True)
class Spent:
    """What a `BudgetedClient` and its sessions have used: calls, and sampled tokens."""

    calls: int = 0
    tokens: int = 0
    # The most that calls in flight may sample.
    reserved: int = 0
    # Set when one of them has ended.
    freed: asyncio.Event = field(default_factory=asyncio.Event)
