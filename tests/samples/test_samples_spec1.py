"""One training row per step, as in verifiers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from samples_kit import exact_groups, examples, groups, state

from rolltree.samples import build_samples, process_trajectories_for_training, to_examples
from rolltree.tokens import Trajectory
from rolltree.values.errors import TokenError
from rolltree.values.types import State, TrainingExample
from step_kit import step


def spec_1(states: list[State], mask_prompts: bool = True) -> list[TrainingExample]:
    """The loop of the document, with plain lists."""
    examples_ = []
    for one in states:
        if one.get("trajectory"):
            for made in one["trajectory"]:
                if made["tokens"] is None:
                    continue
                prompt_ids = made["tokens"]["prompt_ids"]
                completion_ids = made["tokens"]["completion_ids"]
                token_ids = prompt_ids + completion_ids
                known = made["tokens"]["completion_logprobs"] or [math.nan] * len(completion_ids)
                logprobs = [0.0] * len(prompt_ids) + known
                if mask_prompts:
                    mask = made["tokens"]["prompt_mask"] + made["tokens"]["completion_mask"]
                else:
                    mask = [1] * len(token_ids)
                reward = made.get("reward", 0.0)
                row = TrainingExample(token_ids, logprobs, mask, reward, made.get("advantage"))
                examples_.append(row)
    return examples_


def test_rows_by_hand() -> None:
    steps = [
        step([1, 2], [3, 4], logprobs=[-0.1, -0.2], mask=[1, 0], reward=0.5, advantage=2.0),
        step(None),
        step([1, 2, 3, 4, 5], [6], logprobs=[-0.3]),
    ]
    del steps[2]["reward"]
    for trajectory in (steps, Trajectory(steps)):
        rows = process_trajectories_for_training([state(trajectory)])
        assert rows == [
            TrainingExample([1, 2, 3, 4], [0.0, 0.0, -0.1, -0.2], [0, 0, 1, 0], 0.5, 2.0),
            TrainingExample([1, 2, 3, 4, 5, 6], [0.0] * 5 + [-0.3], [0] * 5 + [1], 0.0, None),
        ]
    unmasked = process_trajectories_for_training([state(steps)], mask_prompts=False)
    assert [row.mask for row in unmasked] == [[1] * 4, [1] * 6]


def test_prompt_masks_of_the_step_are_used() -> None:
    made = step([1, 2], [3])
    made["tokens"]["prompt_mask"] = [0, 1]
    (row,) = process_trajectories_for_training([state(Trajectory([made]))])
    assert row.mask == [0, 1, 1]


def test_rows_have_equal_lengths_also_without_logprobs_and_masks() -> None:
    made = step([1, 2], [3, 4], logprobs=[], mask=[])
    made["tokens"]["prompt_mask"] = []
    for trajectory in ([made], Trajectory([made])):
        (row,) = process_trajectories_for_training([state(trajectory)])
        assert row.logprobs[:2] == [0.0, 0.0]
        assert [math.isnan(value) for value in row.logprobs] == [False, False, True, True]
        assert row.mask == [0, 0, 1, 1]


def test_rows_of_contradicting_lists_are_refused() -> None:
    with pytest.raises(TokenError, match="completion_logprobs"):
        process_trajectories_for_training([state([step([1], [2, 3], logprobs=[-0.5])])])


def test_states_without_a_trajectory_give_nothing() -> None:
    assert process_trajectories_for_training([State(), state([]), State(trajectory=None)]) == []


@examples(100)
@given(states=groups)
def test_equal_to_the_documents_loop(states: list[State]) -> None:
    for masked in (True, False):
        assert repr(process_trajectories_for_training(states, masked)) == repr(
            spec_1(states, masked)
        )


@examples(100)
@given(states=exact_groups)
def test_step_samples_are_the_rows_of_spec_1(states: list[State]) -> None:
    """Same ids, masks and logprobs for every call that sampled something after a prompt."""
    for one in states:
        for made in one["trajectory"]:
            tokens = made["tokens"]
            if not tokens["prompt_ids"] or not tokens["completion_ids"]:
                made["tokens"] = None
    rows = process_trajectories_for_training(states)
    made_rows = to_examples(build_samples(states, "step").samples)
    assert [(row.token_ids, row.mask, row.logprobs) for row in made_rows] == [
        (row.token_ids, row.mask, row.logprobs) for row in rows
    ]


def test_a_tree_is_no_row() -> None:
    samples = build_samples([state([step([1], [2]), step([1], [3])])], "tree").samples
    with pytest.raises(TokenError, match="is a tree"):
        to_examples(samples)


def test_rows_carry_an_advantage_only_when_it_is_one() -> None:
    same = [step([1], [2], advantage=0.5), step([1, 2, 3], [4], advantage=0.5)]
    mixed = [step([1], [2], advantage=0.5), step([1, 2, 3], [4], advantage=1.5)]
    rows = to_examples(build_samples([state(same), state(mixed)], "interleave").samples)
    assert [row.advantage for row in rows] == [0.5, None]
