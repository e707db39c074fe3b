"""The values of table `rollouts`, made from the columns of the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rolltree.store import Run, to_plain
from rolltree.store.filters import METRIC
from rolltree.store.metric_names import number_of


def stored_names(names: Sequence[str]) -> list[str]:
    """Return the stored columns that columns of `rollouts` are made from."""
    return list(dict.fromkeys(_source(name)[0] for name in names))


def values_of_rows(run: Run, names: Sequence[str], rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return columns of a run's `rollouts` from rows that have the columns `stored_names`."""
    sources = stored_names(names)
    if rows and hasattr(rows[0], "_fields"):  # projections, which need no look-up by name
        columns = dict(zip(rows[0]._fields, zip(*rows, strict=True), strict=True))
    else:
        columns = {source: tuple(getattr(row, source) for row in rows) for source in sources}
    values: dict[str, list[Any]] = {}
    for name in names:
        source, read = _source(name)
        if name == "trained_step":
            from rolltree.records.trained_steps import trained_steps

            read = trained_steps(run).get
        column = columns.get(source, ())
        values[name] = list(column if read is None else map(read, column))
    return values


def _source(name: str) -> tuple[str, Callable[[Any], Any] | None]:
    """Return the stored column that a column is made from, and the function (None: unchanged)."""
    if name.startswith(METRIC):
        metric = name.removeprefix(METRIC)
        return "metrics", lambda metrics: number_of(metrics.get(metric))
    return _DERIVED.get(name, (name, None))


def clean_text(text: str) -> str:
    """Return a text that UTF-8 can encode: half a surrogate pair, as models write, is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def json_text(value: Any) -> str:
    """Return a value as strict JSON that UTF-8 can encode."""
    return clean_text(json.dumps(to_plain(value), ensure_ascii=False))


def json_bytes(value: object) -> bytes:
    """Return a value as strict JSON in UTF-8; a number that is not finite is null."""
    # msgspec first: it is many times as fast, and rejects only text that UTF-8 cannot encode.
    try:
        return msgspec.json.encode(value, enc_hook=to_plain)
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may well write
        return msgspec.json.encode(_clean(value), enc_hook=to_plain)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value


def _first_message(errors: Sequence[Mapping[str, Any]]) -> str | None:
    message = errors[0].get("message") if errors else None
    return None if message is None else clean_text(str(message))


_DERIVED: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "trained_step": ("group_id", None),
    "error_message": ("errors", _first_message),
    "errors": ("errors", json_text),
    "input": ("input", json_text),
    "example_id": ("example_id", lambda value: None if value is None else str(value)),
}
