"""`max_seq_len`: what is cut, what is marked, and that nothing is lost silently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from samples_kit import SCOPES, check_structure, flat_of, state

from rolltree.samples import build_samples, sample_meta, to_examples
from rolltree.tokens import PlacedStream, Trajectory
from rolltree.values.errors import ConfigError
from step_kit import step


def test_a_flat_sample_is_cut_from_the_right_and_says_so() -> None:
    steps = [step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6, 7, 8])]
    (sample,) = build_samples([state(steps)], "interleave", max_seq_len=6).samples
    assert sample.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.subtree_end.tolist() == [6] * 6
    assert to_examples([sample])[0].mask == [0, 0, 1, 1, 0, 1]
    assert {key: sample.info[key] for key in sample.info if key.startswith("seq_len")} == {
        "seq_len_truncated": True,
        "seq_len_original": 8,
        "seq_len_kept": 6,
        "seq_len_lost": 2,
        "seq_len_cut": (True,),
    }
    (origin,) = sample.origins
    assert (origin.truncated, origin.truncation_reason) == (True, "max_seq_len")


def test_the_lost_tokens_are_reported_per_call() -> None:
    steps = [step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6, 7, 8]), step([1, 2], [9] * 9)]
    batch = build_samples([state(steps)], "interleave", max_seq_len=6)
    assert [(s.call, str(s.reason), s.num_tokens) for s in batch.skipped] == [
        (1, "max_seq_len", 2),
        (2, "max_seq_len", 5),
    ]
    report = batch.report
    assert (report["num_seq_len_truncated"], report["skipped_tokens/max_seq_len"]) == (2, 7)


def test_an_episodes_own_reason_is_kept() -> None:
    one = state([step([1], [2, 3])], truncated=True, truncation_reason="max_steps")
    (sample,) = build_samples([one], "step", max_seq_len=2).samples
    assert sample.origins[0].truncation_reason == "max_steps"


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_trainable_left_drops_the_sample_and_counts_its_tokens(scope: Any) -> None:
    steps = [step([1, 2, 3], [4, 5]), step([1, 2, 3], [6, 7], mask=[0, 1])]
    batch = build_samples([state(steps)], scope, max_seq_len=3)
    assert batch.samples == []
    assert batch.report["skipped_tokens/max_seq_len"] == 4


def test_only_masked_tokens_left_drops_the_sample_too() -> None:
    batch = build_samples([state([step([1], [2, 3], mask=[0, 1])])], "step", max_seq_len=2)
    assert batch.samples == []
    assert batch.report["num_skipped_tokens"] == 2


def test_a_tree_is_cut_by_depth() -> None:
    steps = [step([1, 2], [3, 4, 5]), step([1, 2], [6]), step([1, 2, 3, 7], [8])]
    (sample,) = build_samples([state(steps)], "tree", max_seq_len=4).samples
    check_structure(sample)
    assert sample.ids.tolist() == [1, 2, 3, 4, 7, 6]
    assert sample.positions.tolist() == [0, 1, 2, 3, 3, 2]
    assert sample.subtree_end.tolist() == [6, 6, 5, 4, 5, 6]
    assert sample.records.source.tolist() == [1, 2, 1]
    assert sample.records.target.tolist() == [3, 4, 6]
    assert sample.info["seq_len_lost"] == 2


def test_only_the_cut_rollouts_of_a_group_are_marked() -> None:
    group = [state([step([1], [2, 3, 4])]), state([step([1], [5])])]
    batch = build_samples(group, "tree", max_seq_len=3, group_key=lambda _: 0)
    (sample,) = batch.samples
    assert [o.truncated for o in sample.origins] == [True, False]


def test_an_episode_that_ended_early_by_itself_is_not_said_to_be_cut() -> None:
    """Its sample lost tokens, but another rollout's."""
    group = [
        state([step([1], [2, 3, 4])]),
        state([step([1], [5])], truncated=True, truncation_reason="max_steps"),
    ]
    (sample,) = build_samples(group, "tree", max_seq_len=3, group_key=lambda _: 0).samples
    cut, whole = sample_meta(sample, group)
    assert (cut["seq_len_truncated"], cut["truncation_reason"]) == (True, "max_seq_len")
    assert (cut["seq_len_kept"], cut["seq_len_original"]) == (4, 5)
    assert (whole["seq_len_truncated"], whole["truncation_reason"]) == (False, "max_steps")
    assert "seq_len_kept" not in whole


def test_a_sample_that_fits_is_untouched() -> None:
    (sample,) = build_samples([state([step([1], [2])])], "step", max_seq_len=2).samples
    assert "seq_len_truncated" not in sample.info
    assert sample.origins[0].truncated is False


def test_streams_are_cut_with_their_tokens() -> None:
    trajectory = Trajectory()
    trajectory.tree.insert(
        [7, 1, 7],
        [2, 3],
        streams={
            "x": np.array([10, 11]),
            "image": PlacedStream([np.zeros(2), np.ones(3)], [0, 2]),
        },
    )
    from rolltree.tokens import StepTokens

    made = step([0], [0])
    made["tokens"] = StepTokens(trajectory.tree, 0)
    (sample,) = build_samples([[made]], "step", max_seq_len=4).samples
    assert sample.info["streams"]["x"].positions.tolist() == [3]
    assert sample.info["streams"]["x"].values.tolist() == [10]
    assert sample.info["streams"]["image"].positions.tolist() == [0, 2]
    assert flat_of([sample]) == [[7, 1, 7, 2]]


@pytest.mark.parametrize("bad", [1, 0, -3])
def test_a_cap_without_room_is_an_error(bad: int) -> None:
    with pytest.raises(ConfigError, match="max_seq_len"):
        build_samples([], "step", max_seq_len=bad)
