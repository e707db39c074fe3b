"""The rows of a run as values: trajectories, training steps, events.

Other packages pass and get `StoredRollout`s; `rolltree.rollouts.record` makes their two blobs.
"""

from __future__ import annotations

import json
import math
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rolltree._helpers.redact import REDACTED, cut_secrets, cut_text, redact
from rolltree.store.codec import deflate, dumps, inflate, loads
from rolltree.store.integrity import blob_checksum, checksum, is_intact
from rolltree.store.metric_names import eval_numbers
from rolltree.values.errors import StoreError, stored_kind

Secrets: TypeAlias = tuple[str, ...]
Status: TypeAlias = Literal["ok", "error"]


class StoredColumn(NamedTuple):
    """How one field of `StoredRollout` is stored in SQL."""

    sql: str
    encode: Callable[[Any, Secrets], Any]
    decode: Callable[[Any], Any]
    kind: str = "string"  # of the column in tables


def _text(value: Any, secrets: Secrets) -> str | None:
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def _label(value: Any, secrets: Secrets) -> str | None:
    text = _text(value, secrets)
    return None if text is None else cut_text(text, secrets)


def _whole(value: Any, secrets: Secrets) -> int | str | None:
    if value is None or isinstance(value, str):
        return _text(value, secrets)
    return int(value) if -(2**63) <= int(value) < 2**63 else str(value)


def _integer(value: Any, secrets: Secrets) -> int | float | str | None:
    # SQLite turns an integer beyond 64 bits into a float in an INTEGER column. The checksum covers
    # what SQLite returns, so the conversion is made here, before the checksum.
    whole = _whole(value, secrets)
    is_long = isinstance(whole, str) and not isinstance(value, str)
    return float(whole) if is_long and whole is not None else whole


def _real(value: Any, secrets: Secrets) -> float | None:
    number = math.nan if value is None else float(value)
    return None if math.isnan(number) else number + 0.0  # SQLite has neither NaN nor -0.0


def _json(value: Any, secrets: Secrets) -> str:
    # Almost no row has a secret, and searching the text costs less than searching the value.
    text = dumps(value)
    has_one = any(each in text for each in _spellings(secrets))
    return dumps(cut_secrets(dict(value), secrets)) if has_one else text


@lru_cache(maxsize=8)
def _spellings(secrets: Secrets) -> Secrets:
    """Return the secrets as JSON writes them."""
    return tuple(json.dumps(secret)[1:-1] for secret in secrets)


@lru_cache(maxsize=8)
def _raw_spellings(secrets: Secrets) -> tuple[bytes, ...]:
    """Return the secrets as they are, and as JSON writes them, in bytes."""
    spelled = (*secrets, *_spellings(secrets))
    return tuple(dict.fromkeys(each.encode("utf-8", "replace") for each in spelled))


def _errors(value: Any, secrets: Secrets) -> str:
    return dumps([redact(dict(item), secrets) for item in value])


def _record(value: bytes, secrets: Secrets) -> bytes:
    if any(spelling in value for spelling in _raw_spellings(secrets)):
        try:
            # A cut in the bytes could split an escape, so the values are cut and written again.
            value = dumps(cut_secrets(loads(value), secrets)).encode()
        except (ValueError, KeyError, TypeError):  # not the codec's JSON
            for spelling in _raw_spellings(secrets):
                value = value.replace(spelling, REDACTED.encode())
    return deflate(value)


def as_stored(value: Any) -> Any:
    """Return the value as it is: the decoder of columns that need none."""
    return value


_KEY = StoredColumn("TEXT NOT NULL", _text, as_stored)
_INDEX = StoredColumn("INTEGER NOT NULL", _whole, as_stored, "int64")
_ANY = StoredColumn("", _whole, as_stored)  # no type: SQLite would turn "7" into 7
_TEXT = StoredColumn("TEXT", _text, as_stored)
_LABEL = StoredColumn("TEXT", _label, as_stored)
_INT = StoredColumn("INTEGER", _integer, as_stored, "int64")
_REAL = StoredColumn("REAL", _real, as_stored, "float64")
_BOOL = StoredColumn("INTEGER", _whole, bool, "bool")
_JSON = StoredColumn("TEXT", _json, loads)
_ERRORS = StoredColumn("TEXT", _errors, lambda text: () if text == "[]" else tuple(loads(text)))
_RECORD = StoredColumn("BLOB", _record, inflate)
_TOKENS = StoredColumn("BLOB", lambda value, secrets: deflate(value), inflate)


def _about(stored: StoredColumn, description: str) -> dict[str, Any]:
    return {"stored": stored, "description": description}


