"""Several processes: one writes, others read whole batches; a lock dies with its holder."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from rolltree.store import Run, StoredRollout
from rolltree.store.database import Database, WriterLock
from rolltree.store.settings import config_differences, with_defaults, write_config
from rolltree.values.errors import ConfigError, StoreError


def python(program, *words):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    process.stdin.close()
    process.stdout.close()
    return process.wait(timeout=30)


HOLDER = """
    import sys
    from pathlib import Path
    from rolltree.store.database import WriterLock
    lock = WriterLock(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.read()
"""


class TestLock:
    def test_released_and_taken_again(self, tmp_path):
        first = WriterLock(tmp_path / "run.lock")
        with pytest.raises(StoreError, match=f"process {os.getpid()} on"):
            WriterLock(tmp_path / "run.lock")
        first.release()
        first.release()
        WriterLock(tmp_path / "run.lock").release()

    def test_killing_the_holder_frees_it(self, tmp_path):
        process = python(HOLDER, tmp_path / "run.lock")
        assert process.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=f"process {process.pid} on"):
            WriterLock(tmp_path / "run.lock")
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
        WriterLock(tmp_path / "run.lock").release()

    @pytest.mark.parametrize(
        "text",
        ["", "garbage", "[]", '{"pid": 1}', '{"since": "x"}', "[" * 4096, '{"since": 1e300}'],
    )
    def test_what_the_file_says_decides_nothing(self, tmp_path, text):
        path = tmp_path / "run.lock"
        path.write_text(text)
        lock = WriterLock(path)  # nobody holds it, whatever it says
        path.write_text(text)
        with pytest.raises(StoreError, match="is being written by another process; two writers"):
            WriterLock(path)
        lock.release()

    def test_a_child_of_the_holder_does_not_hold_it(self, tmp_path):
        lock = WriterLock(tmp_path / "run.lock")
        child = python("import sys; sys.stdin.read()")
        lock.release()
        WriterLock(tmp_path / "run.lock").release()
        finish(child)

    def test_the_lock_comes_before_any_change(self, tmp_path):
        """A refused second start leaves the config of the first as it is."""
        with Run.create(tmp_path, config={"a": 1}):
            with pytest.raises(StoreError, match="is being written by"):
                Run.open_or_create(tmp_path, config={"a": 2})
            assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


READER = """
    import sys
    from rolltree.store import Run
    with Run.open(sys.argv[1], mode="r") as run:
        counts = []
        while not counts or counts[-1] < 400:
            counts.append(run.num_rollouts())
            assert counts[-1] % 8 == 0, counts[-1]
            rows = [row.request_id for row in run.rollouts(blobs=False)]
            assert rows == [str(i) for i in range(len(rows))]
    print("saw", len(set(counts)))
"""


def test_readers_see_whole_batches_while_somebody_writes(tmp_path):
    with Run.create(tmp_path / "run") as run:
        readers = [python(READER, tmp_path / "run") for _ in range(2)]
        for start in range(0, 400, 8):
            run.add_rollouts(StoredRollout(request_id=str(start + i)) for i in range(8))
            time.sleep(0.01)
        for reader in readers:
            assert reader.stdout.readline().startswith("saw ")
            assert finish(reader) == 0


class TestDiskTrouble:
    def test_a_full_disk_is_said_and_loses_nothing(self, tmp_path):
        with Run.create(tmp_path) as run:
            run.add_rollouts([StoredRollout(request_id="a")])
            pages = run.query("PRAGMA page_count")[0]["page_count"]
            run.query(f"PRAGMA max_page_count = {pages + 2}")
            big = [StoredRollout(request_id=f"b{i}", record=os.urandom(9000)) for i in range(9)]
            with pytest.raises(StoreError, match=r"full.*Make room"):
                run.add_rollouts(big)
            assert [row.request_id for row in run.rollouts()] == ["a"]
            run.query("PRAGMA max_page_count = 1000000")
            assert run.add_rollouts(big) == 9

    def test_a_damaged_file_is_said(self, tmp_path):
        with Run.create(tmp_path) as run:
            run.add_rollouts(
                StoredRollout(request_id=str(i), record=os.urandom(5000)) for i in range(50)
            )
        data = bytearray((tmp_path / "run.db").read_bytes())
        data[4096:] = os.urandom(len(data) - 4096)  # the header page survives
        (tmp_path / "run.db").write_bytes(data)
        with pytest.raises(StoreError, match="damaged"), Run.open(tmp_path, mode="r") as run:
            list(run.rollouts())

    def test_a_torn_header_is_said(self, tmp_path):
        Run.create(tmp_path).close()
        data = (tmp_path / "run.db").read_bytes()
        (tmp_path / "run.db").write_bytes(data[:100])
        for mode in ("r", "w"):
            with pytest.raises(StoreError, match="damaged"):
                Run.open(tmp_path, mode=mode)

    def test_an_error_inside_a_transaction_rolls_back(self, tmp_path):
        database = Database(tmp_path / "run.db", "create")

        def write_and_fail():
            with database.transaction() as change:
                change.put("meta", "a", "1")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        assert database.table("meta") == []
        with database.transaction() as change:
            change.put("meta", "a", "2")
        assert database.table("meta") == [("a", "2")]
        database.close()


class TestConfig:
    def test_differences_by_dotted_key(self):
        old = {"a": {"b": 1, "c": [1, 2], "d": {}}, "e": None, "gone": True}
        new = {"a": {"b": 1.5, "c": [1, 3], "d": {}}, "e": None, "added": "x"}
        assert config_differences(old, new) == [
            "a.b was 1 and is now 1.5",
            "a.c was [1, 2] and is now [1, 3]",
            "added was not set and is now 'x'",
            "gone was True and is now not set",
        ]
        assert config_differences(old, old) == []

    def test_a_parent_covers_its_keys_and_no_namesakes(self):
        old, new = {"eval": {"every": 1}, "evaluate": 1}, {"eval": {"every": 2}, "evaluate": 2}
        assert config_differences(old, new, ["eval"]) == ["evaluate was 1 and is now 2"]
        assert config_differences(old, new, ["eval.every", "evaluate"]) == []

    def test_a_section_that_becomes_a_value(self):
        assert config_differences({"a": {"b": 1}}, {"a": 2}) == [
            "a was not set and is now 2",
            "a.b was 1 and is now not set",
        ]

    def test_a_key_that_the_run_lacks_counts_as_its_default(self):
        old = {"a": {"b": 1}, "args": {}, "own": {"x": 1}}
        defaults = {"a": {"b": 0, "c": {"d": 2}}, "args": {"k": 1}, "own": {}, "section": {"e": 3}}
        full = with_defaults(old, defaults)
        assert full == {
            "a": {"b": 1, "c": {"d": 2}}, "args": {"k": 1}, "own": {"x": 1}, "section": {"e": 3},
        }  # fmt: skip
        assert config_differences(full, {**full, "section": {"e": 4}}) == [
            "section.e was 3 and is now 4"
        ]
        assert old == {"a": {"b": 1}, "args": {}, "own": {"x": 1}}

    @pytest.mark.parametrize("stored", [{"a": 1}, {"a": 1, "made_later": {"x": 0}}])
    def test_a_run_made_before_a_setting_was_added_is_continued(self, tmp_path, stored):
        defaults = {"made_later": {"x": 0, "y": 2}}
        with Run.create(tmp_path, config=stored) as run:
            run.add_step(1, {})
        now = {"a": 1, **defaults}
        for x, y in ((1, 2), (0, 1)):
            other = {"a": 1, "made_later": {"x": x, "y": y}}
            with pytest.raises(ConfigError, match=r"made_later\.[xy] was \d and is now 1"):
                Run.open_or_create(tmp_path, config=other, defaults=defaults)
        with pytest.raises(ConfigError, match=r"made_later.y was not set and is now 2"):
            Run.open_or_create(tmp_path, config=now)
        with Run.open_or_create(tmp_path, config=now, defaults=defaults) as run:
            assert run.config == now  # so that a later default does not change what it was
        assert json.loads((tmp_path / "config.json").read_text()) == now

    def test_written_through_a_rename(self, tmp_path):
        path = tmp_path / "config.json"
        write_config(path, {"a": 1})
        before = path.stat().st_ino
        write_config(path, {"a": 1})
        assert path.stat().st_ino == before  # nothing to write
        write_config(path, {"a": 2})
        assert path.stat().st_ino != before  # a new file, renamed into place
        assert json.loads(path.read_text()) == {"a": 2}
        assert [file.name for file in tmp_path.iterdir()] == ["config.json"]

    def test_the_copy_is_made_again_when_it_is_missing(self, tmp_path):
        Run.create(tmp_path, config={"a": 1}).close()
        (tmp_path / "config.json").unlink()
        Run.open_or_create(tmp_path, config={"a": 1}).close()
        assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}

    def test_values_that_are_no_json_compare_as_text(self, tmp_path):
        config = {"path": tmp_path, "stop": ("a", "b")}
        with Run.open_or_create(tmp_path / "r", config=config) as run:
            run.add_step(1, {})
        Run.open_or_create(tmp_path / "r", config=config).close()
        with pytest.raises(ConfigError, match="path was"):
            Run.open_or_create(tmp_path / "r", config={**config, "path": tmp_path / "other"})
