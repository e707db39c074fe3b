"""Buckets: what goes where, worked out by hand, and what their checksums miss (nothing small)."""

from __future__ import annotations

import pytest
import torch
from transfer_kit import bits, same, tensors

from rolltree.scale.weights.buckets import (
    TensorSpec,
    bucket_checksum,
    fill_buckets,
    pack,
    specs_from_data,
    specs_to_data,
    unpack_bucket,
)
from rolltree.values.errors import BadResponse, ConfigError


def spec(name, size, dtype="int8"):
    return TensorSpec(name, dtype, (size,))


def described(found):
    return [([s.name for s in b.specs], b.starts, b.num_bytes) for b in found]


def test_buckets_are_filled_in_order():
    # 20 bytes take 32, 16 take 16; 8 more are the checksum. 32 + 16 + 8 fill 56 exactly.
    specs = [spec("a", 20), spec("b", 4, "float32"), spec("c", 1), spec("big", 100), spec("d", 0)]
    assert described(fill_buckets(specs, 56)) == [
        (["a", "b"], (0, 32), 56),
        (["c"], (0,), 24),
        (["big"], (0,), 120),  # larger than a bucket: one of its own
        (["d"], (0,), 8),
    ]
    assert described(fill_buckets(specs[:3], 55)) == [
        (["a"], (0,), 40),
        (["b", "c"], (0, 16), 40),
    ]
    assert fill_buckets([], 64) == []


@pytest.mark.parametrize("size", [64, 300, 2048, 10**6])
def test_what_is_packed_comes_out_again(size):
    given = tensors()
    specs = [TensorSpec.of(*item) for item in given.items()]
    assert specs_from_data(specs_to_data(specs)) == specs
    found = {}
    memory = torch.full((10**5,), 99, dtype=torch.uint8)  # what was there before does not matter
    for bucket in fill_buckets(specs, size):
        held = [given[each.name] for each in bucket.specs]
        found |= {name: t.clone() for name, t in unpack_bucket(bucket, pack(bucket, held, memory))}
    assert same(found, given)


def test_the_checksum_finds_every_single_bit_flip():
    (bucket,) = fill_buckets([spec("a", 40)], 64)
    given = torch.arange(40, dtype=torch.int8)
    packed = pack(bucket, [given], torch.zeros(64, dtype=torch.uint8))
    assert torch.equal(unpack_bucket(bucket, packed)[0][1], given)
    for at in range(8 * bucket.num_bytes):
        packed[at // 8] ^= 1 << at % 8
        with pytest.raises(BadResponse, match="begins with a"):
            unpack_bucket(bucket, packed)
        packed[at // 8] ^= 1 << at % 8


def test_the_checksum_by_hand_and_what_is_moved():
    odd = 0x9E3779B97F4A7C15
    words = torch.tensor([3, -2, 7])
    weights = [(place * odd) % 2**64 | 1 for place in (1, 2, 3)]
    expected = (3 * weights[0] - 2 * weights[1] + 7 * weights[2]) % 2**64
    assert int(bucket_checksum(bits(words))) % 2**64 == expected
    assert int(bucket_checksum(bits(words[[1, 0, 2]]))) % 2**64 != expected
    assert (
        int(bucket_checksum(bits(torch.tensor([4, -3, 7])))) % 2**64 != expected
    )  # one unit moved
    blocks = torch.arange(2 * 2**17).view(2, -1)
    assert int(bucket_checksum(bits(blocks))) != int(bucket_checksum(bits(blocks.flip(0))))
    assert int(bucket_checksum(torch.zeros(0, dtype=torch.uint8))) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "does not describe a tensor"),
        ([["a", "float32"]], "does not describe a tensor"),
        ([["a", "float32", ["x"]]], "does not describe a tensor"),
        ([["a", "float31", [1]]], "not a torch dtype"),
        ([["a", "load", [1]]], "not a torch dtype"),
        ([["a", "int8", [-1]]], "has a negative size"),
    ],
)
def test_what_describes_no_tensors(data, said):
    with pytest.raises(ConfigError, match=said):
        specs_from_data(data)
