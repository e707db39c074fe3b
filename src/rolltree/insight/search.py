"""A run's search index, in its own file: texts, previews, prefix breaks and advantages.

It is built on request, and the run is only read. Words are matched by SQLite's FTS5, without case
and punctuation. The system message and the examples before a question are not in it, because all
rollouts have them.
"""

from __future__ import annotations

import json
import re
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rolltree.records.conversations import tool_call_parts
from rolltree.records.token_rows import break_rows, mean_advantage, state_of
from rolltree.records.values import clean_text
from rolltree.rollouts.conversation import conversation_of
from rolltree.rollouts.decode import decode_rollout
from rolltree.store import Run, StoredRollout
from rolltree.store.conditions import Condition
from rolltree.values.errors import ConfigError, StoreError

OWN = ("breaks", "advantage", "question", "answer")
"""Columns that only the index has; filter or sort by them as by the columns of rollouts."""
_VERSION = 1
_BATCH = 250
_PREVIEW = 300
_SCHEMA = """
CREATE TABLE about (
  version INTEGER, created_at REAL, gone TEXT, last_id INTEGER, last_step INTEGER
);
CREATE TABLE facts (
  id INTEGER PRIMARY KEY, request_id TEXT, trajectory_index INTEGER,
  question TEXT, answer TEXT, breaks INTEGER, advantage REAL
);
CREATE INDEX facts_by_name ON facts (request_id, trajectory_index);
CREATE VIRTUAL TABLE texts USING fts5 (text, content='', tokenize="unicode61 remove_diacritics 2");
"""
Name = tuple[str, int]


