"""The example data sets of verifiers 0.1.8, and its small functions on answers.

Data sets come from the Hugging Face hub (or its local cache), or from files in
`$ROLLTREE_HOME/datasets` (`~/.cache/rolltree/datasets`): `gsm8k-test.jsonl` there is the test split
of gsm8k as the hub has it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.environments.dataset import Row, Rows, hub_rows
from rolltree.errors import ConfigError, did_you_mean
from rolltree.parsers import extract_boxed_answer

# What verifiers 0.1.8 sends; the first is the prompt of Hugging Face's lighteval for math.
BOXED_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
THINK_BOXED_SYSTEM_PROMPT = (
    "Think step-by-step inside <think>...</think> tags. "
    "    Then, give your final answer inside \\boxed{}."
)
Convert = Callable[[Mapping[str, Any]], Row]


def extract_hash_answer(text: str) -> str:
    """Return what follows `####`, stripped; without it the text itself."""
    _, found, answer = text.partition("####")
    return answer.partition("####")[0].strip() if found else text


def strip_non_numeric(text: str) -> str:
    """Return the digits and dots of a text."""
    return "".join(char for char in text if char.isdigit() or char == ".")


def _columns(
    question: str, answer: str, read: Callable[[Any], Any] = lambda value: value
) -> Convert:
    return lambda row: {"question": row[question], "answer": read(row[answer])}


def _lettered(question: str, options: Sequence[str]) -> str:
    lines = [f"{letter}: {text}" for letter, text in zip("ABCDEFGHIJ", options, strict=False)]
    return f"Question: {question}\n\n" + "\n".join(lines)


def _mmlu(row: Mapping[str, Any]) -> Row:
    return {
        "question": _lettered(row["question"], row["choices"]),
        "answer": "ABCD"[row["answer"]],
    }


def _mmlu_pro(row: Mapping[str, Any]) -> Row:
    return {"question": _lettered(row["question"], row["options"]), "answer": row["answer"]}


def _gpqa(row: Mapping[str, Any]) -> Row:
    letters = ["A", "B", "C", "D"]
    random.shuffle(letters)
    texts = [row["Correct Answer"], *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
    options = dict(zip(letters, texts, strict=True))
    question = _lettered(row["Question"], [options[letter] for letter in "ABCD"])
    return {"question": question, "answer": letters[0]}


def _openbookqa(row: Mapping[str, Any]) -> Row:
    choices = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    lines = "\n".join(f"{label}. {text}" for label, text in choices)
    return {
        "question": f"Question: {row['question_stem']}\n\nChoices:\n{lines}",
        "answer": row["answerKey"],
    }


_PYTHON_TASK = "Solve the following coding problem using the programming language python:"


@dataclass(frozen=True, slots=True)
class _Example:
    """One data set: where it is, its split, how a row is read, and which rows count."""

    hub: str
    split: str
    convert: Convert
    configs: tuple[str | None, ...] = (None,)
    keep: Callable[[Mapping[str, Any]], bool] | None = None


_PROBLEM = _columns("problem", "answer")
_OPENRS = "knoveleng/open-rs"
_EXAMPLES: dict[str, _Example] = {
    "aime2024": _Example(
        "HuggingFaceH4/aime_2024", "train", _columns("problem", "answer", lambda n: str(int(n)))
    ),
    "aime2025": _Example(
        "opencompass/AIME2025",
        "test",
        _columns("question", "answer", strip_non_numeric),
        ("AIME2025-I", "AIME2025-II"),
    ),
    "amc2023": _Example("knoveleng/AMC-23", "train", _PROBLEM),
    "gpqa_diamond": _Example("Idavidrein/gpqa", "train", _gpqa, ("gpqa_diamond",)),
    "gpqa_main": _Example("Idavidrein/gpqa", "train", _gpqa, ("gpqa_main",)),
    "gsm8k": _Example(
        "openai/gsm8k", "test", _columns("question", "answer", extract_hash_answer), ("main",)
    ),
    "math": _Example(
        "chiayewken/competition_math",
        "train",
        _columns("problem", "solution", extract_boxed_answer),
    ),
    "math500": _Example("HuggingFaceH4/MATH-500", "test", _PROBLEM),
    "mmlu": _Example("cais/mmlu", "dev", _mmlu, ("all",)),
    "mmlu_pro": _Example("TIGER-Lab/MMLU-Pro", "validation", _mmlu_pro),
    "openbookqa": _Example("allenai/openbookqa", "train", _openbookqa, ("main",)),
    "openrs": _Example(_OPENRS, "train", _PROBLEM),
    "openrs_easy": _Example(_OPENRS, "train", _PROBLEM, keep=lambda row: row["level"] == "Easy"),
    "openrs_hard": _Example(_OPENRS, "train", _PROBLEM, keep=lambda row: row["level"] == "Hard"),
    "prime_code": _Example(
        "PrimeIntellect/verifiable-coding-problems",
        "train",
        _columns("prompt", "verification_info"),
        keep=lambda row: row["prompt"].startswith(_PYTHON_TASK),
    ),
}


def get_preprocess_fn(name: str) -> Convert:
    """Return the function from a row of an example data set to its `question` and `answer`.

    Raises:
        ConfigError: there is no example data set of that name.
    """
    return _example(name).convert


def _example(name: str) -> _Example:
    if name not in _EXAMPLES:
        raise ConfigError(
            f"there is no example data set {name!r}.{did_you_mean(name, _EXAMPLES)} Load it with "
            "the datasets package and pass it as dataset=..."
        )
    return _EXAMPLES[name]


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Any:
    """Return a Hugging Face `Dataset` with the columns `question` and `answer`.

    With `n`, that many rows of the data set shuffled by `seed`.

    Raises:
        ConfigError: there is no example data set of that name.
        ConfigError: it cannot be loaded, or the `datasets` package is missing; the message names
            the file to put where.
    """
    example = _example(name)
    rows = _raw_rows(name, example, split or example.split)
    from datasets import Dataset

    if example.keep is not None:
        rows = rows.filter(example.keep)
    if n is not None and n > 0:
        rows = rows.shuffle(seed=seed).select(range(min(n, len(rows))))
    return Dataset.from_list([example.convert(row) for row in rows])


def _raw_rows(name: str, example: _Example, split: str) -> Any:
    """Return the rows of a split as the hub has them."""
    try:
        from datasets import Dataset, concatenate_datasets
    except ImportError as error:
        raise ConfigError(
            f"load_example_dataset({name!r}) needs the `datasets` package. Install it with "
            "`pip install rolltree[envs]`."
        ) from error
    home = os.environ.get("ROLLTREE_HOME") or Path.home() / ".cache" / "rolltree"
    folder = Path(home) / "datasets"
    for ending in ("jsonl", "parquet"):
        file = folder / f"{name}-{split}.{ending}"
        if file.is_file():
            found = Rows.of(file, lambda row, index: dict(row))
            return Dataset.from_list(found.to_list())
    try:
        parts = [hub_rows(example.hub, config, split) for config in example.configs]
    except ConfigError as error:
        raise ConfigError(
            f"the example data set {name!r} cannot be fetched ({error}). Put the split {split!r} "
            f"of {example.hub}, with the columns it has there, into "
            f"{folder / f'{name}-{split}.jsonl'} (or .parquet)."
        ) from error
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)
