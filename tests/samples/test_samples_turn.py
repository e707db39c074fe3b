"""Turn-concatenated samples: one per agent turn, credit from the turn's last step."""

from __future__ import annotations

import numpy as np
from samples_kit import flat_of, state

from rolltree.samples import build_samples, to_examples
from rolltree.tokens import BreakCause
from step_kit import step


def react_turn() -> list[object]:
    """Think, call a tool, read its result, answer: three calls of one turn."""
    return [
        step([1, 2], [3, 4], agent="react", turn=0, advantage=0.1, logprobs=[-0.1, -0.2]),
        step([1, 2, 3, 4, 50, 51], [5], agent="react", turn=0, advantage=0.2, logprobs=[-0.3]),
        step(
            [1, 2, 3, 4, 50, 51, 5, 52], [6, 7], agent="react", turn=0, advantage=0.9,
            logprobs=[-0.4, -0.5],
        ),
    ]  # fmt: skip


def test_a_turn_is_one_sample_with_prompt_suffixes_masked() -> None:
    (sample,) = build_samples([state(react_turn())], "turn").samples
    (row,) = to_examples([sample])
    assert row.token_ids == [1, 2, 3, 4, 50, 51, 5, 52, 6, 7]
    assert row.mask == [0, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert row.logprobs == [0, 0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, -0.5]


def test_credit_comes_from_the_last_step_of_the_turn() -> None:
    (sample,) = build_samples([state(react_turn())], "turn").samples
    assert np.unique(sample.records.advantage).tolist() == [np.float32(0.9)]


def test_the_last_step_gives_the_credit_even_without_tokens() -> None:
    steps = [step([1], [2], turn=0, advantage=0.5), step(None, turn=0, advantage=-1.0)]
    (sample,) = build_samples([state(steps)], "turn").samples
    assert sample.records.advantage.tolist() == [-1.0]


def test_turns_do_not_merge_with_each_other() -> None:
    steps = [step([1], [2], turn=0, advantage=1), step([1, 2, 3], [4], turn=1, advantage=2)]
    batch = build_samples([state(steps)], "turn")
    assert flat_of(batch.samples) == [[1, 2], [1, 2, 3, 4]]
    assert [s.records.advantage.tolist() for s in batch.samples] == [[1], [2]]
    assert batch.breaks == ()


def test_steps_without_a_turn_are_turns_of_their_own() -> None:
    steps = [step([1], [2]), step([1, 2, 3], [4])]
    assert len(build_samples([state(steps)], "turn").samples) == 2


def test_turns_of_two_agents_may_interleave() -> None:
    steps = [
        step([1], [2], agent="a", turn=0, advantage=1),
        step([8], [9], agent="b", turn=0, advantage=2),
        step([1, 2, 3], [4], agent="a", turn=0, advantage=3),
    ]
    batch = build_samples([state(steps)], "turn")
    assert flat_of(batch.samples) == [[1, 2, 3, 4], [8, 9]]
    assert [s.records.advantage.tolist() for s in batch.samples] == [[3, 3], [2]]


def test_a_break_splits_the_turn_and_says_why() -> None:
    thinking, answer = [70, 71, 72, 73], [61, 62, 9]
    steps = [
        step([1, 2], thinking + answer, turn=0, advantage=0.25),
        step([1, 2, *answer, 3], [64, 9], turn=0, advantage=0.75),
    ]
    batch = build_samples([state(steps)], "turn")
    assert flat_of(batch.samples) == [[1, 2, *thinking, *answer], [1, 2, *answer, 3, 64, 9]]
    assert [np.unique(s.records.advantage).tolist() for s in batch.samples] == [[0.75], [0.75]]
    assert [item.cause for item in batch.breaks] == [BreakCause.REASONING_STRIPPED]
    assert batch.samples[1].info["break"].position == 2


def test_logprobs_are_all_or_none_in_a_turn() -> None:
    steps = [
        step([1], [2], turn=0, logprobs=[]),
        step([1, 2, 3], [4], turn=0),
        step([7], [8], turn=0),  # a break: the turn's second sample
        step([7, 8], [9], turn=1),
    ]
    batch = build_samples([state(steps)], "turn")
    assert [np.isnan(s.records.logprob).tolist() for s in batch.samples] == [
        [True, True],
        [True],
        [False],
    ]
    assert batch.report["num_calls_without_logprobs"] == 1
    interleaved = build_samples([state(steps)], "interleave").samples
    assert np.isnan(interleaved[0].records.logprob).tolist() == [True, False]
