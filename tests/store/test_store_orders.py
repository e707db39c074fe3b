"""Orders are sorted once and kept until something is stored; metrics are named without rows."""

import sqlite3

import pytest

from rolltree.store import Run, StoredRollout
from rolltree.store.database import Database
from rolltree.values.errors import StoreError


def rows(*rewards, **metrics):
    return [
        StoredRollout(request_id=f"{at}", reward=reward, metrics=metrics)
        for at, reward in enumerate(rewards)
    ]


@pytest.fixture
def asked(monkeypatch):
    """Return the queries for whole orders and counts, as they come."""
    said, read = [], Database.all

    def all_rows(self, sql, values=()):
        if sql.startswith(("SELECT id FROM rollouts", "SELECT count(*) FROM rollouts")):
            said.append(sql)
        return read(self, sql, values)

    monkeypatch.setattr(Database, "all", all_rows)
    return said


def test_an_order_is_sorted_once(tmp_path, asked):
    with Run.create(tmp_path / "run") as run:
        run.add_rollouts(rows(0.5, 1.0, 0.0, None))
        found = []
        for offset in range(0, 4, 2):
            found += [
                row.request_id for row in run.rollouts(sort="-reward", offset=offset, limit=2)
            ]
        assert found == ["1", "0", "2", "3"]
        assert len(asked) == 1
        filtered = [
            name for (name,) in run.columns(["request_id"], sort="reward", where="reward > 0")
        ]
        assert filtered == ["0", "1"]
        assert run.num_rollouts(where="reward > 0") == 2
        assert len(asked) == 2  # the rows of an order need no count
        run.add_rollouts([StoredRollout(request_id="4", reward=2.0)])
        assert next(run.columns(["request_id"], sort="-reward")) == ("4",)
        assert run.num_rollouts(where="reward > 0") == 3
        assert len(asked) == 4


def test_only_the_last_orders_are_kept(tmp_path, asked):
    with Run.create(tmp_path / "run") as run:
        run.add_rollouts(rows(*range(20)))
        for least in [*range(20), 0]:
            page = list(run.columns(["reward"], sort="-reward", where=f"reward >= {least}"))
            assert page == [(float(each),) for each in range(19, least - 1, -1)]
        assert len(asked) == 21
        assert len(run._database.orders._kept) < 20


def test_metrics_are_named_in_the_order_in_which_they_appeared(tmp_path):
    with Run.create(tmp_path / "run") as run:
        assert run.metric_names() == []
        run.add_rollouts([StoredRollout(request_id="a", metrics={"z": 1.0, "a": None})])
        run.add_rollouts([StoredRollout(request_id="b", metrics={"b": 2.0, "z": 1.0, "0": 1})])
        assert run.metric_names() == ["z", "a", "b", "0"]


@pytest.mark.parametrize("name", ["höhe", 'with "quotes"', "back\\slash", "$t", "line\nbreak", 7])
def test_odd_names_of_metrics_are_named_as_they_are(tmp_path, name):
    with Run.create(tmp_path / "run") as run:
        run.add_rollouts([StoredRollout(request_id="a", metrics={"x": 1.0})])
        run.add_rollouts([StoredRollout(request_id="b", metrics={name: 1.0, "y": 2.0})])
        assert run.metric_names() == ["x", name, "y"]


def test_metrics_that_are_no_json_are_damage(tmp_path):
    with Run.create(tmp_path / "run") as run:
        run.add_rollouts(rows(1.0, x=1.0))
    with sqlite3.connect(tmp_path / "run" / "run.db") as connection:
        connection.execute("UPDATE rollouts SET metrics = '{\"x\": '")
    connection.close()
    with (
        Run.open(tmp_path / "run", "r") as run,
        pytest.raises(StoreError, match="is damaged: rollout '0'"),
    ):
        run.metric_names()
