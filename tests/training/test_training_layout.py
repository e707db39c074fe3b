import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_kit import Call, flat, tree

from rolltree.errors import TokenError
from rolltree.training.layout import collate, key_blocks


def seen_by_definition(end):
    index = np.arange(len(end))
    return (index[:, None] >= index) & (index[:, None] < np.asarray(end)[None, :])


def seen_by_blocks(blocks, num_tokens):
    seen = np.zeros((num_tokens, num_tokens), int)
    for block in blocks:
        seen[block.first : block.stop, block.first : block.stop] += block.mask
        seen[block.stop : block.reach, block.first : block.stop] += 1
    return seen


@st.composite
def forests(draw):
    """Random depth-first subtree ends."""
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 40)))]
    children = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    ends = []

    def walk(node):
        at = len(ends)
        ends.append(0)
        for child in children.get(node, []):
            walk(child)
        ends[at] = len(ends)

    for root in children[-1]:
        walk(root)
    return np.array(ends, np.int32)


@given(forests(), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_key_blocks_see_exactly_what_the_definition_says(end, max_block):
    blocks = key_blocks(end, max_block)
    assert (seen_by_blocks(blocks, len(end)) == seen_by_definition(end)).all()
    assert all(block.stop - block.first <= 2 * max_block for block in blocks)
    assert [b.first for b in blocks] == [0, *[b.stop for b in blocks[:-1]]]


def test_key_blocks_of_a_path_and_of_siblings():
    path = key_blocks(np.full(5, 5, np.int32), 2)
    assert [(b.first, b.stop, b.reach) for b in path] == [(0, 2, 5), (2, 4, 5), (4, 5, 5)]
    far = key_blocks(np.full(40, 40, np.int32), 2)  # over 16 blocks below: pieces of 4
    assert [(b.first, b.stop) for b in far[:4]] == [(0, 4), (4, 8), (8, 10), (10, 12)]
    siblings = key_blocks(np.array([6, 6, 4, 4, 6, 6], np.int32), 4)
    assert [(b.first, b.stop, b.reach) for b in siblings] == [(0, 2, 6), (2, 6, 6)]
    assert siblings[1].mask.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


def test_collate_shifts_and_shares_rows():
    first = tree([Call([5, 6], [7]), Call([5, 6], [8, 9], rollout=1)])
    second = flat(Call([1, 2, 3], [4], rollout=2, temperature=0.5))
    forest = collate([first, second])
    assert forest.ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert forest.subtree_end.tolist() == [5, 5, 3, 5, 5, 9, 9, 9, 9]
    assert forest.positions.tolist() == [0, 1, 2, 2, 3, 0, 1, 2, 3]
    assert forest.records.source.tolist() == [1, 1, 3, 7]
    assert forest.rows.tolist() == [1, 3, 7]  # two records read position 1
    assert forest.record_row.tolist() == [0, 0, 1, 2]
    assert forest.row_temperature.tolist() == [1.0, 1.0, 0.5]
    assert forest.record_sample.tolist() == [0, 0, 0, 1]
    assert not forest.is_path
    assert collate([second]).is_path


def test_collate_keeps_two_temperatures_at_one_position_apart():
    forest = collate([tree([Call([5], [7]), Call([5], [7], rollout=1, temperature=0.5)])])
    assert forest.rows.tolist() == [0, 0]
    assert sorted(forest.row_temperature.tolist()) == [0.5, 1.0]
    temperature = forest.row_temperature[forest.record_row]
    assert temperature.tolist() == forest.records.temperature.tolist()


def test_collate_refuses_what_cannot_be_trained():
    sample = flat(Call([1, 2], [3]))
    sample.records.source[0] = 3
    with pytest.raises(TokenError, match=r"r0.*position 3"):
        collate([sample])
    with pytest.raises(TokenError, match="nothing to train on"):
        collate([flat(Call([1, 2], []))])
