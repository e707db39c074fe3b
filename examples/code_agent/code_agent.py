"""The coding agent of agent.py as an environment: its model calls pass through the gateway.

    user       7 times 2
    assistant  print(7+2)
    user       9, not 14: 7 times 2
    assistant  print(7*2)

The reward is the result of the test: 1 if the agent's last line prints the expected text.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import rolltree as rt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from agent import run, solve  # noqa: E402

WORDS = {"plus": "+", "minus": "-", "times": "*"}


def passes(state: rt.State) -> float:
    """1 if the agent's last line passes the test."""
    program = state["program"]
    line = str(program["returned"] or program["stdout"]).strip()
    return float(run(line) == state["answer"])


def first_try(state: rt.State) -> float:
    """1 if the agent's first line passes the test."""
    return passes(state) * float(len(state["trajectory"]) == 1)


async def play(session: Any, state: rt.State) -> str:
    """Run the agent in this process, which saves the second that each start takes."""
    import openai

    url, key = session.base_url, session.api_key
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        return await solve(state["question"], state["answer"], client)


def code(task: str) -> str:
    """Return the line that solves a task."""
    first, word, second = task.split()
    return f"print({first}{WORDS[word]}{second})"


def load_environment(num_eval: int = 100, as_command: bool = False) -> rt.Environment:
    """Return the environment; no task of evaluation is one of training.

    `as_command` starts a process for each rollout.
    """
    tasks = [f"{a} {word} {b}" for a in range(10) for word in WORDS for b in range(10)]
    random.Random(0).shuffle(tasks)
    rows = [{"question": task, "answer": run(code(task))} for task in tasks]
    rubric = rt.Rubric([passes])
    rubric.add_metric(first_try)
    return rt.ProgramEnv(
        [sys.executable, str(HERE / "agent.py"), "{question}", "{answer}"] if as_command else play,
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        rubric=rubric,
        time_limit_s=120,
    )


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who takes the wrong operator or forgets the bracket."""
    rng = random.Random(seed)

    def talk(messages: rt.Messages) -> str:
        line = code(messages[-1]["content"].rpartition(": ")[2])
        if rng.random() < 0.5:
            line = line[:7] + rng.choice("+-*") + line[8:]
        return line[:-1] if rng.random() < 0.3 else line

    return talk


WARM_UP = {"num_games": 160, "num_steps": 90, "batch_size": 16, "lr": 2e-3}
