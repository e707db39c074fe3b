"""What an author's code raises past `except Exception` fails or scores its own rollout only."""

import asyncio
from contextlib import AsyncExitStack

import anyio
import pytest
from env_scripts import ROWS, Echo, ScriptedModel, a_request, exact, single

from rolltree._helpers.tasks import OwnTask, Terminated
from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import (
    DelegatingProtocol,
    SingleAgentProtocol,
    SubAgent,
    delegate_tool,
)
from rolltree.environments import (
    ProtocolEnvironment,
    ToolEnv,
    cleanup,
    teardown,
)
from rolltree.environments.rubrics import Rubric, run_inline
from rolltree.insight.recorded import ReplayStopped
from rolltree.rollouts import RolloutEngine
from rolltree.testing import ScriptedClient
from rolltree.values.steps import StepOutcome
from rolltree.values.types import State


class Own(BaseException):
    """An author's own way to jump out of everything."""


ESCAPES = [
    *(Own("out"), KeyboardInterrupt(), SystemExit(3), BaseExceptionGroup("two", [Own()])),
    GeneratorExit(),
    asyncio.CancelledError(),  # as from awaiting a task that this code cancelled
    BaseExceptionGroup("two", [KeyboardInterrupt(), ValueError()]),
]
escapes = pytest.mark.parametrize("error", ESCAPES, ids=lambda error: type(error).__name__)


def hooked(name, error, *, after=0):
    """Return an Echo whose method `name` raises once the model has answered `after` times."""

    async def method(self, *given, **named):
        state = next(each for each in given if isinstance(each, State))
        if len(state.get("trajectory") or ()) >= after:
            raise error
        return await getattr(Echo, name)(self, *given, **named)

    return type("Hooked", (Echo,), {name: method})()


async def played(env, client, num=2):
    """Return the results of so many rollouts, played two at a time."""
    requests = [a_request(env, index) for index in range(num)]
    return await asyncio.wait_for(
        RolloutEngine(env, client, max_concurrent=2).run_all(requests), 60
    )


@escapes
@pytest.mark.parametrize("name", ["env_response", "is_completed", "won"])
async def test_a_hook_that_escapes_after_an_answer_is_scored(name, error):
    env = hooked(name, error, after=1)
    for result in await played(env, ScriptedModel("two")):
        (state,) = result.states
        raised = state["environment_errors"]["environment"]
        assert (result.error, raised["type"]) == (None, type(error).__name__)
        assert "in method" in raised["traceback"]
        assert (state["reward"], state["stop_condition"]) == (0.0, "environment_raised")


@escapes
@pytest.mark.parametrize("name", ["setup_state", "get_model_response"])
async def test_a_hook_that_escapes_before_an_answer_fails_its_rollout_alone(name, error):
    async def method(self, *given, **named):
        if name == "get_model_response" or given[-1]["example_id"] == 0:
            raise error

    env = type("Hooked", (Echo,), {name: method})()
    for result in await played(env, ScriptedModel("one")):
        phase = "setup" if name == "setup_state" else "environment"
        assert (result.error.type, result.error.phase) == (type(error).__name__, phase)
        assert result.states[0]["reward"] is None


@escapes
async def test_a_cleanup_that_escapes_is_recorded_and_the_others_run(error):
    log = []

    class Hooked(Echo):
        @cleanup(priority=1)
        async def first(self, state):
            raise error

        @cleanup
        async def second(self, state):
            log.append("second")

        @teardown
        async def last(self):
            raise error

    env = Hooked()
    (result,) = await played(env, ScriptedModel("one"), 1)
    assert result.states[0]["cleanup_errors"][0]["type"] == type(error).__name__
    assert (result.states[0]["reward"], log) == (1.0, ["second"])
    await env.aclose()


@escapes
@pytest.mark.parametrize("kind", ["async", "inline", "thread"])
async def test_a_tool_that_escapes_is_told_to_the_model(kind, error):
    if kind == "async":

        async def broken(x: int) -> str:
            """Break."""
            raise error
    else:

        def broken(x: int) -> str:
            """Break."""
            raise error

    tool = run_inline(broken) if kind == "inline" else broken
    call = {"id": "c", "function": {"name": "broken", "arguments": '{"x": 1}'}}
    model = ScriptedModel({"role": "assistant", "content": "", "tool_calls": [call]}, "one")
    env = ToolEnv(tools=[tool], dataset=ROWS, rubric=Rubric([exact]))
    for result in await played(env, model):
        (state,) = result.states
        assert (result.error, state["reward"]) == (None, 1.0)
        assert "broken" in str(state["completion"][1]["content"])


