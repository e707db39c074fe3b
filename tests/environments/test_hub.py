"""Benchmark rows from the hub, files or thin air; and writing rows."""

import os
import sys
import time
import types

import pytest

import rolltree._helpers.hub
from rolltree.environments import Rows, SingleTurnEnv
from rolltree.environments.dataset import RowFormat, benchmark_rows, hub_rows
from rolltree.values.errors import ConfigError

HUB = ("some/data", "main", "test")


def convert(row):
    return {"question": row["q"].upper(), "answer": row["a"], "info": {}}


def generate():
    return [{"question": "made", "answer": "up", "info": {}}]


def rows_of(source):
    found = benchmark_rows(source, hub=HUB, task="bench", convert=convert, generate=generate)
    return None if found is None else list(SingleTurnEnv(eval_dataset=found).eval_dataset)


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` package that answers or fails as told."""
    fake = types.ModuleType("datasets")
    fake.asked = []
    fake.rows = [{"q": "x", "a": "1"}]

    def load_dataset(*args, split):
        fake.asked.append((*args, split))
        if fake.rows is None:
            raise ConnectionError("no route to the hub")
        return fake.rows

    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("rolltree._helpers.hub.answers", lambda: True)
    return fake


def test_the_hub_is_asked_for_the_split(hub):
    assert hub_rows(*HUB) == [{"q": "x", "a": "1"}]
    assert hub.asked == [("some/data", "main", "test")]
    (row,) = rows_of("hub")
    assert (row["prompt"][0]["content"], row["answer"], row["task"]) == ("X", "1", "bench")


def test_without_the_hub_there_are_no_rows_unless_they_are_asked_for(hub):
    hub.rows = None
    with pytest.raises(ConfigError, match=r"no route to the hub.*'generated' makes rows"):
        rows_of("hub")
    (row,) = rows_of("generated")
    assert (row["answer"], row["task"]) == ("up", "bench-generated")


def test_a_hub_that_cannot_be_reached_costs_no_minute(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    rolltree._helpers.hub._reached.cache_clear()
    started = time.monotonic()
    with pytest.raises(ConfigError, match="'no/such-data' could not be loaded"):
        hub_rows("no/such-data")
    assert time.monotonic() - started < 45
    rolltree._helpers.hub._reached.cache_clear()
    import datasets.config

    assert not datasets.config.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="rolltree\\[envs\\]"):
        hub_rows("some/data")
    with pytest.raises(ConfigError, match="rolltree\\[envs\\]"):
        Rows.of([{"question": "q"}], RowFormat()).to_dataset()


def test_generated_and_none(hub):
    (row,) = rows_of("generated")
    assert row["task"] == "bench-generated"
    assert hub.asked == []
    assert rows_of(None) is None


def test_a_file(tmp_path, hub):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "y", "a": "2"}\n')
    (row,) = rows_of(str(path))
    assert (row["answer"], row["task"], row["example_id"]) == ("2", "bench", 0)
    with pytest.raises(ConfigError, match="no data set at"):
        rows_of(str(tmp_path / "missing.jsonl"))


def sample_rows():
    return Rows.of([{"question": f"q{n}", "answer": str(n)} for n in range(5)], RowFormat())


def test_filter_and_map_change_nothing_for_others():
    rows = sample_rows()
    even = rows.filter(lambda row: int(row["answer"]) % 2 == 0)
    assert even["answer"] == ["0", "2", "4"]
    assert even.shuffle(1).filter(lambda row: row["answer"] != "0").take(9, seed=0)["answer"]
    loud = even.map(lambda row: {**row, "answer": row["answer"] + "!"})
    assert loud["answer"] == ["0!", "2!", "4!"]
    assert rows["answer"] == ["0", "1", "2", "3", "4"]
    assert [row["example_id"] for row in loud] == [0, 2, 4]


def test_rows_written_are_rows_read(tmp_path):
    rows = sample_rows()
    rows.to_jsonl(tmp_path / "out.jsonl")
    again = Rows.of(tmp_path / "out.jsonl", RowFormat())
    assert again.to_list() == rows.to_list()
    assert rows.to_dataset().column_names == rows.column_names
    assert Rows.of(rows.to_dataset(), RowFormat()).to_list() == rows.to_list()
