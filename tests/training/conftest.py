"""What the tests of training share: the folder of a tiny model, and torch's threads put back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loop_kit import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of two layers, made once."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Undo `train.num_threads`, which is the whole process's."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
