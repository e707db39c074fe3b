"""One agent, one world: action targets and truncations, case by case."""

import asyncio

import pytest
from protocol_kit import CountWorld, a_call, a_delegator, an_agent, move

from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import EpisodeContext, Recording, SingleAgentProtocol
from rolltree.agents.protocols.episode import open_world
from rolltree.inference.deadline import Clock
from rolltree.samples import build_samples
from rolltree.testing import ScriptedAnswer, ScriptedClient
from rolltree.values.errors import ConfigError, ServerError
from rolltree.values.seeds import derive_seed
from rolltree.values.steps import AgentStep, EnvironmentStep, ToolAnswer
from rolltree.values.types import FinishReason, State


async def play(answers, world=None, *, agent=None, context=None, **settings):
    world = world or CountWorld(end=2)
    protocol = SingleAgentProtocol(agent or an_agent(answers), **settings)
    (rollout,) = await protocol.run(world, context)
    return rollout


def kinds(rollout):
    return ["agent" if isinstance(step, AgentStep) else "env" for step in rollout.steps]


def marked(rollout):
    """The indices of steps that say that they are the end, and the flags of the last record."""
    ends = [i for i, step in enumerate(rollout.steps) if step.truncated or step.terminated]
    extras = rollout.agent_steps[-1].record["extras"]
    return ends, (extras["terminated"], extras["truncated"])


class TestTheLoop:
    async def test_observe_act_step(self):
        world = CountWorld(end=2)
        rollout = await play(["move 1", "move 2"], world, context=EpisodeContext(seed=7))
        assert (world.seeds, world.actions) == ([7], ["1", "2"])
        assert kinds(rollout) == ["agent", "env", "agent", "env"]
        first, second = rollout.environment_steps
        assert (first.prev_obs, first.action, first.next_obs) == ("start", "1", "after 1")
        assert (second.turn, second.agent_steps) == (1, (2,))
        assert [m["content"] for m in rollout.agent_steps[1].prompt] == [
            "start",
            "move 1",
            "after 1",
        ]

    async def test_rewards_land_in_one_place_each(self):
        rollout = await play(["nothing", "move 1", "move 2"])
        assert [step.reward for step in rollout.agent_steps] == [-0.5, 0.25, 0.25]
        assert [step.reward for step in rollout.environment_steps] == [1.0, 1.0]
        assert rollout.turn_rewards == {0: -0.5, 1: 1.25, 2: 1.25}

    async def test_each_call_samples_with_a_seed_of_its_own(self):
        client = ScriptedClient(["move 1", "move 2"])
        agent = Agent(client, parser=move, sampling={"temperature": 0.5, "max_tokens": 9})
        context = EpisodeContext(sampling_seed=11, sampling={"temperature": 0.25})
        await play([], agent=agent, context=context)
        assert [c.sampling.seed for c in client.calls] == [11, derive_seed(11, "turn", 1)]
        first = client.calls[0].sampling
        assert (first.temperature, first.max_tokens) == (0.25, 9)  # field by field

    async def test_without_a_world_the_first_answer_with_an_action_is_the_end(self):
        question = [{"role": "user", "content": "2 + 2?"}]
        agent = an_agent(["well", "move 4", "more"])
        (rollout,) = await SingleAgentProtocol(agent).run(None, EpisodeContext(messages=question))
        assert kinds(rollout) == ["agent", "agent"]
        assert rollout.terminated
        assert rollout.steps[-1].parse_result.action == "4"

    async def test_one_protocol_plays_many_episodes_at_once(self):
        client = ScriptedClient(["move 1", "move 2"], delay_s=0.001)
        protocol = SingleAgentProtocol(lambda: Agent(client, parser=move))
        played = await asyncio.gather(*(protocol.run(CountWorld(end=2)) for _ in range(5)))
        assert all(len(rollouts) == 1 and rollouts[0].terminated for rollouts in played)

    async def test_an_asynchronous_world_and_a_blocking_one_in_a_thread(self):
        class Slow(CountWorld):
            async def step(self, action):
                await asyncio.sleep(0)
                return super().step(action)

        assert (await play(["move 1", "move 2"], Slow(end=2))).terminated
        threaded = CountWorld(end=2)
        threaded.in_thread = True
        assert (await play(["move 1", "move 2"], threaded)).terminated

    def test_no_steps_are_an_error(self):
        with pytest.raises(ConfigError, match="max_steps must be >= 1, got 0"):
            SingleAgentProtocol(an_agent([]), max_steps=0)


