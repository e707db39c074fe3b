from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.inference.local.plan import make_plan
from rolltree.inference.local.slots import KvShape, LayerShape, SlotCache

torch.set_num_threads(1)
CPU = torch.device("cpu")
SHAPES = {
    "alike": KvShape((LayerShape(3, 4, 4),) * 2, torch.float32, CPU),
    "apart": KvShape((LayerShape(1, 4, 2), None, LayerShape(3, 5, 5)), torch.float32, CPU),
}
SHAPE = SHAPES["alike"]


@pytest.fixture(params=SHAPES)
def cache(request: pytest.FixtureRequest) -> SlotCache:
    cache = SlotCache(SHAPES[request.param], 4, 8)
    for data in cache.data:
        for slot in range(4):
            data[slot] = slot + 1
    return cache


def first(cache: SlotCache, slot: int) -> list[float]:
    """Return what a slot holds, one number per position, and check that all layers agree."""
    found = cache.data[0][slot, 0, 0, :, 0]
    for data in cache.data:
        assert bool((data[slot] == found[:, None]).all())
    return found.tolist()


def test_token_bytes_count_keys_and_values_of_all_layers() -> None:
    assert SHAPE.token_bytes == 2 * 2 * 3 * 4 * 4
    assert SHAPES["apart"].token_bytes == (1 * (4 + 2) + 3 * (5 + 5)) * 4
    cache = SlotCache(SHAPES["apart"], 2, 8)
    assert sum(data.nbytes for data in cache.data) == 2 * 8 * SHAPES["apart"].token_bytes
    assert cache.layers[0].values.shape == (2, 1, 8, 2)


def test_states_are_written_where_the_plan_says() -> None:
    cache = SlotCache(SHAPE, 4, 8)
    ids = np.zeros((4, 8), np.int32)
    cache.plan = make_plan(
        [1, 3], np.array([1, 2]), np.array([5, 0]), ids, torch.float32, SHAPE.device
    )
    keys, values = torch.randn(2, 1, 3, 3, 4)
    all_keys, all_values = cache.update(keys, values, 1)
    assert all_keys.shape == (4, 3, 6, 4)  # as far as the plan reaches
    assert torch.equal(all_keys[1, :, 5], keys[0, :, 0])
    assert torch.equal(all_keys[3, :, :2], keys[0, :, 1:])
    assert torch.equal(all_values[3, :, :2], values[0, :, 1:])
    (data,) = cache.data
    assert int((data != 0).any(-1).sum()) == 3 * 3 * 2  # tokens x heads x (keys, values)
    assert not cache.layers[0].keys.any()


def test_copy_takes_a_prefix(cache: SlotCache) -> None:
    cache.copy(0, 2, 3)
    assert first(cache, 2) == [1, 1, 1, 3, 3, 3, 3, 3]
    assert first(cache, 0) == [1] * 8
    cache.copy(1, 1, 8)
    assert first(cache, 1) == [2] * 8


@pytest.mark.parametrize(("num_one", "num_two"), [(3, 5), (5, 3), (3, 0), (0, 3), (0, 0)])
def test_swap_keeps_what_is_worth_keeping(cache: SlotCache, num_one: int, num_two: int) -> None:
    cache.swap(0, 1, num_one, num_two)
    assert first(cache, 0)[:num_two] == [2] * num_two
    assert first(cache, 1)[:num_one] == [1] * num_one
    assert first(cache, 2) == [3] * 8


def test_clear_zeroes_a_prefix(cache: SlotCache) -> None:
    cache.clear(1, 3)
    assert first(cache, 1) == [0, 0, 0, 2, 2, 2, 2, 2]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_taken_when_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    shape = KvShape((LayerShape(4, 64, 64),) * 8, torch.float32, CPU)
    before = resident()
    cache = SlotCache(shape, 64, 1024)
    size = 64 * 1024 * shape.token_bytes
    (data,) = cache.data
    assert data.nbytes == size == 2**30
    assert resident() - before < 2**25
    data[:4, :, :, :128] = 1.0
    used = 4 * 128 * shape.token_bytes
    assert used * 0.9 < resident() - before < used + 2**25
