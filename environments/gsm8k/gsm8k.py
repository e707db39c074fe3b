"""GSM8K: primary-school word problems whose answer is a whole number (Cobbe et al. 2021).

The rows come from the Hugging Face hub or from a local file. "generated" makes problems from two
templates instead: they are not the benchmark, and their task says so.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import rolltree as rt
from rolltree.environments.dataset import benchmark_rows

SYSTEM = "Think step by step. Then give the final answer, a number, inside \\boxed{}."
TEMPLATES = (
    ("Ada packs {a} boxes with {b} apples each and gives {c} apples away. How many are left?", -1),
    ("Ben reads {a} pages a day for {b} days, and {c} pages more. How many pages are that?", 1),
)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the number after `####` as its answer."""
    answer = (rt.extract_hash_answer(row["answer"]) or row["answer"]).replace(",", "")
    return {"question": row["question"], "answer": answer, "info": {"solution": row["answer"]}}


def generate(num: int, seed: int) -> list[dict[str, Any]]:
    """Return `num` problems that are not GSM8K's; even and odd `a` keep the splits apart."""
    rng, rows = random.Random(seed), []
    for index in range(num):
        text, sign = TEMPLATES[index % len(TEMPLATES)]
        a, b, c = 2 * rng.randrange(5, 500) + seed % 2, rng.randrange(3, 40), rng.randrange(2, 15)
        question, answer = text.format(a=a, b=b, c=c), str(a * b + sign * c)
        rows.append({"question": question, "answer": answer, "info": {}})
    return rows


def number(text: str | None) -> Decimal | None:
    """Return the number in a short answer such as `$1,200.00`, or None."""
    if len(text or "") > 200:
        return None
    cleaned = re.sub(r"\\(?:text|mathrm)\{[^}]*\}|\\[!,;%$ ]|[,$%\s]", "", text or "")
    try:
        value = Decimal(cleaned)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def boxed(text: str) -> str | None:
    return rt.extract_boxed_answer(text) if "\\boxed{" in text else None


@rt.run_inline
def correct(parser: rt.Parser, completion: rt.Messages, answer: str) -> float:
    said = number(parser.parse_answer(completion))
    return float(said is not None and said == number(answer))


def load_environment(
    train: str | None = "hub", test: str | None = "hub", num_generated: int = 500
) -> rt.Environment:
    """Return the environment; `train` and `test` are "hub", "generated", a path or null."""

    def rows(source: str | None, split: str, seed: int) -> Any:
        hub, made = ("openai/gsm8k", "main", split), partial(generate, num_generated, seed)
        return benchmark_rows(source, hub=hub, task="gsm8k", convert=convert, generate=made)

    parser = rt.MaybeThinkParser(boxed)
    return rt.SingleTurnEnv(
        dataset=rows(train, "train", 2),
        eval_dataset=rows(test, "test", 1),
        system_prompt=SYSTEM,
        parser=parser,
        rubric=rt.Rubric([correct], parser=parser),
    )
