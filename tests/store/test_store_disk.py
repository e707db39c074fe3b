"""Full and read-only disks, and rows that cannot be read: real disks, real damage."""

import json
import os
import shutil
import sqlite3

import pytest
from click.testing import CliRunner
from test_store_damage import make

from disk_kit import read_only, resize, small_disk
from rolltree.cli.app import app
from rolltree.store import Run, StoredRollout, summarize
from rolltree.values.errors import StoreError


def big(number, size=200_000):
    return StoredRollout(request_id=str(number), reward=0.5, record=os.urandom(size))


def fill(run):
    for number in range(100):
        run.add_rollouts([big(number)])


class TestFull:
    def test_a_batch_that_does_not_fit_is_said_and_all_others_stay(self, tmp_path):
        with small_disk(tmp_path / "disk", "3m") as disk:
            with Run.create(disk / "run") as run:
                with pytest.raises(StoreError, match=r"nothing of this batch.*Make room"):
                    fill(run)
                number = run.num_rollouts()
                assert 0 < number < 20
                assert [row.request_id for row in run.rollouts()] == [str(i) for i in range(number)]
            with Run.open(disk / "run", "r") as run:  # after a close that could not merge the log
                assert summarize(run).phases[0].num_rollouts == number
            resize(disk, "20m")
            with Run.open(disk / "run") as run:
                assert run.num_rollouts() == number
                assert run.add_rollouts([big("more", 9)]) == 1

    def test_a_run_that_cannot_be_made_is_said(self, tmp_path):
        with small_disk(tmp_path / "disk", "64k") as disk:
            (disk / "ballast").write_bytes(bytes(60_000))
            with pytest.raises(StoreError, match=r"No space|full"):
                Run.create(disk / "run", config={"a": 1})
            (disk / "ballast").unlink()

    def test_an_export_that_does_not_fit_is_said(self, tmp_path):
        with Run.create(tmp_path / "run") as run:
            run.add_rollouts(
                StoredRollout(request_id=str(i), input={"text": "x" * 900}) for i in range(99)
            )
            with small_disk(tmp_path / "disk", "16k") as disk:
                with pytest.raises(StoreError, match=r"No space left.*not complete"):
                    run.export(disk / "x.jsonl")
                with pytest.raises(StoreError, match="No such file or directory"):
                    run.export(disk / "missing" / "x.jsonl")


class TestReadOnly:
    def test_a_closed_run_is_read_and_not_written(self, tmp_path):
        with small_disk(tmp_path / "disk", "8m") as disk:
            make(disk / "run")
            with read_only(disk):
                with Run.open(disk / "run", "r") as run:
                    assert run.num_rollouts() == 48
                    assert len(list(run.rollouts(truncated=True))) == 12
                for start in (Run.open, lambda path: Run.open_or_create(path, config={})):
                    with pytest.raises(StoreError, match=r"cannot be written \(Read-only"):
                        start(disk / "run")
                with pytest.raises(StoreError, match=r"cannot be written \(Read-only"):
                    Run.create(disk / "other" / "run")

    def test_a_killed_run_is_read_with_its_log_or_refused(self, tmp_path):
        with small_disk(tmp_path / "disk", "8m") as disk:
            make(disk / "run", kill=True)
            with read_only(disk), Run.open(disk / "run", "r") as run:
                assert run.num_rollouts() == 48
            (disk / "run" / "run.db-shm").unlink()  # without it SQLite cannot use the log
            with read_only(disk), pytest.raises(StoreError, match=r"read-only.*copy the directory"):
                Run.open(disk / "run", "r")
            with Run.open(disk / "run", "r") as run:
                assert run.num_rollouts() == 48


