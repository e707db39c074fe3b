"""Interleaving by hand: which steps merge, and what ids, masks and logprobs the rows have."""

from __future__ import annotations

import numpy as np
from samples_kit import flat_of, state, trained

from rolltree.samples import build_samples, to_examples
from rolltree.tokens import BreakCause
from step_kit import step

# U: user text, A: answers, R: reasoning that the template strips, 9 ends a message
U1, U2, U3, U4, U5 = [1, 11, 9], [1, 12, 9], [1, 13, 9], [1, 14, 9], [1, 15, 9]
R1, R2, R3 = [70, 71, 72], [73, 74, 75], [76, 77, 78]
A1, A2, A3, A4, A5 = [21, 9], [22, 9], [23, 9], [24, 9], [25, 9]


def five_steps() -> list[object]:
    """Extension breaks at step 4: earlier reasoning is stripped from history."""
    first = U1
    second = first + R1 + A1 + U2
    third = second + R2 + A2 + U3
    fourth = U1 + A1 + U2 + A2 + U3 + A3 + U4
    fifth = fourth + A4 + U5
    return [
        step(first, R1 + A1, logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5], advantage=1.0),
        step(second, R2 + A2, logprobs=[-0.6, -0.7, -0.8, -0.9, -1.0], advantage=2.0),
        step(third, R3 + A3, logprobs=[-1.1, -1.2, -1.3, -1.4, -1.5], advantage=3.0),
        step(fourth, A4, logprobs=[-1.6, -1.7], advantage=4.0),
        step(fifth, A5, logprobs=[-1.8, -1.9], advantage=5.0),
    ]


def test_five_steps_give_two_samples() -> None:
    batch = build_samples([state(five_steps(), reward=1.0)], "interleave")
    assert flat_of(batch.samples) == [
        U1 + R1 + A1 + U2 + R2 + A2 + U3 + R3 + A3,
        U1 + A1 + U2 + A2 + U3 + A3 + U4 + A4 + U5 + A5,
    ]
    assert [origin.calls for s in batch.samples for origin in s.origins] == [(0, 1, 2), (3, 4)]
    first, second = to_examples(batch.samples)
    prompt, answer = [0] * 3, [1] * 5
    assert first.mask == prompt + answer + prompt + answer + prompt + answer
    assert first.logprobs == [
        0, 0, 0, -0.1, -0.2, -0.3, -0.4, -0.5,
        0, 0, 0, -0.6, -0.7, -0.8, -0.9, -1.0,
        0, 0, 0, -1.1, -1.2, -1.3, -1.4, -1.5,
    ]  # fmt: skip
    assert second.mask == [0] * 18 + [1, 1] + [0] * 3 + [1, 1]
    assert second.logprobs == [0] * 18 + [-1.6, -1.7] + [0] * 3 + [-1.8, -1.9]
    assert (first.reward, first.advantage) == (1.0, None)
    assert batch.samples[0].records.advantage.tolist() == [1] * 5 + [2] * 5 + [3] * 5
    assert batch.samples[1].records.advantage.tolist() == [4, 4, 5, 5]


def test_the_break_is_explained() -> None:
    batch = build_samples([state(five_steps())], "interleave")
    (found,) = batch.breaks
    assert (found.call, found.previous, found.position) == (3, 2, 3)
    assert found.cause is BreakCause.REASONING_STRIPPED
    assert batch.samples[0].info["break"] is None
    assert batch.samples[1].info["break"] == found
    assert batch.report["break_rate"] == 0.25
    assert batch.report["break_rate/reasoning_stripped"] == 0.25


def test_the_same_steps_in_the_other_scopes() -> None:
    one = state(five_steps())
    assert flat_of(build_samples([one], "step").samples) == [
        made["tokens"]["prompt_ids"] + made["tokens"]["completion_ids"] for made in five_steps()
    ]
    (tree,) = build_samples([one], "tree").samples
    shared = U1
    kept = R1 + A1 + U2 + R2 + A2 + U3 + R3 + A3
    stripped = A1 + U2 + A2 + U3 + A3 + U4 + A4 + U5 + A5
    assert tree.ids.tolist() == shared + kept + stripped
    assert tree.positions.tolist() == [*range(3 + len(kept)), *range(3, 3 + len(stripped))]
    assert tree.subtree_end.tolist() == [46, 46, 46] + [24] * 21 + [46] * 22
    assert len(tree.records) == 19


def test_interleaved_agents_give_two_samples_with_the_third_step_merged_back() -> None:
    a1 = step([1, 2], [3], agent="A")
    a2 = step([1, 2, 3, 4], [5], agent="A")
    b1 = step([8, 2], [6], agent="B")
    a3 = step([1, 2, 3, 4, 5, 7], [9], agent="A")
    batch = build_samples([state([a1, a2, b1, a3])], "interleave")
    assert flat_of(batch.samples) == [[1, 2, 3, 4, 5, 7, 9], [8, 2, 6]]
    assert [(o.agent, o.calls) for s in batch.samples for o in s.origins] == [
        ("A", (0, 1, 3)),
        ("B", (2,)),
    ]
    assert [item.cause for item in batch.breaks] == [BreakCause.AGENT_HANDOFF]
    assert trained(batch.samples[0]) == [(1, 3, 0), (3, 5, 1), (5, 9, 3)]


def test_the_longest_prefix_wins_over_the_first() -> None:
    short = step([1], [2])  # open: 1 2
    other = step([1, 2, 3], [4])  # takes 1 2, open: 1 2 3 4
    again = step([1], [2])  # open again: 1 2
    joins = step([1, 2, 3, 4, 5], [6])  # both 1 2 and 1 2 3 4 are prefixes
    batch = build_samples([state([short, other, again, joins])], "interleave")
    assert [o.calls for s in batch.samples for o in s.origins] == [(0, 1, 3), (2,)]


