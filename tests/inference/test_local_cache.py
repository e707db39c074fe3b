from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.inference.local.attention import make_plan
from rolltree.inference.local.slots import KvShape, SlotCache

torch.set_num_threads(1)
SHAPE = KvShape(2, 3, 4, torch.float32, torch.device("cpu"))


def cache_with(num_slots: int = 4, capacity: int = 8) -> SlotCache:
    cache = SlotCache(SHAPE, num_slots, capacity)
    for slot in range(num_slots):
        cache.data[slot] = slot + 1
    return cache


def first(cache: SlotCache, slot: int) -> list[float]:
    """Return what a slot holds, one number per position, and check that all layers agree."""
    values = cache.data[slot].flatten(0, 2)
    assert bool((values == values[:1, :, :1]).all())
    return values[0, :, 0].tolist()


def test_token_bytes_count_keys_and_values_of_all_layers() -> None:
    assert SHAPE.token_bytes == 2 * 2 * 3 * 4 * 4


def test_states_are_written_where_the_plan_says() -> None:
    cache = SlotCache(SHAPE, 4, 8)
    ids = np.zeros((4, 8), np.int32)
    cache.plan = make_plan(
        [1, 3], np.array([1, 2]), np.array([5, 0]), ids, torch.float32, SHAPE.device
    )
    keys, values = torch.randn(2, 1, 3, 3, 4)
    all_keys, all_values = cache.update(keys, values, 1)
    assert torch.equal(all_keys[1, :, 5], keys[0, :, 0])
    assert torch.equal(all_keys[3, :, :2], keys[0, :, 1:])
    assert torch.equal(all_values[3, :, :2], values[0, :, 1:])
    assert int((cache.data != 0).any(-1).sum()) == 3 * 3 * 2  # tokens x heads x (keys, values)
    assert bool((cache.data[:, 0] == 0).all())  # the other layer


def test_copy_takes_a_prefix() -> None:
    cache = cache_with()
    cache.copy(0, 2, 3)
    assert first(cache, 2) == [1, 1, 1, 3, 3, 3, 3, 3]
    assert first(cache, 0) == [1] * 8
    cache.copy(1, 1, 8)
    assert first(cache, 1) == [2] * 8


@pytest.mark.parametrize(("num_one", "num_two"), [(3, 5), (5, 3), (3, 0), (0, 3), (0, 0)])
def test_swap_keeps_what_is_worth_keeping(num_one: int, num_two: int) -> None:
    cache = cache_with()
    cache.swap(0, 1, num_one, num_two)
    assert first(cache, 0)[:num_two] == [2] * num_two
    assert first(cache, 1)[:num_one] == [1] * num_one
    assert first(cache, 2) == [3] * 8


def test_clear_zeroes_a_prefix() -> None:
    cache = cache_with()
    cache.clear(1, 3)
    assert first(cache, 1) == [0, 0, 0, 2, 2, 2, 2, 2]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_taken_when_it_is_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    shape = KvShape(8, 4, 64, torch.float32, torch.device("cpu"))
    before = resident()
    cache = SlotCache(shape, 64, 1024)
    size = 64 * 1024 * shape.token_bytes
    assert cache.data.numel() * 4 == size == 2**30
    assert resident() - before < 2**25
    cache.data[:4, :, :, :, :128] = 1.0
    used = 4 * 128 * shape.token_bytes
    assert used * 0.9 < resident() - before < used + 2**25
