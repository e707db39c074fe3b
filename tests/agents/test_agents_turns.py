"""One turn of an agent without tools: what is sent, recorded, parsed and fed back."""

from __future__ import annotations

from typing import Any

import pytest

from rolltree.agents import Agent
from rolltree.environments.parsers import tagged
from rolltree.inference import OpenAIClient
from rolltree.samples import build_samples
from rolltree.testing import FaultyClient, ScriptedAnswer, ScriptedClient, ScriptedServer
from rolltree.values.errors import BadResponse, ConfigError
from rolltree.values.seeds import derive_seed
from rolltree.values.steps import AgentStep, EnvironmentStep, ParseResult, Rollout
from rolltree.values.types import ErrorRecord, FinishReason, SamplingParams, State


async def one(agent: Agent, obs: str = "obs") -> AgentStep:
    agent.observe(obs)
    (step,) = await agent.act()
    return step


async def test_a_turn_without_tools_is_addressed_to_the_world() -> None:
    client = ScriptedClient(["<move>up</move>", "down"], version=4)
    agent = Agent(
        client, name="walker", system_prompt="Walk.", parser=tagged("move", reward=0.5, penalty=-1)
    )
    step = await one(agent)
    assert (step.agent, step.turn, step.action_target) == ("walker", 0, "env")
    assert step.parse_result == ParseResult("up", 0.5)
    assert step.reward == 0.5
    assert step.prompt == [
        {"role": "system", "content": "Walk."},
        {"role": "user", "content": "obs"},
    ]
    assert step.message == {"role": "assistant", "content": "<move>up</move>"}
    tokens = step.record["tokens"]
    assert tokens is not None
    assert bytes(tokens["completion_ids"][:-1]) == b"<move>up</move>"
    assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"])
    assert step.record["extras"]["policy_version_min"] == 4
    for mine, listed in [
        (step.prompt_ids, tokens["prompt_ids"]),
        (step.completion_ids, tokens["completion_ids"]),
        (step.logprobs, tokens["completion_logprobs"]),
        (step.versions, [4] * len(tokens["completion_ids"])),
    ]:
        assert mine is not None
        assert mine.tolist() == listed
    failed = await one(agent, "next")
    assert (failed.turn, failed.reward, failed.parse_failed) == (1, -1, True)
    told = "Put your answer between <move> and </move>."
    assert failed.info["parse_feedback_obs"] == told
    assert failed.parse_result == ParseResult(None, -1, told)
    assert [step.record for step in agent.steps] == list(agent.trajectory)
    assert [step["extras"]["turn"] for step in agent.trajectory] == [0, 1]
    assert agent.trajectory.tree.num_calls == 2


async def test_a_parser_without_feedback_gets_the_agents() -> None:
    agent = Agent(ScriptedClient(["x"]), parser=lambda text: ParseResult(None), parse_feedback="No")
    step = await one(agent)
    assert step.parse_result == ParseResult(None, 0.0, "No")


@pytest.mark.parametrize("reason", ["length", "abort", "content_filter"])
async def test_an_incomplete_answer_is_rejected_and_stays_in_the_history(reason: str) -> None:
    cut = ScriptedAnswer("<move>up</move> because", finish_reason=FinishReason(reason))
    agent = Agent(
        ScriptedClient([cut, "<move>up</move>"]),
        parser=tagged("move", reward=1.0),
        incomplete_penalty=-0.25,
        incomplete_feedback="Be brief.",
    )
    step = await one(agent)
    assert step.parse_result == ParseResult(None, -0.25, "Be brief.")  # the parser is not asked
    assert step.info["incomplete_completion"] is True
    assert step.info["finish_reason"] == reason
    assert step.finish_reason is FinishReason(reason)
    assert step.record["extras"]["incomplete_completion"] is True
    assert not step.truncated  # the model was cut, the episode was not
    assert step.parse_result is not None
    second = await one(agent, str(step.parse_result.obs))
    assert [m["content"] for m in second.prompt if isinstance(m, dict)] == [
        "obs",
        "<move>up</move> because",
        "Be brief.",
    ]
    state = State(trajectory=agent.trajectory, advantage=1.0)
    assert (
        build_samples([state], "interleave").breaks == ()
    )  # the cut turn is closed, not rewritten


async def test_incomplete_answers_can_be_accepted() -> None:
    cut = ScriptedAnswer("<move>up</move> because", finish_reason=FinishReason.LENGTH)
    agent = Agent(ScriptedClient([cut]), parser=tagged("move"), reject_incomplete_completions=False)
    step = await one(agent)
    assert step.parse_result == ParseResult("up")
    assert "incomplete_completion" not in step.info
    assert step.info["finish_reason"] == "length"


