"""Pack a run for the tests: `cd tests; python -m golden.pack RUN TARGET.tar.xz [--steps N]`.

The texts and trees of its rollouts are stored without compression, which xz then finds in all of
them at once (a tenth of the size). Paths of this machine become `/rolltree`, and that of the run
`runs/NAME`. `--steps` keeps the first steps and what was before and between them. Nothing else of
the run is changed.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltree.rollouts.decode import export_line
from rolltree.store import Run
from rolltree.store.integrity import TABLES, checksum
from rolltree.store.rows import LIGHT, STORED, with_checksums

ROOT = Path(__file__).resolve().parents[2]
PLACES = {str(ROOT): "/rolltree", sys.base_prefix: "/python"}
EXPECTED = "expected.jsonl"


def pack(run: Path, target: Path, *, steps: int | None = None, expected: bool = False) -> None:
    """Write `target` from the run, its config and its last checkpoint.

    With `expected` also what `rolltree export` writes today, to which later versions are held.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        copy.mkdir()
        for name in ("run.db", "run.db-wal", "run.commits", "config.json"):
            if (run / name).exists():
                shutil.copy(run / name, copy / name)
        if steps is not None:
            _keep_steps(copy, steps)
        places = dict(PLACES)
        place = json.loads((copy / "config.json").read_text()).get("run", {}).get("dir", "")
        if Path(place).is_absolute():
            places[place] = f"runs/{target.name.partition('.')[0]}"
        _rewrite(copy / "run.db", places)
        (copy / "config.json").write_text(_clean((copy / "config.json").read_text(), places))
        last = run / "checkpoints" / "latest"
        if expected and last.exists():
            name = last.read_text().strip()
            shutil.copytree(run / "checkpoints" / name, copy / "checkpoints" / name)
            shutil.copy(last, copy / "checkpoints" / "latest")
        (copy / "run.lock").unlink(missing_ok=True)
        if expected:
            with Run.open(copy, "r") as stored:
                stored.export(copy / EXPECTED, render=export_line)
        for left in ("run.db-shm", "run.db-wal"):
            (copy / left).unlink(missing_ok=True)
        _write(copy, target)


def _keep_steps(path: Path, steps: int) -> None:
    with Run.open(path) as run:
        run.truncate_steps(steps, rollout_phases=["train"])
        late = {event.data["phase"] for event in run.events("evaluation") if event.step > steps}
        late |= {f"{phase}/held_out" for phase in late}
        with run._database.transaction() as change:
            for phase in late:
                sql = "SELECT DISTINCT request_id FROM rollouts WHERE phase = ?"
                for (request_id,) in change.connection.execute(sql, (phase,)).fetchall():
                    change.drop_request(request_id, if_failed=False)
            gone = change.connection.execute("DELETE FROM events WHERE step > ?", (steps,))
            change.counts.events -= gone.rowcount


def _rewrite(file: Path, places: Mapping[str, str]) -> None:
    """Store every blob of rollouts uncompressed and without this machine's paths."""
    database = sqlite3.connect(file)
    for row in database.execute(f"SELECT {', '.join(STORED)} FROM rollouts").fetchall():
        light = [_clean(value, places) for value in row[1 : 1 + len(LIGHT)]]
        blobs = [zlib.compress(_clean(zlib.decompress(b), places), 0) if b else b for b in row[-2:]]
        new = with_checksums(row[0], (*light, *blobs))
        sets = ", ".join(f"{name} = ?" for name in STORED)
        database.execute(f"UPDATE rollouts SET {sets} WHERE id = ?", (*new, row[0]))
    for table in ("meta", "events"):
        names = TABLES[table]
        key = names.partition(",")[0]
        for row in database.execute(f"SELECT {names} FROM {table}").fetchall():
            new = tuple(_clean(value, places) for value in row)
            sets = ", ".join(f"{name} = ?" for name in (*names.split(", "), "checksum"))
            database.execute(
                f"UPDATE {table} SET {sets} WHERE {key} = ?", (*new, checksum(table, new), row[0])
            )
    database.commit()
    database.execute("PRAGMA journal_mode = DELETE")
    database.execute("VACUUM")
    database.close()


def _clean(value: Any, places: Mapping[str, str]) -> Any:
    for place, name in places.items():
        if isinstance(value, str):
            value = value.replace(place, name)
        elif isinstance(value, bytes):
            value = value.replace(place.encode(), name.encode())
    return value


def _write(folder: Path, target: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            info = tarfile.TarInfo(str(file.relative_to(folder)))
            info.size = file.stat().st_size
            archive.addfile(info, io.BytesIO(file.read_bytes()))
    target.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(data.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    target.write_bytes(packed)
    print(json.dumps({"file": target.name, "bytes": len(packed), "unpacked": data.tell()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    pack(given.run, given.target, steps=given.steps)