@escapes
@pytest.mark.parametrize("kind", ["rollout", "step", "group"])
async def test_a_reward_function_that_escapes_counts_as_nothing(kind, error):
    async def later(state):
        raise error

    async def in_step(step):
        raise error

    async def compares(states) -> list:
        raise error

    rubric = Rubric([exact])
    if kind == "step":
        rubric.add_step_reward_func(in_step)
    else:
        rubric.add_reward_func(later if kind == "rollout" else compares)
    for result in await played(single(rubric=rubric), ScriptedModel("one")):
        (state,) = result.states
        assert (result.error, state["reward"]) == (None, 1.0)
        (record,) = state["scoring_errors"].values()
        assert record["type"] == type(error).__name__


@escapes
async def test_a_rubric_that_escapes_counts_as_a_function_that_does(error):
    class Broken(Rubric):
        async def score_rollout(self, state, score_sem=None):
            raise error

    for result in await played(single(rubric=Broken([exact])), ScriptedModel("one")):
        (state,) = result.states
        assert (result.error, state["reward"]) == (None, 0.0)
        assert state["scoring_errors"]["Broken"]["type"] == type(error).__name__


class Broken:
    """A world whose method `broken` raises `error`."""

    in_thread = False
    broken, error = "", Own()

    def __init__(self, row=None):
        pass

    def reset(self, *, seed=None):
        self.play("reset")
        return "go", {}

    def step(self, action):
        self.play("step")
        return StepOutcome("more", 0.5, terminated=True)

    def close(self):
        self.play("close")

    def play(self, name):
        if name == self.broken:
            raise self.error


@escapes
@pytest.mark.parametrize("name", ["reset", "step", "close"])
async def test_a_world_that_escapes_ends_its_own_episode(name, error):
    make = type("Hooked", (Broken,), {"broken": name, "error": error})
    protocol = SingleAgentProtocol(lambda: Agent(name="player"), max_steps=2)
    env = ProtocolEnvironment(protocol, make, num_train=1, num_eval=1)
    for result in await played(env, ScriptedClient(["one"])):
        (state,) = result.states
        if name == "reset":
            assert result.error.type == type(error).__name__
        else:
            assert result.error is None
            assert state["reward"] == (0.0 if name == "step" else 0.5)


@escapes
async def test_agents_that_escape_end_their_own_rollouts(error):
    """Two children act in tasks of their own, where `exit()` would end the event loop."""

    class Escaping(Agent):
        async def act(self):
            await super().act()
            raise error

    protocol = DelegatingProtocol(
        lambda: ToolAgent(name="parent", external_tools=[delegate_tool("ask")]),
        {"ask": SubAgent(lambda: Escaping(name="child"))},
    )
    call = {"function": {"name": "ask", "arguments": '{"task": "x"}'}}
    asks = {"role": "assistant", "tool_calls": [call, call]}

    def answer(messages):
        if messages[0]["content"] == "x":
            return "X"
        return asks if len(messages) == 1 else "one"

    env = ProtocolEnvironment(protocol, dataset=ROWS, rubric=Rubric([exact]))
    for result in await played(env, ScriptedClient(answer)):
        assert result.error is None
        assert result.states[0]["reward"] == 1.0
        assert len(result.states) == 3


@pytest.mark.parametrize(
    "error", [Terminated(143), ReplayStopped("the replay is over")], ids=lambda e: type(e).__name__
)
async def test_the_end_of_the_program_or_of_a_replay_passes(error):
    env = hooked("env_response", error, after=1)
    with pytest.raises(type(error)):
        await env.rollout(env.example("eval", 0), ScriptedModel("two"), "m")


@escapes
@pytest.mark.parametrize("name", ["add_model_response", "rollout"])
async def test_what_escapes_around_the_first_answer_is_scored(name, error):
    async def method(self, *given, **named):
        if name == "rollout":
            await Echo.rollout(self, *given, **named)
        raise error

    env = type("Hooked", (Echo,), {name: method})()
    for result in await played(env, ScriptedModel("one", "two")):
        (state,) = result.states
        assert (result.error, state["stop_condition"]) == (None, "environment_raised")
        assert state["environment_errors"]["environment"]["type"] == type(error).__name__
        assert state["reward"] is not None


