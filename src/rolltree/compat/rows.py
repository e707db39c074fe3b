"""Data sets as verifiers 0.1.8 formats them: a Hugging Face `Dataset` stays one.

Everything else that rolltree reads (lists, paths, `Rows`) becomes rolltree's `Rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolltree.environments.dataset import Data, Row, RowFormat, Rows
from rolltree.types import ChatMessage


def is_hub_dataset(data: object) -> bool:
    """Whether `data` is a Hugging Face `Dataset`."""
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


def with_task(dataset: Any, task: str, map_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return a Hugging Face data set whose rows have a task."""
    if "task" in dataset.column_names:
        return dataset
    return dataset.map(lambda row: {"task": task}, **(map_kwargs or {}))


def repeated(rows: Any, times: int) -> list[Row]:
    """Return the rows of a data set as dicts, all of them `times` times in turn."""
    listed: list[Row] = rows.to_list() if hasattr(rows, "to_list") else list(rows)
    return [dict(row) for _ in range(max(times, 1)) for row in listed]


def opened(data: Data, row_format: RowFormat) -> Rows:
    """Return `data` as `Rows` that leave complete rows as they are."""

    def complete(row: Mapping[str, Any], index: int) -> Row:
        if row.get("prompt") is None:
            return row_format(row, index)
        made = dict(row)
        if isinstance(made["prompt"], str) and row_format.message_type == "chat":
            made["prompt"] = [{"role": "user", "content": made["prompt"]}]
        if not isinstance(made.get("example_id"), int):
            made["example_id"] = index
        made.setdefault("task", row_format.env_id or "default")
        return made

    return Rows.of(data, complete)
