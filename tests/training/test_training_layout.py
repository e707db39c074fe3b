import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_kit import Call, flat, tree

from rolltree.training.layout import Pattern, collate, key_blocks
from rolltree.values.errors import TokenError


def seen_by_definition(end):
    index = np.arange(len(end))
    return (index[:, None] >= index) & (index[:, None] < np.asarray(end)[None, :])


def seen_by_blocks(blocks, num_tokens):
    seen = np.zeros((num_tokens, num_tokens), int)
    for block in blocks:
        found = np.ones((block.reach - block.start, block.stop - block.first), int)
        for first, mask in block.masks:
            found[first - block.start : first - block.start + len(mask)] = mask
        seen[block.start : block.reach, block.first : block.stop] += found
    return seen


def depths(end):
    """How many tokens each token of a forest comes after."""
    return (seen_by_definition(end).sum(1) - 1).astype(np.int32)


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


@st.composite
def patterns(draw):
    """Windows, chunks and both at once, shorter and longer than the forests above are deep."""
    either = st.none() | st.integers(1, 12)
    return Pattern(window=draw(either), chunk=draw(either))


def seen_with_pattern(end, pattern):
    """The rule, pair by pair."""
    depth = depths(end)
    seen = seen_by_definition(end)
    if pattern.window is not None:
        seen &= depth[:, None] - depth[None, :] < pattern.window
    if pattern.chunk is not None:
        seen &= depth[:, None] // pattern.chunk == depth[None, :] // pattern.chunk
    return seen


@given(forests(), st.integers(1, 12), patterns())
@settings(max_examples=300, deadline=None)
def test_key_blocks_see_exactly_what_the_definition_says(end, max_block, pattern):
    depth = depths(end)
    blocks = key_blocks(end, max_block, depth, pattern.limit(depth))
    assert (seen_by_blocks(blocks, len(end)) == seen_with_pattern(end, pattern)).all()
    assert all(block.stop - block.first <= 2 * max_block for block in blocks)
    pieces = list(dict.fromkeys((b.first, b.stop) for b in blocks))
    assert [first for first, _ in pieces] == [0, *[stop for _, stop in pieces[:-1]]]
    assert all(block.start >= block.first for block in blocks)


@pytest.mark.parametrize("pattern", [Pattern(window=200), Pattern(chunk=200)])
def test_queries_beyond_the_window_are_not_computed(pattern):
    """A path of 2,000 and 4 branches of 500 below: work is per token, not per pair."""
    depth = np.concatenate([np.arange(2000), *[np.arange(2000, 2500)] * 4]).astype(np.int32)
    leaves = np.repeat(2500 + 500 * np.arange(4), 500)
    end = np.concatenate([np.full(2000, 4000), leaves]).astype(np.int32)

    def pairs(limit):
        blocks = key_blocks(end, depth=depth, limit=limit)
        return sum((b.reach - b.start) * (b.stop - b.first) for b in blocks)

    exact = np.minimum(depth + 1, 200).sum() if pattern.window else (depth % 200 + 1).sum()
    assert exact <= pairs(pattern.limit(depth)) < 1.8 * exact + 64 * 64
    assert pairs(None) > 6 * pairs(pattern.limit(depth))


def test_a_pattern_longer_than_every_path_is_none():
    depth = np.array([0, 1, 2, 3, 2], np.int32)
    assert Pattern().limit(depth) is None
    assert Pattern(window=4).limit(depth) is None
    assert Pattern(chunk=4).limit(depth) is None
    assert Pattern(window=3).limit(depth).tolist() == [3, 4, 5, 6, 5]
    assert Pattern(chunk=3).limit(depth).tolist() == [3, 3, 3, 6, 3]
    assert Pattern(window=3) & Pattern(window=5, chunk=8) == Pattern(window=3, chunk=8)
    with pytest.raises(ValueError, match="two chunk sizes"):
        Pattern(chunk=3) & Pattern(chunk=4)


def test_key_blocks_of_a_path_and_of_siblings():
    path = key_blocks(np.full(5, 5, np.int32), 2)
    assert [(b.first, b.stop, b.reach) for b in path] == [(0, 2, 5), (2, 4, 5), (4, 5, 5)]
    far = key_blocks(np.full(40, 40, np.int32), 2)  # over 16 blocks below: pieces of 4
    assert [(b.first, b.stop) for b in far[:4]] == [(0, 4), (4, 8), (8, 10), (10, 12)]
    siblings = key_blocks(np.array([6, 6, 4, 4, 6, 6], np.int32), 4)
    assert [(b.first, b.stop, b.reach) for b in siblings] == [(0, 2, 6), (2, 6, 6)]
    assert siblings[1].masks[0][1].tolist() == [
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
