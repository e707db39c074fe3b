"""Twenty turns with a tool on real chat templates: what is carried verbatim merges into one sample.

Against it, the same turns with every prompt rendered anew. The scenario is `benchmarks/tool_loop`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench_kit import load
from rolltree.agents import ReActAgent, ToolAgent
from rolltree.samples import build_samples
from rolltree.testing import ByteTokenizer, ScriptedClient
from rolltree.values.types import State

NUM_TURNS = 20


@pytest.fixture(scope="module")
def bench() -> Any:
    return load("tool_loop")


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
async def test_twenty_turns_with_a_tool_are_one_sample(bench: Any, name: str) -> None:
    agent = await bench.play(
        ToolAgent(bench.make_client(name), tools=[bench.add], system_prompt="Count.")
    )
    assert agent.steps[-1].parse_result.action == f"it is {NUM_TURNS + 1}"
    state = State(trajectory=agent.trajectory, reward=1.0, advantage=1.0)
    interleaved, turns, tree = (
        build_samples([state], scope) for scope in ("interleave", "turn", "tree")
    )
    assert interleaved.breaks == ()
    (sample,) = interleaved.samples
    assert sample.origins[0].calls == tuple(range(2 * NUM_TURNS))
    assert len(turns.samples) == NUM_TURNS
    assert tree.samples[0].ids.tolist() == sample.ids.tolist()
    # every sampled token, and nothing else, is trained, and it is the token that was sampled
    sampled = [step["tokens"]["completion_ids"] for step in agent.trajectory]
    assert sample.records.target.tolist() == [token for ids in sampled for token in ids]
    assert np.array_equal(sample.ids[sample.records.source + 1], sample.records.target)


@pytest.mark.parametrize(
    ("name", "num_samples"),
    [
        ("qwen3", NUM_TURNS + 1),  # each call of the tool is spelled anew, answers are not
        ("llama3", 2 * NUM_TURNS),  # answers are trimmed, too
    ],
)
def test_rendered_anew_the_same_turns_fall_apart(bench: Any, name: str, num_samples: int) -> None:
    anew, carried = bench.measure(name, "anew"), bench.measure(name, "carried")
    assert (anew["samples"], anew["breaks"]) == (num_samples, num_samples - 1)
    assert (carried["samples"], carried["breaks"]) == (1, 0)
    assert anew["calls"] == carried["calls"] == 2 * NUM_TURNS
    assert anew["trained"] > 8 * carried["trained"]


async def test_calls_as_text_keep_the_prefix_too() -> None:
    """The stop string is sampled and stays in the ids, though not in the text."""

    def add(a: int) -> int:
        """Add one to a number."""
        return a + 1

    def answer(messages: Any) -> str:
        number = sum(message["role"] == "user" for message in messages)
        if not messages[-1]["content"].startswith("Observation:"):
            return f'Thought: add\nAction: add\nAction Input: {{"a": {number}}}\nObservation: 99'
        return f"Final Answer: {messages[-1]['content'].split()[1]}"

    agent = ReActAgent(ScriptedClient(answer), tools=[add])
    for turn in range(NUM_TURNS):
        agent.observe(f"turn {turn}")
        steps = await agent.act()
        assert steps[-1].parse_result is not None
        assert steps[-1].parse_result.action == str(2 * turn + 2)
    state = State(trajectory=agent.trajectory, reward=1.0, advantage=1.0)
    found = build_samples([state], "interleave")
    assert (len(found.samples), found.breaks) == (1, ())
    assert "\nObservation:" in ByteTokenizer().decode(found.samples[0].ids.tolist())
