"""What a gateway that was stopped, killed or cut off knows when it is started again."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import openai
import pytest
from gateway_kit import openai_agent, paths

import rolltree as rt
from rolltree.gateway import journal
from rolltree.gateway.calls import AgentCall, AnswerHead, CallOrigin, Connection
from rolltree.gateway.journal import Journal, KeptCall, read_session
from rolltree.gateway.session import SessionLimits, new_state
from rolltree.inference.session import TokenSession
from rolltree.records import audit
from rolltree.testing import FaultyClient, ScriptedClient
from rolltree.tokens import Trajectory, recorded_routing
from rolltree.values.errors import ConfigError, ConnectionFailed, StoreError
from rolltree.values.seeds import derive_seed
from rolltree.values.types import ModelResponse
from rolltree.web.guard import RequestError

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}


def echo(messages):
    return messages[-1]["content"].upper()


async def turns(agent, messages, num):
    for _ in range(num):
        messages.append({"role": "user", "content": f"turn {len(messages)}"})
        answer = await agent.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    return messages


async def test_a_gateway_that_is_started_again_serves_the_same_sessions(tmp_path):
    limits = SessionLimits(max_calls=7)
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.session("one", seed=3, limits=limits, info={"task": "t"})
        key = s.api_key
        async with openai_agent(s) as agent:
            messages = await turns(agent, [], 3)
        before, said = paths(s), list(s.trajectory)
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.sessions["one"]
        assert s.api_key is None
        assert (s.limits, s.info, s.seed) == (limits, {"task": "t"}, 3)
        assert paths(s) == before
        assert s.num_sampled_tokens == sum(len(step["tokens"]["completion_ids"]) for step in said)
        for restored, step in zip(s.trajectory, said, strict=True):
            for name in ("prompt", "completion", "tokens"):
                assert restored[name] == step[name]
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=key) as agent:
            await turns(agent, messages, 2)
        # Token-in across the restart: one path.
        assert s.breaks == ()
        assert s.trajectory.tree.num_tokens == s.trajectory.tree.path_len(4)
        longer = paths(s)
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.sessions["one"]
        assert paths(s) == longer
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=key, max_retries=0) as agent:
            await turns(agent, messages, 2)
            with pytest.raises(openai.PermissionDeniedError):
                await turns(agent, messages, 1)


async def test_a_session_that_outlived_a_gateway_is_stored_with_the_time_of_its_opening(
    tmp_path, monkeypatch
):
    call = AgentCall([{"role": "user", "content": "hi"}])
    now = time.time()
    with rt.Run.open_or_create(tmp_path / "run", config={}, kind="gateway") as run:
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        async with rt.gateway(ScriptedClient(echo), run=run) as g:
            await g.session("one").complete(call)
        monkeypatch.undo()
        async with rt.gateway(ScriptedClient(echo), run=run) as g:
            s = g.sessions["one"]
            await s.complete(call)
            await g.close_session(s, {"reward": 1.0})
    assert s.state.timing["start_time"] == s.opened_s == now - 3600
    report = audit(tmp_path / "run")
    assert report.ok, report.findings


async def test_no_call_after_a_restart_has_the_seed_of_one_before(tmp_path):
    """Failed calls draw seeds, too: the next process drew a kept call's once more."""
    call, seeds = AgentCall([{"role": "user", "content": "hi"}]), []
    for fault in (ConnectionFailed("gone"), None, None):
        client = ScriptedClient(echo)
        faulty = FaultyClient(client, [fault, None])
        async with rt.gateway(faulty, directory=tmp_path) as g:
            s = g.sessions.get("one") or g.session("one", seed=3, limits=SessionLimits(max_calls=4))
            if fault is not None:
                with pytest.raises(ConnectionFailed):
                    await s.complete(call)
            await s.complete(call)
        seeds += [each.sampling.seed for each in client.calls]
    assert seeds == [derive_seed(3, "turn", number) for number in (1, 2, 3)]
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        with pytest.raises(RequestError, match="max_steps"):
            await g.sessions["one"].complete(call)