def test_an_empty_suffix_is_a_hit() -> None:
    batch = build_samples([state([step([1, 2], [3]), step([1, 2, 3], [4])])], "interleave")
    assert flat_of(batch.samples) == [[1, 2, 3, 4]]
    assert to_examples(batch.samples)[0].mask == [0, 0, 1, 1]


def test_a_prefix_by_text_with_other_ids_is_no_prefix() -> None:
    batch = build_samples([state([step([1], [2, 3]), step([1, 23, 4], [5])])], "interleave")
    assert flat_of(batch.samples) == [[1, 2, 3], [1, 23, 4, 5]]


def test_after_a_retokenized_turn_the_original_tokens_are_still_found() -> None:
    steps = [step([1], [2, 3]), step([1, 23, 4], [5]), step([1, 2, 3, 4], [6])]
    batch = build_samples([state(steps)], "interleave")
    assert flat_of(batch.samples) == [[1, 2, 3, 4, 6], [1, 23, 4, 5]]


def test_masks_with_zeros_are_kept() -> None:
    steps = [step([1], [2, 3], mask=[1, 0]), step([1, 2, 3, 4], [5], mask=[0])]
    (sample,) = build_samples([state(steps)], "interleave").samples
    assert to_examples([sample])[0].mask == [0, 1, 0, 0, 0]
    assert sample.records.weight.tolist() == [1, 0, 0]
    report = build_samples([state(steps)], "interleave").report
    assert (report["num_trained_tokens"], report["num_masked_tokens"]) == (1, 2)


def test_a_failed_rollout_keeps_ids_and_logprobs_and_trains_nothing() -> None:
    failed = state([step([1], [2], logprobs=[-0.25])], error={"type": "ServerError"}, advantage=1)
    for scope in ("step", "turn", "interleave", "tree"):
        batch = build_samples([failed], scope)
        (sample,) = batch.samples
        assert sample.ids.tolist() == [1, 2]
        assert sample.records.logprob.tolist() == [-0.25]
        assert sample.records.weight.tolist() == [0]
        assert batch.report["num_failed_rollouts"] == 1
        assert batch.report["num_trained_tokens"] == 0


def test_a_step_without_tokens_is_counted_and_never_guessed() -> None:
    batch = build_samples([state([step(None), step([1], [2]), step(None)])], "interleave")
    assert flat_of(batch.samples) == [[1, 2]]
    assert [(s.call, str(s.reason)) for s in batch.skipped] == [(0, "no_tokens"), (2, "no_tokens")]
    assert batch.report["skipped/no_tokens"] == 2


def test_a_subagent_starts_a_sample_of_its_own_and_the_main_agent_a_new_one() -> None:
    main = [1, 31, 9]
    delegate, result = [41, 9], [1, 43, 9]
    sub = [2, 32, 9]
    compacted = main + result  # only the sub-agent's result comes back
    steps = [
        step(main, delegate, agent="main"),
        step(sub, [42, 9], agent="sub"),
        step([*sub, 42, 9, 33], [44, 9], agent="sub"),
        step(compacted, [45, 9], agent="main"),
    ]
    batch = build_samples([state(steps)], "interleave")
    assert [o.calls for s in batch.samples for o in s.origins] == [(0,), (1, 2), (3,)]
    assert batch.breaks[0].cause is BreakCause.AGENT_HANDOFF


def test_siblings_that_share_sampled_tokens_train_them_once_each() -> None:
    steps = [step([1], [2, 3], advantage=1.0), step([1], [2, 4], advantage=-1.0)]
    (tree,) = build_samples([state(steps)], "tree").samples
    assert tree.ids.tolist() == [1, 2, 3, 4]
    assert tree.positions.tolist() == [0, 1, 2, 2]
    assert tree.subtree_end.tolist() == [4, 4, 3, 4]
    assert tree.records.source.tolist() == [0, 1, 0, 1]
    assert tree.records.target.tolist() == [2, 3, 2, 4]
    assert tree.records.advantage.tolist() == [1, 1, -1, -1]


def test_the_example_of_the_sample_docstring() -> None:
    (tree,) = build_samples([state([step([5, 6], [7]), step([5, 6], [8, 9])])], "tree").samples
    assert tree.ids.tolist() == [5, 6, 7, 8, 9]
    assert tree.positions.tolist() == [0, 1, 2, 2, 3]
    assert tree.subtree_end.tolist() == [5, 5, 3, 5, 5]
    assert tree.records.source.tolist() == [1, 1, 3]
    assert tree.records.target.tolist() == [7, 8, 9]


def test_where_every_token_came_from() -> None:
    one = state(
        five_steps(),
        rollout_id="r7",
        reward=0.5,
        terminated=True,
        truncated=False,
    )
    first, second = build_samples([one], "interleave").samples
    assert first.origins[0].rollout_id == "r7"
    assert (first.origins[0].reward, first.origins[0].terminated) == (0.5, True)
    for sample, calls in (
        (first, {0: (3, 8), 1: (11, 16), 2: (19, 24)}),
        (second, {3: (18, 20), 4: (23, 25)}),
    ):
        assert set(sample.records.call.tolist()) == set(calls)
        for call, (start, end) in calls.items():
            mine = sample.records.call == call
            assert (sample.records.source[mine] + 1).tolist() == [*range(start, end)]
    assert np.array_equal(first.records.rollout, np.zeros(15))
