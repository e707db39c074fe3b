"""The rows of a run as values: trajectories, training steps, events.

Other packages pass and get `StoredRollout`s; `rolltree.rollouts.record` makes their two blobs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rolltree._helpers.redact import REDACTED, cut_secrets, cut_text, redact
from rolltree.store.codec import deflate, dumps, inflate, loads
from rolltree.store.integrity import blob_checksum, checksum, is_intact
from rolltree.store.metric_names import eval_numbers
from rolltree.values.errors import StoreError, stored_kind

Secrets: TypeAlias = tuple[str, ...]
Status: TypeAlias = Literal["ok", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One trajectory of one request; every value worth querying has its own column.

    A request that failed before it made a trajectory is stored with `trajectory_index=0` and empty
    blobs.
    """

    # The identity: rows with the same two values are the same rollout, which is stored once.
    request_id: str
    trajectory_index: int = 0
    num_trajectories: int = 1
    group_id: str = ""
    index_in_group: int = 0
    phase: str = "eval"
    train_step: int | None = None
    env_id: str = ""
    example_id: int | str | None = None
    task: str = ""
    agent: str = ""
    # The rollout that delegated this one; its own name is in `record`.
    parent_rollout: str | None = None
    # The number of delegations above it.
    depth: int = 0
    # None if it was not scored; never a silent 0.0.
    reward: float | None = None
    status: Status = "ok"
    error_type: str | None = None
    error_phase: str | None = None
    stop_condition: str | None = None
    is_completed: bool = True
    terminated: bool = False
    truncated: bool = False
    truncation_reason: str | None = None
    finish_reason: str | None = None
    num_calls: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_unique_tokens: int = 0
    # The oldest and the newest policy version of its sampled tokens.
    min_version: int | None = None
    max_version: int | None = None
    num_attempts: int = 1
    generation_ms: float = 0.0
    scoring_ms: float = 0.0
    total_ms: float = 0.0
    # Seconds since the epoch, for people; durations come from a monotonic clock.
    started_at: float | None = None
    created_at: float = field(default_factory=time.time)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    # The dataset row without its prompt, which is in `record`.
    input: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[Mapping[str, Any], ...] = ()
    # JSON of the codec, and a token tree's bytes; this package does not interpret them.
    record: bytes = b""
    tokens: bytes = b""


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


class StoredColumn(NamedTuple):
    """How one field of `StoredRollout` is stored in SQL."""

    sql: str
    encode: Callable[[Any, Secrets], Any]
    decode: Callable[[Any], Any]


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


_TEXT = StoredColumn("TEXT", _text, as_stored)
_LABEL = StoredColumn("TEXT", _label, as_stored)
_INT = StoredColumn("INTEGER", _integer, as_stored)
_REAL = StoredColumn("REAL", _real, as_stored)
_BOOL = StoredColumn("INTEGER", _whole, bool)

COLUMNS: dict[str, StoredColumn] = {
    "request_id": StoredColumn("TEXT NOT NULL", _text, as_stored),
    "trajectory_index": StoredColumn("INTEGER NOT NULL", _whole, as_stored),
    "num_trajectories": _INT,
    "group_id": _TEXT,
    "index_in_group": _INT,
    "phase": StoredColumn("TEXT NOT NULL", _text, as_stored),
    "train_step": _INT,
    "env_id": _LABEL,
    "example_id": StoredColumn("", _whole, as_stored),  # no type: SQLite would turn "7" into 7
    "task": _LABEL,
    "agent": _LABEL,
    "parent_rollout": _TEXT,
    "depth": _INT,
    "reward": _REAL,
    "status": _TEXT,
    "error_type": _LABEL,
    "error_phase": _TEXT,
    "stop_condition": _LABEL,
    "is_completed": _BOOL,
    "terminated": _BOOL,
    "truncated": _BOOL,
    "truncation_reason": _LABEL,
    "finish_reason": _LABEL,
    "num_calls": _INT,
    "num_prompt_tokens": _INT,
    "num_completion_tokens": _INT,
    "num_unique_tokens": _INT,
    "min_version": _INT,
    "max_version": _INT,
    "num_attempts": _INT,
    "generation_ms": _REAL,
    "scoring_ms": _REAL,
    "total_ms": _REAL,
    "started_at": _REAL,
    "created_at": _REAL,
    "metrics": StoredColumn("TEXT", _json, loads),
    "input": StoredColumn("TEXT", _json, loads),
    "errors": StoredColumn(
        "TEXT", _errors, lambda text: () if text == "[]" else tuple(loads(text))
    ),
    "record": StoredColumn("BLOB", _record, inflate),
    "tokens": StoredColumn("BLOB", lambda value, secrets: deflate(value), inflate),
}
"""The fields of `StoredRollout` in their order; the blobs come last, so that a scan skips them."""

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
