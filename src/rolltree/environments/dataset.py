"""Rows: data sets as environments read them, and the sources of benchmark rows.

Rows are formatted when they are read, so a large data set costs nothing to open. The `datasets`
package is needed only for Parquet files and the Hugging Face hub.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, overload

from rolltree._helpers.files import write_whole
from rolltree.values.errors import ConfigError, import_extra
from rolltree.values.types import ChatMessage, Messages, MessageType

Row: TypeAlias = dict[str, Any]
Data: TypeAlias = "Sequence[Mapping[str, Any]] | str | Path | Rows | Any"
"""A list of dicts, a path to `.jsonl` or `.parquet`, a name of the Hugging Face hub (`user/data`,
`user/data@revision`, `user/data:split`; the split is `train`), a `Dataset`, or `Rows`."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row becomes a prompt.

    A row with a `prompt` keeps it; otherwise `question_key` becomes the user's message. The system
    prompt goes in front, unless the row's prompt has one; the few-shot messages follow it.
    `example_id` defaults to the row's index, `task` to the environment's name.
    """

    env_id: str = "default"
    system_prompt: str | None = None
    few_shot: tuple[ChatMessage, ...] = ()
    message_type: MessageType = "chat"
    question_key: str = "question"
    answer_key: str = "answer"

    def __call__(self, row: Mapping[str, Any], index: int) -> Row:
        """Return the row with `prompt`, `example_id`, `task` and, if there is one, `answer`."""
        formatted = dict(row)
        prompt = row.get("prompt")
        if prompt is None:
            if self.question_key not in row:
                raise ConfigError(
                    f"row {index} has neither 'prompt' nor {self.question_key!r}, so there is "
                    f"nothing to ask. Its columns are {', '.join(map(repr, row))}; rename one or "
                    "set question_key."
                )
            prompt = row[self.question_key]
        formatted["prompt"] = self._prompt(prompt, index)
        if self.answer_key != "answer" and self.answer_key in row:
            formatted["answer"] = row[self.answer_key]
        # Arrow turns missing ids into None, and some hub data sets have strings as ids; results and
        # groups need integers.
        if not isinstance(row.get("example_id"), int):
            formatted["example_id"] = index
        if row.get("task") is None:
            formatted["task"] = self.env_id or "default"
        return formatted

    def _prompt(self, prompt: Any, index: int) -> Messages:
        if self.message_type == "completion":
            if not isinstance(prompt, str):
                raise ConfigError(
                    f"the prompt of row {index} is a {type(prompt).__name__}, but message_type is "
                    "'completion', which continues a string. Use a string or message_type='chat'."
                )
            return prompt
        if isinstance(prompt, str):
            messages: list[ChatMessage] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes):
            messages = [self._message(message, index) for message in prompt]
        else:
            raise self._asks_nothing(prompt, index)
        head: list[ChatMessage] = []
        if messages and messages[0].get("role") == "system":
            head = [messages.pop(0)]
        elif self.system_prompt is not None:
            head = [{"role": "system", "content": self.system_prompt}]
        return [*head, *self.few_shot, *messages]

    def _message(self, message: Any, index: int) -> ChatMessage:
        if not isinstance(message, Mapping):
            raise self._asks_nothing([message], index)
        return _without_none(message)

    def _asks_nothing(self, prompt: Any, index: int) -> ConfigError:
        return ConfigError(
            f"the prompt of row {index} of a data set is a {type(prompt).__name__}, "
            f"{str(prompt)[:60]!r}, not a string or a list of messages. "
            f"Write a string under {self.question_key!r}, or "
            'under \'prompt\' messages such as [{"role": "user", "content": "7 + 5 ="}].'
        )


class Rows(Sequence[Row]):
    """Rows of a data set, formatted when read. Immutable: `shuffle` returns new `Rows`."""

    def __init__(
        self,
        source: Any,
        formatter: Callable[[Mapping[str, Any], int], Row],
        order: Sequence[int] | None = None,
    ) -> None:
        self._source = source
        self._format = formatter
        self._order: Sequence[int] = range(len(source)) if order is None else order

    @classmethod
    def of(cls, data: Data, formatter: Callable[[Mapping[str, Any], int], Row]) -> Rows:
        """Open `data`.

        Raises:
            ConfigError: `data` has an unknown type, cannot be read, or has no rows.
        """
        if isinstance(data, Rows):
            return data
        source = _read_named(data) if isinstance(data, str | Path) else data
        if isinstance(source, Mapping) or not hasattr(source, "__getitem__"):
            raise ConfigError(
                f"a {type(data).__name__} is not a data set of rows: rollouts are counted and "
                "repeated by index. Pass a list of dicts, a .jsonl or .parquet path, or a "
                "Hugging Face Dataset (for a DatasetDict choose a split)."
            )
        if len(source) == 0:
            raise ConfigError("a data set has no rows, so there would be nothing to run.")
        # A list is in memory, so every row is checked; of other data sets only the first.
        for index, row in enumerate(source if isinstance(source, list | tuple) else [source[0]]):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"row {index} of a data set is a {type(row).__name__}, not a dict of columns: "
                    f"{str(row)[:60]!r}. It cannot be made a prompt. Write rows such as "
                    '{"question": "7 + 5 =", "answer": "12"}.'
                )
        return cls(source, formatter)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Rows: ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Row | Rows | list[Any]:
        if isinstance(key, str):
            return [row[key] for row in self]
        if isinstance(key, slice):
            return Rows(self._source, self._format, self._order[key])
        index = self._order[key]
        return self._format(self._source[index], index)

    def __iter__(self) -> Iterator[Row]:
        return (self[position] for position in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        """The columns of the first row."""
        return list(self[0])

    def select(self, indices: Sequence[int]) -> Rows:
        """Return the rows at `indices`, in that order."""
        return Rows(self._source, self._format, [self._order[index] for index in indices])

    def shuffle(self, seed: int = 0) -> Rows:
        """Return all rows in an order that depends on `seed` only. These rows stay as they are."""
        order = list(self._order)
        random.Random(seed).shuffle(order)
        return Rows(self._source, self._format, order)

    def take(self, num: int, seed: int | None = None) -> Rows:
        """Return the first `num` rows (-1: all), after shuffling when there is a seed."""
        # A new view, never in place: rows are shared by all users of this environment.
        rows = self if seed is None else self.shuffle(seed)
        return rows if num < 0 else rows[:num]

    def place(self, position: int) -> tuple[Any, int]:
        """Return what a row is read from, and its index there."""
        return self._source, self._order[position]

    def filter(self, keep: Callable[[Row], bool]) -> Rows:
        """Return the rows for which `keep` is true; every row is read once, now."""
        order = [index for index in self._order if keep(self._format(self._source[index], index))]
        return Rows(self._source, self._format, order)

    def map(self, change: Callable[[Row], Row]) -> Rows:
        """Return rows to which `change` is applied when they are read."""
        before = self._format
        return Rows(self._source, lambda row, index: change(before(row, index)), self._order)

    def freeze(self) -> _Frozen:
        """Return these rows as plain data, for an environment to format."""
        return _Frozen(self)

    def to_list(self) -> list[Row]:
        """Return all rows as dicts."""
        return list(self)

    def to_jsonl(self, path: str | Path) -> None:
        """Write the rows as JSON Lines, which `dataset=path` reads back.

        Raises:
            TypeError: a row holds a value that JSON cannot represent.
        """
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self)
        write_whole(path, text)

    def to_dataset(self) -> Any:
        """Return the rows as a Hugging Face `Dataset`.

        Raises:
            ConfigError: the `datasets` package is missing.
        """
        return datasets_package("a Hugging Face Dataset").Dataset.from_list(self.to_list())


class _Frozen(Sequence[Row]):
    """Rows that are not of the type `Rows`, so that `Rows.of` formats them again."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]


