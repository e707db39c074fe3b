"""Twenty turns with a tool on two chat templates: prompts carried as ids against re-rendering.

    python benchmarks/tool_loop.py            the table, figures on the last line
    python benchmarks/tool_loop.py --check    exit 1 when a bar is missed
    python benchmarks/tool_loop.py --json     one JSON object instead of the table

A scripted agent calls a tool at the beginning of each turn and says what came back. Its calls are
spelled as models spell them, with other white space than the template's. "carried" sends each
prompt as the exact ids of the call before plus what is new; "anew" renders all messages again, as a
chat endpoint of messages does; "hidden" carries, but leaves the tools out of the last call of each
turn instead of telling the model. Tokens are bytes and special tokens; trained is what scope
`interleave` computes for training.

Then what one call of a tool that does nothing costs, by where it runs, best of five.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from verdict import Bar, conclude, make_parser

from rolltree.agents import ToolAgent
from rolltree.environments.rubrics import run_inline
from rolltree.environments.tools import Tool, call_function
from rolltree.environments.tools.run import call_in_process
from rolltree.inference import ChatRenderer
from rolltree.samples import build_samples
from rolltree.testing import ByteTokenizer, ScriptedClient
from rolltree.values.types import State

TEMPLATES = Path(__file__).parents[1] / "tests" / "samples" / "templates"
NUM_TURNS = 20
NAMES = ("qwen3", "llama3")
HOWS = ("carried", "anew", "hidden")
SPECIAL = {
    "qwen3": ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
END = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>"}
PARSER = {"qwen3": "hermes", "llama3": "llama3"}
CALL = {
    "qwen3": "<think>\nadd {n}</think>\n"
    '<tool_call>{{"name":"add","arguments":{{"a":{n}}}}}</tool_call>',
    "llama3": '{{"name":"add","parameters":{{"a":  {n}}}}}',
}


def add(a: int) -> int:
    """Add one to a number."""
    return a + 1


class Anew:
    """A client without a memory: every prompt is rendered from its messages."""

    def __init__(self, inner: ScriptedClient) -> None:
        self.model, self.chat, self.generate = inner.model, inner.chat, inner.generate
        self.aclose = inner.aclose

    def session(self) -> Anew:
        return self


class Hiding(ToolAgent):
    """Hides its tools from the last call of a turn."""

    async def _call(self) -> Any:
        shown = self.tool_schemas
        if self._num_rounds == self.max_tool_rounds:
            self.tool_schemas = []
        try:
            return await super()._call()
        finally:
            self.tool_schemas = shown


def make_client(name: str) -> ScriptedClient:
    def answer(messages: Any) -> str:
        if messages[-1]["role"] == "user":
            return CALL[name].format(n=sum(message["role"] == "user" for message in messages))
        return f"  it is {messages[-1]['content']} "

    tokenizer = ByteTokenizer((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL[name], END[name])
    return ScriptedClient(answer, renderer=ChatRenderer(tokenizer, tool_parser=PARSER[name]))


async def play(agent: ToolAgent) -> ToolAgent:
    for turn in range(NUM_TURNS):
        agent.observe(f"turn {turn}")
        steps = await agent.act()
        assert [step.action_target for step in steps] == ["internal", "env"]
        assert steps[0].tool_answers[0].text == str(turn + 2)
    return agent


def measure(name: str, how: str) -> dict[str, Any]:
    client = make_client(name)
    agent = (Hiding if how == "hidden" else ToolAgent)(
        Anew(client) if how == "anew" else client,
        tools=[add],
        system_prompt="Count.",
        **({"max_tool_rounds": 1, "last_call": ""} if how == "hidden" else {}),
    )
    asyncio.run(play(agent))
    state = State(trajectory=agent.trajectory, reward=1.0, advantage=1.0)
    batch = build_samples([state], "interleave")
    return {
        "template": name,
        "prompts": how,
        "calls": len(agent.trajectory),
        "samples": len(batch.samples),
        "breaks": len(batch.breaks),
        "trained": sum(sample.num_tokens for sample in batch.samples),
    }


async def call_costs() -> dict[str, float]:
    """Return seconds of wall clock for one call, by where it runs."""

    @run_inline
    def quick() -> int:
        """Do nothing."""
        return 1

    def plain() -> int:
        """Do nothing."""
        return 1

    in_loop, in_thread = Tool.of(quick), Tool.of(plain)
    ways: dict[str, tuple[int, Callable[[], Awaitable[Any]]]] = {
        "in the loop": (500, lambda: call_function(in_loop, {}, limit_s=9)),
        "in a thread": (500, lambda: call_function(in_thread, {}, limit_s=9)),
        "in a process": (1, lambda: call_in_process(textwrap.dedent, {"text": "x"})),
    }
    costs = {}
    for name, (number, call) in ways.items():
        runs = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(number):
                await call()
            runs.append((time.perf_counter() - began) / number)
        costs[name] = min(runs)
    return costs


def bars(rows: dict[tuple[str, str], dict[str, Any]]) -> list[Bar]:
    found = []
    for name in NAMES:
        carried, anew = rows[name, "carried"], rows[name, "anew"]
        ratio = anew["trained"] / carried["trained"]
        found += [
            Bar.at_most(f"samples where prompts are carried ({name})", carried["samples"], 1),
            Bar.at_most(f"breaks where prompts are carried ({name})", carried["breaks"], 0),
            Bar.above(f"times fewer trained tokens than re-rendered ({name})", ratio, 8),
        ]
    return found


def show(rows: list[dict[str, Any]], costs: dict[str, float]) -> None:
    print(f"{'template':10}{'prompts':10}{'calls':>6}{'samples':>9}{'breaks':>8}{'trained':>10}")
    for row in rows:
        print(
            f"{row['template']:10}{row['prompts']:10}{row['calls']:6}{row['samples']:9}"
            f"{row['breaks']:8}{row['trained']:10,}"
        )
    print("\none call of a tool: " + ", ".join(f"{1e3 * s:.3g} ms {n}" for n, s in costs.items()))


def main() -> int:
    options = make_parser(__doc__).parse_args()
    found = {(name, how): measure(name, how) for name in NAMES for how in HOWS}
    rows, costs = list(found.values()), asyncio.run(call_costs())
    return conclude(
        options,
        bars(found),
        {"rows": rows, "call_costs_s": costs},
        lambda: show(rows, costs),
        also=[f"{found[name, 'anew']['breaks']} breaks re-rendered ({name})" for name in NAMES],
    )


if __name__ == "__main__":
    sys.exit(main())
