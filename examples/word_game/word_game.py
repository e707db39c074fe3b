"""A small Wordle: find the secret word of three letters in four guesses.

    user       guess
    assistant  cat
    user       XGG          G: right, Y: elsewhere in the word, X: not in it
    assistant  hat

There are sixteen words, and a player who guesses a new one each time finds a quarter of them. To do
better, the model has to use what the colours said.
"""

from __future__ import annotations

import random
from typing import Any

import rolltree as rt

WORDS = "cat cot cut hat hot hut bat bit but sat sit set mat met map cap".split()


def colours(guess: str, secret: str) -> str:
    """Return G, Y or X per letter; no word here has a letter twice."""
    return "".join(
        "G" if g == s else "Y" if g in secret else "X" for g, s in zip(guess, secret, strict=True)
    )


class WordGame(rt.MultiTurnEnv):
    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        guess = messages[-1]["content"] or ""
        told = colours(guess, state["answer"]) if guess in WORDS else "no word"
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
    """1 if the word was found."""
    return float(last(state) == state["answer"])


def load_environment(num_train: int = 1000, num_eval: int = 160) -> rt.Environment:
    """Return the game. Evaluation plays the same sixteen words: a game, and not a set of facts."""
    rng = random.Random(0)
    rows = [{"question": "guess", "answer": rng.choice(WORDS)} for _ in range(num_train)]
    held_out = [{"question": "guess", "answer": WORDS[n % len(WORDS)]} for n in range(num_eval)]
    return WordGame(dataset=rows, eval_dataset=held_out, rubric=rt.Rubric([win]), max_turns=4)


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who seldom thinks of what the colours said."""
    rng = random.Random(seed)

    def play(messages: rt.Messages) -> str:
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        told = [m["content"] for m in messages if m["role"] == "user"][1:]
        fitting = [
            word
            for word in WORDS
            if all(colours(g, word) == t for g, t in zip(said, told, strict=True))
        ]
        return rng.choice(fitting if rng.random() < 0.3 else WORDS)

    return play


WARM_UP = {"num_games": 2000, "num_steps": 300, "batch_size": 64, "lr": 2e-3}