def _without_none(message: Mapping[str, Any]) -> ChatMessage:
    """Drop the keys that Arrow filled with None because another message has them."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _read_named(name: str | Path) -> Any:
    """Return the rows of a file, or of a data set of the hub if there is no such file."""
    path = Path(name)
    repo, _, split = str(name).partition(":")
    is_file = path.exists() or isinstance(name, Path) or path.suffix in _READERS
    from rolltree._helpers.hub import hub_name

    if is_file or hub_name(repo, "dataset") is None:
        return _read_file(path)
    return hub_rows(repo, split=split or "train")


def _read_file(path: Path) -> Any:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(
            f"{path} cannot be read as a data set: its ending is {path.suffix!r}. Use .jsonl or "
            ".parquet, or load it yourself and pass a list of dicts."
        )
    if not path.is_file():
        raise ConfigError(f"there is no data set at {path}; the environment would have no rows.")
    return reader(path)


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Not `splitlines`, which splits at characters such as U+2028 that a row of JSON may hold.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is not valid JSON: {error}.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is not a JSON object, so it has no columns.")
        rows.append(row)
    return rows


def datasets_package(what: str) -> Any:
    """Return the module `datasets`, which `what` needs.

    Raises:
        ConfigError: it is not installed.
    """
    return import_extra("datasets", what, "rolltree[envs]", ", or use .jsonl files")


_READERS: dict[str, Callable[[Path], Any]] = {
    ".jsonl": _read_jsonl,
    ".parquet": lambda path: datasets_package(f"the file {path}").Dataset.from_parquet(str(path)),
}


def hub_rows(dataset_id: str, config: str | None = None, split: str = "train") -> Any:
    """Return a split of a data set of the Hugging Face hub (or of its local cache).

    `dataset_id` may name a revision: `owner/name@revision`.

    Raises:
        ConfigError: `datasets` is missing, or the data set cannot be loaded.
    """
    from rolltree._helpers.hub import HubName, answers, cache_only, hub_name, unavailable

    datasets = datasets_package(f"loading {dataset_id!r}")
    name = hub_name(dataset_id, "dataset") or HubName(dataset_id, kind="dataset")
    at = {} if name.revision is None else {"revision": name.revision}
    try:
        # Without a network, the client retries for most of a minute before it reads its cache.
        with nullcontext() if answers() else cache_only():
            return datasets.load_dataset(name.repo, config, split=split, **at)
    except Exception as error:
        # `load_dataset` raises whatever its many back ends raise.
        raise ConfigError(
            f"the split {split!r} of {dataset_id!r} could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Pass the path of a .jsonl or .parquet file, or: "
            + unavailable(name, type(error).__name__)
        ) from error


def benchmark_rows(
    source: str | Path | None,
    *,
    hub: tuple[str, str | None, str],
    task: str,
    convert: Callable[[Mapping[str, Any]], Row],
    generate: Callable[[], Sequence[Row]],
) -> Data | None:
    """Return a benchmark's rows, converted by `convert`; None if `source` is None.

    Args:
        source: "hub"; a path; or "generated" for the rows of `generate`. Their task is
            `<task>-generated`, so that their results cannot be mistaken for the benchmark's.
        hub: data set, configuration and split.
        task: the task of real rows.
        convert: turns a row of the data set into `question` (or `prompt`), `answer` and `info`.
        generate: returns rows in converted form.

    Raises:
        ConfigError: the source cannot be read.
    """
    if source is None:
        return None
    if source == "generated":
        return [{**row, "task": f"{task}-generated"} for row in generate()]
    if source == "hub":
        try:
            found: Any = hub_rows(*hub)
        except ConfigError as error:
            raise ConfigError(
                f"{error} The source 'generated' makes rows for practice, which are not {hub[0]}: "
                '-a \'{"train": "generated", "test": "generated"}\'.'
            ) from error
    else:
        found = Path(source)
    return Rows.of(found, lambda row, index: {**convert(row), "task": task}).freeze()
