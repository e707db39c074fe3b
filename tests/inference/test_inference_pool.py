"""The pool: where rollouts go, what happens when servers fail, and that retries are visible."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest
from inference_templates import user

from rolltree.inference import EndpointPool, OpenAIClient, RetryPolicy, as_client
from rolltree.testing import FaultyClient, HttpFault, ScriptedClient, ScriptedServer
from rolltree.values.errors import (
    BadResponse,
    CallTimeout,
    ConfigError,
    ConnectionFailed,
    ModelError,
    PromptTooLong,
    ServerError,
    TokenError,
)
from rolltree.values.types import ModelResponse

FAST = RetryPolicy(max_retries=3, first_wait_s=0.0)


class Recording:
    """A scripted client with a name, that notes what it is asked."""

    def __init__(self, name: str, faults: Any = ()) -> None:
        self.inner = FaultyClient(ScriptedClient(lambda _: name), list(faults))
        self.model, self.version = "m", 0
        self.asked: list[Any] = []
        self.health: ModelError | None = None
        self.num_checks = 0

    async def check_health(self) -> None:
        self.num_checks += 1
        if self.health is not None:
            raise self.health

    def session(self) -> Any:
        return _Session(self, self.inner.session())

    async def chat(self, *args: Any, **options: Any) -> ModelResponse:
        return await self.session().chat(*args, **options)

    async def generate(self, request: Any) -> ModelResponse:
        return await self.inner.generate(request)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _Session:
    def __init__(self, owner: Recording, inner: Any) -> None:
        self.owner, self.inner = owner, inner

    async def chat(self, messages: Any, **options: Any) -> ModelResponse:
        self.owner.asked.append(messages)
        await asyncio.sleep(0)
        got: ModelResponse = await self.inner.chat(messages, **options)
        return got


def pool_of(*clients: Any, **options: Any) -> EndpointPool:
    return EndpointPool(clients, **{"retry": FAST, "cool_down_s": 30.0, **options})


async def test_groups_stay_together_rollouts_stay_put_and_the_work_is_shared() -> None:
    servers = [Recording(name) for name in "abc"]
    pool = pool_of(*servers)
    for question in range(30):
        homes = set()
        for _ in range(4):
            session = pool.session()
            first = await session.chat([user(f"question {question}")])
            second = await session.chat([user(f"question {question}"), first.message, user("x")])
            assert second.extends == first.call_id
            homes |= {first.text, second.text}
        assert len(homes) == 1
    shares = [len(server.asked) for server in servers]
    assert sum(shares) == 240
    assert min(shares) >= 24  # by hash; 80 each on average
    await pool.aclose()


async def test_a_crowd_with_one_prompt_is_spread_when_it_is_large() -> None:
    servers = [Recording(name) for name in "abc"]
    pool = pool_of(*servers)
    got = await asyncio.gather(*(pool.session().chat([user("same")]) for _ in range(60)))
    assert len(got) == 60
    shares = sorted(len(server.asked) for server in servers)
    assert shares[0] > 0
    assert shares[-1] <= 26  # 1.25 times the mean of those in flight
    small = pool_of(*(Recording(name) for name in "abc"))
    got = await asyncio.gather(*(small.session().chat([user("same")]) for _ in range(16)))
    assert len({each.text for each in got}) == 1


@pytest.mark.parametrize(
    "error",
    [
        ConnectionFailed("gone"),
        BadResponse("not JSON"),
        ServerError("overloaded", status=503, retryable=True),
        TokenError("5,000 ids"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_failing_server_is_left_alone_and_the_retry_is_visible(error: ModelError) -> None:
    servers = [Recording(name, [error]) for name in "ab"]
    servers[1] = Recording("b")
    pool = pool_of(*servers)
    for question in range(12):
        got = await pool.chat([user(f"{question}")])
        if "failed_endpoints" in got.info:
            assert (got.text, got.info["num_retries"]) == ("b", 1)
            assert got.info["endpoint"] == "Recording-1"
            break
    else:
        raise AssertionError("no call went to the first server")
    asked = len(servers[0].asked)
    assert all([(await pool.chat([user(f"{n}")])).text == "b" for n in range(8)])
    assert len(servers[0].asked) == asked  # in its cool-down
    assert servers[0].num_checks == 0


async def test_tokens_that_every_server_gets_wrong_are_not_tried_for_long() -> None:
    servers = [Recording(name, [TokenError("wrong")] * 9) for name in "ab"]
    with pytest.raises(TokenError, match="wrong"):
        await pool_of(*servers).chat([user("x")])
    assert [len(server.asked) for server in servers] == [1, 1]


async def test_a_server_that_was_removed_meanwhile_still_counts_as_wrong() -> None:
    asked = list[Any]()

    class Wrong(Recording):
        def session(self) -> Any:
            asked.append(self)
            if len(asked) == 3:
                pool.remove(asked[0])
            return super().session()

    pool = pool_of(*(Wrong(name, [TokenError("wrong")] * 9) for name in "abc"))
    with pytest.raises(TokenError, match="wrong"):
        await pool.chat([user("x")])
    assert len(asked) == len(set(asked)) == 3


async def test_a_server_comes_back_after_a_health_check() -> None:
    bad = Recording("a")
    pool = pool_of(bad, Recording("b"), cool_down_s=0.0)
    pool.note_failure(pool.endpoints[0])
    bad.health = ConnectionFailed("still gone")
    assert {(await pool.chat([user(f"{n}")])).text for n in range(8)} == {"b"}
    assert bad.num_checks >= 1
    bad.health = None
    pool.endpoints[0].down_until_s = 0.0
    assert {(await pool.chat([user(f"{n}")])).text for n in range(12)} == {"a", "b"}


async def test_calls_that_fail_together_are_one_failure_of_the_server() -> None:
    """A server that drops many connections at once gets a pause of 30 s, not of a minute."""
    faults = [ConnectionFailed("it was restarted")] * 100
    bad = Recording("a", faults)
    pool = pool_of(bad, Recording("b"), spread=100.0)
    began = monotonic()
    answers = await asyncio.gather(*(pool.session().chat([user(f"{n}")]) for n in range(40)))
    assert {answer.text for answer in answers} <= {"a", "b"}
    assert len(bad.asked) > 1
    endpoint = pool.endpoints[0]
    assert (endpoint.num_failures, endpoint.is_up) == (1, False)
    assert endpoint.down_until_s - began < 45.0
    # It is used again, and fails again within its old pause: it is down, as after any failure.
    endpoint.num_failures = 0
    pool.note_failure(endpoint)
    assert not endpoint.is_up


async def test_the_callers_mistakes_are_not_tried_elsewhere() -> None:
    for error in (PromptTooLong("long"), ServerError("no", status=400, retryable=False)):
        servers = [Recording(name, [error, error]) for name in "ab"]
        pool = pool_of(*servers)
        with pytest.raises(type(error)):
            await pool.chat([user("x")])
        assert sum(len(server.asked) for server in servers) == 1
        assert all(endpoint.is_up for endpoint in pool.endpoints)


async def test_when_all_are_gone_the_last_error_says_how_often_it_was_tried() -> None:
    servers = [Recording(name, [ConnectionFailed("gone")] * 9) for name in "ab"]
    pool = pool_of(*servers)
    with pytest.raises(ConnectionFailed, match="gone") as caught:
        await pool.chat([user("x")])
    assert sum(len(server.asked) for server in servers) == 4
    assert all(server.asked for server in servers)
    assert "4 attempts" in str(caught.value.__notes__)


async def test_a_call_is_not_tried_for_ever() -> None:
    servers = [Recording(name, [ConnectionFailed("gone")] * 99) for name in "ab"]
    pool = pool_of(*servers, retry=RetryPolicy(max_retries=50, first_wait_s=0.0), deadline_s=1e-9)
    with pytest.raises(CallTimeout, match="asked 1 times"):
        await pool.chat([user("x")])
    client = OpenAIClient("http://127.0.0.1:9/v1", "m", timeout_s=3.0)
    assert EndpointPool([client]).deadline_s == 6.0


async def test_real_http_moves_on_with_what_was_remembered() -> None:
    down = [HttpFault(status=503)] * 20
    with ScriptedServer(lambda _: "ok") as one, ScriptedServer(lambda _: "ok") as other:
        pool = EndpointPool.of([one.base_url, other.base_url], "scripted", retry=FAST)
        session = pool.session()
        first = await session.chat([user("a")])
        home = one if first.info["endpoint"] == one.base_url else other
        away = other if home is one else one
        home.faults = type(home.faults)(down)
        second = await session.chat([user("a"), first.message, user("b")])
        assert second.extends == first.call_id
        assert second.info["endpoint"] == away.base_url
        assert second.info["failed_endpoints"] == [home.base_url]
        assert second.info["num_retries"] == 1
        assert set((await pool.check()).values()) == {None}
        await pool.aclose()
    pool = EndpointPool.of([one.base_url], "scripted")
    (problem,) = (await pool.check()).values()
    assert problem is not None
    assert "could not be reached" in problem
    await pool.aclose()


def test_pools_that_make_no_sense() -> None:
    client = OpenAIClient("http://a/v1", "m")
    for clients in ([], [client, OpenAIClient("http://a/v1", "m")]):
        with pytest.raises(ConfigError, match="at least one server, and no server twice"):
            EndpointPool(clients)
    with pytest.raises(ConfigError, match="different models"):
        EndpointPool([client, OpenAIClient("http://b/v1", "n")])
    with pytest.raises(ConfigError, match="must be >= 0"):
        EndpointPool([client], spread=0.5)
    pool = EndpointPool([client])
    assert as_client(pool) is pool
    assert (pool.model, pool.clients) == ("m", [client])
