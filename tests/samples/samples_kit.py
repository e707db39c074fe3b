"""Shared by the sample tests: random conversations, and what a sample must satisfy."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rolltree.tokens import Trajectory
from rolltree.values.types import Sample, State
from step_kit import step

LONG = os.environ.get("ROLLTREE_HYPOTHESIS") == "long"
SCOPES = ("step", "turn", "interleave", "tree")


def examples(count: int) -> settings:
    """Run `count` examples, 20 times as many under ROLLTREE_HYPOTHESIS=long."""
    return settings(
        max_examples=count * (20 if LONG else 1),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def state(steps: list[Any], **fields: Any) -> State:
    return State(trajectory=steps, **fields)


def flat_of(samples: list[Sample]) -> list[list[int]]:
    return [sample.ids.tolist() for sample in samples]


def trained(sample: Sample) -> list[tuple[int, int, int]]:
    """Return (source, target, call) of every record."""
    r = sample.records
    return list(zip(r.source.tolist(), r.target.tolist(), r.call.tolist(), strict=True))


def context(sample: Sample, position: int) -> list[int]:
    """Return the ids that the token at `position` attends to, itself included."""
    order = np.arange(sample.num_tokens)
    seen = (order <= position) & (position < sample.subtree_end)
    return sample.ids[seen].tolist()


def check_structure(sample: Sample) -> None:
    """Check that the arrays describe a forest in depth-first order."""
    size = sample.num_tokens
    assert sample.ids.dtype == sample.positions.dtype == sample.subtree_end.dtype == np.int32
    assert len(sample.positions) == len(sample.subtree_end) == size
    stack: list[int] = []
    for i in range(size):
        while stack and sample.subtree_end[stack[-1]] <= i:
            stack.pop()
        assert sample.positions[i] == len(stack)
        assert i < sample.subtree_end[i] <= (sample.subtree_end[stack[-1]] if stack else size)
        stack.append(i)
    for name in ("source", "target", "version", "rollout", "call", "offset"):
        assert getattr(sample.records, name).dtype == np.int32
    for name in ("logprob", "temperature", "advantage", "weight"):
        assert getattr(sample.records, name).dtype == np.float32
    if len(sample.records):
        assert sample.records.source.min() >= 0
        assert sample.records.source.max() < size


def check_records(samples: list[Sample], states: list[State]) -> Counter[tuple[int, int, int]]:
    """Check each record against the step it came from; return how often each token is trained."""
    seen: Counter[tuple[int, int, int]] = Counter()
    for sample in samples:
        r = sample.records
        for i in range(len(r)):
            rollout, call, offset = int(r.rollout[i]), int(r.call[i]), int(r.offset[i])
            tokens = states[rollout]["trajectory"][call]["tokens"]
            prompt, completion = tokens["prompt_ids"], tokens["completion_ids"]
            assert context(sample, int(r.source[i])) == prompt + completion[:offset]
            assert int(r.target[i]) == completion[offset]
            logprobs = tokens["completion_logprobs"]
            if logprobs and not np.isnan(r.logprob[i]):
                assert r.logprob[i] == np.float32(logprobs[offset])
            seen[rollout, call, offset] += 1
    return seen


def sampled_tokens(states: list[State], *, with_source: bool = True) -> set[tuple[int, int, int]]:
    """Return every (rollout, call, offset) that was sampled and has a token before it."""
    return {
        (index, call, offset)
        for index, one in enumerate(states)
        for call, made in enumerate(one["trajectory"])
        if made["tokens"] is not None
        for offset in range(len(made["tokens"]["completion_ids"]))
        if offset or made["tokens"]["prompt_ids"] or not with_source
    }


# -- random conversations ------------------------------------------------------------------------

TOKEN = st.integers(0, 4)
PAIR = 5  # one token with the text of tokens 0 1


def retokenize(ids: list[int]) -> list[int]:
    """Return other ids with the same text, where there are any."""
    for i, token in enumerate(ids):
        if token == PAIR:
            return [*ids[:i], 0, 1, *ids[i + 1 :]]
        if ids[i : i + 2] == [0, 1]:
            return [*ids[:i], PAIR, *ids[i + 2 :]]
    return ids


@st.composite
def conversations(draw: st.DrawFn, max_calls: int = 8, exact: bool = False) -> State:
    """Return a rollout of 1 to 3 agents that extend, strip, rewrite, re-tokenize, roll back,
    compact, hand off and repeat their prompts.

    `exact` leaves out what is not trained: steps without tokens, missing logprobs, errors.
    """
    own: dict[str, list[tuple[list[int], list[int]]]] = {}
    steps: list[Any] = []
    turn = 0
    for _ in range(draw(st.integers(0, max_calls))):
        agent = draw(st.sampled_from("AAB"))
        fresh = draw(st.lists(TOKEN, max_size=3))
        past = own.setdefault(agent, [])
        prompt = fresh
        if past:
            before, sampled = draw(st.sampled_from(past[-2:]))
            cut = draw(st.integers(0, len(before)))
            lost = draw(st.integers(0, len(sampled)))
            others = [p + c for calls in own.values() for p, c in calls]
            prompt = draw(
                st.sampled_from(
                    [
                        before + sampled + fresh,  # extend, maybe by nothing
                        before + sampled + fresh,
                        before + sampled[lost:] + fresh,  # reasoning stripped
                        retokenize(before + sampled) + fresh,
                        [*before[:cut], 4, *before[cut + 1 :], *sampled, *fresh],  # rewritten
                        before[:cut] + fresh,  # rolled back, or compacted
                        before,  # sampled once more
                        others[-1] + fresh,  # goes on from another agent's tokens
                        fresh,
                    ]
                )
            )
        completion = draw(st.lists(st.integers(0, PAIR), max_size=4))
        past.append((prompt, completion))
        turn += draw(st.integers(0, 1))
        number = len(steps)
        logprobs = [-(number * 8 + i + 1) / 1024 for i in range(len(completion))]
        masked = draw(st.booleans())
        without = not exact and draw(st.integers(0, 9)) == 0
        steps.append(
            step(
                None if without else prompt,
                completion,
                logprobs=[] if not exact and draw(st.integers(0, 9)) == 0 else logprobs,
                mask=[float(i % 2) for i in range(len(completion))] if masked else None,
                advantage=draw(st.sampled_from([None, 0.5, -1.0])),
                agent=agent,
                turn=turn,
                policy_version=number,
                temperature=0.5 + number / 8,
            )
        )
    made: Any = Trajectory(steps) if draw(st.booleans()) else steps
    fields: dict[str, Any] = {"reward": 1.0, "advantage": draw(st.sampled_from([None, 0.25]))}
    if not exact and draw(st.integers(0, 5)) == 0:
        fields["error"] = {"type": "ServerError"}
    return state(made, **fields)


groups = st.lists(conversations(), min_size=1, max_size=3)
exact_groups = st.lists(conversations(exact=True), min_size=1, max_size=3)