class TestTruncation:
    """What truncates an episode: one test for each case."""

    async def test_the_world_terminates(self):
        rollout = await play(["move 1", "move 2"])
        assert (rollout.terminated, rollout.truncated) == (True, False)
        assert rollout.truncation_reason is None
        assert rollout.meta["episode_truncated"] is False
        assert marked(rollout) == ([3], (True, False))

    async def test_the_world_truncates(self):
        rollout = await play(["move 1", "move 2"], CountWorld(cut=2))
        assert (rollout.terminated, rollout.truncated) == (False, True)
        assert rollout.meta["truncation_reason"] == "env"
        assert rollout.steps[-1].info["truncation_reason"] == "env"
        assert marked(rollout) == ([3], (False, True))

    async def test_a_world_that_says_both_has_terminated(self):
        rollout = await play(["move 1"], CountWorld(end=1, cut=1))
        assert rollout.meta["episode_truncated"] is False

    async def test_max_steps(self):
        rollout = await play(["move 1", "move 2", "move 3"], CountWorld(), max_steps=2)
        assert rollout.steps[-1].truncated
        assert rollout.steps[-1].info["truncation_reason"] == "max_steps"
        assert rollout.meta["episode_truncated"] is True
        assert rollout.meta["truncation_reason"] == "max_steps"
        assert rollout.truncation_reason == "max_steps"
        assert marked(rollout) == ([3], (False, True))

    async def test_the_marked_step_is_the_last_one_also_after_parse_failures(self):
        rollout = await play(["move 1", "hm", "hmm"], CountWorld(), max_steps=3)
        assert kinds(rollout) == ["agent", "env", "agent", "agent"]
        assert marked(rollout) == ([3], (False, True))
        assert isinstance(rollout.steps[-1], AgentStep)
        assert rollout.steps[-1].info["parse_feedback_obs"] == "Say: move N"

    async def test_a_world_that_ends_at_the_last_step_is_not_truncated(self):
        assert (await play(["move 1", "move 2"], max_steps=2)).truncated is False

    async def test_finish_reason_is_not_truncation(self):
        answers = [ScriptedAnswer("move 1", FinishReason.LENGTH), "move 2"]
        agent = an_agent(answers, reject_incomplete_completions=False)
        rollout = await play([], CountWorld(end=2), agent=agent)
        assert rollout.agent_steps[0].info["finish_reason"] == "length"
        assert not rollout.agent_steps[0].truncated
        assert rollout.terminated

    async def test_incomplete_completions_are_rejected_like_parse_failures(self):
        world = CountWorld(end=1)
        answers = [ScriptedAnswer("move 1", FinishReason.LENGTH), "move 2"]
        rollout = await play(answers, world)
        cut = rollout.agent_steps[0]
        assert world.actions == ["2"]
        assert cut.parse_result.action is None
        assert cut.info["incomplete_completion"] is True
        assert cut.info["finish_reason"] == "length"
        said = [m["content"] for m in rollout.agent_steps[1].prompt]
        assert said[1] == "move 1"
        assert "cut off" in said[2]

    async def test_stop_on_parse_error(self):
        world = CountWorld(end=2)
        rollout = await play(["hm", "move 1"], world, stop_on_parse_error=True)
        assert (rollout.terminated, rollout.truncated) == (True, False)
        assert world.actions == []

    async def test_time_limit(self):
        clock = Clock(limit_s=1e-9)
        rollout = await play(["move 1"], context=EpisodeContext(clocks=(clock,)))
        assert rollout.truncation_reason == "time_limit"
        assert rollout.steps == ()

    async def test_waiting_for_the_server_is_not_spent(self):
        clock = Clock(limit_s=30.0)
        clock.call_started()
        clock.call_ended(wait_s=-29.9)  # as if 29.9 s of the 30 were spent
        clock.call_ended(wait_s=29.9)
        rollout = await play(["move 1", "move 2"], context=EpisodeContext(clocks=(clock,)))
        assert rollout.terminated

    async def test_max_seq_len(self):
        rollout = await play(["move 1", "move 2"], context=EpisodeContext(max_seq_len=8))
        assert kinds(rollout) == ["agent", "env"]
        assert rollout.truncation_reason == "max_seq_len"
        assert marked(rollout) == ([1], (False, True))

    @pytest.mark.parametrize("limit", ["time_limit", "max_seq_len"])
    async def test_limits_hold_between_the_tool_rounds_of_a_turn(self, limit):
        clock = Clock(limit_s=1e9)

        def look() -> str:
            """Look around, which takes all the time that is left."""
            clock.limit_s = 1e-9 if limit == "time_limit" else None
            return "a wall"

        call = {"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
        agent = an_agent([{"role": "assistant", **call}] * 9, ToolAgent, tools=[look])
        max_seq_len = 8 if limit == "max_seq_len" else None
        context = EpisodeContext(clocks=(clock,), max_seq_len=max_seq_len)
        rollout = await play([], agent=agent, context=context)
        assert rollout.truncation_reason == limit
        assert rollout.error is None
        assert [answer.text for s in rollout.agent_steps for answer in s.tool_answers] == ["a wall"]

    async def test_training_sees_it(self):
        """Per-step flags, the episode's, the reason and the finish reason reach the samples."""
        agent = an_agent(["move 1", "hm"])
        await SingleAgentProtocol(agent, max_steps=2).run(CountWorld())
        state = State(trajectory=agent.trajectory, reward=1.0, truncated=True)
        state["truncation_reason"] = "max_steps"
        samples = build_samples([state], "step").samples
        assert [s.origins[0].truncation_reason for s in samples] == ["max_steps"] * 2
        assert [s.origins[0].finish_reason for s in samples] == ["stop"] * 2


class TestExternalTools:
    async def test_the_table_of_action_targets(self):
        """internal: the agent goes on; external: parse_result None, answered; env: the world."""

        def double(n: int) -> int:
            """Double a number."""
            return 2 * n

        agent = a_delegator(
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "double", "arguments": '{"n": 4}'}}],
                },
                a_call("look"),
                "move 8",
            ],
            tools=[double],
        )
        asked = []

        async def handler(request):
            asked.append((request.name, dict(request.arguments)))
            return "seen"

        rollout = await play([], CountWorld(end=1), agent=agent, external_tool_handler=handler)
        internal, external, env = rollout.agent_steps
        assert [s.action_target for s in rollout.agent_steps] == ["internal", "external", "env"]
        assert internal.parse_result is not None
        assert external.parse_result is None
        assert env.parse_result.action == "8"
        assert {s.turn for s in rollout.agent_steps} == {0}  # one turn
        assert internal.tool_answers[0].text == "8"
        assert external.tool_answers[0].text == "seen"
        assert asked == [("delegate", {"task": "look"})]
        assert rollout.environment_steps[0].agent_steps == (0, 1, 2)
        assert env.prompt[-1]["content"] == "seen"

    @pytest.mark.parametrize("kind", ["plain", "async", "object", "answer"])
    async def test_handlers_of_every_kind(self, kind):
        class Object:
            async def __call__(self, request):
                return "answered"

        async def asynchronous(request):
            return "answered"

        handlers = {
            "plain": lambda request: "answered",
            "async": asynchronous,
            "object": Object(),
            "answer": lambda request: ToolAnswer(request.call_id, request.name, "answered"),
        }
        agent = a_delegator([a_call("x"), "move 1"])
        rollout = await play(
            [], CountWorld(end=1), agent=agent, external_tool_handler=handlers[kind]
        )
        assert rollout.agent_steps[0].tool_answers[0].text == "answered"

    async def test_what_a_handler_raises_is_an_answer(self):
        def handler(request):
            raise OSError("no disk")

        agent = a_delegator([a_call("x"), "move 1"])
        rollout = await play([], CountWorld(end=1), agent=agent, external_tool_handler=handler)
        answer = rollout.agent_steps[0].tool_answers[0]
        assert answer.text == "delegate failed: OSError: no disk"
        assert answer.error.type == "OSError"
        assert rollout.error is None

    async def test_a_refusal_after_an_answer_ends_the_episode_without_an_error(self):
        def answer(messages):
            if len(messages) > 2:
                raise ServerError("content_filter", status=400, retryable=False)
            return "move 1"

        rollout = await play([], CountWorld(end=3), agent=an_agent(answer))
        assert (rollout.error, rollout.truncation_reason) == (None, "env")
        assert rollout.meta["refused_request"] == "content_filter"
        assert rollout.reward == 1.25

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_a_handler_that_calls_exit_ends_nothing(self, is_async):
        def handler(request):
            raise SystemExit(3)

        async def later(request):
            raise SystemExit(3)

        agent = a_delegator([a_call("x"), "move 1"])
        chosen = later if is_async else handler
        rollout = await play([], CountWorld(end=1), agent=agent, external_tool_handler=chosen)
        answer = rollout.agent_steps[0].tool_answers[0]
        assert answer.text == "delegate failed: ToolQuit: delegate called exit()."
        assert (rollout.error, rollout.terminated) == (None, True)

    async def test_without_a_handler_the_agent_is_told(self):
        agent = a_delegator([a_call("x"), "move 1"])
        rollout = await play([], CountWorld(end=1), agent=agent)
        assert "'delegate' is not available here" in rollout.agent_steps[0].tool_answers[0].text

    async def test_external_calls_are_bounded(self):
        """The third call is refused, and an agent that calls on is cut for its budget."""
        agent = a_delegator(lambda messages: a_call("again"), max_tool_rounds=100)
        handled = []
        rollout = await play(
            [],
            agent=agent,
            external_tool_handler=lambda request: handled.append(1) or "ok",
            max_external_calls=2,
        )
        assert len(handled) == 2
        assert rollout.truncation_reason == "budget"
        answers = [step.tool_answers for step in rollout.agent_steps]
        assert [a[0].text for a in answers[:2]] == ["ok", "ok"]
        assert "No more tool calls" in answers[2][0].text
        assert len(rollout.agent_steps) == 4
        assert rollout.steps[-1].truncated

    async def test_calls_of_one_message_are_worked_on_at_the_same_time(self):
        together = asyncio.Barrier(2)

        async def handler(request):
            async with asyncio.timeout(5):
                await together.wait()
            return request.arguments["task"]

        agent = a_delegator([a_call(["a", "b"]), "move 1"])
        rollout = await play([], CountWorld(end=1), agent=agent, external_tool_handler=handler)
        assert [a.text for a in rollout.agent_steps[0].tool_answers] == ["a", "b"]


