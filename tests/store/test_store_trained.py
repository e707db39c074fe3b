"""The table `trained`: what a step knew of its tokens is stored with the step, and goes with it."""

import sqlite3

import numpy as np
import pytest

from rolltree.store import Run, TrainedRollout
from rolltree.values.errors import StoreError


def trained(request_id="a", step=1, index=0, *, calls=(2, 1), **arrays):
    size = sum(calls)
    values = {
        "advantage": np.full(size, 0.5),
        "weight": np.arange(size) / 8,
        "logprob": -np.arange(size) / 3 - 0.1,
        "entropy": np.linspace(0, 3, size),
    } | arrays
    return TrainedRollout(
        request_id=request_id,
        trajectory_index=index,
        step=step,
        num_sampled=np.array(calls, np.int32),
        **{name: np.asarray(value, np.float32) for name, value in values.items()},
    )


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run") as made:
        yield made


def test_a_row_comes_back_as_it_was(run):
    given = trained(logprob=[-0.1, np.nan, -3.3], reference=[-0.2, -0.3, -0.4])
    run.add_step(1, {"loss": 1.0}, [given, trained("b", kl=[1e-7, 2.0, 0.0])])
    one, two = run.trained()
    assert (one.request_id, one.trajectory_index, one.step, one.num_tokens) == ("a", 0, 1, 3)
    for name in ("advantage", "weight", "logprob", "reference"):
        np.testing.assert_array_equal(getattr(one, name), getattr(given, name))
        assert getattr(one, name).dtype == np.float32
    np.testing.assert_allclose(one.entropy, given.entropy, rtol=2**-11)  # float16 on disk
    assert one.call.tolist() == [0, 0, 1]
    assert one.kl is None
    np.testing.assert_array_equal(two.kl, np.array([1e-7, 2.0, 0.0], np.float32))
    assert two.reference is None


def test_rollouts_without_tokens(run):
    run.add_step(1, {}, [trained(calls=()), trained("b", calls=(0, 0))])
    assert [(row.num_tokens, row.num_sampled.tolist()) for row in run.trained()] == [
        (0, []),
        (0, [0, 0]),
    ]


def test_filters_and_replacing(run):
    for step in (1, 2, 3):
        rows = [trained(f"{step}{name}", step, i) for name in "ab" for i in (0, 1)]
        run.add_step(step, {}, rows)
    run.add_step(2, {"again": 1.0}, [trained("2a", 2)])  # taken again

    def found(**where):
        return [(row.request_id, row.trajectory_index) for row in run.trained(**where)]

    assert found(step=2) == [("2a", 0)]
    assert found(request_id="3b") == [("3b", 0), ("3b", 1)]
    assert found(request_id="3b", trajectory_index=1) == [("3b", 1)]
    assert found(request_id=["3b", "2a"]) == [("3b", 0), ("3b", 1), ("2a", 0)]
    assert found(request_id=[]) == []
    assert found(step=9) == []
    assert len(found()) == 9


def test_truncated_steps_take_their_tokens_along(run):
    for step in (1, 2, 3):
        run.add_step(step, {}, [trained("a", step)])
    run.truncate_steps(1)
    assert [row.step for row in run.trained()] == [1]
    run.close()
    with Run.open(run.path) as again:  # the counts agree
        assert [row.step for row in again.trained()] == [1]


def test_step_and_tokens_are_one_transaction(run, monkeypatch):
    run.add_step(1, {"loss": 1.0}, [trained()])

    def fails(*args):
        raise sqlite3.OperationalError("the disk is full")

    monkeypatch.setattr("rolltree.store.change.insert_trained", fails)
    with pytest.raises(StoreError, match="nothing of this batch"):
        run.add_step(2, {"loss": 2.0}, [trained("b", 2)])
    assert [row.step for row in run.steps()] == [1]
    assert [row.step for row in run.trained()] == [1]


def test_tokens_of_another_step_and_of_other_lengths_are_refused(run):
    with pytest.raises(StoreError, match="tokens of step 2 were given with the metrics of step 1"):
        run.add_step(1, {}, [trained(step=2)])
    with pytest.raises(StoreError, match="weight of rollout 'a' has 2 values for 3 sampled"):
        trained(weight=[1.0, 1.0])
    assert run.steps() == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE trained SET step = 7 WHERE request_id = 'b'", "differ from their checksum"),
        ("UPDATE trained SET tokens = x'00' WHERE request_id = 'b'", "differ from their checksum"),
        ("DELETE FROM trained WHERE request_id = 'b'", "has 1 rows instead of 2"),
    ],
)
def test_damage_is_said(run, damage, said):
    run.add_step(1, {}, [trained("a"), trained("b")])
    run.close()
    with sqlite3.connect(run.path / "run.db") as raw:
        raw.execute(damage)
    raw.close()
    with (
        Run.open(run.path, "r") as reader,
        pytest.raises(StoreError, match=f"is damaged: .*{said}"),
    ):
        list(reader.trained())