async def test_calls_of_a_killed_process_are_not_taken_for_those_of_the_next(tmp_path, monkeypatch):
    """Each process counts its calls from 0: a prompt continued another conversation's tokens."""
    ann, bob = [{"role": "user", "content": "Ann"}], [{"role": "user", "content": "Bob"}]
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.session("one")
        key = s.api_key
        async with openai_agent(s) as agent:
            await turns(agent, bob, 3)
    # In this test, both processes are the same one.
    taken = itertools.count(ModelResponse.overlong_prompt().call_id + 1)
    decode = journal.decode_step

    def decoded_elsewhere(data, *rest):
        return decode({**data, "extras": {**data["extras"], "call_id": next(taken)}}, *rest)

    monkeypatch.setattr(journal, "decode_step", decoded_elsewhere)
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.sessions["one"]
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=key) as agent:
            await turns(agent, ann, 4)
            await turns(agent, bob, 1)
        read = bytes(token for token in paths(s)[-1] if token < 256).decode()
        assert "Bob" in read
        assert "Ann" not in read
        ids = [step["extras"]["call_id"] for step in s.trajectory]
        assert len(set(ids)) == len(ids) == 8


async def test_routed_experts_are_there_after_a_restart(tmp_path, monkeypatch):
    complete = TokenSession.complete

    def routed(self, prompt, answer, call):
        num_tokens = len(prompt.ids) + len(answer.completion_ids)
        answer.routed_experts = np.arange(num_tokens - 1).reshape(-1, 1, 1)
        return complete(self, prompt, answer, call)

    monkeypatch.setattr(TokenSession, "complete", routed)
    found = []
    for _ in range(2):
        async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
            s = g.sessions.get("one") or g.session("one")
            if not found:
                async with openai_agent(s) as agent:
                    await turns(agent, [], 2)
            tree = s.trajectory.tree
            found.append([recorded_routing(tree, call) for call in range(tree.num_calls)])
    for before, after in zip(*found, strict=True):
        assert len(before) > 20
        assert np.array_equal(before, after)


