"""Two agents as an environment: sums to solve, and a reward for the answer."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import rolltree as rt

HERE = Path(__file__).resolve().parent


def answer_of(state: rt.State) -> str:
    """Return what the agent answered: what the function returned, or the command printed."""
    program = state["program"]
    return str(program["returned"] or program["stdout"]).strip()


def correct(state: rt.State) -> float:
    """1 for the right sum on any try, else 0."""
    return float(answer_of(state) == state["answer"])


def first_try(state: rt.State) -> float:
    """1 for the right sum after one model call."""
    return correct(state) * float(len(state["trajectory"]) == 1)


def playing(module: str) -> Any:
    """Return a function that runs `solve` of an agent's module in this process.

    It is the same code as the command, without the second that each start takes.
    """

    async def play(session: Any, state: rt.State) -> str:
        import openai

        url, key = session.base_url, session.api_key
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            return await import_module(module).solve(state["question"], client)

    return play


def load_environment(agent: str = "agent", as_command: bool = False) -> rt.Environment:
    """Return the environment of `agent.py` or `pydantic_agent.py`.

    `as_command` starts a process for each rollout.
    """
    sums = rt.load_environment(HERE.parents[1] / "environments" / "arithmetic")
    rubric = rt.Rubric([correct])
    rubric.add_metric(first_try)
    return rt.ProgramEnv(
        [sys.executable, str(HERE / f"{agent}.py"), "{question}"] if as_command else playing(agent),
        dataset=plain(sums.get_dataset()),
        eval_dataset=plain(sums.get_eval_dataset()),
        rubric=rubric,
        time_limit_s=120,
    )


def plain(rows: Any) -> list[dict]:
    """Return rows without the prompt that another environment made of them."""
    return [{key: row[key] for key in ("question", "answer")} for row in rows]
