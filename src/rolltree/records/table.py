"""Tables: documented columns, and rows that are read a batch at a time, as often as needed.

pyarrow, pandas, polars and DuckDB read a `Table` through Arrow's C stream protocol; rows are plain
dicts. Only Arrow itself needs pyarrow: `pip install 'rolltree[data]'`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rolltree._helpers.files import check_replaced, whole_file
from rolltree._helpers.html_view import html_table
from rolltree.store.export import write_lines
from rolltree.values.errors import ConfigError, StoreError, UnknownName, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

Kind: TypeAlias = Literal[
    "string", "bool", "int32", "int64", "float32", "float64", "int32 list", "messages"
]
Batch: TypeAlias = Mapping[str, Any]
"""Column name to its values, all of one length: a list (None: no value) or a numpy array (a masked
array if values may be missing)."""
MESSAGE_TEXTS = ("role", "content", "reasoning_content", "name", "tool_call_id", "extra")
"""The texts of a message in a column of kind `messages`; `extra` is JSON of its other keys."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, and what it holds with its unit."""

    name: str
    kind: Kind
    description: str


class Table:
    """Rows of one kind, which are read only when they are needed, a batch at a time.

    Args:
        name: what the rows are, for messages.
        columns: the columns in their order.
        read: returns the batches, from the first row on, at each call. It gets the names of the
            wanted columns; batches may have more.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[Column],
        read: Callable[[Sequence[str]], Iterable[Batch]],
    ) -> None:
        self.name = name
        self.columns = tuple(columns)
        self._read = read

    def __repr__(self) -> str:
        return f"<Table {self.name}: {', '.join(self.column_names)}>"

    def _repr_html_(self) -> str:
        """Return the first rows for a notebook, long cells cut."""
        rows = [
            [str("" if value is None else value)[:200] for value in row.values()]
            for row in self.head(20).rows()
        ]
        return html_table(f"{self.name}, its first rows", self.column_names, rows)

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.columns]

    def select(self, names: Sequence[str]) -> Table:
        """Return the table with these columns only, in this order.

        Raises:
            UnknownName: there is no such column.
        """
        by_name = {column.name: column for column in self.columns}
        for name in names:
            if name not in by_name:
                raise UnknownName(
                    f"table {self.name!r} has no column {name!r}.{did_you_mean(name, by_name)}"
                )
        return Table(self.name, [by_name[name] for name in names], self._read)

    def head(self, limit: int) -> Table:
        """Return the first rows only."""

        # A batch that is not asked for is not read: `head(5)` of a large run costs one page.
        def read(names: Sequence[str]) -> Iterator[Batch]:
            left = limit
            for batch in self._read(names) if left else ():
                size = len(batch[names[0]])
                yield {name: batch[name][:left] for name in names} if size > left else batch
                left -= size
                if left <= 0:
                    return

        return Table(self.name, self.columns, read)

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the rows a batch at a time: name to values."""
        names = self.column_names
        for batch in self._read(names):
            yield {name: batch[name] for name in names}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row as a dict of plain values; None if there is no value."""
        names = self.column_names
        for batch in self.batches():
            lists = (_as_list(values) for values in batch.values())
            for row in zip(*lists, strict=True):
                yield dict(zip(names, row, strict=True))

    # -- Arrow -------------------------------------------------------------------------------

    def arrow_schema(self) -> pa.Schema:
        """Return the Arrow schema; every field's metadata has the column's description."""
        pa = _pyarrow()
        return pa.schema(
            [
                pa.field(c.name, _arrow_type(pa, c.kind), metadata={"description": c.description})
                for c in self.columns
            ],
            metadata={"rolltree.table": self.name},
        )

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader of Arrow record batches: memory holds a batch at a time."""
        pa = _pyarrow()
        schema = self.arrow_schema()

        def read() -> Iterator[Any]:
            for batch in self.batches():
                arrays = [
                    _arrow_array(pa, field.type, values)
                    for field, values in zip(schema, batch.values(), strict=True)
                ]
                yield pa.record_batch(arrays, schema=schema)

        return pa.RecordBatchReader.from_batches(schema, read())

    def to_arrow(self) -> pa.Table:
        """Return a pyarrow table with all rows."""
        return self.to_reader().read_all()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return an Arrow C stream, which `polars.DataFrame(table)` or DuckDB request."""
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        """Return the schema of the stream."""
        return self.arrow_schema().__arrow_c_schema__()

    def to_pandas(self) -> Any:
        """Return a pandas data frame; whole numbers stay whole if values are missing (Int64)."""
        pd = _package("pandas", "to_pandas")
        pa = _pyarrow()
        # Without these types, a single missing step turns all steps into floats.
        whole = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
        return self.to_arrow().to_pandas(types_mapper=whole.get)

    def to_polars(self) -> Any:
        """Return a polars data frame."""
        return _package("polars", "to_polars").DataFrame(self)

    # -- files -------------------------------------------------------------------------------

    def write(self, target: str | Path) -> int:
        """Write the rows to a file and return their number; the suffix names the format.

        `.parquet` and `.arrow` (Arrow IPC) need pyarrow, `.jsonl` and `.csv` do not. The columns'
        descriptions go into the schema of the first two.

        Raises:
            ConfigError: an unknown suffix, or pyarrow is missing; or a file is there that is not
                an earlier export of these columns or of rollouts.
            StoreError: the file cannot be written, or a row is damaged.
        """
        path = Path(target)
        write = _WRITERS.get(path.suffix.lower())
        if write is None:
            raise ConfigError(
                f"{path} needs the suffix of a table format. Use one of {', '.join(_WRITERS)}."
            )
        check_replaced(path, lambda file: is_export(file, self.column_names))
        try:
            # Written beside its place and renamed, so that a table is whole or absent.
            with whole_file(path) as part:
                return write(self, part)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error.strerror or error}), so no table was saved. "
                "Check the folder and the free space, or choose another file."
            ) from error


_OF_ROLLOUTS = frozenset(("request_id", "trajectory_index"))


def is_export(path: Path, columns: Iterable[str] = ()) -> bool:
    """Whether a file has these columns, or names rollouts as every export of them does."""
    names = _names_in(path)
    return names >= _OF_ROLLOUTS or (bool(names) and names == set(columns))


def _names_in(path: Path) -> set[str]:
    """Return the columns of a table in a file; none if it is not one."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            import pyarrow.parquet as pq

            return set(pq.read_schema(path).names)
        if suffix == ".arrow":
            with _pyarrow().ipc.open_file(str(path)) as file:
                return set(file.schema.names)
        with path.open(encoding="utf-8", newline="") as text:
            if suffix == ".csv":
                return set(next(csv.reader(text), ()))
            found = json.loads(text.readline())
            return set(found) if isinstance(found, dict) else set()
    # pyarrow's errors are ValueErrors, and so is text that is not UTF-8.
    except (ImportError, OSError, ValueError, RecursionError, csv.Error):
        return set()