def _column(stored: StoredColumn, description: str, default: Any) -> Any:
    """Declare a field of a stored row with its default."""
    return field(default=default, metadata=_about(stored, description))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One trajectory of one request; every value worth querying has its own column.

    A request that failed before it made a trajectory is stored with `trajectory_index=0` and empty
    blobs. A field is declared once: how it is stored, and what the column of the tables says.
    """

    # The identity: rows with the same two values are the same rollout, which is stored once.
    request_id: str = field(
        metadata=_about(_KEY, "the request; with `trajectory_index` the name of the rollout")
    )
    trajectory_index: int = _column(_INDEX, "which of the request's rollouts, from 0", 0)
    num_trajectories: int = _column(_INT, "rollouts of the request", 1)
    group_id: str = _column(_TEXT, "the group it is compared with", "")
    index_in_group: int = _column(_INT, "its place in the group, from 0", 0)
    phase: str = _column(_KEY, "`train`, or an evaluation's name", "eval")
    train_step: int | None = _column(
        _INT, "the optimizer step it was played for; none in an evaluation", None
    )
    env_id: str = _column(_LABEL, "the environment", "")
    example_id: int | str | None = _column(_ANY, "the example, as text", None)
    task: str = _column(_LABEL, "the example's task", "")
    agent: str = _column(_LABEL, "the agent, if there are several", "")
    # The rollout's own name, which others have here, is in `record`.
    parent_rollout: str | None = _column(_TEXT, "the rollout that delegated this one", None)
    depth: int = _column(_INT, "delegations above it", 0)
    # Never a silent 0.0.
    reward: float | None = _column(_REAL, "none if nothing scored it", None)
    status: Status = field(default="ok", metadata=_about(_TEXT, "`ok` or `error`"))
    error_type: str | None = _column(_LABEL, "the error that ended it", None)
    error_phase: str | None = _column(_TEXT, "where that happened", None)
    stop_condition: str | None = _column(_LABEL, "the condition that ended it", None)
    is_completed: bool = _column(_BOOL, "it came to an end", True)
    terminated: bool = _column(_BOOL, "a true end of the world", False)
    truncated: bool = _column(_BOOL, "it was cut before its true end", False)
    truncation_reason: str | None = _column(_LABEL, "what cut it", None)
    finish_reason: str | None = _column(_LABEL, "why the model stopped in the last call", None)
    num_calls: int = _column(_INT, "model calls", 0)
    num_prompt_tokens: int = _column(_INT, "prompt tokens of all calls, as billed", 0)
    num_completion_tokens: int = _column(_INT, "sampled tokens of all calls", 0)
    num_unique_tokens: int = _column(_INT, "tokens as stored: shared prefixes once", 0)
    min_version: int | None = _column(_INT, "oldest policy version of its sampled tokens", None)
    max_version: int | None = _column(_INT, "newest policy version of its sampled tokens", None)
    num_attempts: int = _column(_INT, "attempts that the episode took", 1)
    generation_ms: float = _column(_REAL, "ms of playing, waiting for the server included", 0.0)
    scoring_ms: float = _column(_REAL, "ms of scoring", 0.0)
    total_ms: float = _column(_REAL, "ms of both", 0.0)
    # For people; durations come from a monotonic clock.
    started_at: float | None = _column(_REAL, "s since 1970 (UTC)", None)
    created_at: float = field(
        default_factory=time.time, metadata=_about(_REAL, "when it was stored, s since 1970 (UTC)")
    )
    metrics: Mapping[str, Any] = field(default_factory=dict, metadata=_about(_JSON, ""))
    # The prompt is in `record`.
    input: Mapping[str, Any] = field(
        default_factory=dict, metadata=_about(_JSON, "the dataset row without its prompt, as JSON")
    )
    errors: tuple[Mapping[str, Any], ...] = _column(
        _ERRORS, "all errors with their tracebacks, as JSON", ()
    )
    # JSON of the codec, and a token tree's bytes; this package does not interpret them. The blobs
    # come last, so that a scan skips them.
    record: bytes = _column(_RECORD, "", b"")
    tokens: bytes = _column(_TOKENS, "", b"")


COLUMNS: dict[str, StoredColumn] = {
    each.name: each.metadata["stored"] for each in fields(StoredRollout)
}
"""The fields of `StoredRollout` in their order."""


# Typed like this because mypy accepts only field names that are written out.
_make_class: Callable[..., Any] = namedtuple


@lru_cache(maxsize=64)
def projection(names: tuple[str, ...]) -> Any:
    """Return the class of rows with some fields of `StoredRollout` only: a tuple with its names.

    What reads rollouts reads such rows, whether they come from a store or from memory.
    """
    empty = StoredRollout(request_id="")
    defaults = [getattr(empty, name) for name in names]
    return _make_class("RolloutRow", names, rename=True, defaults=defaults)


def raised_by_rewards(errors: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return the reward functions among the `errors` of a row, each with its error."""
    return tuple(
        (str(each["function"]), f"{each.get('type')}: {each.get('message')}")
        for each in errors
        if "function" in each
    )


