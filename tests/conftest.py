"""What all tests share: how Hypothesis searches.

No deadline: a slow machine is not a wrong answer. The same examples in every run, so that the suite
says the same of the same code; `ROLLTREE_HYPOTHESIS=long` searches at random, and longer where a
room's kit says so. Ctrl-C works even if a shell's background job ignores it: tests send it.
"""

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rolltree._helpers.redact import _remembered

settings.register_profile(
    "suite",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
signal.signal(signal.SIGINT, signal.default_int_handler)
# A full collection takes 0.6 s beside torch, transformers and 9,000 tests, and finds little.
gc.set_threshold(*gc.get_threshold()[:2], 1000)
settings.load_profile("long" if os.environ.get("ROLLTREE_HYPOTHESIS") == "long" else "suite")


LONG = tuple(
    line
    for line in (Path(__file__).parent / "long.txt").read_text().splitlines()
    if not line.startswith("#")
)


@pytest.fixture(autouse=True)
def _forget_secrets():
    """Undo what a test adds to the secrets that the process cuts out of every text it shows."""
    before = set(_remembered)
    yield
    _remembered.intersection_update(before)


# First: pytest's own hook leaves out what `-m` does not ask for.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what `long.txt` names. Several workers begin with the files that have slow tests."""
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.long)
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
