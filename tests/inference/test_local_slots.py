from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from local_models import ids

from rolltree.inference.local.decoder import LocalRequest, UniformStream
from rolltree.inference.local.slots import SlotTable
from rolltree.values.types import SamplingParams


def pending(*prompt: int, **sampling: float) -> LocalRequest:
    settings = SamplingParams(**sampling)  # type: ignore[arg-type]
    return LocalRequest(ids(*prompt), settings, 0, 10)


def fill(table: SlotTable, row: int, *tokens: int) -> None:
    table.start(row, pending(*tokens), 0)
    table.cached[row] = len(tokens)
    table.release(row)


def test_a_stream_depends_on_its_seed_alone() -> None:
    one, same, other = UniformStream(7), UniformStream(7), UniformStream(8)
    first = [next(one) for _ in range(200)]
    assert first == [next(same) for _ in range(200)]
    assert first != [next(other) for _ in range(200)]
    assert len(set(first)) > 190
    assert all(0 <= number < 1 for number in first)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(tokens, min_size=1, max_size=4), tokens)
def test_common_is_the_longest_shared_prefix(rows: list[list[int]], prompt: list[int]) -> None:
    table = SlotTable(4, 8)
    for row, known in enumerate(rows):
        fill(table, row, 2, 2, 2, 2, 2, 2, 2, 2)  # stale ids behind the new ones
        fill(table, row, *known)
    found = table.common(ids(*prompt))
    for row, known in enumerate(rows):
        expected = 0
        while expected < min(len(known), len(prompt)) and known[expected] == prompt[expected]:
            expected += 1
        assert found[row] == expected
    assert (found[len(rows) :] == 0).all()


def test_the_victim_is_empty_or_unused_for_longest() -> None:
    table = SlotTable(4, 8)
    fill(table, 0, 1)
    fill(table, 2, 2)
    table.start(1, pending(3), 0)
    assert table.victim() == 3
    table.start(3, pending(4), 0)
    assert table.victim() == 0
    fill(table, 0, 5)
    assert table.victim() == 2


def test_sampled_tokens_are_appended_with_their_records() -> None:
    table = SlotTable(3, 8)
    for row in range(3):
        table.start(row, pending(1, 2, temperature=0.5, top_k=3, top_p=0.9), 2)
    table.append([0, 2], ids(7, 8), np.float32([-1, -2]), np.float32([-3, -4]), 5)
    assert table.length.tolist() == [3, 2, 3]
    assert table.cached.tolist() == [2, 2, 2]
    assert table.ids[2, :3].tolist() == [1, 2, 8]
    assert table.logprobs[0, 2] == -1
    assert table.raw_logprobs[2, 2] == -4
    assert table.versions[:, 2].tolist() == [5, 0, 5]
    assert np.allclose(table.settings[0], [0.5, 3, 0.9])


def test_swap_exchanges_everything() -> None:
    table = SlotTable(3, 8)
    table.start(0, pending(1, 2), 1)
    fill(table, 2, 5, 6, 7)
    request = table.request[0]
    table.swap(0, 2)
    assert table.request == [None, None, request]
    assert table.ids[0, :3].tolist() == [5, 6, 7]
    assert table.ids[2, :2].tolist() == [1, 2]
    assert table.length.tolist() == [3, 0, 2]
    assert table.cached.tolist() == [3, 0, 1]
    assert table.active() == [2]


def test_forget_drops_keys_everywhere_and_ids_of_free_rows() -> None:
    table = SlotTable(2, 8)
    table.start(0, pending(1, 2), 2)
    fill(table, 1, 3, 4)
    table.forget()
    assert table.cached.tolist() == [0, 0]
    assert table.length.tolist() == [2, 0]


def test_a_released_row_can_be_emptied() -> None:
    table = SlotTable(1, 8)
    table.start(0, pending(1, 2), 2)
    table.release(0, keep=False)
    assert table.length[0] == table.cached[0] == 0
    assert table.active() == []
