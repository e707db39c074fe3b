"""The environment: a parent that must pick what to ask, and a child that must know the answer.

    user       a=K b=P ?b
    assistant  P                     the parent's first call; the child is told "P" and says "5"
    user       5
    assistant  5                     the parent's answer

Each letter has a digit in a code book that no prompt shows. The parent earns 1 for the digit of the
wanted letter; a child earns 1 for the digit of the letter that it was asked, whatever it was asked.
Both are one model in two roles. This module has no training code: `delegation.py`
has the recipe, and `rolltree eval examples/delegation/code_book.py` plays.
"""

from __future__ import annotations

import json
import random
import re
from string import ascii_uppercase
from typing import Any

import rolltree as rt
from rolltree.agents import Agent, ToolAgent
from rolltree.agents.protocols import Budget, DelegatingProtocol, SubAgent, delegate_tool
from rolltree.environments import ProtocolEnvironment
from rolltree.inference import ToolCall, ToolCalls

BOOK = dict(zip(ascii_uppercase, "39140826757163920485028461", strict=True))


class AskCalls:
    """Calls that a model of 0.8M parameters can spell: a message of one letter is a call."""

    stop: tuple[str, ...] = ()
    needs_answers = False

    def schemas(self, tools: Any) -> list[Any]:
        return []

    def instructions(self, tools: Any) -> str:
        return ""

    def read(self, message: rt.ChatMessage) -> ToolCalls:
        text = str(message.get("content") or "")
        if len(text) != 1 or not text.isalpha():
            return ToolCalls(text)
        return ToolCalls(text, (ToolCall("ask", json.dumps({"task": text})),))

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
        tool_call_format=AskCalls(),
        max_tool_rounds=1,
        last_call="",
    )


def child() -> Agent:
    return Agent(name="child")


@rt.run_inline
def right(state: rt.State, answer: str) -> float:
    """1 when the parent's final answer is the wanted digit."""
    steps = state["trajectory"]
    said = steps[-1]["completion"][-1]["content"] if steps else ""
    return float(said.strip() == answer)


@rt.run_inline
def known(state: rt.State) -> float:
    """1 when a child said the digit of the letter that it was asked."""
    return float(state["result"].strip() == BOOK.get(state["subtask"].strip()))


def question(rng: random.Random) -> dict[str, Any]:
    first, second = rng.sample(ascii_uppercase, 2)
    wanted = rng.choice("ab")
    answer = BOOK[first if wanted == "a" else second]
    return {"question": f"a={first} b={second} ?{wanted}", "answer": answer}


def rows(num: int, seed: int, without: set[str]) -> list[dict[str, Any]]:
    """Return `num` questions that are not in `without`, and add them to it."""
    rng, found = random.Random(seed), []
    while len(found) < num:
        row = question(rng)
        if row["question"] not in without:
            without.add(row["question"])
            found.append(row)
    return found


def load_environment(num_train: int = 900, num_eval: int = 60, seed: int = 0) -> rt.Environment:
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
        rubrics={"child": rt.Rubric([known])},
        env_id="code_book",
    )


def expert(noise: dict[str, float], seed: int) -> Any:
    """Return a half-competent player for the warm start: a function from messages to an answer.

    `noise`: how often the parent asks for the other letter (`ask`), the child answers with a random
    digit (`book`), and the parent answers with something other than it was told (`tell`).
    """
    rng = random.Random(seed)

    def say(messages: rt.Messages) -> str:
        assert not isinstance(messages, str)
        first, last = str(messages[0]["content"]), str(messages[-1]["content"])
        if "?" not in first:  # the child
            return str(rng.randrange(10)) if rng.random() < noise["book"] else BOOK[first]
        if len(messages) > 1:  # the parent has its answer
            return str(rng.randrange(10)) if rng.random() < noise["tell"] else last
        letters = dict(zip("ab", re.findall(r"=(\w)", first), strict=True))
        wanted = first[-1]
        other = "b" if wanted == "a" else "a"
        return letters[other if rng.random() < noise["ask"] else wanted]

    return say
