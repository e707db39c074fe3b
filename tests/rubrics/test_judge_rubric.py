import asyncio

import pytest
from rubric_states import a_state as any_state

from rolltree.environments.parsers import XMLParser
from rolltree.environments.rubrics import JudgeRubric
from rolltree.testing import FaultyClient, ScriptedClient
from rolltree.values.errors import ConfigError, ConnectionFailed, PromptTooLong, ServerError


async def correct(judge, prompt, completion, answer, state):
    reply = await judge(prompt, completion, answer, state)
    return float(reply.strip().lower().startswith("yes"))


async def sure(judge, prompt, completion, answer, state):
    return float("!" in await judge(prompt, completion, answer, state))


def a_state(said="<answer>4</answer>", answer="4"):
    return any_state(
        prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "2 {+} 2"}],
        completion=[{"role": "assistant", "content": said}],
        answer=answer,
    )


async def test_the_judge_decides_and_two_functions_share_one_call():
    client = ScriptedClient(lambda messages: "Yes!")
    rubric = JudgeRubric(
        [correct, sure],
        [1.0, 0.5],
        XMLParser(["answer"]),
        judge_client=client,
        judge_model="judge-1",
        judge_prompt="Q {question} A {answer} R {response} {{}}",
        judge_sampling_args={"temperature": 0.0, "max_tokens": 5},
    )
    state = a_state()
    await rubric.score_rollout(state)
    assert state["reward"] == 1.5
    assert len(client.calls) == 1
    call = client.calls[0]
    assert call.messages == [{"role": "user", "content": "Q 2 {+} 2 A 4 R 4 {}"}]
    assert (call.sampling.temperature, call.sampling.max_tokens) == (0.0, 5)
    assert call.model == "judge-1"
    assert state["judge_response"] == {"Q 2 {+} 2 A 4 R 4 {}": "Yes!"}
    assert rubric._asked == {}


async def test_the_default_prompt_and_a_no():
    def strict(messages):
        text = messages[0]["content"]
        return "yes" if text.partition("Response:\n")[2].startswith("4") else "no"

    rubric = JudgeRubric([correct], judge_client=ScriptedClient(strict))
    good, bad = a_state("4"), a_state("5")
    await asyncio.gather(rubric.score_rollout(good), rubric.score_rollout(bad))
    assert (good["reward"], bad["reward"]) == (1.0, 0.0)


async def test_no_answer_is_said_so_to_the_judge():
    client = ScriptedClient(lambda messages: "no")
    rubric = JudgeRubric([correct], parser=XMLParser(["answer"]), judge_client=client)
    await rubric.score_rollout(a_state("four"))
    assert "(no answer was given)" in client.calls[0].messages[0]["content"]


async def test_a_judge_that_fails_is_no_zero():
    client = FaultyClient(ScriptedClient(lambda messages: "yes"), [ConnectionFailed("judge away")])
    rubric = JudgeRubric([correct], judge_client=client)
    first, second = a_state(), a_state()
    await rubric.score_rollout(first)
    assert first["reward"] is None
    assert first["error"].message.startswith("reward function 'correct', ")
    assert first["error"].message.endswith(": judge away")
    assert first["error"].phase == "scoring"
    await rubric.score_rollout(second)
    assert second["reward"] == 1.0


@pytest.mark.parametrize("status", [400, 403])
async def test_a_response_that_the_judge_refuses_counts_as_no_answer(status):
    def reply(messages):
        if "filtered" in messages[0]["content"]:
            raise ServerError("content_filter", status=status, retryable=False)
        return "yes" if "four" in messages[0]["content"] else "no"

    rubric = JudgeRubric([correct], judge_client=ScriptedClient(reply))
    refused, right = a_state("filtered four"), a_state("four")
    for state in (refused, right):
        await rubric.score_rollout(state)
    assert (refused["reward"], refused["error"], right["reward"]) == (0.0, None, 1.0)
    # What is wrong with every prompt is not the response's fault.
    rubric = JudgeRubric([correct], judge_client=ScriptedClient(reply), judge_prompt="filtered")
    await rubric.score_rollout(right)
    assert (right["reward"], right["error"].type) == (None, "ServerError")


def test_wrong_settings():
    with pytest.raises(ConfigError, match="needs a judge_client"):
        JudgeRubric([correct])
    with pytest.raises(ConfigError, match="completion"):
        JudgeRubric([correct], judge_client=ScriptedClient(["x"]), judge_prompt="{completion}")


async def test_a_response_cannot_outgrow_the_judges_prompt():
    """A judge that cannot be asked gives no reward, so a long answer was a way out of a bad one."""
    asked = []

    def reply(messages):
        asked.append(len(messages[0]["content"]))
        if asked[-1] > 9000:
            raise PromptTooLong("too long")
        return "no"

    rubric = JudgeRubric([correct], judge_client=ScriptedClient(reply))
    state = a_state("x" * 1_000_000 + " the end")
    await rubric.score_rollout(state)
    assert (state["reward"], state["error"]) == (0.0, None)
    assert [size // 1000 for size in asked] == [32, 16, 8]
    (said,) = state["judge_response"]
    assert "the end" in said
    assert "characters were left out" in said
    rubric = JudgeRubric([correct], judge_client=ScriptedClient(reply), judge_prompt="x" * 9999)
    state = a_state("4")
    await rubric.score_rollout(state)
    assert (state["reward"], state["error"].type) == (None, "PromptTooLong")