class TestFailures:
    async def test_a_model_that_fails_leaves_the_steps_before(self):
        rollout = await play(["move 1"], CountWorld())  # the script has one answer only
        assert (rollout.error.type, rollout.error.phase) == ("BadResponse", "model")
        assert kinds(rollout) == ["agent", "env"]

    async def test_a_world_that_fails(self):
        class Broken(CountWorld):
            def reset(self, *, seed=None):
                raise RuntimeError("no board")

        rollout = await play(["move 1"], Broken())
        assert (rollout.error.type, rollout.error.phase) == ("RuntimeError", "environment")
        assert "no board" in rollout.error.traceback
        assert kinds(rollout) == []

    async def test_a_world_that_raises_on_a_move_ends_the_rollout_which_counts(self):
        """It may be an illegal move, and no move may decide whether a rollout has a reward."""

        class Strict(CountWorld):
            def step(self, action):
                raise AssertionError("played illegal move")

        rollout = await play(["move 1"], Strict())
        assert (rollout.error, rollout.truncation_reason) == (None, "env")
        assert kinds(rollout) == ["agent"]

    async def test_a_world_whose_network_is_away_fails(self):
        class Remote(CountWorld):
            def step(self, action):
                raise ConnectionResetError("hung up")

        rollout = await play(["move 1"], Remote())
        assert rollout.error.type == "ConnectionResetError"

    async def test_a_world_that_cannot_be_closed_keeps_what_was_played(self):
        class Stuck(CountWorld):
            def close(self):
                raise RuntimeError("stuck")

        async with open_world(Stuck) as world:
            rollout = await play(["move 1", "move 1", "move 1"], world, max_steps=2)
        assert (rollout.error, len(kinds(rollout))) == (None, 4)

    async def test_a_cancelled_episode_keeps_what_it_had_and_leaves_no_task(self):
        started = asyncio.Event()

        async def hang(request):
            started.set()
            await asyncio.sleep(60)

        agent = a_delegator(["move 1", a_call("x")])
        protocol = SingleAgentProtocol(agent, external_tool_handler=hang)
        recording = Recording()
        task = asyncio.create_task(protocol.run(CountWorld(), None, recording))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (rollout,) = recording.rollouts()
        assert kinds(rollout) == ["agent", "env", "agent"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_steps_are_values_of_the_right_type(self):
        rollout = await play(["move 1", "move 2"])
        assert all(isinstance(step, AgentStep | EnvironmentStep) for step in rollout.steps)
