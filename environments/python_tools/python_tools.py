"""Questions that a few lines of Python answer, with a sandboxed interpreter as the tool.

The rows are generated from a seed and are not a benchmark.
"""

from __future__ import annotations

import random

import rolltree as rt

SYSTEM = "Use the tool `python` to work it out. Then answer with the number alone in <answer> tags."


def digit_sum(rng: random.Random) -> tuple[str, int]:
    base, power = rng.randint(3, 99), rng.randint(20, 200)
    question = f"What is the sum of the decimal digits of {base}**{power}?"
    return question, sum(map(int, str(base**power)))


def divisors(rng: random.Random) -> tuple[str, int]:
    number = rng.randint(10_000, 200_000)
    found = sum(number % i == 0 for i in range(1, number + 1))
    return f"How many positive divisors does {number} have?", found


def collatz(rng: random.Random) -> tuple[str, int]:
    start = number = rng.randint(1_000, 99_999)
    steps = 0
    while number != 1:
        number, steps = (number // 2 if number % 2 == 0 else 3 * number + 1), steps + 1
    rule = "Halve an even number, else multiply by 3 and add 1."
    return f"{rule} How many steps lead from {start} to 1?", steps


def letters(rng: random.Random) -> tuple[str, int]:
    text = "".join(rng.choices("abcdefgh", k=rng.randint(60, 120)))
    letter = rng.choice("abcdefgh")
    return f"How often does {letter!r} occur in {text}?", text.count(letter)


KINDS = (digit_sum, divisors, collatz, letters)


def make_rows(num: int, seed: int) -> list[dict[str, str]]:
    """Return `num` different questions, alternating between the kinds."""
    rng, rows = random.Random(seed), {}
    while len(rows) < num:
        kind = KINDS[len(rows) % len(KINDS)]
        question, answer = kind(rng)
        rows[question] = {"question": question, "answer": str(answer), "task": kind.__name__}
    return list(rows.values())


def load_environment(
    num_train: int = 200, num_eval: int = 40, max_turns: int = 6, seed: int = 0, **settings: object
) -> rt.Environment:
    """Return the environment; `settings` go to `PythonEnv`: `sandbox`, `limits`, `stateful`."""
    rows = make_rows(num_train + num_eval, seed)
    parser = rt.XMLParser(["answer"])

    @rt.run_inline
    def correct(parser: rt.XMLParser, completion: rt.Messages, answer: str) -> float:
        return float((parser.parse_answer(completion) or "").strip() == answer)

    @rt.run_inline
    def num_tool_calls(completion: rt.Messages) -> float:
        return float(sum(len(message.get("tool_calls") or ()) for message in completion))

    return rt.PythonEnv(
        dataset=rows[:num_train] or None,
        eval_dataset=rows[num_train:] or None,
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rt.Rubric([correct, num_tool_calls], weights=[1.0, 0.0], parser=parser),
        max_turns=max_turns,
        **settings,
    )
