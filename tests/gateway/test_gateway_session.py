"""Sessions in this process: what becomes of calls that overlap, repeat, are cut off or limited."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack

import pytest
from gateway_kit import ADD, Lingering, calling

import rolltree as rt
from rolltree._helpers.tasks import ShortCollections
from rolltree.gateway.calls import (
    AgentAnswer,
    AgentCall,
    AnswerDelta,
    AnswerHead,
    CallOrigin,
    Connection,
)
from rolltree.gateway.session import GatewaySession, SessionLimits
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.client_base import DelegatingClient
from rolltree.samples import build_samples
from rolltree.testing import FaultyClient, ScriptedClient
from rolltree.testing.tokenizer import ByteTokenizer
from rolltree.values.errors import ConfigError, ConnectionFailed
from rolltree.values.types import FinishReason, SamplingParams
from rolltree.web.guard import RequestError

THINKING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(*messages, **more):
    return AgentCall(list(messages), **more)


def session(client, **settings):
    return GatewaySession("one", client, "http://127.0.0.1:1", **settings)


def echo(messages):
    return messages[-1]["content"].upper()


async def settle():
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_prompt_that_continues_a_call_has_its_exact_ids():
    async with session(ScriptedClient(echo)) as s:
        first = await s.complete(call(user("a")))
        await s.complete(call(user("a"), said("A"), user("b")))
        response = s.trajectory[1]["response"]
        assert first.text == "A"
        assert response.extends == s.trajectory[0]["response"].call_id
        assert s.breaks == ()


@pytest.mark.parametrize(
    "returned",
    [
        said("A", reasoning_content="because"),
        said("A"),
        said(" A\n"),
    ],
    ids=["as it was", "without its reasoning", "stripped or padded"],
)
async def test_reasoning_and_space_do_not_break_a_prefix(returned):
    renderer = ChatRenderer(ByteTokenizer(), THINKING, reasoning="think")
    client = ScriptedClient(["<think>because</think>A", "done"], renderer=renderer)
    async with session(client) as s:
        answer = await s.complete(call(user("a")))
        assert (answer.reasoning, answer.text) == ("because", "A")
        await s.complete(call(user("a"), returned, user("b")))
        assert s.breaks == ()
        assert s.trajectory.tree.num_tokens == s.trajectory.tree.path_len(1)


async def test_overlapping_calls_are_branches_of_one_tree():
    client = ScriptedClient(echo, delay_s=0.01)
    async with session(client) as s:
        await s.complete(call(user("root")))
        begun = [user("root"), said("ROOT")]
        await asyncio.gather(*(s.complete(call(*begun, user(f"branch {i}"))) for i in range(8)))
        assert len(s.trajectory) == 9
        tree = s.trajectory.tree
        shared = tree.path_len(0)
        for number in range(1, 9):
            assert (tree.prompt_ids(number)[:shared] == tree.path_view(0)).all()
        assert tree.num_tokens < sum(tree.path_len(n) for n in range(9)) - 7 * shared


async def test_compaction_and_rollback_are_breaks_and_every_token_trains_once():
    async with session(ScriptedClient(echo)) as s:
        history = [user("first question"), said("FIRST QUESTION"), user("second question")]
        await s.complete(call(history[0]))
        await s.complete(call(*history))
        await s.complete(call(user("what was said so far, in short"), user("third question")))
        await s.complete(call(*history[:2], user("another second question")))
        causes = [each.cause for each in s.breaks]
        batch = build_samples([s.state])
        assert causes == ["compaction", "history_rewritten"]
        tree = s.trajectory.tree
        num_sampled = sum(tree.num_sampled(n) for n in range(4))
        assert sum(len(sample.records.target) for sample in batch.samples) == num_sampled


async def test_votes_and_sub_agents_break_nothing():
    title = {"role": "system", "content": "You give titles."}
    async with session(ScriptedClient(echo)) as s:
        history = [{"role": "system", "content": "You are an engineer."}, user("first question")]
        for _ in range(3):
            await s.complete(call(*history))
        history += [said("FIRST QUESTION"), user("second question")]
        await s.complete(call(*history))
        await s.complete(call(title, user("first question")))
        await s.complete(call(*history, said("SECOND QUESTION"), user("third question")))
        assert (s.breaks, s.summary()["breaks"]) == ((), [])
        report = build_samples([s.state]).report
    assert (report["begun/sampled_again"], report["begun/another_conversation"]) == (2, 1)
    assert report["break_rate"] == report["num_breaks"] == 0


async def test_agents_that_are_named_are_agents_of_the_trajectory():
    async with session(ScriptedClient(echo)) as s:
        await s.complete(call(user("plan")), CallOrigin(agent="planner"))
        await s.complete(call(user("work")), CallOrigin(agent="worker"))
        assert [step["extras"]["agent"] for step in s.trajectory] == ["planner", "worker"]
        assert [each.cause for each in s.breaks] == ["agent_handoff"]


async def test_fields_that_change_the_distribution_are_named_with_their_calls():
    async with session(ScriptedClient(echo)) as s:
        await s.complete(call(user("a")))
        await s.complete(call(user("a"), sampling=SamplingParams(top_p=0.5)))
        assert s.changed_sampling == {1: {"top_p": 0.5}}


async def test_the_sessions_sampling_wins_and_the_smaller_max_tokens():
    client = ScriptedClient(echo)
    asked = SamplingParams(temperature=0.2, top_p=0.5, max_tokens=50, stop=("x",))
    async with session(client, sampling={"temperature": 1.0, "top_p": 1.0, "max_tokens": 80}) as s:
        await s.complete(call(user("a"), sampling=asked))
        await s.complete(call(user("a"), sampling=SamplingParams(max_tokens=500)))
    first, second = (each.sampling for each in client.calls)
    assert (first.temperature, first.top_p, first.max_tokens) == (1.0, 1.0, 50)
    assert first.stop == ("x",)
    assert second.max_tokens == 80


async def test_seeds_depend_on_the_session_and_on_what_the_agent_asks():
    seeds = []
    for seed in (3, 3, 4):
        client = ScriptedClient(echo)
        async with session(client, seed=seed) as s:
            for own in (None, None, 42):
                await s.complete(call(user("a"), sampling=SamplingParams(seed=own)))
        seeds.append([each.sampling.seed for each in client.calls])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 6


# -- streams ---------------------------------------------------------------------------------------


async def test_a_stream_comes_token_by_token_and_adds_up():
    client = ScriptedClient(lambda messages: "one two three", token_delay_s=0.001)
    async with session(client) as s:
        news = [each async for each in s.stream(call(user("a"), stream=True))]
    head, *deltas, answer = news
    assert isinstance(head, AnswerHead)
    assert isinstance(answer, AgentAnswer)
    assert answer.head == head
    assert all(isinstance(delta, AnswerDelta) for delta in deltas)
    assert len(deltas) > 5
    assert "".join(delta.content for delta in deltas) == answer.text == "one two three"


async def test_an_answer_that_nobody_saw_grow_comes_with_its_end():
    async with session(ScriptedClient(echo)) as s:
        # Not asked as a stream, as with a client that gives whole answers only.
        news = [each async for each in s.stream(call(user("a")))]
    _, answer = news
    assert answer.rest == AnswerDelta(content="A")


async def test_a_stream_that_is_left_is_cancelled_and_is_not_in_the_tree():
    client = ScriptedClient(echo, token_delay_s=0.001)
    async with session(client) as s:
        stream = s.stream(call(user("a long question"), stream=True))
        await anext(stream)
        await anext(stream)
        assert s.num_in_flight == 1
        await stream.aclose()
        await settle()
        assert (s.num_in_flight, s.num_cancelled, len(s.trajectory)) == (0, 1, 0)
        answer = await s.complete(call(user("a long question")))
        assert answer.text == "A LONG QUESTION"


# -- repeated requests -----------------------------------------------------------------------------


class Asked:
    """A model that answers when it is told to, and counts."""

    def __init__(self):
        self.num = 0
        self.go = asyncio.Event()

    async def __call__(self, messages):
        self.num += 1
        number = self.num
        await self.go.wait()
        return f"answer {number}"


async def both(s, first, second):
    one = asyncio.ensure_future(s.complete(call(user("a")), first))
    await settle()
    two = asyncio.ensure_future(s.complete(call(user("a")), second))
    await settle()
    return one, two


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (CallOrigin(key="k", digest=b"1"), CallOrigin(key="k", digest=b"1")),
        (CallOrigin(digest=b"1"), CallOrigin(digest=b"1", attempt=1)),
        (CallOrigin(digest=b"1", attempt=0), CallOrigin(digest=b"1", attempt=1)),
    ],
    ids=["by key", "by content and attempt", "by a second attempt"],
)
async def test_a_repeated_request_is_answered_once(first, second):
    model = Asked()
    async with session(ScriptedClient(model)) as s:
        one, two = await both(s, first, second)
        one.cancel()  # the client hung up and asks again; its repetition still waits
        await settle()
        assert s.num_in_flight == 1
        model.go.set()
        answer = await two
        again = await s.complete(call(user("a")), second)
        assert (model.num, len(s.trajectory)) == (1, 1)
        assert again.head == answer.head
        assert again.message == answer.message == {"role": "assistant", "content": "answer 1"}


@pytest.mark.parametrize("attempt", [0, None])
async def test_equal_requests_whose_clients_still_wait_are_two_samples(attempt):
    model = Asked()
    async with session(ScriptedClient(model)) as s:
        origin = CallOrigin(digest=b"1", attempt=attempt)
        one, two = await both(s, origin, origin)
        model.go.set()
        assert {(await one).text, (await two).text} == {"answer 1", "answer 2"}
        assert len(s.trajectory) == 2


async def test_an_answer_that_was_delivered_is_not_given_again():
    model = Asked()
    model.go.set()
    async with session(ScriptedClient(model)) as s:
        origin = CallOrigin(digest=b"1")
        first = await s.complete(call(user("a")), origin)
        s.delivered(first)
        second = await s.complete(call(user("a")), origin)
        # It was lost on its way after all: the client says that it tries again.
        third = await s.complete(call(user("a")), CallOrigin(digest=b"1", attempt=1))
    assert [first.text, second.text, third.text] == ["answer 1", "answer 2", "answer 2"]


async def test_an_equal_request_gets_the_answer_only_of_a_connection_that_was_lost():
    model = Asked()
    model.go.set()
    origins = [CallOrigin(digest=b"1", connection=Connection()) for _ in range(4)]
    async with session(ScriptedClient(model)) as s:
        # Both are being sent: the third is a sample of its own.
        texts = [(await s.complete(call(user("a")), each)).text for each in origins[:2]]
        origins[0].connection.is_open = False
        texts += [(await s.complete(call(user("a")), each)).text for each in origins[2:]]
    assert texts == ["answer 1", "answer 2", "answer 1", "answer 3"]


async def test_retries_of_equal_requests_find_an_answer_each():
    model = Asked()
    client = FaultyClient(ScriptedClient(model), [None, None, ConnectionFailed("gone"), None])
    first, again = (CallOrigin(digest=b"1", attempt=number) for number in range(2))
    async with session(client) as s:
        running = [asyncio.ensure_future(s.complete(call(user("a")), first)) for _ in range(3)]
        await settle()
        with pytest.raises(ConnectionFailed):
            await running[2]
        # The third was refused, so its retry is a new call; those of the others join them.
        retries = [asyncio.ensure_future(s.complete(call(user("a")), again)) for _ in range(3)]
        await settle()
        model.go.set()
        texts = sorted([(await each).text for each in retries])
        assert texts == ["answer 1", "answer 2", "answer 3"]
        assert len(s.trajectory) == 3


async def test_a_key_with_another_request_is_refused():
    async with session(ScriptedClient(echo)) as s:
        await s.complete(call(user("a")), CallOrigin(key="k", digest=b"1"))
        with pytest.raises(RequestError, match="idempotency key") as caught:
            await s.complete(call(user("b")), CallOrigin(key="k", digest=b"2"))
        assert caught.value.status == 422


async def test_a_failed_call_leaves_nothing_and_can_be_repeated():
    client = FaultyClient(ScriptedClient(echo), [ConnectionFailed("gone"), None])
    async with session(client) as s:
        origin = CallOrigin(key="k", digest=b"1")
        with pytest.raises(ConnectionFailed):
            await s.complete(call(user("a")), origin)
        assert (await s.complete(call(user("a")), origin)).text == "A"
        assert len(s.trajectory) == 1


# -- limits and the end ----------------------------------------------------------------------------


async def test_calls_are_limited():
    async with session(ScriptedClient(echo), limits=SessionLimits(max_calls=2)) as s:
        await s.complete(call(user("a")))
        await s.complete(call(user("b")))
        with pytest.raises(RequestError, match="limit") as caught:
            await s.complete(call(user("c")))
        assert caught.value.status == 403
    assert (s.state.truncated, s.state.truncation_reason) == (True, "max_steps")
    assert len(s.trajectory) == 2


async def test_tokens_are_limited_and_the_last_call_gets_what_is_left():
    client = ScriptedClient(lambda messages: "x" * 20)
    async with session(client, limits=SessionLimits(max_tokens=30)) as s:
        await s.complete(call(user("a")))
        last = await s.complete(call(user("b")))
        assert last.finish_reason == FinishReason.LENGTH
        assert s.num_sampled_tokens == 30
        with pytest.raises(RequestError, match="limit"):
            await s.complete(call(user("c")))
    assert s.state.truncation_reason == "budget"


async def test_a_call_that_finds_the_last_tokens_taken_is_refused():
    """Else it was sent to the model with a `max_tokens` of 0 or less."""
    client = Gated(ScriptedClient(lambda messages: "x" * 20))
    async with session(client, limits=SessionLimits(max_tokens=10)) as s:
        first = asyncio.ensure_future(s.complete(call(user("a"))))
        await settle()
        client.go.set()
        # It begins before the first is recorded, and its task runs afterwards.
        with pytest.raises(RequestError, match="limit") as caught:
            await s.complete(call(user("b")))
        assert (await first).finish_reason == FinishReason.LENGTH
        assert caught.value.status == 403
    assert (s.state.truncation_reason, len(client.calls)) == ("budget", 1)


class Gated(DelegatingClient):
    """A client that returns sampled answers when it is told to."""

    def __init__(self, client):
        super().__init__(client)
        self.go, self.calls = asyncio.Event(), []

    async def call(self, call):
        self.calls.append(call)
        response = await super().call(call)
        await self.go.wait()
        return response


async def test_time_is_limited_also_for_a_call_in_flight():
    model = Asked()
    async with session(ScriptedClient(model), limits=SessionLimits(time_limit_s=0.05)) as s:
        with pytest.raises(RequestError, match="time_limit"):
            await s.complete(call(user("a")))
        with pytest.raises(RequestError, match="time_limit"):
            await s.complete(call(user("b")))
    assert s.state.truncation_reason == "time_limit"


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="max_calls"):
        SessionLimits(max_calls=0)


async def test_closing_ends_calls_and_completes_the_state():
    model = Asked()
    s = session(ScriptedClient(model))
    model.go.set()
    await s.complete(call(user("a")))
    model.go.clear()
    waiting = asyncio.ensure_future(s.complete(call(user("a"), said("answer 1"), user("b"))))
    await settle()
    await s.aclose()
    with pytest.raises(RequestError, match="closed"):
        await waiting
    with pytest.raises(RequestError, match="closed"):
        await s.complete(call(user("c")))
    state = s.state
    assert state["prompt"] == [user("a")]
    assert state["completion"] == [said("answer 1")]
    assert (state["is_completed"], state["terminated"], state["truncated"]) == (True, True, False)


async def test_a_second_close_finishes_what_a_cancelled_one_began():
    client = Lingering(ScriptedClient(echo))
    s = session(client)
    asking = asyncio.ensure_future(s.complete(call(user("a"))))
    await client.has_begun.wait()
    first = asyncio.ensure_future(s.aclose())
    await settle()
    first.cancel()
    second = asyncio.ensure_future(s.aclose())
    await settle()
    assert (first.cancelled(), second.done(), s.state["is_completed"]) == (True, False, False)
    client.may_end.set()
    await second
    assert s.state["is_completed"]
    with pytest.raises(RequestError, match="closed"):
        await asking


async def test_memory_is_one_object_per_message():
    async with session(ScriptedClient(echo)) as s:
        history = []
        for turn in range(6):
            history.append(user(f"turn {turn}"))
            answer = await s.complete(call(*(dict(message) for message in history)))
            history.append(said(answer.text))
        prompts = [step["prompt"] for step in s.trajectory]
        kept = {id(message) for prompt in prompts for message in prompt}
        assert len(kept) == len(prompts[-1]) == 11


def upper(prompt):
    return (prompt if isinstance(prompt, str) else prompt[-1]["content"]).upper()


def text(prompt):
    return AgentCall(prompt, message_type="completion")


@pytest.mark.parametrize(
    ("calls", "completion"),
    [
        ([call(user("a")), text("b")], [said("A")]),
        ([text("b"), call(user("a"))], "B"),
        ([text("b"), text("bBc")], "BcBBC"),
    ],
)
async def test_chat_and_text_in_one_session_end_in_the_form_of_the_prompt(calls, completion):
    async with session(ScriptedClient(upper)) as s:
        for each in calls:
            await s.complete(each)
    assert s.state["completion"] == completion
    assert len(s.trajectory) == len(calls)


@pytest.mark.parametrize(
    ("prompt", "asked", "completion"),
    [([user("q")], text("b"), [said("B")]), ("q", call(user("a")), "A")],
)
async def test_a_program_that_asks_in_another_form_than_its_row(prompt, asked, completion):
    async with session(ScriptedClient(upper)) as s:
        s.state.prompt = prompt
        await s.complete(asked)
    assert s.state["completion"] == completion


async def test_the_trajectory_takes_over_the_tree_of_the_calls():
    async with session(ScriptedClient(echo)) as s:
        assert s.summary()["num_unique_tokens"] == 0  # as opening it over HTTP says
        await s.complete(call(user("a")))
        assert s._client._memory._calls.tree is s.trajectory.tree
        assert s.summary()["num_unique_tokens"] == s.trajectory.tree.num_tokens > 0


async def test_histories_of_two_agents_keep_each_message_once():
    async with session(ScriptedClient(echo)) as s:
        for _ in range(3):
            await s.complete(call(user("a"), said("A"), user("b")))
            await s.complete(call(user("c"), said("C"), user("b")))
        prompts = [step["prompt"] for step in s.trajectory]
        assert prompts[0] == [user("a"), said("A"), user("b")]
        assert {id(message) for prompt in prompts for message in prompt} == {
            id(message) for prompt in prompts[:2] for message in prompt
        }
        assert len({id(message) for prompt in prompts for message in prompt}) == 5


async def test_equal_tool_calls_have_ids_of_their_own(tmp_path):
    def adder(messages):
        return calling("add", '{"a": 1}') if messages[-1]["role"] == "user" else "done"

    history, ids = [user("go")], []
    async with rt.gateway(ScriptedClient(adder), directory=tmp_path) as g:
        s = g.session("one")
        for _ in range(3):
            answer = await s.complete(call(*history, tools=(ADD,)))
            (made,) = answer.tool_calls
            ids.append(made["id"])
            assert s.answer(answer.head.id).tool_calls == answer.tool_calls
            tool = {"role": "tool", "content": "1", "tool_call_id": made["id"]}
            history += [answer.message, tool]
            done = await s.complete(call(*history, tools=(ADD,)))
            history += [done.message, user("again")]
        assert len(set(ids)) == 3
        assert all(len(each) == 9 and each.isalnum() for each in ids)
        assert s.breaks == ()
        # The record has the message that the agent got, and the tree its tokens once.
        assert s.trajectory[2]["completion"][0]["tool_calls"][0]["id"] == ids[1]
        assert s._client._memory._calls.tree is s.trajectory.tree
    async with rt.gateway(ScriptedClient(adder), directory=tmp_path) as g:
        s = g.sessions["one"]
        answer = await s.complete(call(*history, tools=(ADD,)))
        assert answer.tool_calls[0]["id"] not in ids
        assert s.breaks == ()


async def test_many_sessions_suspend_full_garbage_collections():
    before = gc.get_threshold()
    async with rt.gateway(ScriptedClient(echo)) as g, AsyncExitStack() as stack:
        for _ in range(ShortCollections.FEW - 1):
            await stack.enter_async_context(g.session())
        assert gc.get_threshold() == before
        await stack.enter_async_context(g.session())
        assert gc.get_threshold() == ShortCollections.THRESHOLDS
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
