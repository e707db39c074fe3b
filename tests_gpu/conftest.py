"""What the tests on a GPU share. `make test-gpu` runs them; without a CUDA device they skip."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "training"), str(ROOT / "tests_vllm")]


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))  # torch's own, of a device
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device():
    return "cuda"
