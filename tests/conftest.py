"""What all tests share: how Hypothesis searches.

No deadline: a slow machine is not a wrong answer. The same examples in every run, so that the suite
says the same of the same code; `ROLLTREE_HYPOTHESIS=long` searches at random, and longer where a
room's kit says so. Ctrl-C works, also where a shell's background job ignores it: tests send it.
"""

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.load_profile("long" if os.environ.get("ROLLTREE_HYPOTHESIS") == "long" else "suite")


def pytest_collection_modifyitems(config, items):
    """Several workers begin with the files that have slow tests: none waits for them at the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
