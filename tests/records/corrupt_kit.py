"""Changes a stored run below its checksums: rows go back with right ones, and right sums."""

import sqlite3
import zlib
from contextlib import contextmanager
from dataclasses import replace

from rolltree.store.change import Change
from rolltree.store.codec import dumps, loads
from rolltree.store.integrity import Counts
from rolltree.store.rows import STORED, from_sql, to_sql, with_checksums
from rolltree.store.trained import TRAINED_COLUMNS, insert_trained, trained_from_sql, trained_to_sql
from rolltree.tokens import TokenTree

OF_TOKENS = (
    *("num_calls", "num_prompt_tokens", "num_completion_tokens", "num_unique_tokens"),
    *("generation_ms", "scoring_ms", "total_ms", "started_at", "reward", "metrics"),
    *("finish_reason", "truncated", "truncation_reason", "stop_condition", "terminated"),
)
"""The columns that what was played determines."""


class Corrupter:
    """Edits rollouts, trained tokens, steps and sums of the run at `path`."""

    def __init__(self, path):
        self.path = path
        self.db = sqlite3.connect(path / "run.db", isolation_level=None)

    @contextmanager
    def change(self, *phases):
        """A transaction that leaves counts and sums right."""
        self.db.execute("BEGIN IMMEDIATE")
        change = Change(self.db, Counts.read(self.db))
        yield change
        for phase in phases:
            change.sum_again(phase)
        change.phases.clear()  # keep the reports of evaluations
        change.finish()
        self.db.execute("COMMIT")
        (self.path / "run.commits").unlink(missing_ok=True)

    def ids(self, where="phase = 'train' AND status = 'ok'"):
        """The request ids of rows, in the order they were stored."""
        found = self.db.execute(f"SELECT request_id FROM rollouts WHERE {where} ORDER BY id")
        return [name for (name,) in found]

    def row(self, request_id):
        """The id and the values of a row."""
        sql = f"SELECT {', '.join(STORED)} FROM rollouts WHERE request_id = ?"
        values = self.db.execute(sql, (request_id,)).fetchone()
        return values[0], from_sql(values)

    def edit(self, request_id, **values):
        """Replace fields of a row."""
        row_id, row = self.row(request_id)
        with self.change(row.phase) as change:
            self.db.execute("DELETE FROM rollouts WHERE id = ?", (row_id,))
            self._insert(change, row_id, replace(row, **values))

    def _insert(self, change, row_id, row):
        marks = ", ".join("?" for _ in STORED)
        sql = f"INSERT INTO rollouts ({', '.join(STORED)}) VALUES ({marks})"
        self.db.execute(sql, with_checksums(row_id, to_sql(row)))

    def record(self, request_id, edit, **columns):
        """Change the record of a row in place, and columns with it."""
        _, row = self.row(request_id)
        data = loads(row.record)
        edit(data)
        self.edit(request_id, record=dumps(data).encode(), **columns)

    def tree(self, request_id, **edits):
        """Insert the calls anew, each value put through the edit of its name: `(call, values)`."""
        _, row = self.row(request_id)
        old, new = TokenTree.from_bytes(row.tokens), TokenTree()
        for call in range(old.num_calls):
            values = {
                "prompt_ids": old.prompt_ids(call),
                "completion_ids": old.completion_ids(call),
                "logprobs": old.logprobs(call),
                "versions": old.versions(call),
                "temperature": old.temperature(call),
                "mask": old.mask(call),
                "prompt_mask": old.prompt_mask(call),
            }
            values |= {name: edit(call, values[name].copy()) for name, edit in edits.items()}
            size = len(values["completion_ids"])
            for name in ("logprobs", "versions", "temperature", "mask"):
                missing = size - len(values[name])
                values[name] = [*values[name], *[values[name][-1]] * missing][:size]
            new.insert(**values, agent=old.agent(call), turn=old.turn(call))
        self.edit(request_id, tokens=new.to_bytes(), num_unique_tokens=new.num_tokens)

    def delegated(self, edit, **columns):
        """Change the record of the first delegated rollout, and columns with it."""
        sql = f"SELECT {', '.join(STORED)} FROM rollouts WHERE parent_rollout IS NOT NULL"
        values = self.db.execute(sql).fetchone()
        row = from_sql(values)
        data = loads(row.record)
        edit(data)
        known = {name: value for name, value in columns.items() if hasattr(row, name)}
        with self.change(row.phase) as change:
            self.db.execute("DELETE FROM rollouts WHERE id = ?", (values[0],))
            self._insert(change, values[0], replace(row, record=dumps(data).encode(), **known))

    def delete(self, request_id):
        """Take a row away."""
        _, row = self.row(request_id)
        with self.change(row.phase) as change:
            self.db.execute("DELETE FROM rollouts WHERE request_id = ?", (request_id,))
            change.counts.rollouts -= 1

    def copy(self, request_id, to, **values):
        """Store a row again under another name, in its record too."""
        _, row = self.row(request_id)
        data = loads(row.record)
        data["request"] |= {"request_id": to, **values}
        with self.change(row.phase) as change:
            made = replace(row, request_id=to, record=dumps(data).encode(), **values)
            self._insert(change, change.next_id(), made)
            change.counts.rollouts += 1

    def trained(self, request_id, **edits):
        """Change what training knew of a rollout: `name=function of the array`, or `step=`."""
        names = ", ".join(TRAINED_COLUMNS)
        sql = f"SELECT {names} FROM trained WHERE request_id = ?"
        values = self.db.execute(sql, (request_id,)).fetchone()
        row = trained_from_sql(values)
        new = {n: e(getattr(row, n).copy()) if callable(e) else e for n, e in edits.items()}
        with self.change():
            self.db.execute("DELETE FROM trained WHERE id = ?", (values[0],))
            insert_trained(self.db, values[0], trained_to_sql(replace(row, **new)))

    def retarget(self, request_id, to):
        """Make the trained tokens of a rollout those of another one."""
        self.db.execute("UPDATE trained SET request_id = ? WHERE request_id = ?", (to, request_id))
        names = ", ".join(TRAINED_COLUMNS)
        sql = f"SELECT {names} FROM trained WHERE request_id = ?"
        row_id, *light = self.db.execute(sql, (to,)).fetchone()
        with self.change():
            self.db.execute("DELETE FROM trained WHERE id = ?", (row_id,))
            insert_trained(self.db, row_id, (*light[: len(TRAINED_COLUMNS) - 4], light[-1]))

    def event(self, kind, step, edit):
        """Change the data of an event, or take it away where `edit` is None."""
        sql = "SELECT id, created_at, data FROM events WHERE kind = ? AND step = ?"
        row_id, created, text = self.db.execute(sql, (kind, step)).fetchone()
        with self.change() as change:
            self.db.execute("DELETE FROM events WHERE id = ?", (row_id,))
            change.counts.events -= 1
            if edit is not None:
                data = loads(text)
                edit(data)
                change.put("events", row_id, created, kind, step, dumps(data))

    def meta(self, key, edit):
        """Change what the run keeps under a key."""
        data = loads(self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])
        edit(data)
        with self.change() as change:
            change.put("meta", key, dumps(data))

    def step_time(self, step, shift_s):
        """Move the time of a step."""
        created, text = self.db.execute(
            "SELECT created_at, metrics FROM steps WHERE step = ?", (step,)
        ).fetchone()
        with self.change() as change:
            change.put("steps", step, created + shift_s, text)

    def swap(self, one, other, parts):
        """Let two rollouts change places, in `parts` of their records and in their tokens."""
        rows = {name: self.row(name)[1] for name in (one, other)}
        data = {name: loads(row.record) for name, row in rows.items()}
        for name, source in ((one, other), (other, one)):
            mine = data[name] | {part: data[source][part] for part in parts}
            self.edit(
                name,
                record=dumps(mine).encode(),
                tokens=rows[source].tokens,
                **{each: getattr(rows[source], each) for each in OF_TOKENS},
            )

    def train_again(self, request_id, step):
        """Store the trained tokens of a rollout for another step too."""
        names = ", ".join(TRAINED_COLUMNS)
        sql = f"SELECT {names} FROM trained WHERE request_id = ?"
        row = trained_from_sql(self.db.execute(sql, (request_id,)).fetchone())
        with self.change() as change:
            values = trained_to_sql(replace(row, step=step))
            insert_trained(self.db, change.next_id(), values)
            change.counts.trained += 1

    def step(self, step, edit):
        """Change the metrics of a step, or take it away where `edit` is None."""
        created, text = self.db.execute(
            "SELECT created_at, metrics FROM steps WHERE step = ?", (step,)
        ).fetchone()
        with self.change() as change:
            if edit is None:
                self.db.execute("DELETE FROM steps WHERE step = ?", (step,))
                change.counts.steps -= 1
            else:
                change.put("steps", step, created, dumps({**loads(text), **edit}))

    def sums(self, phase, **values):
        """Change the sums of a phase alone."""
        from rolltree.store.integrity import TOTAL_NAMES, checksum

        sql = f"SELECT {', '.join(TOTAL_NAMES)} FROM totals WHERE phase = ?"
        row = dict(zip(TOTAL_NAMES, self.db.execute(sql, (phase,)).fetchone(), strict=True))
        new = tuple((row | values).values())
        marks = ", ".join("?" for _ in (*new, 0))
        sql = f"INSERT OR REPLACE INTO totals VALUES ({marks})"
        self.db.execute(sql, (*new, checksum("totals", new)))

    def flip(self, request_id):
        """Change one byte of a blob, without its checksum."""
        sql = "SELECT tokens FROM rollouts WHERE request_id = ?"
        blob = bytearray(zlib.decompress(self.db.execute(sql, (request_id,)).fetchone()[0]))
        blob[len(blob) // 2] ^= 1
        values = zlib.compress(bytes(blob)), request_id
        self.db.execute("UPDATE rollouts SET tokens = ? WHERE request_id = ?", values)

    def blob(self, request_id, **blobs):
        """Put bytes into the columns `record` and `tokens` of a row as they are."""
        row_id, row = self.row(request_id)
        *light, record, tokens = to_sql(row)
        values = {"record": record, "tokens": tokens} | blobs
        new = with_checksums(row_id, (*light, *values.values()))
        sets = ", ".join(f"{name} = ?" for name in STORED)
        with self.change():
            self.db.execute(f"UPDATE rollouts SET {sets} WHERE id = ?", (*new, row_id))

    def trained_blob(self, request_id, blob):
        """Put bytes into the trained tokens of a rollout as they are."""
        names = ", ".join(TRAINED_COLUMNS)
        sql = f"SELECT {names} FROM trained WHERE request_id = ?"
        row_id, *light = self.db.execute(sql, (request_id,)).fetchone()
        with self.change():
            self.db.execute("DELETE FROM trained WHERE id = ?", (row_id,))
            insert_trained(self.db, row_id, (*light[: len(TRAINED_COLUMNS) - 4], blob))
