"""The agent of `agent.py` as an environment: sums to solve, and a reward for what it prints."""

from __future__ import annotations

import sys
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


async def play(session: Any, state: rt.State) -> str:
    """Run the agent in this process: the same code, without the second that a start takes."""
    import openai
    from agent import solve

    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        return await solve(state["question"], client)


def load_environment(as_command: bool = False) -> rt.Environment:
    """Return the environment; `as_command` starts a process for each rollout."""
    sums = rt.load_environment(HERE.parents[1] / "environments" / "arithmetic")
    rubric = rt.Rubric([correct])
    rubric.add_metric(first_try)
    return rt.ProgramEnv(
        [sys.executable, str(HERE / "agent.py"), "{question}"] if as_command else play,
        dataset=plain(sums.get_dataset()),
        eval_dataset=plain(sums.get_eval_dataset()),
        rubric=rubric,
        time_limit_s=120,
    )


def plain(rows: Any) -> list[dict]:
    """Return rows without the prompt that another environment made of them."""
    return [{key: row[key] for key in ("question", "answer")} for row in rows]
