"""Where the bodies of the tests on a GPU are."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests_gpu"), str(ROOT / "tests" / "training")]
