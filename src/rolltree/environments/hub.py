"""Benchmark rows: from the Hugging Face hub, a local file, or made up, and said so.

It knows the `datasets` package and that it may not reach anything. It knows nothing about what a
row means. It leaves out caching, which `datasets` does.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rolltree.environments.dataset import Data, Row, Rows
from rolltree.errors import ConfigError


class GeneratedRowsWarning(UserWarning):
    """A benchmark could not be loaded, and rows that are not the benchmark stand in for it."""


def hub_rows(dataset_id: str, config: str | None = None, split: str = "train") -> Any:
    """Return a split of a data set of the Hugging Face hub (or of its local cache).

    Raises:
        ConfigError: `datasets` is missing, or the data set cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"loading {dataset_id!r} needs the `datasets` package. Install it with "
            "`pip install rolltree[envs]`, or pass the path of a .jsonl or .parquet file."
        ) from error
    try:
        with nullcontext() if _hub_answers() else _offline():
            return load_dataset(dataset_id, config, split=split)
    except Exception as error:  # it raises what its many back ends raise
        raise ConfigError(
            f"the split {split!r} of {dataset_id!r} could not be loaded from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Pass the path of a .jsonl or .parquet file."
        ) from error


@functools.cache
def _hub_answers() -> bool:
    """Whether the hub can be reached at all: its client would try for most of a minute."""
    import httpx

    try:
        httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5.0)
    except httpx.TransportError:
        return False
    return True


@contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` look into its cache only, while the block lasts."""
    import datasets.config
    import huggingface_hub.constants

    modules: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def benchmark_rows(
    source: str | Path | None,
    *,
    hub: tuple[str, str | None, str],
    task: str,
    convert: Callable[[Mapping[str, Any]], Row],
    generate: Callable[[], Sequence[Row]],
) -> Data | None:
    """Return rows of a benchmark, each as `convert` makes it; None for the source None.

    Sources: "hub"; a path; "generated", which are `generate`'s rows, whose task is
    `<task>-generated`, so that no result can be taken for the benchmark's; "auto", which is the
    hub, and with a `GeneratedRowsWarning` generated rows where it cannot be reached.

    Args:
        source: where from.
        hub: data set, configuration and split.
        task: the task of real rows.
        convert: from a row of the data set to `question` (or `prompt`), `answer` and `info`.
        generate: makes rows in converted form.

    Raises:
        ConfigError: the source cannot be read.
    """
    if source is None:
        return None
    if source == "generated":
        return [{**row, "task": f"{task}-generated"} for row in generate()]
    if source in ("auto", "hub"):
        try:
            found: Any = hub_rows(*hub)
        except ConfigError as error:
            if source == "hub":
                raise
            warnings.warn(
                f"{error} Until then generated rows stand in: they are NOT {hub[0]}.",
                GeneratedRowsWarning,
                stacklevel=3,
            )
            return benchmark_rows(
                "generated", hub=hub, task=task, convert=convert, generate=generate
            )
    else:
        found = Path(source)
    return Rows.of(found, lambda row, index: {**convert(row), "task": task}).freeze()