async def test_a_cleanup_whose_task_group_raises_is_recorded():
    async def fails():
        raise ValueError("no")

    class Hooked(Echo):
        @cleanup
        async def close(self, state):
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())

    (result,) = await played(Hooked(), ScriptedModel("one"), 1)
    assert result.states[0]["cleanup_errors"][0]["type"] == "ExceptionGroup"
    assert (result.error, result.states[0]["reward"]) == (None, 1.0)


async def test_an_emptied_trajectory_hides_no_answer():
    class Hooked(Echo):
        async def env_response(self, messages, state):
            state["trajectory"].clear()
            raise ValueError("illegal move")

    (result,) = await played(Hooked(), ScriptedModel("two"), 1)
    assert (result.error, result.states[0]["reward"]) == (None, 0.0)


async def test_a_text_as_a_later_prompt_of_a_chat_is_scored():
    class Hooked(Echo):
        async def get_prompt_messages(self, state):
            given = await super().get_prompt_messages(state)
            return "go on" if state["trajectory"] else given

    (result,) = await played(Hooked(), ScriptedModel("two"), 1)
    assert (result.error, result.states[0]["reward"]) == (None, 0.0)


async def test_a_client_that_cancels_a_call_is_the_weather():
    def closed(messages):
        raise asyncio.CancelledError

    for result in await played(Echo(), ScriptedModel("two", closed)):
        assert (result.error.type, result.error.kind) == ("ConnectionFailed", "infrastructure")
        assert result.states[0]["reward"] is None


IN_TASKS = {
    "wait_for": lambda work: asyncio.wait_for(work, 60),
    "gather": lambda work: asyncio.gather(work, asyncio.sleep(0)),
    "task": asyncio.create_task,
    "shield": asyncio.shield,
}


@pytest.mark.parametrize("begin", IN_TASKS.values(), ids=IN_TASKS)
async def test_an_exit_in_a_task_that_an_environment_begins_ends_its_rollout_alone(begin):
    class Leaves(Echo):
        async def env_response(self, messages, state):
            async def leave():
                await asyncio.sleep(0)
                raise SystemExit(3)

            await begin(leave())

    for result in await played(Leaves(), ScriptedModel("two")):
        (state,) = result.states
        assert result.error is None
        assert "SystemExit" in str(state["environment_errors"]["environment"])
        assert state["reward"] == 0.0


async def test_a_task_of_an_environment_that_is_cancelled_before_it_begins_warns_nobody(recwarn):
    class Cancels(Echo):
        async def env_response(self, messages, state):
            work = asyncio.create_task(asyncio.sleep(60))
            work.cancel()
            (ended,) = await asyncio.gather(work, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError)
            return await super().env_response(messages, state)

    for result in await played(Cancels(), ScriptedModel("two", "one"), 1):
        assert result.error is None
        assert result.states[0].get("environment_errors") is None
    assert not recwarn.list


@pytest.mark.parametrize("way", ["super", "create", "call"])
async def test_an_override_of_a_call_that_raises_after_its_first_answer_is_scored(way):
    class Parses(Echo):
        async def get_model_response(self, client, model, prompt, *given, **named):
            if way == "super":
                await super().get_model_response(client, model, prompt, *given, **named)
            elif way == "create":
                await client.chat.completions.create(model=model, messages=prompt)
            else:
                await client.chat(prompt)
            raise ValueError("no JSON in it")

    for result in await played(Parses(), ScriptedModel("two")):
        (state,) = result.states
        assert (result.error, state["reward"]) == (None, 0.0)
        assert state["environment_errors"]["environment"]["message"] == "no JSON in it"


class Scoped(Echo):
    """Opens a scope of anyio in one hook, and closes it in another, as with an MCP client."""

    async def setup_state(self, state):
        state["stack"] = stack = AsyncExitStack()
        group = await stack.enter_async_context(anyio.create_task_group())
        group.start_soon(self.background)
        state["scope"] = group.cancel_scope
        return state

    async def background(self):
        await anyio.sleep(60)

    @cleanup
    async def close(self, state):
        state["scope"].cancel()
        await state["stack"].aclose()


