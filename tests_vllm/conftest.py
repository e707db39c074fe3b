"""What the tests against real vLLM share. `make test-vllm` runs them in their own environment.

`ROLLTREE_TEST_MODEL` is the folder of SmolLM2-135M-Instruct, which the project's main environment
makes: this one has no GGUF reader.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads that spin for a shared core crawl
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items):
    for item in items:  # vLLM and what it imports warn of their own affairs
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def folder():
    name = os.environ.get("ROLLTREE_TEST_MODEL", "")
    if not (Path(name) / "model.safetensors").is_file():
        pytest.fail("ROLLTREE_TEST_MODEL names no model folder. Run `make test-vllm`.")
    return Path(name)


@pytest.fixture(scope="session")
def loaded(folder):
    import torch

    from rolltree.inference.models import load_model

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return load_model(str(folder), "float32")
