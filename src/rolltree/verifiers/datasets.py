"""Data sets as verifiers 0.1.8 formats them, and its example data sets."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolltree.environments.dataset import (
    Data,
    Row,
    RowFormat,
    Rows,
    datasets_package,
    hub_rows,
)
from rolltree.environments.parsers import extract_boxed_answer
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import ChatMessage


def is_hub_dataset(data: object) -> bool:
    """Whether `data` is a Hugging Face `Dataset`."""
    # Without importing `datasets`, which is slow.
    return type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "column_names")


def format_dataset(
    dataset: Any,
    system_prompt: str | None = None,
    few_shot: list[ChatMessage] | None = None,
    question_key: str = "question",
    answer_key: str = "answer",
    map_kwargs: dict[str, Any] = {},  # noqa: B006  (never changed)
) -> Any:
    """Return a data set with the columns `example_id` and `prompt`.

    An `example_id` that is not a number is kept as `src_id`. A `prompt` that is there stays as it
    is; otherwise it is the system prompt, the few-shot messages and the question.
    """
    if not is_hub_dataset(dataset):
        few = tuple(few_shot or ())
        return Rows.of(dataset, RowFormat("", system_prompt, few, "chat", question_key, answer_key))
    dataset = with_example_ids(dataset)
    return with_prompts(dataset, system_prompt, few_shot, question_key, answer_key, map_kwargs)


def with_example_ids(dataset: Any) -> Any:
    """Return a Hugging Face data set whose rows are numbered."""
    names = dataset.column_names
    # The first row decides, as in verifiers.
    if "example_id" in names and not isinstance(dataset[0]["example_id"], int):
        dataset, names = dataset.rename_column("example_id", "src_id"), ["src_id"]
    if "example_id" in names:
        return dataset
    return dataset.add_column("example_id", range(len(dataset)))


def with_prompts(
    dataset: Any,
    system_prompt: str | None = None,
    few_shot: Sequence[ChatMessage] | None = None,
    question_key: str = "question",
    answer_key: str = "answer",
    map_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return a Hugging Face data set whose rows have a prompt."""
    # Also with a system prompt: verifiers adds it to questions only.
    if "prompt" in dataset.column_names:
        return dataset
    head: list[ChatMessage] = []
    if system_prompt:
        head.append({"role": "system", "content": system_prompt})
    head.extend(few_shot or ())

    def add_prompt(row: Row) -> Row:
        made: Row = {"prompt": [*head, {"role": "user", "content": row[question_key]}]}
        return made if answer_key == "answer" else {**made, "answer": row[answer_key]}

    return dataset.map(add_prompt, **(map_kwargs or {}))


def as_rows(data: Data, row_format: RowFormat) -> Rows:
    """Return `data` as `Rows` that leave complete rows as they are."""

    def complete(row: Mapping[str, Any], index: int) -> Row:
        if row.get("prompt") is None:
            return row_format(row, index)
        made = dict(row)
        if isinstance(made["prompt"], str) and row_format.message_type == "chat":
            made["prompt"] = [{"role": "user", "content": made["prompt"]}]
        # Rows are grouped by it, a text as well as a number; verifiers fails without it.
        if not isinstance(made.get("example_id"), (int, str)):
            made["example_id"] = index
        made.setdefault("task", row_format.env_id or "default")
        return made

    return Rows.of(data, complete)


# The prompts of verifiers 0.1.8; the first is that of Hugging Face's lighteval for math.
BOXED_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
THINK_BOXED_SYSTEM_PROMPT = (
    "Think step-by-step inside <think>...</think> tags. "
    "    Then, give your final answer inside \\boxed{}."
)
Convert = Callable[[Mapping[str, Any]], Row]


def extract_hash_answer(text: str) -> str:
    """Return the text after `####`, stripped; without `####`, the whole text."""
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
    # The global generator and this order of calls, so that a seeded script gets the same letters as
    # with verifiers.
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
    """One data set: its name on the hub, its split, how a row is read, and which rows count."""

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
        ConfigError: it cannot be loaded, or the `datasets` package is missing; the message says
            which file to put where.
    """
    example = _example(name)
    rows = _raw_rows(name, example, split or example.split)
    from datasets import Dataset

    if example.keep is not None:
        rows = rows.filter(example.keep)
    # After the filter and before the conversion, as in verifiers: the same seed gives the same
    # rows.
    if n is not None and n > 0:
        rows = rows.shuffle(seed=seed).select(range(min(n, len(rows))))
    return Dataset.from_list([example.convert(row) for row in rows])


def _raw_rows(name: str, example: _Example, split: str) -> Any:
    """Return the rows of a split as the hub has them."""
    datasets = datasets_package(f"load_example_dataset({name!r})")
    home = os.environ.get("ROLLTREE_HOME") or Path.home() / ".cache" / "rolltree"
    folder = Path(home) / "datasets"
    for ending in ("jsonl", "parquet"):
        file = folder / f"{name}-{split}.{ending}"
        if file.is_file():
            found = Rows.of(file, lambda row, index: dict(row))
            return datasets.Dataset.from_list(found.to_list())
    try:
        parts = [hub_rows(example.hub, config, split) for config in example.configs]
    except ConfigError as error:
        raise ConfigError(
            f"the example data set {name!r} cannot be fetched ({error}). Put the split {split!r} "
            f"of {example.hub}, with the columns it has there, into "
            f"{folder / f'{name}-{split}.jsonl'} (or .parquet)."
        ) from error
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
