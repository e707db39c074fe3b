"""Laws of the reducers: what must not matter does not, what must count does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.evaluation import REDUCERS, Settings, build_report, compare_reports, outcomes
from rolltree.store import StoredRollout

rewards = st.sampled_from([0.0, 1.0]) | st.floats(-5, 5)


@st.composite
def row_lists(draw, min_size=0):
    rows = []
    for example in range(draw(st.integers(min_size, 6))):
        for index in range(draw(st.integers(1, 3))):
            failed = draw(st.integers(0, 4)) == 0
            unscored = draw(st.integers(0, 4)) == 0
            for trajectory in range(draw(st.integers(1, 2))):
                rows.append(
                    StoredRollout(
                        request_id=f"{example}/{index}",
                        trajectory_index=trajectory,
                        env_id="e",
                        task=f"task{example % 2}",
                        example_id=example,
                        reward=None if failed or unscored else draw(rewards),
                        status="error" if failed else "ok",
                        error_type="E" if failed else None,
                        truncated=draw(st.booleans()),
                        truncation_reason="max_steps",
                        metrics={"m": draw(rewards)},
                        num_calls=draw(st.integers(0, 3)),
                        num_completion_tokens=draw(st.integers(0, 9)),
                    )
                )
    return rows


def close(a, b):
    """Equal up to the order in which floats were added."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return a == b


@given(row_lists(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    first, second = build_report(rows).as_dict(), build_report(shuffled).as_dict()
    assert close(first, second)


@given(row_lists())
def test_every_episode_is_counted_exactly_once(rows):
    report = build_report(rows)
    scored = sum(outcome.reward is not None for outcome in report.outcomes)
    assert report.num_rollouts == len({row.request_id for row in rows})
    assert report.num_failed + report.num_unscored + scored == report.num_rollouts
    assert sum(report.results["failures"].values()) == report.num_failed
    assert sum(report.results["truncations"].values()) == report.num_truncated
    usage = report.results["usage"]
    assert usage["num_calls"] == sum(row.num_calls for row in rows)
    assert usage["num_completion_tokens"] == sum(row.num_completion_tokens for row in rows)


@given(row_lists(min_size=1))
def test_failures_change_counts_and_no_mean(rows):
    """Adding failed episodes of known and new examples leaves every mean as it was."""
    failed = [
        StoredRollout(
            request_id=f"more/{example}", env_id="e", task="task0", example_id=example,
            status="error", error_type="Late", metrics={"m": 1e9},
        )
        for example in (0, 99)
    ]  # fmt: skip
    before, after = build_report(rows), build_report([*rows, *failed])
    for name in ("reward", "pass_at", "metrics", "tasks"):
        assert before.results[name] == after.results[name]
    assert after.num_failed == before.num_failed + 2
    assert after.results["failures"]["Late"] == 2


@given(row_lists(min_size=1))
def test_means_lie_between_the_extremes(rows):
    report = build_report(rows)
    scored = [outcome.reward for outcome in report.outcomes if outcome.reward is not None]
    if report.reward is None:
        assert not scored
        return
    assert min(scored) - 1e-9 <= report.reward.mean <= max(scored) + 1e-9
    assert report.reward.num_values == len(scored)
    parts = report.tasks.values()
    mean = sum(t.mean * t.num_examples for t in parts) / sum(t.num_examples for t in parts)
    assert mean == pytest.approx(report.reward.mean, abs=1e-9)


@given(row_lists(min_size=1))
def test_more_tries_never_lower_pass_at_k(rows):
    """On examples that all have the same number of rollouts."""
    full = [row for row in rows if row.status == "ok" and row.reward is not None]
    counts = {}
    for outcome in outcomes(full):
        counts[outcome.example] = counts.get(outcome.example, 0) + 1
    most = max(counts.values(), default=0)
    kept = [row for row in full if counts[(row.env_id, row.task, row.example_id)] == most]
    found = build_report(kept).pass_at
    means = [found[k].mean for k in sorted(found)]
    assert means == sorted(means)
    assert all(0.0 <= mean <= 1.0 for mean in means)
    assert all(0.0 <= found[k].low <= found[k].high <= 1.0 for k in found)
    if most:
        assert max(found) == most


@given(row_lists(min_size=2))
def test_comparing_with_itself_finds_nothing(rows):
    report = build_report(rows)
    if report.reward is None:
        return
    found = compare_reports(report, report)
    assert found.difference.mean == 0.0
    assert not found.is_significant
    assert (found.num_only_a, found.num_only_b) == (0, 0)


@given(row_lists(min_size=2), row_lists(min_size=2))
def test_comparing_the_other_way_round_changes_the_sign(rows_a, rows_b):
    a, b = build_report(rows_a), build_report(rows_b)
    if not {o.example for o in a.outcomes if o.reward is not None} & {
        o.example for o in b.outcomes if o.reward is not None
    }:
        return
    there, back = compare_reports(a, b), compare_reports(b, a)
    assert there.difference.mean == pytest.approx(-back.difference.mean)
    assert there.is_significant == back.is_significant
    if there.difference.low is not None:
        assert there.difference.low == pytest.approx(-back.difference.high)
    assert (there.num_only_a, there.num_only_b) == (back.num_only_b, back.num_only_a)


@pytest.mark.parametrize("name", list(REDUCERS))
def test_every_reducer_takes_nothing(name):
    result = REDUCERS[name]([], Settings())
    assert not result or set(result.values()) == {0.0}


def test_wider_confidence_is_wider():
    rows = [
        StoredRollout(request_id=str(i), example_id=i, reward=float(i % 3 == 0)) for i in range(30)
    ]
    narrow = build_report(rows, settings=Settings(confidence=0.8)).reward
    wide = build_report(rows, settings=Settings(confidence=0.99)).reward
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_same_example_id_in_two_tasks_is_two_examples():
    rows = [
        StoredRollout(request_id=f"{task}", task=task, example_id=0, reward=reward)
        for task, reward in (("a", 1.0), ("b", 0.0))
    ]
    assert build_report(rows).reward.num_examples == 2
