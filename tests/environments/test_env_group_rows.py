"""Properties of a group's rows: complete, in order, and each finds its way home."""

from hypothesis import given, settings
from hypothesis import strategies as st

import rolltree as rt

tasks = st.one_of(st.none(), st.text("abc", min_size=1, max_size=3))
members = st.lists(st.lists(tasks, min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=60)
@given(members, st.data())
def test_a_row_of_a_group_is_the_row_of_its_environment(given_tasks, data):
    labels = data.draw(
        st.lists(
            st.text("xyz", min_size=1, max_size=3),
            min_size=len(given_tasks),
            max_size=len(given_tasks),
            unique=True,
        )
    )
    envs = []
    for number, row_tasks in enumerate(given_tasks):
        rows = [
            {"question": f"{number}.{index}", **({"task": task} if task else {})}
            for index, task in enumerate(row_tasks)
        ]
        envs.append(rt.SingleTurnEnv(dataset=rows, env_id=f"env{number}"))
    group = rt.EnvGroup(envs, labels)
    expected = [(env, row) for env in envs for row in env.dataset]
    assert len(group.dataset) == len(expected)
    for position, (row, (env, own)) in enumerate(zip(group.dataset, expected, strict=True)):
        assert row["example_id"] == position
        assert row["prompt"] == own["prompt"]
        assert group.get_env_for_task(row["task"]) is env
        assert group.own_task(row["task"]) == own["task"]


@given(st.integers(0, 5))
def test_shuffled_rows_keep_their_environment(seed):
    envs = [
        rt.SingleTurnEnv(dataset=[{"question": f"{name}{n}"} for n in range(3)], env_id=name)
        for name in ("a", "b")
    ]
    group = rt.EnvGroup(envs)
    rows = group.get_dataset(seed=seed)
    assert sorted(row["example_id"] for row in rows) == list(range(6))
    for row in rows:
        assert row["prompt"][0]["content"].startswith(row["task"])
