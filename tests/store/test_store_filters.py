"""Conditions, order and pages of rollouts: SQL and Python must say the same."""

import pytest

from rolltree.store import Run, StoredRollout
from rolltree.store.conditions import conditions, matches
from rolltree.values.errors import ConfigError

ROWS = [
    StoredRollout(request_id="a", reward=0.0, task="adding", metrics={"tries": 1.0}, train_step=1),
    StoredRollout(request_id="b", reward=0.5, task="long division", example_id="7"),
    StoredRollout(request_id="c", reward=None, status="error", error_type="ToolError"),
    StoredRollout(request_id="d", reward=1.0, example_id=7, truncated=True, metrics={"tries": 3}),
    StoredRollout(request_id="e", reward=0.5, agent="none", metrics={"a 'b' and": 2}),
]


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run") as made:
        made.add_rollouts(ROWS)
        yield made


def ids(run, **chosen):
    return "".join(row.request_id for row in run.rollouts(blobs=False, **chosen))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("reward < 0.5", "a"),
        ("reward<=0.5 AND reward>0", "be"),
        ("reward = none", "c"),
        ("reward != none", "abde"),
        ("reward != 0.5", "acd"),
        ("status=error", "c"),
        ("metrics/tries >= 2", "d"),
        ("metrics/tries = none", "bce"),
        ("task ~ division", "b"),
        ("task ~ 'long div'", "b"),
        ("task !~ div", "acde"),
        ('task = "long division"', "b"),
        ("example_id = 7", "d"),
        ("example_id = '7'", "b"),
        ("truncated = true", "d"),
        ("truncated = false and reward = 0.5", "be"),
        ("agent = 'none'", "e"),
        ("train_step = 1", "a"),
        ("error_type ~ Tool", "c"),
        ("error_type !~ Tool", "abde"),
    ],
)
def test_conditions_by_hand(run, where, expected):
    assert ids(run, where=where) == expected
    assert "".join(row.request_id for row in ROWS if matches(row, {"where": where})) == expected
    assert run.num_rollouts(where=where) == len(expected)
    assert [x for (x,) in run.columns(["request_id"], where=where)] == list(expected)


def test_conditions_and_columns_must_both_hold(run):
    assert ids(run, where="reward >= 0.5", train_step=None, agent="") == "bd"
    assert ids(run, where=None) == "abcde"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rewrd < 1", "Did you mean 'reward'"),
        ("record = 1", "cannot be filtered"),
        ("reward <", "cannot be read"),
        ("reward < 1 and", "cannot be read"),
        ("reward < 1 or reward > 2", "cannot be read"),
        ("", "cannot be read"),
        ("1 = 1; DROP TABLE rollouts", "cannot be"),
        ("reward < high", "does not compare two numbers"),
        ("task > 3", "does not compare two numbers"),
        ("reward", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_nearest_name(run, where, said):
    with pytest.raises(ConfigError, match=said):
        ids(run, where=where)


def test_values_and_metric_names_are_never_sql(run):
    assert ids(run, where='task = "\' OR 1 --"') == ""
    assert ids(run, sort="metrics/x') --") == "abcde"
    for name in ("metrics/x')--", 'metrics/x"'):
        with pytest.raises(ConfigError):
            conditions(f"{name}=1")


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("reward", "abedc"), ("-reward", "dbeac"), ("-id", "edcba"), ("id", "abcde"),
        ("-metrics/tries", "dabce"),
    ],
)  # fmt: skip
def test_sorted_rows_without_a_value_come_last(run, sort, expected):
    assert ids(run, sort=sort) == expected
    for offset in range(6):
        assert ids(run, sort=sort, limit=2, offset=offset) == expected[offset : offset + 2]
    for name in ("rewards", ""):
        with pytest.raises(ConfigError, match=f"sorted by '{name}'"):
            ids(run, sort=name)


def test_pages_of_many_rows(run):
    run.add_rollouts(
        StoredRollout(request_id=str(n), reward=n % 10 / 10, phase="p") for n in range(3000)
    )
    found = list(run.columns(["reward", "request_id"], phase="p", sort="-reward"))
    assert len({request_id for _, request_id in found}) == len(found) == 3000
    assert [reward for reward, _ in found] == sorted((r for r, _ in found), reverse=True)
    assert ids(run, phase="p", offset=2998) == "29982999"
