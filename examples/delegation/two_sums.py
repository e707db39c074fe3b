"""The environment: one of two sums is wanted, and the parent cannot add: it asks a child.

    user       a=3+4 b=2+1 ?b
    assistant  ask 2+1                 the parent's first call; the child is told "2+1" and says "3"
    user       3
    assistant  3                       the parent's answer

The parent earns 1 for the right final answer, a child 1 for the right sum of what it was asked,
whatever it was asked. Both are one model in two roles. It knows rolltree's agents and protocols. It
leaves out training: `run.py` does that, and `rolltree eval examples/delegation/two_sums.py` plays.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import rolltree as rt
from rolltree.agents import Agent, Spoken, SpokenCall, ToolAgent
from rolltree.environments import ProtocolEnvironment
from rolltree.protocols import Budget, DelegatingProtocol, SubAgent, delegate_tool

SUM = re.compile(r"(\d)\+(\d)")


class AskCalls:
    """Calls spelled for a model of 0.8M parameters: a message "ask TASK" is a call."""

    stop: tuple[str, ...] = ()
    needs_answers = False

    def schemas(self, tools: Any) -> list[Any]:
        return []

    def instructions(self, tools: Any) -> str:
        return ""

    def read(self, message: rt.ChatMessage) -> Spoken:
        text = str(message.get("content") or "")
        if not text.startswith("ask "):
            return Spoken()
        return Spoken((SpokenCall("", "ask", json.dumps({"task": text[4:]})),))

    def write(self, answers: Any) -> list[rt.ChatMessage]:
        return [{"role": "user", "content": answer.text.strip()} for answer in answers]

    def complain(self, problem: str) -> list[rt.ChatMessage]:
        return [{"role": "user", "content": problem}]

    def final(self, message: rt.ChatMessage) -> str:
        return str(message.get("content") or "")


def parent() -> Agent:
    return ToolAgent(
        name="parent",
        external_tools=[delegate_tool("ask")],
        spelling=AskCalls(),
        max_tool_rounds=1,
        last_call="",
    )


def child() -> Agent:
    return Agent(name="child")


@rt.cheap
def right(state: rt.State, answer: str) -> float:
    """1 when the parent's final answer is the wanted sum."""
    steps = state["trajectory"]
    said = steps[-1]["completion"][-1]["content"] if steps else ""
    return float(said.strip() == answer)


@rt.cheap
def right_sum(state: rt.State) -> float:
    """1 when a child said the sum that it was asked for."""
    asked = SUM.fullmatch(state["subtask"])
    return float(asked is not None and state["result"] == str(int(asked[1]) + int(asked[2])))


def question(rng: random.Random) -> dict[str, Any]:
    digits = [rng.randrange(5) for _ in range(4)]
    wanted = rng.choice("ab")
    first = digits[0] + digits[1] if wanted == "a" else digits[2] + digits[3]
    text = f"a={digits[0]}+{digits[1]} b={digits[2]}+{digits[3]} ?{wanted}"
    return {"question": text, "answer": str(first)}


def rows(num: int, seed: int, without: set[str]) -> list[dict[str, Any]]:
    """Return `num` questions, none of them in `without`, which they join."""
    rng, found = random.Random(seed), []
    while len(found) < num:
        row = question(rng)
        if row["question"] not in without:
            without.add(row["question"])
            found.append(row)
    return found


def load_environment(num_train: int = 1000, num_eval: int = 200, seed: int = 0) -> rt.Environment:
    """Return the environment; no question of evaluation is one of training."""
    taken: set[str] = set()
    held_out = rows(num_eval, seed + 1, taken)
    return ProtocolEnvironment(
        DelegatingProtocol(
            parent,
            {"ask": SubAgent(child, max_steps=1, budget=Budget(max_calls=1))},
            max_steps=1,
            max_external_calls=1,
        ),
        dataset=rows(num_train, seed, taken),
        eval_dataset=held_out,
        rubric=rt.Rubric([right]),
        rubrics={"child": rt.Rubric([right_sum])},
        env_id="two_sums",
    )


def expert(noise: dict[str, float], seed: int) -> Any:
    """Return what a half-competent player says to any prompt, for the warm start.

    `noise`: how often the parent asks for the wrong sum (`ask`), the child answers with a random
    number (`sum`), and the parent says something else than it was told (`tell`).
    """
    rng = random.Random(seed)

    def say(messages: rt.Messages) -> str:
        assert not isinstance(messages, str)
        first, last = str(messages[0]["content"]), str(messages[-1]["content"])
        if "?" not in first:  # the child
            total = sum(int(digit) for digit in re.findall(r"\d", first)[:2])
            return str(rng.randrange(9) if rng.random() < noise["sum"] else total)
        if len(messages) > 1:  # the parent has its answer
            return str(rng.randrange(9)) if rng.random() < noise["tell"] else last
        sums = dict(zip("ab", re.findall(r"\d\+\d", first), strict=True))
        wanted = first[-1]
        other = "b" if wanted == "a" else "a"
        return f"ask {sums[other if rng.random() < noise['ask'] else wanted]}"

    return say
