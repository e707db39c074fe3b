"""Find a number from 1 to 7 in three guesses: each is answered with "more" or "less".

    user       guess
    assistant  4
    user       more
    assistant  6
    user       less
    assistant  5

Halving what is left always wins. A model has to choose the first guess for what it will be told, and
each later one by all that it was told: credit has to reach back over the turns.
"""

from __future__ import annotations

import random
from typing import Any

import rolltree as rt

NUMBERS = range(1, 8)
MAX_GUESSES = 3


def answer_to(guess: str, secret: int) -> str:
    """Return what a guess is told."""
    if guess not in map(str, NUMBERS):
        return "no number"
    return "more" if int(guess) < secret else "less"


class GuessGame(rt.MultiTurnEnv):
    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        told = answer_to(messages[-1]["content"] or "", int(state["answer"]))
        return [{"role": "user", "content": told}]

    @rt.stop
    async def solved(self, state: rt.State) -> bool:
        return bool(state["trajectory"]) and last(state) == state["answer"]

    @rt.stop
    async def guesses_used_up(self, state: rt.State) -> bool:
        return len(state["trajectory"]) >= self.max_turns


def last(state: rt.State) -> str:
    return state["trajectory"][-1]["completion"][-1]["content"] or ""


@rt.run_inline
def win(state: rt.State) -> float:
    """1 if the number was found."""
    return float(last(state) == state["answer"])


@rt.run_inline
def num_guesses(state: rt.State) -> float:
    """How many guesses were made."""
    return float(len(state["trajectory"]))


def load_environment(num_train: int = 1000, num_eval: int = 210) -> rt.Environment:
    """Return the game. Evaluation plays the same seven numbers: a game, and not a set of facts."""
    rng = random.Random(0)
    rubric = rt.Rubric([win])
    rubric.add_metric(num_guesses)
    return GuessGame(
        dataset=[row(rng.choice(NUMBERS)) for _ in range(num_train)],
        eval_dataset=[row(NUMBERS[n % len(NUMBERS)]) for n in range(num_eval)],
        rubric=rubric,
        max_turns=MAX_GUESSES,
    )


def row(secret: int) -> dict[str, Any]:
    return {"question": "guess", "answer": str(secret)}


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who says any number from 1 to 7, whatever it was told."""
    rng = random.Random(seed)
    return lambda messages: str(rng.choice(NUMBERS))


WARM_UP = {"num_games": 500, "num_steps": 60, "batch_size": 32, "lr": 2e-3}
