"""Budgets of concurrent calls: what one has reserved is not given to another."""

import asyncio

import pytest

from rolltree.agents.protocols import Budget, BudgetedClient
from rolltree.testing import ScriptedClient
from rolltree.values.errors import BudgetSpent, ConnectionFailed
from rolltree.values.types import SamplingParams


async def answer(messages):
    await asyncio.sleep(0.01)
    if messages[-1]["content"] == "fail":
        raise ConnectionFailed("gone")
    return messages[-1]["content"]


def client_of(**limits):
    return BudgetedClient(ScriptedClient(answer), Budget(**{"max_calls": None, **limits}))


def ask(client, text, max_tokens=None):
    prompt = [{"role": "user", "content": text}]
    return client.session().chat(prompt, sampling=SamplingParams(max_tokens=max_tokens))


async def sizes(*calls):
    """The completions' numbers of tokens, or the error's type."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    return [type(f) if isinstance(f, BaseException) else f.num_completion_tokens for f in found]


async def test_concurrent_calls_without_a_limit_sample_no_more_than_the_budget():
    client = client_of(max_tokens=100)
    assert await sizes(*(ask(client, "x" * 200) for _ in range(3))) == [100, *[BudgetSpent] * 2]
    assert (client.spent.tokens, client.spent.calls) == (100, 1)


@pytest.mark.parametrize("length", [200, 4])
async def test_concurrent_calls_share_what_the_others_leave(length):
    client = client_of(max_tokens=100)
    found = await sizes(*(ask(client, "x" * length, 40) for _ in range(3)))
    # The end of an answer is a token, too.
    assert found == ([40, 40, 20] if length == 200 else [5, 5, 5])
    assert client.spent.tokens == sum(found)


async def test_a_call_without_a_limit_leaves_what_it_does_not_use():
    client = client_of(max_tokens=100)
    assert await sizes(ask(client, "xyz"), ask(client, "x" * 200)) == [4, 96]


async def test_calls_that_fit_run_at_once():
    together = asyncio.Barrier(3)

    async def meet(messages):
        await together.wait()
        return "ok"

    client = BudgetedClient(ScriptedClient(meet), Budget(max_tokens=30))
    async with asyncio.timeout(5):
        assert await sizes(*(ask(client, "", 10) for _ in range(3))) == [3, 3, 3]


async def test_a_failed_or_cancelled_call_gives_back_what_it_reserved():
    client = client_of(max_tokens=100)
    assert await sizes(ask(client, "fail"), ask(client, "x" * 200, 60)) == [ConnectionFailed, 60]
    task = asyncio.create_task(ask(client, "y"))
    await asyncio.sleep(0)
    task.cancel()
    assert await sizes(task, ask(client, "x" * 200)) == [asyncio.CancelledError, 40]


async def test_a_call_that_waited_is_refused_when_the_calls_are_spent():
    client = client_of(max_tokens=100, max_calls=1)
    assert await sizes(ask(client, "a"), ask(client, "b")) == [2, BudgetSpent]
    assert client.spent.calls == 1
