"""@stop, @cleanup, @teardown: order, once, and whatever happens."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from env_scripts import Echo, ScriptedModel, a_request, single, user

from rolltree.environments import cleanup, lifecycle, stop, teardown
from rolltree.environments import environment as environment_module
from rolltree.environments.lifecycle import close_all, discover
from rolltree.rollouts import RolloutEngine
from rolltree.values.errors import ServerError

INPUT = {"prompt": user("say one"), "answer": "one", "example_id": 0, "task": "t"}


def names(cls, role):
    return [name for name, _ in discover(cls)[role]]


class Base:
    @stop
    def b_first(self, state): ...
    @stop(priority=5)
    def urgent(self, state): ...
    @stop(priority=-5)
    def limit(self, state): ...
    @cleanup
    def release(self, state): ...
    @teardown
    def close(self): ...


class Derived(Base):
    @stop
    def a_second(self, state): ...
    @stop(priority=5)
    def urgent_too(self, state): ...
    @cleanup(priority=1)
    def release_first(self, state): ...
    @teardown(priority=-1)
    def close_last(self): ...


def test_order_is_priority_then_base_first_then_definition():
    assert names(Base, "stop") == ["urgent", "b_first", "limit"]
    assert names(Derived, "stop") == ["urgent", "urgent_too", "b_first", "a_second", "limit"]
    assert names(Derived, "cleanup") == ["release_first", "release"]
    assert names(Derived, "teardown") == ["close", "close_last"]


def test_discovery_happens_once_per_class():
    assert discover(Derived) is discover(Derived)


def test_an_override_of_post_init_runs_once_with_the_settings_there():
    class Prepared(Echo):
        def __post_init__(self):
            super().__post_init__()
            self.prepared = [*getattr(self, "prepared", []), self.parser, len(self.dataset)]

    env = Prepared()
    assert env.prepared == [env.parser, len(env.dataset)]
    assert "max_turns_reached" in [condition.__name__ for condition in env._stop_conditions]


def test_an_override_keeps_its_mark():
    class Quiet(Base):
        def b_first(self, state):
            return False

    assert names(Quiet, "stop") == ["urgent", "b_first", "limit"]


def test_an_override_may_change_its_priority():
    class Changed(Base):
        @stop(priority=9)
        def limit(self, state): ...

    assert names(Changed, "stop") == ["limit", "urgent", "b_first"]


def test_none_removes():
    class Without(Base):
        urgent = None

    class Again(Without):
        @stop
        def urgent(self, state): ...

    assert names(Without, "stop") == ["b_first", "limit"]
    assert "urgent" in names(Again, "stop")


async def test_conditions_are_asked_in_order_and_only_until_one_is_true():
    asked = []

    class Asks(Echo):
        @stop(priority=20)
        async def early(self, state):
            asked.append("early")
            return False

        @stop(priority=10)
        def hit(self, state):
            asked.append("hit")
            return 1

        @stop
        async def never(self, state):
            asked.append("never")

    state = await Asks().rollout(INPUT, ScriptedModel(), "m")
    assert asked == ["early", "hit"]
    assert state["stop_condition"] == "hit"


# Cleanup


class Tracked(Echo):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.log = []
        self.hangs = asyncio.Event()

    async def env_response(self, messages, state):
        if state["answer"] == "raise":
            raise KeyError("board")
        if state["answer"] == "hang":
            self.hangs.set()
            await asyncio.sleep(60)
        return await super().env_response(messages, state)

    @cleanup
    async def second(self, state):
        await asyncio.sleep(0)
        self.log.append(("second", state["example_id"]))

    @cleanup(priority=1)
    def first(self, state):
        self.log.append(("first", state["example_id"]))


def row(answer, example_id=0):
    return {**INPUT, "answer": answer, "example_id": example_id}


BOTH = [("first", 0), ("second", 0)]


async def test_cleanup_after_success():
    env = Tracked()
    state = await env.rollout(row("one"), ScriptedModel("one"), "m")
    assert env.log == BOTH
    assert state["cleaned_up"] is True


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        ("raise", "two"),
        ("one", ServerError("500", status=500, retryable=True)),
        ("one", ValueError("bug in the client")),
    ],
)
async def test_cleanup_after_failure(answer, reply):
    env = Tracked()
    state = await env.rollout(row(answer), ScriptedModel(reply), "m")
    assert state["error"] is not None or state["environment_errors"]
    assert env.log == BOTH


async def test_cleanup_after_a_failed_setup():
    class Broken(Tracked):
        async def setup_state(self, state):
            raise OSError("no room")

    env = Broken()
    await env.rollout(row("one"), ScriptedModel(), "m")
    assert env.log == BOTH


async def test_cleanup_after_cancellation():
    env = Tracked()
    task = asyncio.create_task(env.rollout(row("hang"), ScriptedModel("two"), "m"))
    await env.hangs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.log == BOTH


async def test_cleanup_finishes_when_it_is_cancelled_too():
    begins, release = asyncio.Event(), asyncio.Event()

    class Slow(Tracked):
        @cleanup(priority=2)
        async def slowly(self, state):
            self.log.append("slow begins")
            begins.set()
            await release.wait()
            self.log.append("slow ends")

    env = Slow()
    task = asyncio.create_task(env.rollout(row("hang"), ScriptedModel("two"), "m"))
    await env.hangs.wait()
    task.cancel()
    await begins.wait()
    task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.log == ["slow begins", "slow ends", *BOTH]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cleanup_after_a_time_out():
    env = Tracked()
    request = a_request(env, input=row("hang"))
    engine = RolloutEngine(env, ScriptedModel("two"), time_limit_s=0.5, grace_s=0.0)
    result = (await engine.run_all([request]))[0]
    assert result.error.type == "RolloutTimeout"
    assert env.log == BOTH


async def test_cleanup_runs_once_each_for_many_rollouts():
    env = Tracked()
    rows = [row(answer, index) for index, answer in enumerate(["one", "raise", "two"] * 7)]
    results = await env.generate(rows, ScriptedModel("two", "one"), "m", max_concurrent=4)
    assert results.metadata.num_truncated == 7
    assert sorted(env.log) == sorted((name, i) for i in range(21) for name in ("first", "second"))


async def test_cleanup_runs_for_an_overridden_rollout():
    class Old(Tracked):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input)
            if input["answer"] == "raise":
                raise KeyError("x")
            return state

    for answer in ("one", "raise"):
        env = Old()
        await env.run_request(a_request(env, input=row(answer)), ScriptedModel())
        assert env.log == BOTH


async def test_a_cleanup_that_raises_is_recorded_and_the_others_run():
    class Broken(Tracked):
        @cleanup(priority=2)
        async def broken(self, state):
            raise OSError("cannot release")

    env = Broken()
    state = (await env.run_request(a_request(env), ScriptedModel("one")))[0]
    assert env.log == BOTH
    assert state["error"] is None
    assert state["reward"] == 1.0
    assert state["cleanup_errors"][0]["type"] == "OSError"
    assert state["cleanup_errors"][0]["phase"] == "cleanup"


async def a_task_that_was_cancelled():
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    await inner


async def test_a_cleanup_that_awaits_what_it_cancelled_is_recorded_and_the_others_run():
    class Broken(Tracked):
        @cleanup(priority=2)
        async def broken(self, state):
            await a_task_that_was_cancelled()

    env = Broken()
    state = (await env.run_request(a_request(env), ScriptedModel("one")))[0]
    assert env.log == BOTH
    assert state["reward"] == 1.0
    assert [error["type"] for error in state["cleanup_errors"]] == ["CancelledError"]


async def test_a_cleanup_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(environment_module, "CLEANUP_LIMIT_S", 0.02)

    class Hangs(Tracked):
        @cleanup(priority=2)
        async def hangs(self, state):
            await asyncio.sleep(60)

    env = Hangs()
    state = await env.rollout(row("one"), ScriptedModel("one"), "m")
    assert state["cleanup_errors"][0]["type"] == "TimeoutError"
    assert env.log == BOTH


async def test_cleanup_comes_before_scoring():
    class Order(Tracked):
        @cleanup
        async def last(self, state):
            state["released"] = state["reward"] is None

    env = Order()
    state = (await env.run_request(a_request(env), ScriptedModel("one")))[0]
    assert state["released"] is True
    assert state["reward"] == 1.0


# Teardown


class Closes(Echo):
    def __init__(self, log, **settings):
        super().__init__(**settings)
        self.log = log

    @teardown(priority=1)
    async def first(self):
        self.log.append("first")

    @teardown
    def second(self):
        self.log.append("second")


async def test_teardown_runs_once_in_order():
    log = []
    env = Closes(log)
    await env.aclose()
    await env.aclose()
    assert log == ["first", "second"]


async def test_an_environment_is_a_context_manager():
    log = []
    async with Closes(log) as env:
        assert isinstance(env, Closes)
    assert log == ["first", "second"]


async def cannot_close():
    raise OSError("cannot close")


@pytest.mark.parametrize("failure", [cannot_close, a_task_that_was_cancelled])
async def test_a_teardown_that_raises_does_not_stop_the_others(caplog, failure):
    class Broken(Closes):
        @teardown(priority=5)
        async def broken(self):
            await failure()

    log = []
    await Broken(log).aclose()
    assert log == ["first", "second"]
    assert "broken" in caplog.text


async def test_a_teardown_that_is_cancelled_says_so():
    class Hangs(Closes):
        @teardown(priority=5)
        async def hangs(self):
            await asyncio.sleep(60)

    task = asyncio.create_task(Hangs([]).aclose())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_is_open_at_exit_is_closed():
    log = []
    Closes(log)
    close_all()
    close_all()
    assert log == ["first", "second"]


def test_an_environment_can_be_built_in_another_thread():
    log, built = [], []
    thread = threading.Thread(target=lambda: built.append(Closes(log)))
    thread.start()
    thread.join()
    assert len(built) == 1
    close_all()
    assert log == ["first", "second"]


def test_environments_without_teardown_are_not_kept():
    from rolltree.environments import lifecycle as module

    before = len(module._open)
    single()
    assert len(module._open) == before


SCRIPT = """
    import asyncio, os, signal, sys, threading
    import rolltree as rt

    class Env(rt.MultiTurnEnv):
        async def env_response(self, messages, state):
            return []
        @rt.cleanup
        async def release(self, state):
            print("cleanup", flush=True)
        @rt.teardown
        async def close(self):
            print("teardown", flush=True)
        async def setup_state(self, state):
            print("ready", flush=True)
            if sys.argv[1] != "exit":
                os.kill(os.getpid(), getattr(signal, sys.argv[1]))
            await asyncio.sleep(0.2 if sys.argv[1] == "exit" else 60)
            return state

    class Model:
        model = "m"
        def session(self): return self
        async def chat(self, *a, **k): raise rt.ModelError("none")
        async def generate(self, *a): ...
        async def aclose(self): ...

    built = []
    build = lambda: built.append(Env(dataset=[{"question": "hi"}]))
    if sys.argv[2] == "in a thread":
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    else:
        build()
    env = built[0]
    asyncio.run(env.rollout({"prompt": [], "example_id": 0, "task": "t"}, Model(), "m"))
    print("end", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "where", "lines", "status"),
    [
        ("exit", "", ["ready", "cleanup", "end", "teardown"], 0),
        ("SIGTERM", "", ["ready", "cleanup", "teardown"], 143),
        ("SIGTERM", "in a thread", ["ready", "cleanup", "teardown"], 143),
        ("SIGINT", "in a thread", ["ready", "cleanup", "teardown"], -2),
    ],
)
def test_teardown_at_the_end_of_a_process(how, where, lines, status):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), how, where],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == lines, done.stderr
    assert done.returncode == status


def test_a_signal_handler_of_the_program_stays():
    lifecycle._open[0] = None
    try:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lifecycle.watch()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
        del lifecycle._open[0]