async def test_a_scope_may_be_opened_in_setup_state_and_closed_in_a_cleanup():
    for result in await played(Scoped(), ScriptedModel("two", "one")):
        assert result.error is None
        assert result.states[0]["reward"] == 1.0
        assert "cleanup_errors" not in result.states[0]
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("way", ["timeout", "task", "group"])
async def test_a_cancellation_that_arrives_in_the_next_model_call_is_scored(way):
    class Leaves(Scoped):
        async def background(self):
            await anyio.sleep(0.1 if way == "group" else 60)
            raise ValueError("it died")

        async def env_response(self, messages, state):
            if way == "timeout":
                await asyncio.timeout(0.02).__aenter__()
            if way == "task":
                asyncio.get_running_loop().call_later(0.02, asyncio.current_task().cancel)
            return await super().env_response(messages, state)

    for result in await played(Leaves(), ScriptedModel("two", delay_s=0.06)):
        (state,) = result.states
        assert (result.error, result.num_attempts) == (None, 1)
        assert state["reward"] in (0.0, 1.0)  # the second row is answered at once
        assert ("environment_errors" in state) == (state["reward"] == 0.0)


@pytest.mark.parametrize("way", ["group", "task", "timeout"])
async def test_a_cancellation_by_an_environments_own_code_is_scored(way):
    class Cancels(Scoped):
        async def background(self):
            await anyio.sleep(0.01)
            raise ValueError("it died")

        async def env_response(self, messages, state):
            if way == "task":
                asyncio.current_task().cancel()
            if way == "timeout":
                await asyncio.timeout(0.01).__aenter__()
            await asyncio.sleep(0.5)

    for result in await played(Cancels(), ScriptedModel("two")):
        (state,) = result.states
        assert (result.error, state["reward"]) == (None, 0.0)
        assert "environment" in state["environment_errors"]


async def test_a_cleanup_is_finished_though_the_run_is_cancelled_and_then_the_run_ends():
    begun, log = asyncio.Event(), []

    class Slow(Echo):
        @cleanup
        async def slow(self, state):
            begun.set()
            await asyncio.sleep(0.2)
            log.append("done")

    run = asyncio.create_task(played(Slow(), ScriptedModel("one"), 1))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert log == ["done"]


@pytest.mark.parametrize("way", ["task", "later", "timeout", "exit", "scope"])
async def test_a_group_scorer_that_cancels_itself_fails_its_group_alone(way):
    async def leave():
        raise SystemExit(3)

    class Ranks(Rubric):
        async def score_group(self, states, *given, **named):
            if way == "task":
                asyncio.current_task().cancel()
            if way == "later":
                asyncio.get_running_loop().call_later(0.02, asyncio.current_task().cancel)
            if way == "timeout":
                await asyncio.timeout(0.02).__aenter__()
            if way == "exit":
                await asyncio.gather(leave())
            if way == "scope":
                scope = anyio.CancelScope().__enter__()
                scope.cancel()
            await asyncio.sleep(0.1)

    def rank(states) -> list[float]:
        return [1.0 for _ in states]

    env = single(rubric=Ranks([rank]))
    for result in await played(env, ScriptedModel("one"), 3):
        (state,) = result.states
        assert (result.error, state["reward"]) == (None, 0.0)
        assert "Ranks" in state["scoring_errors"]
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("later", [ConnectionError("away"), ValueError("no JSON")])
async def test_a_group_of_failures_is_weather_if_each_of_them_is(later):
    class Calls(Echo):
        async def env_response(self, messages, state):
            async def fails(error):
                raise error

            async with asyncio.TaskGroup() as group:
                for error in (ConnectionError("away"), later):
                    group.create_task(fails(error))

    for result in await played(Calls(), ScriptedModel("two")):
        is_weather = isinstance(later, ConnectionError)
        assert (result.error is not None) == is_weather
        assert result.states[0]["reward"] == (None if is_weather else 0.0)


async def test_a_reward_function_of_which_all_tasks_met_the_weather_gives_no_reward():
    async def judged(completion):
        async def fails():
            raise ConnectionError("away")

        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    env = single(rubric=Rubric([judged]))
    for result in await played(env, ScriptedModel("one")):
        assert (result.error.phase, result.states[0]["reward"]) == ("scoring", None)


async def test_a_loop_that_swallows_a_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(OwnTask, "again_s", 0.1)
    log = []

    class Stubborn(Echo):
        async def env_response(self, messages, state):
            while True:
                try:
                    await asyncio.sleep(60)
                except:  # noqa: E722  as authors write it
                    log.append("swallowed")
                    await asyncio.sleep(30)  # and here the next one arrives

    env = Stubborn()
    engine = RolloutEngine(env, ScriptedModel("two"), deadline_s=0.2)
    for result in await asyncio.wait_for(engine.run_all([a_request(env)]), 30):
        assert (result.error.type, log) == ("RolloutTimeout", ["swallowed"])