async def test_seeds_differ_per_call_and_depend_on_the_episodes_seed_alone() -> None:
    client = ScriptedClient(lambda messages: "a")
    agent = Agent(client, sampling={"temperature": 0.5, "max_tokens": 9})

    async def episode(seed: int | None) -> list[int | None]:
        agent.reset(seed=seed)
        for _ in range(3):
            await one(agent)
        return [call.sampling.seed for call in client.calls[-3:]]

    assert await episode(7) == [7, derive_seed(7, "turn", 1), derive_seed(7, "turn", 2)]
    assert await episode(8) == [8, derive_seed(8, "turn", 1), derive_seed(8, "turn", 2)]
    assert await episode(7) == [7, derive_seed(7, "turn", 1), derive_seed(7, "turn", 2)]
    assert await episode(None) == [None] * 3
    assert client.calls[0].sampling.temperature == 0.5
    agent.reset(sampling=SamplingParams(max_tokens=3, seed=11))
    await one(agent)
    assert client.calls[-1].sampling == SamplingParams(max_tokens=3, seed=11)


async def test_reset_forgets_the_episode_and_nothing_of_the_agent() -> None:
    agent = Agent(ScriptedClient(["1", "2"]), system_prompt="S")
    await one(agent)
    kept, history = agent.trajectory, agent.history
    shot = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    agent.reset(messages=shot)
    assert [m["content"] for m in agent.history] == ["S", "q", "a"]
    assert (agent.turn, agent.steps, len(agent.trajectory)) == (0, [], 0)
    assert len(kept) == 1
    assert len(history) == 3
    assert (await one(agent)).parse_result == ParseResult("1")  # a new session, a new script
    agent.reset(messages=[{"role": "system", "content": "T"}])
    assert [m["content"] for m in agent.history] == ["T"]  # the row's own system prompt wins


async def test_messages_can_be_observed_as_they_are() -> None:
    agent = Agent(ScriptedClient(["1"]))
    step = await one(agent, [{"role": "user", "content": "a"}])  # type: ignore[arg-type]
    assert step.prompt == [{"role": "user", "content": "a"}]


async def test_a_failing_model_keeps_what_was_done_before() -> None:
    client = FaultyClient(ScriptedClient(["1", "2"]), [None, BadResponse("down")])
    agent = Agent(client)
    await one(agent)
    agent.observe("again")
    with pytest.raises(BadResponse):
        await agent.act()
    assert [step.parse_result for step in agent.steps] == [ParseResult("1")]
    assert len(agent.trajectory) == 1


async def test_a_parser_that_breaks_fails_the_turn_and_keeps_the_call() -> None:
    agent = Agent(ScriptedClient(["x"]), parser=lambda text: ParseResult(1 / len(text[1:])))
    agent.observe("obs")
    with pytest.raises(ZeroDivisionError):
        await agent.act()
    assert [step.record for step in agent.steps] == list(agent.trajectory)
    assert agent.steps[0].parse_failed


async def test_a_call_without_ids_has_none() -> None:
    with ScriptedServer(lambda messages: "hi", token_ids="ignore") as server:
        client = OpenAIClient(server.base_url, "scripted")
        step = await one(Agent(client))
        await client.aclose()
    assert step.parse_result == ParseResult("hi")
    assert step.record["tokens"] is None
    assert (step.prompt_ids, step.logprobs, step.versions) == (None, None, None)


async def test_without_a_model_or_a_call_the_error_says_so() -> None:
    agent = Agent(name="lost")
    agent.observe("obs")
    with pytest.raises(ConfigError, match="'lost' has no client"):
        await agent.act()
    with pytest.raises(ValueError, match="nothing to answer"):
        agent.answer([])
    agent.reset(client=ScriptedClient(["ok"]))
    assert (await one(agent)).parse_result == ParseResult("ok")


def test_a_rollout_adds_each_reward_once() -> None:
    record: Any = {"prompt": [], "completion": [{"role": "assistant", "content": "x"}]}

    def said(turn: int, reward: float, **more: Any) -> AgentStep:
        parsed = ParseResult("x", reward)
        return AgentStep("a", turn, record, FinishReason.STOP, "env", parsed, reward, **more)

    def did(turn: int, reward: float, **more: Any) -> EnvironmentStep:
        return EnvironmentStep("a", turn, "o", "x", "p", reward, **more)

    steps = (
        said(0, -0.5),
        said(0, 0.25),
        did(0, 2.0, agent_steps=(0, 1)),
        said(1, -1.0, truncated=True, info={"truncation_reason": "max_steps"}),
    )
    rollout = Rollout(
        "r", "a", steps, {"episode_truncated": True, "truncation_reason": "max_steps"}
    )
    assert rollout.reward == 0.75
    assert rollout.turn_rewards == {0: 1.75, 1: -1.0}
    assert (rollout.terminated, rollout.truncated) == (False, True)
    assert rollout.truncation_reason == "max_steps"
    assert len(rollout.agent_steps) == 3
    assert rollout.environment_steps == (steps[2],)
    assert [rollout.steps[i] for i in rollout.environment_steps[0].agent_steps] == list(steps[:2])
    ended = Rollout("r", "a", (did(0, 1.0, terminated=True),))
    assert (ended.terminated, ended.truncated, ended.truncation_reason) == (True, False, None)
    assert Rollout("r", "a", (), error=ErrorRecord("E", "m", "t", "model")).reward == 0
