"""Add two numbers; a wrong answer is told how far off it is and may be given again.

Rows are generated from a seed and are not a benchmark. Held-out sums are new as sums: with 3 + 5
held out, 5 + 3 is not trained on either.
"""

from __future__ import annotations

import random
import re

import rolltree as rt

SYSTEM = "Answer with the number only."
SHOTS = ((8, 3, 9), (5, 4, 12))  # two numbers and a wrong first answer: the examples in the prompt


def number(text: str) -> int | None:
    """Return the number that `text` is, or None when it is anything else."""
    return int(text) if re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII) else None


def feedback(given: int | None, a: int, b: int) -> str:
    """Return what a wrong answer is told. The sum itself is never said."""
    if given is None:
        return f"{SYSTEM} {a} + {b} ="
    off = given - (a + b)
    return f"No, {abs(off)} too {'high' if off > 0 else 'low'}. {a} + {b} ="


def few_shot() -> list[rt.ChatMessage]:
    """Return two played games, each won on the second try."""
    messages: list[rt.ChatMessage] = []
    for a, b, wrong in SHOTS:
        for asked, said in ((f"{a} + {b} =", wrong), (feedback(wrong, a, b), a + b)):
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": str(said)})
    return messages


def split(max_a: int, max_b: int, num_eval: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return training and held-out rows, disjoint as unordered pairs and without the examples."""
    sums = sorted(
        {(min(a, b), max(a, b)) for a in range(1, max_a + 1) for b in range(1, max_b + 1)}
    )
    shown = {(min(a, b), max(a, b)) for a, b, _ in SHOTS}
    sums = [pair for pair in sums if pair not in shown]
    random.Random(seed).shuffle(sums)
    train: list[dict] = []
    held_out: list[dict] = []
    for low, high in sums:
        orders = sorted({(low, high), (high, low)})
        orders = [(a, b) for a, b in orders if a <= max_a and b <= max_b]
        part = held_out if len(held_out) + len(orders) <= num_eval else train
        part += [
            {"question": f"{a} + {b} =", "answer": str(a + b), "info": {"a": a, "b": b}}
            for a, b in orders
        ]
    if len(held_out) < num_eval or not train:
        raise rt.ConfigError(
            f"numbers up to {max_a} and {max_b} cannot give {num_eval} held-out sums and leave "
            "some to train on. Ask for fewer held-out sums or larger numbers."
        )
    return train, held_out


class ArithmeticEnv(rt.MultiTurnEnv):
    """One sum per episode. It ends with the right answer or when the tries are used up."""

    async def env_response(self, messages: rt.Messages, state: rt.State) -> rt.Messages:
        """Say how far off the last answer is, and ask again."""
        given, info = number(messages[-1]["content"] or ""), state["info"]
        return [{"role": "user", "content": feedback(given, info["a"], info["b"])}]

    @rt.stop
    async def solved(self, state: rt.State) -> bool:
        """The last answer is right."""
        return solved_at(state) > 0

    @rt.stop
    async def tries_used_up(self, state: rt.State) -> bool:
        """No try is left: the game is lost, not cut short."""
        return len(state["trajectory"]) >= self.max_turns


def solved_at(state: rt.State) -> int:
    """Return on which try, from 1, the last answer was right; 0 when it was not."""
    steps = state["trajectory"]
    last = steps[-1]["completion"][-1]["content"] if steps else None
    return len(steps) if number(last or "") == int(state["answer"]) else 0


@rt.run_inline
def correct(state: rt.State) -> float:
    """1 for the right sum on any try, else 0."""
    return float(solved_at(state) > 0)


@rt.run_inline
def solved_first_try(state: rt.State) -> float:
    """1 when the first answer was right."""
    return float(solved_at(state) == 1)


@rt.run_inline
def solved_second_try(state: rt.State) -> float:
    """1 when the answer after the first feedback was right."""
    return float(solved_at(state) == 2)


def load_environment(
    max_a: int = 19, max_b: int = 9, num_eval: int = 100, tries: int = 2, seed: int = 0
) -> rt.Environment:
    """Return the environment; the first number is from 1 to `max_a`, the second to `max_b`."""
    if tries < 1:
        raise rt.ConfigError(f"tries is {tries}; the model needs at least 1 to answer at all.")
    train, held_out = split(max_a, max_b, num_eval, seed)
    rubric = rt.Rubric([correct])
    rubric.add_metric(solved_first_try)
    rubric.add_metric(solved_second_try)
    return ArithmeticEnv(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=SYSTEM,
        few_shot=few_shot(),
        rubric=rubric,
        max_turns=tries,
    )
