"""Twenty turns with a tool on real chat templates: what is carried verbatim merges into one sample.

Against it, the same agents with a client that renders the whole conversation anew each time, as a
chat endpoint of messages does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltree.agents import ReActAgent, ToolAgent
from rolltree.inference import ChatRenderer
from rolltree.samples import build_samples
from rolltree.testing import ByteTokenizer, ScriptedClient
from rolltree.types import State

TEMPLATES = Path(__file__).parents[1] / "samples" / "templates"
NUM_TURNS = 20
SPECIAL = {
    "qwen3": ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
END = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
PARSER = {"qwen3": "hermes", "llama3": "llama3"}
CALL = {
    # spelled by hand, not as the template would spell them
    "qwen3": "<think>\nadd {n}</think>\n"
    '<tool_call>{{"name":"add","arguments":{{"a":{n}}}}}</tool_call>',
    "llama3": '{{"name":"add","parameters":{{"a":  {n}}}}}',
}


def add(a: int) -> int:
    """Add one to a number."""
    return a + 1


def model(name: str) -> Any:
    """Call the tool at the beginning of each turn, then say what came back."""

    def answer(messages: Any) -> str:
        number = sum(message["role"] == "user" for message in messages)
        if messages[-1]["role"] == "user":
            return CALL[name].format(n=number)
        return f"  it is {messages[-1]['content']} "

    return answer


class Rerendering:
    """A client without a memory: every prompt is rendered from its messages."""

    def __init__(self, inner: ScriptedClient) -> None:
        self.inner = inner
        self.model = inner.model
        self.chat = inner.chat
        self.generate = inner.generate
        self.aclose = inner.aclose

    def session(self) -> Rerendering:
        return self


def client(name: str) -> ScriptedClient:
    tokenizer = ByteTokenizer((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL[name], END[name])
    return ScriptedClient(model(name), renderer=ChatRenderer(tokenizer, tool_parser=PARSER[name]))


async def play(agent: ToolAgent) -> list[Any]:
    for turn in range(NUM_TURNS):
        agent.observe(f"turn {turn}")
        steps = await agent.act()
        assert [step.action_target for step in steps] == ["internal", "env"]
        assert steps[0].tool_answers[0].text == str(turn + 2)
        assert steps[1].parse_result is not None
        assert steps[1].parse_result.action == f"it is {turn + 2}"
    state = State(trajectory=agent.trajectory, reward=1.0, advantage=1.0)
    return [build_samples([state], scope) for scope in ("interleave", "turn", "tree")]


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
async def test_twenty_turns_with_a_tool_are_one_sample(name: str) -> None:
    agent = ToolAgent(client(name), tools=[add], system_prompt="Count.")
    interleaved, turns, tree = await play(agent)
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
async def test_rendered_anew_the_same_turns_fall_apart(name: str, num_samples: int) -> None:
    agent = ToolAgent(Rerendering(client(name)), tools=[add], system_prompt="Count.")
    interleaved, _, _ = await play(agent)
    assert len(interleaved.samples) == num_samples
    assert len(interleaved.breaks) == num_samples - 1
    kept, _, _ = await play(ToolAgent(client(name), tools=[add], system_prompt="Count."))
    total = sum(sample.num_tokens for sample in interleaved.samples)
    assert total > 8 * kept.samples[0].num_tokens


async def test_calls_as_text_keep_the_prefix_too() -> None:
    """The stop string is sampled and stays in the ids, though not in the text."""

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