def _write_jsonl(table: Table, path: Path) -> int:
    return write_lines(path, table.rows())


def _write_csv(table: Table, path: Path) -> int:
    number = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(table.column_names)
        for number, row in enumerate(table.rows(), 1):  # noqa: B007
            out.writerow(row.values())  # a missing value is an empty field
    return number


def _write_parquet(table: Table, path: Path) -> int:
    _pyarrow()
    import pyarrow.parquet as pq

    return _write_batches(table, partial(pq.ParquetWriter, path, compression="zstd"))


def _write_arrow(table: Table, path: Path) -> int:
    return _write_batches(table, partial(_pyarrow().ipc.new_file, str(path)))


def _write_batches(table: Table, opened: Callable[[Any], Any]) -> int:
    number, reader = 0, table.to_reader()
    with opened(reader.schema) as out:
        for batch in reader:
            out.write_batch(batch)
            number += batch.num_rows
    return number


_WRITERS: dict[str, Callable[[Table, Path], int]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
}
TABLE_SUFFIXES = tuple(_WRITERS)


def _as_list(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else values.tolist()


def _arrow_type(pa: Any, kind: Kind) -> Any:
    if kind == "int32 list":
        return pa.list_(pa.int32())
    if kind == "messages":
        text = dict.fromkeys(MESSAGE_TEXTS, pa.string())
        function = pa.struct({"name": pa.string(), "arguments": pa.string()})
        call = pa.struct({"id": pa.string(), "type": pa.string(), "function": function})
        return pa.list_(pa.struct({**text, "tool_calls": pa.list_(call)}))
    return getattr(pa, {"bool": "bool_"}.get(kind, kind))()


def _arrow_array(pa: Any, kind: Any, values: Any) -> Any:
    # Only numpy's masked arrays have a mask; checking for it does not import numpy.
    if hasattr(values, "mask"):
        return pa.array(values.data, type=kind, mask=values.mask)
    return pa.array(values, type=kind)


def _pyarrow() -> Any:
    return _package("pyarrow", "Arrow tables and Parquet", "'rolltree[data]'")


def _package(name: str, what: str, install: str | None = None) -> Any:
    """Import a package that only some conversions of a table need."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} need{'s' if install is None else ''} the package {name}, which is missing. "
            f"Install it: pip install {install or name}. Rows, JSON lines and CSV need nothing."
        ) from error
