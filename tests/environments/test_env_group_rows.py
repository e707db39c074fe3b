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


def sized(name, num, **settings):
    rows = [{"question": f"{name}{n}"} for n in range(num)]
    return rt.SingleTurnEnv(dataset=rows, env_id=name, **settings)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 30),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_some_rows_of_a_group_are_equally_many_of_each_environment(sizes, num, seed):
    group = rt.EnvGroup([sized(f"e{number}", size) for number, size in enumerate(sizes)])
    for take in (group.get_dataset, group.get_eval_dataset):
        found, order = take(num, seed), [row["prompt"] for row in take(seed=seed)]
        assert len(found) == min(num, sum(sizes))
        tasks = [row["task"] for row in found]
        counted = [tasks.count(name) for name in group.env_names]
        # Those with fewer rows than the others are played whole.
        assert all(
            count >= max(counted) - 1 or count == size
            for count, size in zip(counted, sizes, strict=True)
        )
        # The first rows of each, in the order of the rows.
        asked = [row["prompt"] for row in found]
        assert asked == [prompt for prompt in order if prompt in asked]
    fewer = {row["example_id"] for row in group.get_eval_dataset(num // 2, seed)}
    assert fewer <= {row["example_id"] for row in group.get_eval_dataset(num, seed)}


def test_environments_of_groups_in_a_group_count_alike_and_rows_put_in_later_do():
    inner = rt.EnvGroup([sized("a", 9), sized("b", 2)], env_id="inner")
    outer = rt.EnvGroup([inner, sized("c", 9)])
    tasks = [outer.example("eval", at)["task"] for at in outer.first_examples("eval", 8)]
    assert tasks == ["inner/a"] * 3 + ["inner/b"] * 2 + ["c"] * 3
    before = outer.get_eval_dataset(8).to_list()
    outer.eval_dataset = outer.rows(outer.get_eval_dataset().to_list())
    assert outer.get_eval_dataset(8).to_list() == before
