"""MATH: competition mathematics with answers in LaTeX (Hendrycks et al. 2021).

Training rows are MATH's, evaluation rows MATH-500's (Lightman et al. 2023), from the Hugging Face
hub or from local files. "generated" makes equations instead: they are not the benchmark, and their
task says so. It is a package because a module `math` would be named like Python's own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import rolltree as rt
from rolltree.environments.dataset import benchmark_rows

TRAIN = ("DigitalLearningGmbH/MATH-lighteval", None, "train")
TEST = ("HuggingFaceH4/MATH-500", None, "test")
SYSTEM = "Think step by step. Then give the final answer inside \\boxed{}."


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the data set's answer, or else the boxed answer of its solution."""
    answer = row.get("answer") or rt.extract_boxed_answer(row["solution"])
    info = {key: row[key] for key in ("level", "subject", "type") if row.get(key) is not None}
    return {"question": row["problem"], "answer": answer, "info": info}


def latex(value: Fraction) -> str:
    """Return a fraction in LaTeX."""
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def generate(num: int, seed: int) -> list[dict[str, Any]]:
    """Return `num` equations that are not MATH's; even and odd constants keep the splits apart."""
    rng, rows = random.Random(seed), []
    for index in range(num):
        a, b, c = rng.randrange(2, 60), rng.randrange(1, 99), 2 * rng.randrange(50, 500) + seed % 2
        if index % 2:
            question = f"Solve ${a}x + {b} = {c}$ for $x$."
            answer = latex(Fraction(c - b, a))
        else:
            question = f"Expand $(x + {a})(x - {c})$."
            answer = f"x^2 - {c - a}x - {a * c}"
        rows.append({"question": question, "answer": answer, "info": {}})
    return rows


def load_environment(
    train: str | None = "hub",
    test: str | None = "hub",
    num_generated: int = 500,
    time_limit_s: float = 5.0,
) -> rt.Environment:
    """Return the environment; `train` and `test` are "hub", "generated", a path or null."""

    def rows(source: str | None, hub: tuple[str, str | None, str], seed: int) -> Any:
        made = partial(generate, num_generated, seed)
        return benchmark_rows(source, hub=hub, task="math", convert=convert, generate=made)

    return rt.SingleTurnEnv(
        dataset=rows(train, TRAIN, 2),
        eval_dataset=rows(test, TEST, 1),
        system_prompt=SYSTEM,
        rubric=rt.MathRubric(time_limit_s=time_limit_s),
    )
