"""Example data sets and answer extraction as verifiers 0.1.8 names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rolltree.environments.dataset import hub_rows
from rolltree.errors import UnknownName, did_you_mean
from rolltree.parsers import extract_boxed_answer

BOXED_SYSTEM_PROMPT = "Reason step by step. Write the final answer inside \\boxed{}."
THINK_BOXED_SYSTEM_PROMPT = (
    "Reason inside <think>...</think> first. Then write the final answer inside \\boxed{}."
)
Convert = Callable[[Mapping[str, Any]], dict[str, Any]]


def extract_hash_answer(text: str) -> str:
    """Return what follows `####`, stripped; without it the text itself."""
    _, found, answer = text.partition("####")
    return answer.partition("####")[0].strip() if found else text


def strip_non_numeric(text: str) -> str:
    """Return the digits and dots of a text."""
    return "".join(char for char in text if char.isdigit() or char == ".")


def _columns(question: str, answer: str, read: Callable[[Any], Any] = str) -> Convert:
    return lambda row: {"question": row[question], "answer": read(row[answer])}


def _choices(row: Mapping[str, Any]) -> dict[str, Any]:
    lines = [f"{letter}: {text}" for letter, text in zip("ABCD", row["choices"], strict=False)]
    return {
        "question": f"Question: {row['question']}\n\n" + "\n".join(lines),
        "answer": "ABCD"[row["answer"]],
    }


_EXAMPLES: dict[str, tuple[str, str | None, str, Convert]] = {
    "aime2024": (
        *("HuggingFaceH4/aime_2024", None, "train"),
        _columns("problem", "answer", lambda value: str(int(value))),
    ),
    "amc2023": ("knoveleng/AMC-23", None, "train", _columns("problem", "answer")),
    "gsm8k": (
        *("openai/gsm8k", "main", "test"),
        _columns("question", "answer", extract_hash_answer),
    ),
    "math": (
        *("chiayewken/competition_math", None, "train"),
        _columns("problem", "solution", extract_boxed_answer),
    ),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", _columns("problem", "answer")),
    "mmlu": ("cais/mmlu", "all", "dev", _choices),
    "openrs": ("knoveleng/open-rs", None, "train", _columns("problem", "answer")),
}


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Any:
    """Return a Hugging Face `Dataset` with the columns `question` and `answer`.

    With `n`, that many rows of the data set shuffled by `seed`.

    Raises:
        UnknownName: there is no example data set of that name.
        ConfigError: it cannot be loaded, or the `datasets` package is missing.
    """
    if name not in _EXAMPLES:
        raise UnknownName(
            f"there is no example data set {name!r}.{did_you_mean(name, _EXAMPLES)} Load it with "
            "the datasets package and pass it as dataset=..."
        )
    where, config, default_split, convert = _EXAMPLES[name]
    rows = hub_rows(where, config, split or default_split)
    if n is not None and n > 0:
        rows = rows.shuffle(seed=seed).select(range(min(n, len(rows))))
    return rows.map(convert, remove_columns=rows.column_names)
