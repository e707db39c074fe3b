"""Packing: budgets, ranks in step, trees split without losing or doubling a record."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_kit import check_records, check_structure, context, examples, groups, state

from rolltree.samples import build_samples, join_samples, pack_samples, prune_sample, split_sample
from rolltree.samples.packing import _fill_empty
from rolltree.tokens import PlacedStream, StepTokens, TokenTree
from rolltree.values.errors import ConfigError, TokenError
from rolltree.values.types import Sample, State
from step_kit import step


def flat(*sizes: int) -> list[Sample]:
    """Samples of the given sizes, one trained token each."""
    steps = [step([n] * (size - 1), [n]) for n, size in enumerate(sizes)]
    return build_samples([[one] for one in steps], "step").samples


def sizes(batch: tuple[Sample, ...]) -> list[int]:
    return sorted(sample.num_tokens for sample in batch)


def test_first_fit_decreasing_fills_the_budget() -> None:
    packed = pack_samples(flat(2, 7, 3, 5, 8, 5), 10)
    assert sorted(map(sizes, packed)) == [[2, 8], [3, 7], [5, 5]]
    assert packed.report["num_micro_batches"] == 3
    assert packed.report["padding_waste"] == 0.0
    assert len(packed) == 3


def test_padding_waste_by_hand() -> None:
    packed = pack_samples(flat(6, 6), 10)
    assert packed.report["num_tokens"] == 12
    assert packed.report["padding_waste"] == pytest.approx(0.4)


def test_ranks_have_equally_many_micro_batches_of_equal_weight() -> None:
    packed = pack_samples(flat(9, 8, 7, 6, 5, 4), 10, num_ranks=2)
    assert [len(rank) for rank in packed.ranks] == [3, 3]
    totals = [sum(s.num_tokens for batch in rank for s in batch) for rank in packed.ranks]
    assert sum(totals) == 39
    assert packed.report["rank_imbalance"] == pytest.approx(max(totals) / 19.5 - 1)
    assert max(totals) <= 21


def test_a_rank_without_work_gets_a_filler() -> None:
    packed = pack_samples(flat(3), 10, num_ranks=3)
    assert [len(rank) for rank in packed.ranks] == [1, 1, 1]
    fillers = [batch for batch in packed if batch[0].info.get("filler")]
    assert len(fillers) == packed.report["num_filler_batches"] == 2
    assert (fillers[0][0].num_tokens, fillers[0][0].records.weight.tolist()) == (1, [0])
    check_structure(fillers[0][0])


@examples(100)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=40),
    ranks=st.integers(1, 9),
    budget=st.integers(12, 20),
)
def test_fillers_only_where_there_is_no_work(lengths: list[int], ranks: int, budget: int) -> None:
    packed = pack_samples(flat(*lengths), budget, ranks)
    parts = [s.num_tokens for batch in packed for s in batch if not s.info.get("filler")]
    assert sorted(parts) == sorted(lengths)
    assert all(sum(sizes(batch)) <= budget for batch in packed)
    assert {len(rank) for rank in packed.ranks} == {len(packed) // ranks}
    assert packed.report["num_filler_batches"] == max(0, len(packed) - len(lengths))
    fewest = -(-sum(lengths) // budget)
    assert len(packed) <= -(-(fewest * 11 // 9 + 1) // ranks) * ranks + ranks


def test_bins_that_cannot_be_evened_out_share_with_empty_ones() -> None:
    crowded = _fill_empty([[0], [1, 2, 3], [4, 5], [], []])
    assert sorted(map(len, crowded)) == [1, 1, 1, 1, 2]
    assert sorted(n for members in crowded for n in members) == list(range(6))
    assert sorted(map(len, _fill_empty([[0], []]))) == [0, 1]


def test_what_trains_nothing_is_left_out_and_counted() -> None:
    failed = build_samples([state([step([1], [2])], error={})], "step").samples
    packed = pack_samples(flat(4) + failed, 10)
    assert packed.report["num_untrained_samples"] == 1
    assert packed.report["num_untrained_tokens"] == 2
    assert [sizes(batch) for batch in packed] == [[4]]
    nothing = pack_samples(failed, 10, num_ranks=2)
    assert nothing.ranks == ((), ())
    assert nothing.report["num_micro_batches"] == 0


@pytest.mark.parametrize(("budget", "ranks"), [(0, 1), (5, 0)])
def test_impossible_numbers_are_errors(budget: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        pack_samples([], budget, ranks)


def test_a_path_over_the_budget_is_an_error_with_a_way_out() -> None:
    with pytest.raises(TokenError, match="max_seq_len"):
        pack_samples(flat(11), 10)


def comb() -> Sample:
    """A prompt of 4 tokens and 6 branches of 3: 22 tokens."""
    steps = [step([1, 2, 3, 4], [10 + n, 20, 30]) for n in range(6)]
    return build_samples([steps], "tree").samples[0]


def test_a_tree_is_split_where_branches_end_and_repeats_its_prompt() -> None:
    parts = split_sample(comb(), 13)
    assert [part.num_tokens for part in parts] == [13, 13]
    assert [part.info["num_repeated"] for part in parts] == [0, 4]
    for part in parts:
        check_structure(part)
        assert part.ids[:4].tolist() == [1, 2, 3, 4]
    packed = pack_samples([comb()], 13)
    assert packed.report["num_repeated_tokens"] == 4
    assert packed.report["repetition_waste"] == pytest.approx(4 / 26)


def test_cuts_repeat_as_little_as_possible() -> None:
    """Two prompts: cutting between them repeats nothing, although it fills the budget less."""
    steps = [step([1, 1, 1, 1], [2, 3]), step([1, 1, 1, 1], [4, 5]), step([6, 6], [7])]
    sample = build_samples([steps], "tree").samples[0]
    parts = split_sample(sample, 9)
    assert [part.info["num_repeated"] for part in parts] == [0, 0]
    assert [part.num_tokens for part in parts] == [8, 3]


def test_what_fits_is_not_split() -> None:
    sample = comb()
    assert split_sample(sample, 22)[0] is sample


def test_context_without_records_is_not_computed() -> None:
    steps = [step([1, 2], [3]), step([1, 2], [4], mask=[0]), step([1, 2], [5])]
    sample = build_samples([steps], "tree").samples[0]
    packed = pack_samples([sample], 3)
    targets = [s.records.target[s.records.weight > 0].tolist() for batch in packed for s in batch]
    assert sorted(t for group in targets for t in group) == [3, 5]


def test_a_branchs_first_token_is_trained_where_its_prompt_is() -> None:
    first, second = split_sample(comb(), 13)
    assert sorted(first.records.target.tolist()) == sorted([*range(10, 16), *[20, 30] * 3])
    assert sorted(second.records.target.tolist()) == sorted([20, 30] * 3)
    for part in (first, second):
        records = part.records
        assert part.ids[records.source[records.offset == 1]].tolist() == [
            10 + call for call in records.call[records.offset == 1]
        ]


def test_pruning_by_hand() -> None:
    (sample,) = build_samples([[step([5, 6], [7]), step([5, 6], [8, 9])]], "tree").samples
    pruned = prune_sample(sample)
    assert pruned.ids.tolist() == [5, 6, 8]
    assert pruned.subtree_end.tolist() == [3, 3, 3]
    assert pruned.records.source.tolist() == [1, 1, 2]
    assert pruned.records.target.tolist() == [7, 8, 9]
    assert prune_sample(pruned) is pruned


@examples(75)
@given(states=groups)
def test_pruning_changes_no_record_and_no_context(states: list[State]) -> None:
    samples = build_samples(states, "tree", group_key=lambda _: 0).samples
    pruned = [prune_sample(sample) for sample in samples]
    for one in pruned:
        check_structure(one)
        leaves = one.subtree_end == np.arange(one.num_tokens) + 1
        assert set(np.flatnonzero(leaves)) <= set(one.records.source.tolist())
    assert check_records(pruned, states) == check_records(samples, states)


def test_joined_samples_do_not_see_each_other() -> None:
    one, two = flat(3), build_samples([[step([1], [2]), step([1], [3])]], "tree").samples
    joined = join_samples(one + two)
    check_structure(joined)
    assert joined.ids.tolist() == [0, 0, 0, 1, 2, 3]
    assert joined.records.source.tolist() == [1, 3, 3]
    assert context(joined, 5) == [1, 3]
    assert len(joined.origins) == 2
    assert join_samples([]).num_tokens == 0


def test_streams_survive_joining_and_splitting() -> None:
    tree = TokenTree()
    image = np.arange(6).reshape(2, 3)
    for n in range(2):
        tree.insert(
            [7, 8],
            [10 + n, 20],
            streams={"x": np.array([n, n + 5]), "image": PlacedStream([image], [0])},
        )
    steps = [{"tokens": StepTokens(tree, call)} for call in range(2)]
    (sample,) = build_samples([steps], "tree").samples  # type: ignore[list-item]
    assert sample.info["streams"]["x"].positions.tolist() == [2, 3, 4, 5]
    first, second = split_sample(sample, 4)
    for part, values in ((first, [0, 5]), (second, [1, 6])):
        assert part.info["streams"]["x"].positions.tolist() == [2, 3]
        assert part.info["streams"]["x"].values.tolist() == values
        assert part.info["streams"]["image"].positions.tolist() == [0]
        assert part.info["streams"]["image"].values[0].tolist() == image.tolist()
    joined = join_samples([first, second])
    assert joined.info["streams"]["x"].positions.tolist() == [2, 3, 6, 7]
    assert joined.info["streams"]["x"].values.tolist() == [0, 5, 1, 6]
    assert joined.info["streams"]["image"].positions.tolist() == [0, 4]


@examples(100)
@given(states=groups, extra=st.integers(0, 6), ranks=st.integers(1, 3))
def test_packing_keeps_every_trained_token_exactly_once(
    states: list[State], extra: int, ranks: int
) -> None:
    samples = build_samples(states, "tree", group_key=lambda _: 0).samples
    budget = max([int(s.positions.max()) + 1 for s in samples], default=1) + extra
    packed = pack_samples(samples, budget, ranks)
    parts = [part for batch in packed for part in batch]
    for part in parts:
        check_structure(part)
    seen = check_records([part for part in parts if not part.info.get("filler")], states)
    wanted: Counter[tuple[int, int, int]] = Counter()
    for sample in samples:
        r = sample.records
        rows = zip(r.rollout.tolist(), r.call.tolist(), r.offset.tolist(), r.weight, strict=True)
        wanted.update((a, b, c) for a, b, c, weight in rows if weight)
    assert all(seen[key] == 1 for key in wanted)
    assert set(seen.values()) <= {1}
    assert len({len(rank) for rank in packed.ranks}) == 1
    for batch in packed:
        assert sum(part.num_tokens for part in batch) <= budget
        check_structure(join_samples(batch))