async def test_an_answer_that_was_lost_with_the_gateway_is_given_again(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.session("one")
        # Finished and on disk, and nobody was sent it.
        call = AgentCall([{"role": "user", "content": "hi"}])
        first = await s.complete(call, CallOrigin(digest=b"1"))
        await s.complete(call, CallOrigin(key="k", digest=b"2"))
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.sessions["one"]
        again = await s.complete(call, CallOrigin(digest=b"1"))
        assert again.head == first.head
        assert again.message == first.message
        assert again.num_completion_tokens == first.num_completion_tokens
        await s.complete(call, CallOrigin(key="k", digest=b"2"))
        assert len(s.trajectory) == 2


async def test_equal_answers_that_were_lost_with_the_gateway_are_given_once_each(tmp_path):
    call = AgentCall([{"role": "user", "content": "hi"}])
    client = ScriptedClient(["one", "two", "three"])
    async with rt.gateway(client, directory=tmp_path) as g:
        s = g.session("one")
        alive = [CallOrigin(digest=b"1", connection=Connection()) for _ in range(3)]
        answers = [await s.complete(call, each) for each in alive]
        s.delivered(answers[1])
    async with rt.gateway(ScriptedClient(lambda messages: "four"), directory=tmp_path) as g:
        s = g.sessions["one"]
        again = [CallOrigin(digest=b"1", connection=Connection()) for _ in range(3)]
        texts = [(await s.complete(call, each)).text for each in again]
    assert texts == ["one", "three", "four"]


async def test_a_closed_session_leaves_nothing(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        async with g.session() as s, openai_agent(s) as agent:
            await turns(agent, [], 1)
            assert list(tmp_path.iterdir())
        assert not list(tmp_path.iterdir())


async def test_a_frame_is_on_disk_before_the_last_byte_is_sent(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.session("one")
        async with openai_agent(s) as agent:
            for number in range(1, 4):
                stream = await agent.chat.completions.create(**ASKED, stream=True)
                async for chunk in stream:
                    if chunk.choices[0].finish_reason:
                        break
                assert len(read_session(tmp_path / "one.calls").calls) == number
                await stream.close()


async def test_a_file_is_linear_in_unique_tokens(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s, sizes = g.session("one"), []
        async with openai_agent(s) as agent:
            messages = []
            for _ in range(3):
                await turns(agent, messages, 8)
                sizes.append((tmp_path / "one.calls").stat().st_size)
        grown = [after - before for before, after in itertools.pairwise(sizes)]
        assert grown[1] < 1.2 * grown[0]


def journal_of(tmp_path, num_calls):
    """Write a file with calls that overlap and break; return its path and the trajectory."""

    async def write():
        journal = Journal(tmp_path)
        file = journal.create("one", {"info": {}})
        file.publish()
        client, state = ScriptedClient(echo).session(), new_state("one")
        for number in range(num_calls):
            prompt = [{"role": "user", "content": f"question {number % 3}"}]
            response = await client.chat(prompt)
            state.trajectory.append_call(
                prompt=prompt, completion=[response.message], response=response, agent="a"
            )
            kept = KeptCall(
                AnswerHead(f"id{number}", "m", 1), "a", None, b"d", ({"x": number % 2},)
            )
            await file.append(state.trajectory, number, kept)
        file.close()
        journal.close()
        return state.trajectory

    return tmp_path / "one.calls", asyncio.run(write())


def test_a_file_that_is_cut_off_anywhere_has_the_calls_before(tmp_path):
    path, trajectory = journal_of(tmp_path, 6)
    whole = path.read_bytes()
    rng = random.Random(0)
    seen = set()
    for size in [*rng.sample(range(len(whole)), 60), len(whole)]:
        path.write_bytes(whole[:size])
        found = read_session(path)
        calls = [] if found is None else found.calls
        seen.add(len(calls))
        for index, (kept, step) in enumerate(calls):
            assert kept.head.id == f"id{index}"
            assert kept.tools == ({"x": index % 2},)
            assert step == trajectory[index]
    assert {0, 3, 6} <= seen


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    path, _ = journal_of(tmp_path, 4)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(StoreError, match=r"one\.calls is damaged"):
        read_session(path)


async def test_a_disk_that_is_full_fails_the_call_and_the_session(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path) as g:
        s = g.session("one")
        async with openai_agent(s) as agent:
            await agent.chat.completions.create(**ASKED)
            full_disk(s.journal)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="No space left"):
                    await turns(agent, [], 1)
        assert s.state["error"].type == "StoreError"


def full_disk(file):
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file)
    os.close(full)


class Unsynced:
    """The files and folders that a power cut would damage."""

    def __init__(self, monkeypatch):
        self.found, self.lost = set(), []
        self._wrap(monkeypatch, "write", lambda fd, _: self.found.add(place(fd)))
        for name in ("fsync", "fdatasync"):
            self._wrap(monkeypatch, name, lambda fd: self.found.discard(place(fd)))
        self._wrap(monkeypatch, "replace", self._replaced)

    def _wrap(self, monkeypatch, name, note):
        real = getattr(os, name)

        def wrapped(*arguments):
            result = real(*arguments)
            note(*arguments)
            return result

        monkeypatch.setattr(os, name, wrapped)

    def _replaced(self, source, target):
        if place(target) in self.found:
            self.lost.append(target)
        self.found.add(place(target.parent))


def place(path):
    found = os.stat(path)
    return found.st_dev, found.st_ino


def test_a_power_cut_after_a_restart_loses_no_call(tmp_path, monkeypatch):
    path, _ = journal_of(tmp_path, 3)
    unsynced, journal = Unsynced(monkeypatch), Journal(tmp_path)
    state, file = new_state("one"), journal.create("one", {"info": {}})
    for number, (kept, step) in enumerate(read_session(path).calls):
        state.trajectory.append_call(
            prompt=step["prompt"], completion=step["completion"], response=step["response"]
        )
        file.append_now(state.trajectory, number, kept)
    file.publish()
    assert (unsynced.lost, unsynced.found) == ([], set())
    assert len(read_session(path).calls) == 3
    file.close()
    journal.close()


async def test_what_was_delivered_is_known_after_a_restart_and_a_kill(tmp_path):
    async with (
        rt.gateway(ScriptedClient(echo), directory=tmp_path) as g,
        openai_agent(g.session("one")) as agent,
    ):
        await turns(agent, [], 2)
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path):
        # As a kill would leave it: `aclose` writes what is known about deliveries.
        assert read_session(tmp_path / "one.calls").delivered == {0, 1}


async def test_what_was_delivered_is_known_soon_without_another_call(tmp_path):
    """Else an agent that asks the same again after a kill was given the answer that it has."""
    async with (
        rt.gateway(ScriptedClient(echo), directory=tmp_path) as g,
        openai_agent(g.session("one")) as agent,
    ):
        await turns(agent, [], 1)
        async with asyncio.timeout(20):
            while read_session(tmp_path / "one.calls").delivered != {0}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def test_a_disk_that_is_full_at_a_restart_is_an_error_that_names_it(tmp_path):
    _, trajectory = journal_of(tmp_path, 1)
    journal = Journal(tmp_path)
    file = journal.create("one", {})
    full_disk(file)
    with pytest.raises(StoreError, match=r"one\.calls cannot be written \(No space left"):
        file.append_now(trajectory, 0, KeptCall(AnswerHead("id", "m", 1)))
    file.close()
    journal.close()


def test_nothing_is_written_after_a_frame_that_failed(tmp_path):
    """It would follow half a frame, and continue tokens that are missing."""
    _, trajectory = journal_of(tmp_path, 2)
    journal = Journal(tmp_path)
    file = journal.create("one", {})
    kept, real = KeptCall(AnswerHead("id", "m", 1)), os.dup(file._file)
    full_disk(file)
    for fd in (None, real):
        if fd is not None:
            os.dup2(fd, file._file)
        with pytest.raises(StoreError, match="No space left"):
            file.append_now(trajectory, 0, kept)
    os.close(real)
    file.publish()
    file.close()
    journal.close()
    assert not read_session(tmp_path / "one.calls").calls


async def test_a_gateway_that_cannot_start_leaves_nothing_open(tmp_path):
    folder, unix_socket = tmp_path / "calls", tmp_path / "socket"
    async with rt.gateway(ScriptedClient(echo), directory=folder) as g:
        async with openai_agent(g.session("a")) as agent:
            await turns(agent, [], 2)
        g.session("b")
    (folder / "b.calls").write_bytes(b"damage" * 10)
    g = rt.gateway(ScriptedClient(echo), directory=folder, unix_socket=unix_socket)
    with pytest.raises(StoreError, match=r"b\.calls is damaged"):
        await g.start()
    assert (g.listener.fileno(), unix_socket.exists(), g.sessions) == (-1, False, {})
    assert len(read_session(folder / "a.calls").calls) == 2


async def test_a_gateway_without_its_unix_socket_frees_its_port(tmp_path):
    g = rt.gateway(ScriptedClient(echo), unix_socket=tmp_path / "none" / "socket")
    with pytest.raises(ConfigError, match="cannot listen on the socket"):
        await g.start()
    assert g.listener.fileno() == -1


async def test_a_session_that_was_not_stored_does_not_take_its_name(tmp_path):
    async with rt.gateway(ScriptedClient(echo), directory=tmp_path, max_sessions=1) as g:
        (tmp_path / "one.calls").mkdir()
        with pytest.raises(StoreError, match=r"one\.calls cannot be written"):
            g.session("one")
        assert [path.name for path in tmp_path.iterdir()] == ["one.calls"]
        (tmp_path / "one.calls").rmdir()
        async with g.session("one") as s, openai_agent(s) as agent:
            await turns(agent, [], 1)


# -- kill -9 ---------------------------------------------------------------------------------------

GATEWAY = """
import asyncio, sys
import rolltree as rt
from rolltree.testing import ScriptedClient

def echo(messages):
    return messages[-1]["content"].upper()

async def main(folder, port):
    client = ScriptedClient(echo, token_delay_s=0.0005)
    async with rt.gateway(client, directory=folder, port=port, admin_key="admin") as g:
        print(g.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class KilledGateway:
    """A gateway in a process of its own, which is killed and started again."""

    def __init__(self, folder):
        self.folder, self.port = folder, 0

    def start(self):
        words = [sys.executable, "-c", GATEWAY, str(self.folder), str(self.port)]
        environment = {**os.environ, "PYTHONPATH": str(Path(rt.__file__).parents[1])}
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
        self.url = self.process.stdout.readline().strip()
        assert self.url
        self.port = int(self.url.rpartition(":")[2])

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


async def run_agent(made, number, num_turns):
    """A program that goes on until it has all of its answers, whatever happens to the gateway."""
    messages = []
    async with openai.AsyncOpenAI(
        base_url=made["base_url"], api_key=made["api_key"], max_retries=100_000, timeout=30.0
    ) as agent:
        agent._calculate_retry_timeout = lambda *_: 0.02
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"agent {number} says {turn}"})
            if turn % 2:
                answer = await agent.chat.completions.create(model="m", messages=messages)
                said = answer.choices[0].message.content
            else:
                said = await streamed(agent, messages)
            messages.append({"role": "assistant", "content": said})
    return messages


async def streamed(agent, messages):
    """Read a stream to its end; one that breaks off is asked for again, as programs do."""
    while True:
        try:
            stream = await agent.chat.completions.create(model="m", messages=messages, stream=True)
            parts, reason = [], None
            async for chunk in stream:
                parts.append(chunk.choices[0].delta.content or "")
                reason = chunk.choices[0].finish_reason or reason
            if reason is not None:
                return "".join(parts)
        except (openai.APIError, openai.APIConnectionError):
            pass
        except Exception as error:  # what the client's HTTP package raises of a torn stream
            if "httpx" not in type(error).__module__ and "httpcore" not in type(error).__module__:
                raise


async def kill_at_random(folder, num_kills, num_agents, num_turns, seed):
    rng = random.Random(seed)
    gateway = KilledGateway(folder)
    gateway.start()
    admin = openai.AsyncOpenAI(base_url=gateway.url, api_key="admin")
    made = [
        await admin.post("/sessions", body={"id": f"s{n}"}, cast_to=object)
        for n in range(num_agents)
    ]
    agents = asyncio.gather(*(run_agent(each, n, num_turns) for n, each in enumerate(made)))
    kills = 0
    try:
        while kills < num_kills and not agents.done():
            await asyncio.sleep(rng.uniform(0.0, 0.25))
            await asyncio.to_thread(gateway.kill)
            kills += 1
            await asyncio.to_thread(gateway.start)
        said = await agents
    finally:
        agents.cancel()
        gateway.kill()
        await admin.close()
    return kills, said


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=[pytest.mark.long])])
async def test_a_gateway_that_is_killed_loses_and_doubles_nothing(tmp_path, num_kills):
    num_agents, num_turns = 4, 4 * num_kills
    kills, said = await kill_at_random(tmp_path, num_kills, num_agents, num_turns, seed=1)
    assert kills == num_kills
    for number, messages in enumerate(said):
        kept = read_session(tmp_path / f"s{number}.calls")
        prompts = Counter(step["prompt"][-1]["content"] for _, step in kept.calls)
        asked = [message["content"] for message in messages if message["role"] == "user"]
        # Every call that the agent saw is there, once; what was cut off in the middle is not.
        assert prompts == Counter(asked)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        found = {
            step["prompt"][-1]["content"]: step["completion"][0]["content"]
            for _, step in kept.calls
        }
        assert [found[question] for question in asked] == answers
        assert answers == [question.upper() for question in asked]
        final = kept.calls[-1][1]["tokens"].tree
        assert final.num_tokens == final.path_len(final.num_calls - 1)


def test_a_call_that_overlaps_is_labelled_after_its_tokens_were_written(tmp_path):
    """A call's tokens enter the tree before the session records it; another may end between."""
    client = ScriptedClient(["one", "two", "three", "four"])
    made = client.session()
    answers = [asyncio.run(made.chat([{"role": "user", "content": content}])) for content in "abcd"]
    trajectory, journal = Trajectory(), Journal(tmp_path)
    file = journal.create("one", {})
    for number, (which, agent) in enumerate([(0, ""), (2, "ann"), (1, "bob"), (3, "bob")]):
        trajectory.append_call(
            prompt=[], completion=[], response=answers[which], agent=agent, turn=number
        )
        file.append_now(trajectory, number, KeptCall(AnswerHead(f"id{number}", "m", 1), agent))
    file.publish()
    file.close()
    assert trajectory.tree is answers[3].tree
    kept = read_session(next(tmp_path.glob("one*")))
    read = [step for _, step in kept.calls]
    assert [step["extras"]["agent"] for step in read] == ["", "ann", "bob", "bob"]
    trees = {id(step["response"].tree): step["response"].tree for step in read}
    (read_tree,) = trees.values()
    assert [read_tree.agent(call) for call in range(4)] == ["", "bob", "ann", "bob"]
    assert [read_tree.turn(call) for call in range(4)] == [0, 2, 1, 3]
    journal.close()
