"""Pages of rollouts and groups are slices of the whole, in an order that does not waver."""

from itertools import product

import pytest

import rolltree as rt
from rolltree.insight.page.pages import group_page, rollout_page
from rolltree.store import Run, StoredRollout
from rolltree.store.conditions import matches

SORTS = [
    None,
    "id",
    "-id",
    "reward",
    "-reward",
    "train_step",
    "-total_ms",
    "task",
    "-metrics/tries",
]
FILTERS = [
    {},
    {"phase": "train"},
    {"phase": "train", "step": 2},
    {"where": "reward >= 0.5"},
    {"where": "status = error"},
    {"where": "metrics/tries > 1 and task ~ a"},
    {"phase": "eval", "where": "reward = none"},
    {"where": "num_calls > 99"},
]


def row(at, **more):
    """Return a rollout with many ties, in groups of four of which some come late."""
    is_train = at % 7 != 0
    failed = at % 11 == 3
    return StoredRollout(
        request_id=f"r{at:03d}",
        group_id=f"g{(at * 5) % 12 // 2 if at % 13 else ''}",
        index_in_group=at % 4,
        phase="train" if is_train else "eval",
        train_step=at % 3 + 1 if is_train else None,
        task=("adding", "b", "long")[at % 3],
        reward=None if failed else (at % 4) / 2,
        status="error" if failed else "ok",
        error_type="ToolError" if failed else None,
        num_calls=at % 5,
        num_completion_tokens=at,
        total_ms=float(at % 6),
        metrics={"tries": float(at % 4)} if at % 5 else {},
        **more,
    )


ROWS = [row(at) for at in range(83)]


@pytest.fixture
def path(tmp_path):
    """A run whose ids have gaps: some requests were played again."""
    with Run.create(tmp_path / "run", kind="train") as made:
        made.add_rollouts(ROWS)
        made.add_rollouts(ROWS[10:14], replaced=[each.request_id for each in ROWS[10:14]])
    return tmp_path / "run"


def in_order(rows, sort):
    """Return rows in an order, as Python sorts them: those without a value last, ties as stored."""
    if sort is None:
        return list(rows)
    name = sort.removeprefix("-")
    is_down = sort.startswith("-")
    if name == "id":
        return list(reversed(rows)) if is_down else list(rows)

    def value(each):
        metric = name.removeprefix("metrics/")
        return each.metrics.get(metric) if metric != name else getattr(each, name)

    known = [each for each in rows if value(each) is not None]
    known.sort(key=value, reverse=is_down)  # a stable sort, in both directions
    return known + [each for each in rows if value(each) is None]


def passing(rows, filters):
    names = {"phase": "phase", "step": "train_step", "where": "where"}
    where = {names[name]: value for name, value in filters.items()}
    return [each for each in rows if matches(each, where)]


STORED = [*ROWS[:10], *ROWS[14:], *ROWS[10:14]]


@pytest.mark.parametrize("check", ["file", "rows"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_pages_are_slices_of_the_table(path, filters, check):
    with Run.open(path, "r", check=check) as run:
        for sort, size in product(SORTS, (1, 7, 50)):
            wanted = [each.request_id for each in in_order(passing(STORED, filters), sort)]
            found = []
            for offset in range(0, len(wanted) + size, size):
                page = rollout_page(run, sort=sort, offset=offset, limit=size, **filters)
                assert page["total"] == len(wanted)
                found.append([each["request_id"] for each in page["rows"]])
            assert found == [wanted[at : at + size] for at in range(0, len(wanted) + size, size)]
            last = rollout_page(run, sort=sort, offset=len(wanted) // 2, limit=3, **filters)
            at = len(wanted) // 2
            assert [each["request_id"] for each in last["rows"]] == wanted[at : at + 3]


def test_a_page_has_the_values_of_the_table(path):
    with rt.read_run(path) as data:
        whole = list(data.rollouts(sort="-reward").rows())
        page = rollout_page(data.run, sort="-reward", offset=20, limit=10)
    for found, same in zip(page["rows"], whole[20:30], strict=True):
        metrics = found.pop("metrics")
        assert found == {name: same[name] for name in found}
        assert metrics.get("tries") == same["metrics/tries"]


@pytest.mark.parametrize("filters", [{}, {"phase": "train"}, {"phase": "train", "step": 2}])
def test_pages_of_groups_are_slices_of_all_groups(path, filters):
    wanted = dict.fromkeys(each.group_id for each in passing(STORED, filters) if each.group_id)
    with Run.open(path, "r") as run:
        for size in (1, 4, 100):
            found = []
            for offset in range(0, len(wanted) + size, size):
                page = group_page(run, offset=offset, limit=size, **filters)
                assert page["total"] == len(wanted)
                found += page["rows"]
            assert [group["group_id"] for group in found] == list(wanted)
    for group in found:  # a group is whole, whatever it was found by
        rows = [each for each in STORED if each.group_id == group["group_id"]]
        rows.sort(key=lambda each: each.index_in_group)
        assert [each["request_id"] for each in group["members"]] == [r.request_id for r in rows]
        assert group["rewards"] == [each.reward for each in rows]
        assert group["num_failed"] == sum(each.status == "error" for each in rows)


def test_pages_have_what_was_stored_meanwhile(path):
    with Run.open(path, "r", check="rows") as reader, Run.open(path) as writer:
        for _ in range(2):
            before = rollout_page(reader, sort="-num_completion_tokens", offset=1, limit=2)
            assert before["total"] == 83
            assert [each["request_id"] for each in before["rows"]] == ["r081", "r080"]
        assert group_page(reader)["total"] == group_page(reader, offset=1)["total"]
        groups = group_page(reader)["total"]
        writer.add_rollouts([row(100), StoredRollout(request_id="new", group_id="new")])
        after = rollout_page(reader, sort="-num_completion_tokens", offset=1, limit=2)
        assert after["total"] == 85
        assert [each["request_id"] for each in after["rows"]] == ["r082", "r081"]
        assert rollout_page(reader, where="group_id = new")["total"] == 1
        assert group_page(reader)["total"] == groups + 1
