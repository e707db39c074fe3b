"""Three example environments over real HTTP, with the official openai client, and with faults."""

import collections
import itertools

import numpy as np
import pytest
from env_scripts import Echo, single, user

import rolltree as rt
from rolltree.inference import OpenAIClient
from rolltree.inference.chat import ChatRenderer
from rolltree.inference.retry import RetryPolicy
from rolltree.testing import ByteTokenizer, HttpFault, ScriptedServer

openai = pytest.importorskip("openai")


def countdown(messages):
    """Say "two", "three", then the answer. A client that sends ids is asked with their text."""
    if isinstance(messages, str):
        turn = messages.count("<|im_start|>assistant") - 1
    else:
        turn = sum(message["role"] == "assistant" for message in messages)
    return ["two", "three", "one"][min(turn, 2)]


@pytest.fixture
def server():
    with ScriptedServer(countdown) as server:
        yield server


def official(server, **settings):
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="none", **settings)


async def test_example_1_evaluation(server):
    env = single()
    async with official(server) as client:
        results = await env.evaluate(client, model="scripted", num_examples=2)
    assert results.metadata.avg_reward == 0.5  # "two" is the second row's answer
    for state in results.state:
        assert len(state["trajectory"]) == 1
        for step in state["trajectory"]:
            assert step["prompt"][0]["role"] == "user"
            assert step["completion"][0]["role"] == "assistant"


async def test_example_2_trajectories(server):
    env = Echo()
    row = env.dataset[0]
    given = {
        "prompt": row["prompt"],
        "answer": row.get("answer", ""),
        "task": row.get("task", "default"),
        "info": row.get("info", {}),
        "example_id": row["example_id"],
    }
    async with official(server) as client:
        state = await env.rollout(given, client, model="scripted")
    assert state["error"] is None
    assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3, 5]
    said = [step["completion"][0]["content"] for step in state["trajectory"]]
    assert said == ["two", "three", "one"]
    assert all(step["reward"] is None for step in state["trajectory"])
    assert all(step["tokens"]["completion_ids"] for step in state["trajectory"])
    assert state["terminated"]


async def test_example_3_training_examples(server):
    env = Echo()
    async with official(server) as client:
        results = await env.generate(
            env.dataset, client=client, model="scripted", score_rollouts=True
        )
    examples = rt.process_trajectories_for_training(states=results.state, mask_prompts=True)
    steps = [step for state in results.state for step in state["trajectory"]]
    assert len(examples) == len(steps)
    for example, step in zip(examples, steps, strict=True):
        tokens = step["tokens"]
        assert example.token_ids == tokens["prompt_ids"] + tokens["completion_ids"]
        assert sum(example.mask) == len(tokens["completion_ids"])
        assert example.reward == step["reward"]


async def test_token_in_turns_are_one_sample(server):
    """A client with a renderer sends ids: the rollout is one path, whatever the template does."""
    renderer = ChatRenderer(ByteTokenizer())
    client = OpenAIClient(server.base_url, "scripted", renderer=renderer)
    env = Echo()
    state = (await env.generate(env.dataset[:1], client)).state[0]
    await client.aclose()
    assert state["error"] is None
    steps = state["trajectory"]
    for before, after in itertools.pairwise(steps):
        whole = before["tokens"]["prompt_ids"] + before["tokens"]["completion_ids"]
        assert after["tokens"]["prompt_ids"][: len(whole)] == whole
    assert len(rt.build_samples([state], "interleave").samples) == 1


FAULTS = [
    None,
    HttpFault(status=500),
    HttpFault(status=429, retry_after_s=0.0),
    HttpFault(reset=True),
    HttpFault(body="broken"),
    HttpFault(body="truncated"),
    HttpFault(status=400, message="no such thing"),
    HttpFault(delay_s=2.0),  # longer than the client waits
]


class Counting(Echo):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.cleaned = collections.Counter()

    @rt.cleanup
    async def release(self, state):
        self.cleaned[state["example_id"]] += 1


async def test_every_rollout_ends_as_a_result_or_a_typed_error():
    rng = np.random.default_rng(5)
    draws = rng.integers(0, len(FAULTS), 10_000).tolist()
    rows = [{"question": f"q{i}", "answer": "one", "example_id": i} for i in range(40)]
    env = Counting(eval_dataset=rows)
    with ScriptedServer(countdown, faults=lambda number: FAULTS[draws[number]]) as server:
        client = OpenAIClient(
            server.base_url, "scripted", retry=RetryPolicy(max_retries=0), timeout_s=1.0
        )
        results = await env.evaluate(client, max_concurrent=16)
        await client.aclose()
    assert len(results.state) == 40
    kinds = collections.Counter()
    for state in results.state:
        if state["error"] is None:
            # A request that is refused after an answer may quote it, so the rollout is scored.
            is_cut = state.get("refused_request") is not None
            assert state["reward"] == float(not is_cut)
            assert state["terminated"] != is_cut
        else:
            kinds[state["error"].type] += 1
            assert state["error"].phase == "model"
            assert state["error"].traceback
            assert state["reward"] is None
    assert set(kinds) == {"ServerError", "ConnectionFailed", "BadResponse"}
    said = " ".join(s["error"].message for s in results.state if s["error"] is not None)
    for sign in ("429", "500", "400", "no answer in time", "hung up", "not a completion in JSON"):
        assert sign in said
    assert env.cleaned == collections.Counter(range(40))
    assert results.metadata.num_failed == kinds.total()


async def test_a_prompt_over_the_servers_context_truncates():
    with ScriptedServer(countdown, context_length=60) as server:
        async with official(server) as client:
            env = Echo(sampling_args={"max_tokens": 8})
            state = await env.rollout(env.example("train", 0), client, "scripted")
    assert state["error"] is None
    assert (state["truncated"], state["truncation_reason"]) == (True, "max_seq_len")
    assert 1 <= len(state["trajectory"]) < 3
    assert state["completion"][0] == {"role": "assistant", "content": "two"}


async def test_completion_prompts(server):
    def answer(prompt):
        return " world"

    with ScriptedServer(answer) as server:
        async with official(server) as client:
            env = rt.SingleTurnEnv(
                dataset=[{"prompt": "hello", "answer": " world"}],
                message_type="completion",
                rubric=rt.Rubric([lambda completion, answer: float(completion == answer)]),
            )
            results = await env.evaluate(client, "scripted")
    assert results.reward == [1.0]
    assert results.completion == [" world"]


async def test_tools_over_http():
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
    }

    def script(messages):
        if messages[-1]["role"] == "tool":
            return f"it is {messages[-1]['content']}"
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    with ScriptedServer(script) as server:
        async with official(server) as client:
            env = rt.ToolEnv(tools=[add], dataset=[{"prompt": user("2 + 3?")}])
            state = await env.rollout(env.example("train", 0), client, "scripted")
    assert state["error"] is None
    assert state["completion"][-1]["content"] == "it is 5"
    assert len(state["trajectory"]) == 2
