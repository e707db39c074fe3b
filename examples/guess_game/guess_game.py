"""Find a number from 1 to 7 in three guesses; after each the model is told which numbers are left.

    user       1-7
    assistant  4
    user       5-7
    assistant  6
    user       5-5
    assistant  5

Halving what is left always wins. Whether a first guess was good shows only turns later, so credit
has to reach back to it.
"""

from __future__ import annotations

import random
from typing import Any

import rolltree as rt

NUMBERS = range(1, 8)
MAX_GUESSES = 3


def left_after(guesses: list[str], secret: int) -> str:
    """Return the range of numbers left; a guess other than 1 to 7 changes nothing."""
    low, high = min(NUMBERS), max(NUMBERS)
    for guess in guesses:
        if guess in map(str, NUMBERS):
            low = max(low, int(guess) + 1) if int(guess) < secret else low
            high = min(high, int(guess) - 1) if int(guess) > secret else high
    return f"{low}-{high}"


class GuessGame(rt.MultiTurnEnv):
    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        guesses = [m["content"] or "" for m in messages if m["role"] == "assistant"]
        return [{"role": "user", "content": left_after(guesses, int(state["answer"]))}]

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
    """Return the game. Evaluation plays the same seven numbers: it is a game, not facts."""
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
    return {"question": left_after([], secret), "answer": str(secret)}


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who often forgets which numbers are left."""
    rng = random.Random(seed)

    def play(messages: rt.Messages) -> str:
        low, high = map(int, messages[-1]["content"].split("-"))
        return str(rng.randint(low, high) if rng.random() < 0.5 else rng.choice(NUMBERS))

    return play


WARM_UP = {"num_games": 1000, "num_steps": 200, "batch_size": 32, "lr": 2e-3}
