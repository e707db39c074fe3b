"""Three example environments in the style of verifiers, on the embedded engine.

The model is real (SmolLM2-135M) and small: what counts is that every line of the examples works.
Answers are cut short to keep it quick.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rolltree as vf

ROOT = Path(__file__).parents[2]
SHORT = {"max_tokens": 4}
MADE = {"train": "generated", "test": "generated"}  # the tests have no network


@pytest.fixture(scope="module")
def loaded():
    pytest.importorskip("torch", reason="the embedded engine needs torch")
    from rolltree.inference.models import load_model

    return load_model("smollm2-135m")


@pytest.fixture
def client(loaded):
    from rolltree.inference.local import local_client

    model, tokenizer = loaded
    return local_client(model, tokenizer, name="smollm2-135m", max_batch=4, max_context=512)


@pytest.fixture(autouse=True)
def _at_home_and_offline(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(client, work):
    async def and_close():
        try:
            return await work
        finally:
            await client.aclose()

    return asyncio.run(and_close())


def test_example_1_single_turn_evaluation(client, capsys):
    env = vf.load_environment("gsm8k", **MADE)
    results = run(client, env.evaluate(client, "smollm2-135m", SHORT, num_examples=2))

    print(f"Average reward: {results.metadata.avg_reward}")
    for state in results.state:
        print(f"Trajectory steps: {len(state['trajectory'])}")
        for step in state["trajectory"]:
            print(f"  Prompt: {step['prompt']}")
            print(f"  Completion: {step['completion']}")

    assert [state["error"] for state in results.state] == [None, None]
    assert results.metadata.avg_reward in (0.0, 0.5, 1.0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Average reward: ")
    assert printed.count("Trajectory steps: 1") == 2
    assert set(results.task) == {"gsm8k-generated"}
    for state in results.state:
        assert state["completion"] == state["trajectory"][0]["completion"]
        assert state["completion"][0]["content"]


def test_example_2_multi_turn_with_trajectories(client, capsys):
    env = vf.load_environment("wordle")
    row = env.dataset[0]
    input = {
        "prompt": row["prompt"],
        "answer": row.get("answer", ""),
        "task": row.get("task", "default"),
        "info": row.get("info", {}),
        "example_id": row["example_id"],
    }

    state = run(client, env.rollout(input, client, model="smollm2-135m", sampling_args=SHORT))

    for i, step in enumerate(state["trajectory"]):
        print(f"Step {i}:")
        print(f"  Prompt length: {len(step['prompt'])}")
        print(f"  Completion: {step['completion']}")
        print(f"  Reward: {step['reward']}")
        if step["tokens"]:
            print(f"  Token IDs: {step['tokens']['completion_ids']}")

    assert state["error"] is None
    assert (len(state["trajectory"]), state["stop_condition"]) == (6, "max_turns_reached")
    assert [len(step["prompt"]) for step in state["trajectory"]] == [2, 4, 6, 8, 10, 12]
    assert capsys.readouterr().out.count("Token IDs: [") == 6
    for before, after in zip(state["trajectory"], state["trajectory"][1:], strict=False):
        whole = before["tokens"]["prompt_ids"] + before["tokens"]["completion_ids"]
        assert after["tokens"]["prompt_ids"][: len(whole)] == whole


def test_example_3_training_with_trajectories(client):
    env = vf.load_environment("math", **MADE)
    dataset = env.dataset[:3]
    results = run(
        client,
        env.generate(
            dataset,
            client=client,
            model="smollm2-135m",
            sampling_args=SHORT,
            score_rollouts=True,
        ),
    )

    training_examples = vf.process_trajectories_for_training(
        states=results.state,
        mask_prompts=True,
    )

    for example in training_examples[:5]:
        print(f"Sequence length: {len(example.token_ids)}")
        print(f"Reward: {example.reward}")

    assert len(training_examples) == 3
    for example, state in zip(training_examples, results.state, strict=True):
        tokens = state["trajectory"][0]["tokens"]
        num_prompt, num_sampled = len(tokens["prompt_ids"]), len(tokens["completion_ids"])
        assert 0 < num_sampled <= 4
        assert example.token_ids == tokens["prompt_ids"] + tokens["completion_ids"]
        assert example.mask == [0] * num_prompt + [1] * num_sampled
        assert example.logprobs == [0.0] * num_prompt + tokens["completion_logprobs"]
        assert all(logprob <= 0 for logprob in tokens["completion_logprobs"])
        assert example.reward == state["reward"]