class TestLostLog:
    def test_a_deleted_log_is_said(self, tmp_path):
        path = make(tmp_path / "run", kill=True)
        (path / "run.db-wal").unlink()
        for mode in ("r", "w"):
            with pytest.raises(StoreError, match=r"lacks the last \d+ batches.*run\.commits"):
                Run.open(path, mode)
        (path / "run.commits").unlink()
        Run.open(path, "r").close()

    def test_an_older_copy_of_the_database_is_said(self, tmp_path):
        path = make(tmp_path / "run")
        shutil.copy(path / "run.db", tmp_path / "old.db")
        with Run.open(path) as run:
            run.add_rollouts([big("late", 10)])
        shutil.copy(tmp_path / "old.db", path / "run.db")
        with pytest.raises(StoreError, match="lacks the last 1 batches"):
            Run.open(path)

    @pytest.mark.parametrize("text", ["", "garbage", "999999 1", "-1 x"])
    def test_an_unreadable_note_says_nothing(self, tmp_path, text):
        path = make(tmp_path / "run", 1)
        (path / "run.commits").write_text(text)
        with Run.open(path) as run:
            assert run.num_rollouts() == 4


class TestDamagedRow:
    def damage(self, path, sql):
        with sqlite3.connect(path / "run.db") as raw:
            raw.execute(sql)

    @pytest.mark.parametrize(
        "sql",
        [
            "UPDATE rollouts SET record = x'00' WHERE request_id = '1-1'",
            "UPDATE rollouts SET tokens = substr(tokens, 2) WHERE request_id = '1-1'",
            "UPDATE rollouts SET record = NULL WHERE request_id = '1-1'",
            "UPDATE rollouts SET record = 'text' WHERE request_id = '1-1'",
            "UPDATE rollouts SET reward = reward + 1e-9 WHERE request_id = '1-1'",
            "UPDATE rollouts SET metrics = 'no json' WHERE request_id = '1-1'",
        ],
    )
    def test_an_export_has_all_other_rows_and_says_which(self, tmp_path, sql):
        path = make(tmp_path / "run", 3)
        self.damage(path, sql)
        with Run.open(path, "r") as run:
            with pytest.raises(StoreError, match=r"^11 rollouts are in .*'1-1' \(row \d+\)"):
                run.export(tmp_path / "x.jsonl", render=lambda row: {"id": row.request_id})
            lines = [json.loads(x) for x in (tmp_path / "x.jsonl").read_text().splitlines()]
            assert len({line["id"] for line in lines}) == 11
            with pytest.raises(StoreError, match=r"is damaged: rollout '1-1'"):
                list(run.rollouts())

    def test_a_row_that_is_gone_is_counted(self, tmp_path):
        path = make(tmp_path / "run", 3)
        self.damage(path, "DELETE FROM rollouts WHERE request_id = '1-1'")
        with Run.open(path, "r") as run:
            with pytest.raises(StoreError, match=r"11 rollouts are in .*1 rows that are no longer"):
                run.export(tmp_path / "x.jsonl")
            assert run.num_rollouts(phase="train") == 9  # what was stored
            with pytest.raises(StoreError, match="leads to 8 of 9"):
                list(run.rollouts(phase="train"))

    def test_the_program_ends_with_1_and_one_sentence(self, tmp_path):
        path = make(tmp_path / "run", 3)
        self.damage(path, "UPDATE rollouts SET reward = 1.0 WHERE request_id = '1-1'")
        target = tmp_path / "x.jsonl"
        done = CliRunner().invoke(app, ["data", str(path), "rollouts", "-o", str(target)])
        assert (done.exit_code, "rollout '1-1' (row" in done.output) == (1, True)
        done = CliRunner().invoke(app, ["show", str(path), "--phase", "train"])
        assert (done.exit_code, "is damaged" in done.output) == (1, True)

    def test_a_torn_page_costs_only_its_own_rows(self, tmp_path):
        path = make(tmp_path / "run", 60)
        data = bytearray((path / "run.db").read_bytes())
        with sqlite3.connect(path / "run.db") as raw:
            sql = "SELECT pageno FROM dbstat WHERE name = 'rollouts' AND pagetype = 'leaf'"
            try:
                pages = [row[0] for row in raw.execute(sql)]
            except sqlite3.Error:
                pytest.skip("this SQLite has no dbstat table")
        torn = pages[len(pages) // 2]
        data[(torn - 1) * 4096 : torn * 4096] = bytes(4096)
        (path / "run.db").write_bytes(data)
        with Run.open(path, "r") as run, pytest.raises(StoreError, match="rollouts are in"):
            run.export(tmp_path / "x.jsonl")
        assert 200 < len((tmp_path / "x.jsonl").read_text().splitlines()) < 240
