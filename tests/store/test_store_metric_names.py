"""Metrics of runs that older versions wrote are read under today's names."""

from rolltree.store import Run
from rolltree.store.metric_names import OLD_NAMES, OLD_STEMS, renamed


def test_a_run_with_old_names_is_read_with_todays(tmp_path):
    old = {name: float(number) for number, name in enumerate(OLD_NAMES)} | {"metric/exact": 0.5}
    with Run.create(tmp_path / "run", kind="train") as run:
        run.add_step(1, old | {"reward/mean": 0.25})
    with Run.open(tmp_path / "run") as run:
        (step,) = run.steps()
    expected = {new: float(number) for number, new in enumerate(OLD_NAMES.values())}
    assert step.metrics == expected | {"metrics/exact": 0.5, "reward/mean": 0.25}


def test_todays_names_stay():
    """No name was given to another quantity later, so reading a run cannot confuse the two."""
    assert len(set(OLD_NAMES.values())) == len(OLD_NAMES)
    assert not set(OLD_NAMES) & set(OLD_NAMES.values())
    today = dict.fromkeys(OLD_NAMES.values(), 0.0) | {f"{new}x": 1.0 for new in OLD_STEMS.values()}
    assert renamed(today) == today
