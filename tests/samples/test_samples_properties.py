"""The invariants of the design, over random multi-agent conversations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_kit import (
    SCOPES,
    check_records,
    check_structure,
    conversations,
    exact_groups,
    examples,
    groups,
    sampled_tokens,
    trained,
)

from rolltree.samples import SkipReason, build_samples
from rolltree.samples.resolve import resolve_tokens
from rolltree.tokens.breaks import UNBROKEN
from rolltree.values.types import Records, State


def naive_interleave(steps: list[Any]) -> list[list[int]]:
    """Longest open prefix on plain lists: the calls of each sample."""
    open_ids: list[list[int]] = []
    members: list[list[int]] = []
    for index, made in enumerate(steps):
        if made["tokens"] is None:
            continue
        prompt, completion = made["tokens"]["prompt_ids"], made["tokens"]["completion_ids"]
        best = -1
        for sample, ids in enumerate(open_ids):
            fits = ids and prompt[: len(ids)] == ids
            if fits and (best < 0 or len(ids) >= len(open_ids[best])):
                best = sample
        if best < 0:
            best = len(open_ids)
            open_ids.append([])
            members.append([])
        open_ids[best] = prompt + completion
        members[best].append(index)
    return members


@pytest.mark.parametrize("scope", SCOPES)
@examples(150)
@given(states=groups)
def test_exactly_once_by_id_and_lossless(scope: Any, states: list[State]) -> None:
    """Every sampled token is in one record, after exactly the ids its call saw."""
    batch = build_samples(states, scope)
    for sample in batch.samples:
        check_structure(sample)
    seen = check_records(batch.samples, states)
    assert set(seen) == sampled_tokens(states)
    assert set(seen.values()) <= {1}


@examples(150)
@given(states=groups)
def test_a_group_forest_holds_every_token_once(states: list[State]) -> None:
    batch = build_samples(states, "tree", group_key=lambda _: "one group")
    prefixes = {
        tuple((tokens["prompt_ids"] + tokens["completion_ids"])[: n + 1])
        for one in states
        for made in one["trajectory"]
        if (tokens := made["tokens"]) is not None
        for n in range(len(tokens["prompt_ids"] + tokens["completion_ids"]))
    }
    seen = check_records(batch.samples, states)
    assert set(seen) == sampled_tokens(states)
    assert set(seen.values()) <= {1}
    for sample in batch.samples:
        check_structure(sample)
        assert sample.num_tokens == len(prefixes)
    assert len(batch.samples) == (1 if sampled_tokens(states) else 0)


@examples(150)
@given(made=conversations(max_calls=10))
def test_interleaving_takes_the_longest_open_prefix(made: State) -> None:
    """Same merged calls as a quadratic search on lists (ties: the sample opened last)."""
    batch = build_samples([made], "interleave")
    expected = [
        calls
        for calls in naive_interleave(made["trajectory"])
        if any(
            offset or made["trajectory"][c]["tokens"]["prompt_ids"]
            for c in calls
            for offset in range(len(made["trajectory"][c]["tokens"]["completion_ids"]))
        )
    ]
    got = [sorted(c for o in sample.origins for c in o.calls) for sample in batch.samples]
    assert got == expected


def columns(records: Records) -> Counter[tuple[Any, ...]]:
    names = ("rollout", "call", "offset", "target", "logprob", "temperature", "weight", "version")
    return Counter(zip(*(getattr(records, name).tolist() for name in names), strict=True))


@examples(150)
@given(states=exact_groups)
def test_segmentation_changes_no_record(states: list[State]) -> None:
    """Step, interleave and tree hold the same records but for their positions."""
    seen = {}
    for scope in SCOPES:
        batch = build_samples(states, scope)
        total: Counter[tuple[Any, ...]] = Counter()
        for sample in batch.samples:
            total += columns(sample.records)
        seen[scope] = total
        advantages = {
            (int(r.rollout[i]), int(r.call[i])): float(r.advantage[i])
            for r in (sample.records for sample in batch.samples)
            for i in range(len(r))
        }
        for (rollout, call), advantage in advantages.items():
            own = states[rollout]["trajectory"][call]["advantage"]
            expected = states[rollout]["advantage"] if own is None else own
            if scope != "turn":
                assert advantage == (expected or 0.0)
    assert seen["step"] == seen["turn"] == seen["interleave"] == seen["tree"]


@pytest.mark.parametrize("scope", SCOPES)
@examples(75)
@given(states=groups, max_seq_len=st.integers(2, 12))
def test_every_sampled_token_is_accounted_for(
    scope: Any, states: list[State], max_seq_len: int
) -> None:
    batch = build_samples(states, scope, max_seq_len=max_seq_len)
    report = batch.report
    parts = (
        report["num_trained_tokens"],
        report["num_masked_tokens"],
        report["num_skipped_tokens"],
    )
    assert sum(parts) == report["num_sampled_tokens"]
    assert report["num_sampled_tokens"] == len(sampled_tokens(states, with_source=False))
    assert report["num_tokens"] == sum(sample.num_tokens for sample in batch.samples)
    check_records(batch.samples, states)
    for sample in batch.samples:
        check_structure(sample)
        assert sample.positions.max() < max_seq_len
        if sample.info.get("seq_len_truncated"):
            assert (
                any(origin.truncated for origin in sample.origins)
                or not (sample.info["seq_len_lost"])
            )


@examples(75)
@given(states=exact_groups, max_seq_len=st.integers(2, 12))
def test_the_cap_loses_the_same_tokens_in_every_scope(
    states: list[State], max_seq_len: int
) -> None:
    lost = []
    for scope in SCOPES:
        batch = build_samples(states, scope, max_seq_len=max_seq_len)
        kept = check_records(batch.samples, states)
        weightless = {
            (s.rollout, s.call) for s in batch.skipped if s.reason is SkipReason.MAX_SEQ_LEN
        }
        # A flat sample whose trained tokens are all beyond the cap goes away with its masked ones.
        trained_tokens = {
            (int(r.rollout[i]), int(r.call[i]), int(r.offset[i]))
            for r in (sample.records for sample in batch.samples)
            for i in range(len(r))
            if r.weight[i]
        }
        assert trained_tokens <= set(kept)
        missing = sampled_tokens(states) - set(kept)
        assert {(rollout, call) for rollout, call, _ in missing} <= weightless
        lost.append(trained_tokens)
    assert lost[0] == lost[1] == lost[2] == lost[3]


@examples(75)
@given(states=groups)
def test_plain_lists_and_trees_give_the_same_samples(states: list[State]) -> None:
    plain = [
        State({**one, "trajectory": [_plain(made) for made in one["trajectory"]]}) for one in states
    ]
    for scope in SCOPES:
        one, two = build_samples(states, scope), build_samples(plain, scope)
        assert [trained(s) for s in one.samples] == [trained(s) for s in two.samples]
        for left, right in zip(one.samples, two.samples, strict=True):
            assert np.array_equal(left.ids, right.ids)
            assert np.array_equal(left.subtree_end, right.subtree_end)
            assert left.origins == right.origins
        assert one.report == two.report
        assert list(map(str, one.breaks)) == list(map(str, two.breaks))


def _plain(made: Any) -> Any:
    tokens = made["tokens"]
    return {**made, "tokens": None if tokens is None else dict(tokens)}


@examples(75)
@given(states=groups)
def test_breaks_are_what_opens_interleaved_samples(states: list[State]) -> None:
    batch = build_samples(states, "interleave")
    resolved = [resolve_tokens(i, one["trajectory"]) for i, one in enumerate(states)]
    opened = sum(max(0, len(naive_interleave(one["trajectory"])) - 1) for one in states)
    again = sum(batch.report[f"begun/{cause}"] for cause in UNBROKEN)
    assert len(batch.breaks) == opened - again == batch.report["num_breaks"]
    causes = [value for key, value in batch.report.items() if key.startswith("breaks/")]
    assert sum(causes) == opened - again
    for item in batch.breaks:
        tree, handles = resolved[item.rollout]
        prompt = tree.prompt_ids(handles[item.call]).tolist()
        low = max(0, item.position - 16)
        assert item.current_ids.tolist() == prompt[low : item.position + 16]
        shared = item.position - low
        assert item.previous_ids[:shared].tolist() == item.current_ids[:shared].tolist()
        if shared < min(len(item.previous_ids), len(item.current_ids)):
            assert item.previous_ids[shared] != item.current_ids[shared]