def is_lost(errors: Sequence[Mapping[str, Any]]) -> bool:
    """Whether infrastructure failed the rollout of a row with these `errors`."""
    # The rollout's own failure is the first; those of reward functions follow.
    return stored_kind(errors[0]) == "infrastructure" if errors else False


@dataclass(frozen=True, slots=True)
class StepRow:
    """Metrics of one optimizer step."""

    step: int
    created_at: float
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the run: started, resumed, checkpoint saved, steps dropped."""

    kind: str
    created_at: float
    step: int | None
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class StoredEvaluation:
    """A held-out evaluation of a training run after `step` steps, with rollouts in `phase`."""

    step: int
    phase: str
    metrics: dict[str, Any] = field(compare=False)

    @classmethod
    def of(cls, event: Event) -> StoredEvaluation:
        """Return the evaluation that an event of the kind `evaluation` describes."""
        return cls(event.step or 0, event.data["phase"], event.data.get("metrics") or {})

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers, named as in `docs/metrics.md`: `eval/reward`, `eval/reward_low`, ..."""
        return eval_numbers(self.metrics)

    @property
    def reward(self) -> float | None:
        """The mean reward; None without one."""
        return self.numbers.get("eval/reward")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the mean reward; None without one."""
        low, high = (self.numbers.get(f"eval/reward_{end}") for end in ("low", "high"))
        return None if low is None or high is None else (low, high)


BLOBS = ("record", "tokens")
LIGHT = tuple(name for name in COLUMNS if name not in BLOBS)
STORED = ("id", *LIGHT, "blob_checksum", "checksum", *BLOBS)
"""The columns of the table: `checksum` covers those before it, `blob_checksum` the blobs."""

SUMMED = STORED[: -len(BLOBS)]
_NUM_LIGHT = 1 + len(LIGHT)
_DECODED = [(name, each.decode) for name, each in COLUMNS.items() if each.decode is not as_stored]

_SQL_TYPES: dict[str, Any] = {
    "TEXT NOT NULL": str,
    "INTEGER NOT NULL": int,
    "": int | str | None,
    "TEXT": str | None,
    "INTEGER": int | float | str | None,
    "REAL": float | None,
    "BLOB": bytes,
}
if TYPE_CHECKING:
    SqlRow: TypeAlias = tuple[Any, ...]
else:
    # With types, so that `msgspec` checks rows from other processes.
    SqlRow = tuple[tuple(_SQL_TYPES[column.sql] for column in COLUMNS.values())]


def to_sql(row: StoredRollout, secrets: Secrets = ()) -> SqlRow:
    """Return the SQL values of a row in the order of `COLUMNS`, without the known secrets."""
    return tuple(column.encode(getattr(row, name), secrets) for name, column in COLUMNS.items())


def with_checksums(row_id: int, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values of `STORED`, from a row's id and the values of `to_sql`."""
    light, blobs = values[: len(LIGHT)], values[len(LIGHT) :]
    head = (row_id, *light, blob_checksum(blobs))
    return (*head, checksum("rollouts", head), *blobs)


def verify(values: Sequence[Any]) -> None:
    """Compare values of `STORED`, with or without the blobs, with their checksums.

    Raises:
        StoreError: they differ; the file is not named.
    """
    if not is_intact("rollouts", values, _NUM_LIGHT + 1):
        raise StoreError(f"rollout {values[1]!r} (row {values[0]}) differs from its checksum")


def from_sql(values: Sequence[Any]) -> StoredRollout:
    """Verify values of `STORED` and return their row; without blobs, its blobs stay empty.

    Raises:
        StoreError: see `verify`; or `to_sql` did not make a blob.
    """
    verify(values)
    try:
        return read_sql((*values[1:_NUM_LIGHT], *values[_NUM_LIGHT + 2 :]))
    except StoreError as error:
        raise StoreError(f"{error} (row {values[0]})") from error


def read_sql(values: SqlRow) -> StoredRollout:
    """Return the row that `to_sql` encoded; without the blobs' values, they stay empty.

    Raises:
        StoreError: a value is not one that `to_sql` returns.
    """
    row: dict[str, Any] = dict(zip(COLUMNS, values, strict=False))
    for name, decode in _DECODED[: None if BLOBS[0] in row else -len(BLOBS)]:
        try:
            row[name] = decode(row[name])
        except ValueError as error:
            what = f"the {name} of rollout {values[0]!r} cannot be read: {error}"
            raise StoreError(what) from error
    return StoredRollout(**row)