class SearchIndex:
    """The index of one run in `file`; every call opens the file, so any thread may call."""

    def __init__(self, run: Run, file: Path) -> None:
        self._run = run
        self._file = file

    def state(self) -> dict[str, Any]:
        """Count the indexed rollouts and all, and tell whether the index is complete."""
        last = self._run.last_id
        with self._opened() as found:
            done = step = num = 0
            if found is not None and (about := self._about(found)) is not None:
                done, step = about
                num = found.execute("SELECT count(*) FROM facts").fetchone()[0]
        # Rollouts are stored before training: their advantages come later.
        is_whole = done >= last and step >= self._run.last_step()[0]
        return {"indexed": num, "of": self._run.num_rollouts(), "is_whole": is_whole}

    def build(self, pause: Callable[[], None] = lambda: None) -> None:
        """Add the rollouts that are not indexed yet; `pause` is called between batches.

        Raises:
            ConfigError: the file cannot be written.
            StoreError: a row of the run is damaged.
        """
        try:
            with closing(self._created()) as file:
                done, step = self._about(file) or (0, 0)
                last = self._run.last_id  # its row may have been removed
                rows = self._run.stored_after(done)
                while batch := list(islice(rows, _BATCH)):
                    with file:
                        _add(file, batch)
                        file.execute("UPDATE about SET last_id = ?", (batch[-1][0],))
                    done = batch[-1][0]
                    pause()
                with file:
                    file.execute("UPDATE about SET last_id = ?", (max(done, last),))
                self._add_advantages(file, step, pause)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the search index cannot be written to {self._file} ({error}), so texts cannot be "
                "searched. Set ROLLTREE_CACHE to a writable folder, and start again."
            ) from error

    def ids(
        self, text: str | None, conditions: Sequence[Condition], sort: str | None
    ) -> Sequence[int]:
        """Return the sorted ids of rows that contain `text` and meet conditions on `OWN`.

        Raises:
            ConfigError: the index was not built yet.
        """
        clauses, values = ["1"], []
        for clause, value in (each.sql() for each in conditions):
            clauses.append(clause)
            values.append(value)
        if text:
            clauses.append("id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            values.append(phrase(text))
        order = "id"
        if sort is not None:
            direction = "DESC" if sort.startswith("-") else "ASC"
            order = f"{sort.removeprefix('-')} {direction} NULLS LAST, id"
        sql = f"SELECT id FROM facts WHERE {' AND '.join(clauses)} ORDER BY {order}"
        with self._opened() as found:
            if found is None:
                raise ConfigError(
                    "this run's texts, breaks and advantages are not indexed. Request "
                    "/api/runs/R/index?build=true until is_whole is true."
                )
            return array("q", [row[0] for row in found.execute(sql, values)])

    def names(self, ids: Sequence[int]) -> list[Name]:
        """Return the requests and trajectories of these rows, in this order."""
        sql = (
            "SELECT id, request_id, trajectory_index FROM facts"
            " WHERE id IN (SELECT value FROM json_each(?))"
        )
        with self._opened() as found:
            rows = () if found is None else found.execute(sql, (json.dumps(list(ids)),))
            known = {row[0]: (row[1], row[2]) for row in rows}
        return [known[each] for each in ids if each in known]

    def facts(self, names: Iterable[Name]) -> dict[Name, dict[str, Any]]:
        """Return the values of `OWN` for these rollouts, without those that are not indexed."""
        sql = (
            f"SELECT {', '.join(OWN)} FROM facts WHERE request_id = ? AND trajectory_index = ?"
            " ORDER BY id DESC LIMIT 1"
        )
        with self._opened() as file:
            if file is None:
                return {}
            found = {name: file.execute(sql, name).fetchone() for name in names}
        return {name: dict(zip(OWN, row, strict=True)) for name, row in found.items() if row}

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        """Open the index; None if it does not belong to this run as it is now."""
        if not self._file.is_file():
            yield None
            return
        with closing(sqlite3.connect(f"file:{quote(str(self._file))}?mode=ro", uri=True)) as found:
            try:
                yield found if self._about(found) is not None else None
            except sqlite3.Error as error:
                raise StoreError(
                    f"{self._file}, an index that rolltree made, cannot be read ({error}), so "
                    "texts cannot be searched. Delete it: rolltree makes it again."
                ) from error

    def _created(self) -> sqlite3.Connection:
        file = sqlite3.connect(self._file, timeout=60)
        try:
            if self._about(file) is None:
                file.close()
                self._file.unlink()
                file = sqlite3.connect(self._file, timeout=60)
                self._file.chmod(0o600)
                file.executescript("PRAGMA journal_mode = WAL;" + _SCHEMA)
                about = (_VERSION, self._run.meta["created_at"], self._gone(), 0, 0)
                with file:
                    file.execute("INSERT INTO about VALUES (?, ?, ?, ?, ?)", about)
        except BaseException:  # Ctrl-C, too
            file.close()
            raise
        return file

    def _about(self, file: sqlite3.Connection) -> tuple[int, int] | None:
        """Return the last row and step in it; None if it belongs to another run or version."""
        try:
            row = file.execute("SELECT * FROM about").fetchone()
        except sqlite3.DatabaseError:
            return None
        wanted = (_VERSION, self._run.meta["created_at"], self._gone())
        return (row[3], row[4]) if row is not None and row[:3] == wanted else None

    def _gone(self) -> str:
        """Return a string that changes when rows are removed, since their ids are reused."""
        gone = [each for each in self._run.events() if each.kind in ("retried", "truncated")]
        times = sum(each.data.get("times", 1) for each in gone)
        return json.dumps([len(gone), times, repr(gone[-1].data) if gone else ""])

    def _add_advantages(
        self, file: sqlite3.Connection, done: int, pause: Callable[[], None]
    ) -> None:
        last, _ = self._run.last_step()
        for step in range(done + 1, last + 1):
            values = [
                (mean_advantage(row), row.request_id, row.trajectory_index)
                for row in self._run.trained(step=step)
            ]
            with file:
                file.executemany(
                    "UPDATE facts SET advantage = ? WHERE request_id = ? AND trajectory_index = ?",
                    values,
                )
                file.execute("UPDATE about SET last_step = ?", (step,))
            pause()


def phrase(text: str) -> str:
    """Return the query for consecutive words; the last one may be the beginning of a word.

    >>> phrase('say "no')
    '"say ""no" *'
    """
    return '"' + text.replace('"', '""').replace("\0", " ") + '" *'


def previews(run: Run, rows: Sequence[StoredRollout]) -> dict[Name, dict[str, Any]]:
    """Return the values of `OWN` for these rollouts, read from the run instead of the index.

    Raises:
        StoreError: a row is damaged.
    """
    trained = run.trained(request_id=list({row.request_id: None for row in rows}))
    paid = {(each.request_id, each.trajectory_index): mean_advantage(each) for each in trained}
    found = {}
    for row in rows:
        name = (row.request_id, row.trajectory_index)
        question, answer, breaks, _ = _facts(row)
        found[name] = dict(zip(OWN, (breaks, paid.get(name), question, answer), strict=True))
    return found


def _facts(row: StoredRollout) -> tuple[str, str, int, str]:
    """Return question and answer, the number of breaks, and the whole text."""
    # A single call has no breaks, and text is read several times as fast as tokens.
    state = state_of(row) if row.num_calls > 1 and row.tokens else None
    said = _conversation(row) if state is None else conversation_of(state)
    question, answer, text = _texts(said)
    return question, answer, 0 if state is None else len(break_rows(state, None)), text


def _add(file: sqlite3.Connection, batch: Iterable[tuple[int, StoredRollout]]) -> None:
    facts, texts = [], []
    for row_id, row in batch:
        question, answer, breaks, text = _facts(row)
        wrong = " ".join(str(each.get("message", "")) for each in row.errors)
        name = (row.request_id, row.trajectory_index)
        facts.append((row_id, *name, question, answer, breaks, None))
        texts.append((row_id, clean_text(f"{text}\n{wrong}")))
    file.executemany("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)", facts)
    file.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)


_Messages = tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]


def _conversation(row: StoredRollout) -> _Messages:
    if not row.record:
        return [], []
    states = decode_rollout(row, tokens=False).states
    return conversation_of(states[0]) if states else ([], [])


def _texts(messages: _Messages) -> tuple[str, str, str]:
    """Return question and answer, both shortened, and the whole text."""
    prompt, completion = (
        [(str(each.get("role")), _text_of(each)) for each in part] for part in messages
    )
    asked = [text for role, text in prompt if role == "user"] or [text for _, text in prompt]
    answered = [text for role, text in completion if role == "assistant" and text]
    # What precedes the question is the same for every rollout: the system message, examples.
    begun = next((at for at in reversed(range(len(prompt))) if prompt[at][0] == "user"), 0)
    whole = "\n".join(text for _, text in (*prompt[begun:], *completion))
    said = (asked[-1] if asked else "", answered[-1] if answered else "")
    question, answer = (clean_text(_line(each)) for each in said)
    return question, answer, whole


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
    texts = [each if isinstance(each, str) else str(each.get("text", "")) for each in parts if each]
    thought = message.get("reasoning_content") or message.get("reasoning")
    calls = [tool_call_parts(each) for each in message.get("tool_calls") or ()]
    spoken = [f"{each['name']} {each['arguments']}" for each in calls]
    return "\n".join([*([str(thought)] if thought else []), *texts, *spoken])


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text[: 4 * _PREVIEW]).strip()[:_PREVIEW]
