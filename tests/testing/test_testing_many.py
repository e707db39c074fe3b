"""Many clients at once: nothing is mixed up, everything is counted, limits hold."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.testing import (
    ByteTokenizer,
    FaultRow,
    FaultyClient,
    LoopbackServer,
    Reply,
    Request,
    ScriptedAnswer,
    ScriptedClient,
    ScriptedServer,
)
from rolltree.testing.script import Script, tokens_of
from rolltree.values.errors import BadResponse, ConnectionFailed, UnsupportedSetting
from rolltree.values.types import FinishReason, SamplingParams

ASK = [{"role": "user", "content": "a"}]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_sessions_at_once_each_meet_the_whole_script() -> None:
    client = ScriptedClient(["1", "2", "3"], delay_s=0.001)

    async def rollout() -> list[str]:
        session, messages, texts = client.session(), list(ASK), []
        for _ in range(3):
            got = await session.chat(messages)
            texts.append(got.text)
            messages += [got.message, *ASK]
        return texts

    found = await asyncio.gather(*(rollout() for _ in range(30)))
    assert found == [["1", "2", "3"]] * 30
    assert len(client.calls) == 90


async def test_call_ids_are_unique_and_extends_stays_inside_a_session() -> None:
    client = ScriptedClient(lambda _: "x", delay_s=0.001)

    async def rollout() -> list[Any]:
        session, messages, made = client.session(), list(ASK), []
        for _ in range(3):
            made.append(await session.chat(messages))
            messages += [made[-1].message, *ASK]
        return made

    rollouts = await asyncio.gather(*(rollout() for _ in range(10)))
    ids = [got.call_id for made in rollouts for got in made]
    assert len(set(ids)) == 30
    for made in rollouts:
        assert [got.extends for got in made] == [None, made[0].call_id, made[1].call_id]
        for one, two in itertools.pairwise(made):
            path = [*one.prompt_ids.tolist(), *one.completion_ids.tolist()]
            assert two.prompt_ids.tolist()[: len(path)] == path


async def test_a_row_without_sessions_is_shared_out_exactly_once() -> None:
    answers = [str(number) for number in range(50)]
    client = ScriptedClient(answers, delay_s=0.001)
    got = await asyncio.gather(*(client.chat(ASK) for _ in range(50)))
    assert sorted(int(each.text) for each in got) == list(range(50))
    with pytest.raises(BadResponse):
        await client.chat(ASK)


async def test_a_slow_answer_holds_up_nobody_else() -> None:
    release = asyncio.Event()

    async def script(messages: Any) -> str:
        if messages[0]["content"] == "slow":
            await release.wait()
        return str(messages[0]["content"])

    client = ScriptedClient(script)
    slow = asyncio.create_task(client.chat(ask("slow")))
    await asyncio.sleep(0)
    assert [(await client.chat(ask(text))).text for text in "ab"] == ["a", "b"]
    assert not slow.done()
    release.set()
    assert (await slow).text == "slow"


async def test_a_cancelled_call_leaves_the_client_usable() -> None:
    client = ScriptedClient(lambda _: "ok", delay_s=30)
    session = client.session()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.chat(ASK), 0.02)
    client.delay_s = 0
    got = await session.chat(ASK)
    assert (got.text, got.extends) == ("ok", None)


async def test_several_real_clients_share_a_server() -> None:
    with ScriptedServer(lambda messages: messages[-1]["content"] * 2, delay_s=0.01) as server:
        clients = [OpenAIClient(server.base_url, "scripted") for _ in range(4)]

        async def rollout(client: Any, name: str) -> list[str]:
            session, messages, texts = client.session(), [], []
            for turn in range(3):
                messages.append({"role": "user", "content": f"{name}{turn}"})
                got = await session.chat(messages)
                texts.append(got.text)
                messages.append(got.message)
            return texts

        jobs = [rollout(client, f"c{n}-{k}-") for n, client in enumerate(clients) for k in range(4)]
        found = await asyncio.gather(*jobs)
        for client in clients:
            await client.aclose()
        assert (server.num_requests, server.num_answers) == (48, 48)
        assert server.max_concurrent >= 4
    assert found == [[f"c{n}-{k}-{t}" * 2 for t in range(3)] for n in range(4) for k in range(4)]


def test_clients_in_threads_are_counted_exactly() -> None:
    faults: FaultRow[Any] = FaultRow(lambda number: None)
    with ScriptedServer(lambda messages: messages[0]["content"]) as server:
        url = server.base_url + "/chat/completions"

        def work(name: int) -> list[str]:
            with httpx.Client() as client:
                bodies = ({"model": "scripted", "messages": ask(f"{name}/{n}")} for n in range(10))
                replies = [client.post(url, json=body).json() for body in bodies]
            for _ in range(10):
                faults.next()
            return [reply["choices"][0]["message"]["content"] for reply in replies]

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(work, range(6)))
        assert found == [[f"{name}/{n}" for n in range(10)] for name in range(6)]
        assert server.num_answers == server.num_requests == 60
        ids = [each.body["messages"][0]["content"] for each in server.requests if each.body]
        assert sorted(ids) == sorted(text for texts in found for text in texts)
    assert faults.num_calls == 60


def test_a_row_of_faults_is_handed_out_once_to_threads() -> None:
    row = FaultRow(list(range(2000)))
    taken: list[int | None] = []

    def work() -> None:
        taken.extend(row.next() for _ in range(500))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number in taken if number is not None) == list(range(2000))
    assert (row.num_calls, row.num_faults) == (2000, 2000)


async def test_faults_of_many_sessions_come_from_one_row() -> None:
    client = FaultyClient(
        ScriptedClient(lambda _: "ok"),
        lambda number: ConnectionFailed(str(number)) if number % 3 == 0 else None,
    )
    sessions = [client.session().session() for _ in range(12)]
    got = await asyncio.gather(*(each.chat(ASK) for each in sessions), return_exceptions=True)
    assert sum(isinstance(each, ConnectionFailed) for each in got) == 4
    assert {str(each) for each in got if isinstance(each, Exception)} == {"0", "3", "6", "9"}
    assert (client.faults.num_calls, client.faults.num_faults) == (12, 4)


async def test_closing_a_faulty_client_closes_the_inner_one() -> None:
    inner = ScriptedClient(["1"])
    await FaultyClient(inner, []).aclose()
    assert inner.is_closed


def test_requests_on_their_way_are_dropped_when_the_server_stops() -> None:
    arrived = threading.Event()

    async def hang(request: Request) -> Reply:
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    failures: list[Exception] = []

    def client(url: str) -> None:
        try:
            httpx.get(url, timeout=10)
        except httpx.TransportError as error:
            failures.append(error)

    with LoopbackServer(hang) as server:
        thread = threading.Thread(target=client, args=(server.url,))
        thread.start()
        assert arrived.wait(5)
    thread.join(5)
    assert len(failures) == 1
    assert not isinstance(failures[0], httpx.ReadTimeout)


class TestLimits:
    RENDERER = ChatRenderer(ByteTokenizer())

    @pytest.mark.parametrize("limit", [0, -1])
    async def test_no_room_for_a_token_is_refused(self, limit: int) -> None:
        with pytest.raises(UnsupportedSetting, match=f"max_tokens = {limit}"):
            await ScriptedClient(["12"]).chat(ASK, sampling=SamplingParams(max_tokens=limit))

    async def test_given_logprobs_are_cut_with_their_tokens(self) -> None:
        answer = ScriptedAnswer("", ids=[49, 50, 51, 258], logprobs=[-1.0, -2.0, -3.0, -4.0])
        got = await ScriptedClient([answer]).chat(ASK, sampling=SamplingParams(max_tokens=2))
        assert got.completion_ids is not None
        assert got.logprobs is not None
        assert got.completion_ids.tolist() == [49, 50]
        assert got.logprobs.tolist() == [-1.0, -2.0]
        assert got.finish_reason == FinishReason.LENGTH

    @pytest.mark.parametrize("logprobs", [[-1.0], [-1.0] * 3, []])
    def test_a_wrong_number_of_logprobs_stays_wrong(self, logprobs: list[float]) -> None:
        answer = ScriptedAnswer("", ids=[49, 258], logprobs=logprobs)
        said = tokens_of(answer, self.RENDERER, SamplingParams(max_tokens=1))
        assert said.ids.tolist() == [49]
        assert said.logprobs.tolist() == logprobs

    @pytest.mark.parametrize(("limit", "whole"), [(2, False), (3, True), (4, True)])
    def test_a_limit_at_the_end_token_cuts_nothing(self, limit: int, whole: bool) -> None:
        said = tokens_of(ScriptedAnswer("12"), self.RENDERER, SamplingParams(max_tokens=limit))
        assert (said.finish_reason == FinishReason.STOP) is whole
        assert len(said.ids) == min(limit, 3)

    def test_a_script_function_may_return_every_form(self) -> None:
        forms = ["a", {"role": "assistant", "content": "a"}, ScriptedAnswer("a")]
        for form in forms:
            got = asyncio.run(Script(lambda _, form=form: form).next(ASK))  # type: ignore[misc]
            assert got == ScriptedAnswer("a")


specials = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>", "🙂", "é"]
)
texts = st.lists(specials | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)).map(
    "".join
)


class TestByteTokenizer:
    TOKENIZER = ByteTokenizer()

    @given(texts)
    def test_text_to_ids_and_back(self, text: str) -> None:
        ids = self.TOKENIZER.encode(text)
        assert self.TOKENIZER.decode(ids) == text
        num_special = sum(token >= 256 for token in ids)
        assert num_special == len(re.findall(r"<\|(?:im_start|im_end|endoftext)\|>", text))
        assert len(text.encode()) == sum(
            1 if token < 256 else len(self.TOKENIZER.special_tokens[token - 256]) for token in ids
        )

    @given(st.lists(st.integers(0, 258), max_size=20))
    def test_ids_to_text_and_back_is_stable(self, ids: list[int]) -> None:
        text = self.TOKENIZER.decode(ids)
        again = self.TOKENIZER.decode(self.TOKENIZER.encode(text))
        assert again == text  # what no UTF-8 stood for is U+FFFD once and for all

    @given(texts, texts)
    def test_bytes_concatenate(self, one: str, two: str) -> None:
        joined = self.TOKENIZER.encode(one) + self.TOKENIZER.encode(two)
        assert self.TOKENIZER.decode(joined) == one + two

    @settings(max_examples=30)
    @given(texts)
    def test_skipping_special_tokens_leaves_the_bytes(self, text: str) -> None:
        ids = self.TOKENIZER.encode(text)
        plain = bytes(token for token in ids if token < 256)
        assert self.TOKENIZER.decode(ids, skip_special_tokens=True) == plain.decode()

    def test_other_special_tokens_and_ends(self) -> None:
        tokenizer = ByteTokenizer(None, ["<a>", "<b>"], eos_token="<b>")
        assert tokenizer.encode("x<b><a><|im_end|>")[:3] == [120, 257, 256]
        assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (257, 258)
        assert tokenizer.chat_template is None
        assert tokenizer.all_special_ids == [256, 257]

    def test_numpy_ids_decode_too(self) -> None:
        ids = np.array([104, 105, 258], np.int32)
        assert self.TOKENIZER.decode(ids) == "hi<|im_end|>"  # type: ignore[arg-type]
