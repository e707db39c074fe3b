"""The batch as a whole: whatever comes and goes, every request gets what it would get alone."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_models import (
    VOCAB,
    greedy,
    ids,
    new_model,
    random_prompt,
    shared_model,
    teacher_forced,
)

from rolltree.inference.engine import EngineOutput
from rolltree.inference.local.decoder import Decoder, LocalRequest
from rolltree.inference.local.probe import choose_route
from rolltree.inference.local.slots import SlotTable
from rolltree.values.errors import ModelError
from rolltree.values.types import FinishReason, SamplingParams

cached_route = functools.cache(choose_route)


def decoder(
    model: Any = None,
    *,
    slots: int = 4,
    batch: int = 4,
    chunk: int = 64,
    capacity: int = 64,
    packed: bool = False,
) -> Decoder:
    model = shared_model() if model is None else model
    route = cached_route(model, capacity, packed)
    return Decoder(
        route.runner(model, slots, capacity, packed=packed),
        SlotTable(slots, capacity),
        max_batch=batch,
        prefill_chunk=chunk,
        is_end=np.zeros(VOCAB, bool),
        decode_text=None,
    )


def put(
    target: Decoder, prompt: Any, max_tokens: int = 4, seed: int = 0, **sampling: Any
) -> LocalRequest:
    sampling.setdefault("temperature", 0.0)
    prompt = np.array(prompt, np.int32)
    request = LocalRequest(
        prompt,
        SamplingParams(max_tokens=max_tokens, **sampling),
        seed,
        min(len(prompt) + max_tokens, target.slots.ids.shape[1]),
    )
    target.waiting.append(request)
    return request


def run(target: Decoder, version: int = 0) -> None:
    for _ in range(1000):
        if not target.busy:
            return
        target.step(version)
    raise AssertionError("the decoder did not come to an end")


def result(request: LocalRequest) -> EngineOutput:
    return request.future.result(timeout=0)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
GREEDY: dict[tuple[tuple[int, ...], int], list[int]] = {}


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """Return the greedy continuation, remembered: the property test asks for many."""
    if (prompt, count) not in GREEDY:
        GREEDY[prompt, count] = greedy(shared_model(), prompt, count)
    return GREEDY[prompt, count]


@given(
    work=st.lists(st.tuples(prompts, st.integers(1, 5), st.integers(0, 3)), max_size=10),
    slots=st.integers(1, 6),
    batch=st.integers(1, 6),
    chunk=st.sampled_from([1, 3, 64]),
    forget_at=st.integers(0, 12),
    packed=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_workload_gives_what_each_request_gives_alone(
    work: list[tuple[tuple[int, ...], int, int]],
    slots: int,
    batch: int,
    chunk: int,
    forget_at: int,
    packed: bool,
) -> None:
    """Few slots, prompts that share prefixes, arrivals at any step, a cache dropped midway."""
    target = decoder(slots=slots, batch=batch, chunk=chunk, capacity=20, packed=packed)
    requests = []
    for number, (prompt, count, steps) in enumerate(work):
        requests.append(put(target, prompt, count))
        for _ in range(steps):
            target.step(0)
        if number == forget_at:
            target.slots.forget()
    run(target)
    for (prompt, count, _), request in zip(work, requests, strict=True):
        assert result(request).completion_ids.tolist() == expected(prompt, count)
    assert target.slots.active() == []


def test_logprobs_are_those_of_teacher_forcing() -> None:
    target = decoder()
    requests = [
        put(target, random_prompt(n, 5 + 7 * n), 12, seed=n, temperature=0.7) for n in range(4)
    ]
    run(target)
    for request in requests:
        found = result(request)
        forced = teacher_forced(shared_model(), request.prompt, found.completion_ids, 0.7)
        raw = teacher_forced(shared_model(), request.prompt, found.completion_ids)
        assert np.abs(found.logprobs - forced).mean() < 5e-5
        assert np.abs(found.raw_logprobs - raw).mean() < 5e-5
        assert len(found.logprobs) == len(found.completion_ids) == len(found.versions) == 12


def test_a_group_computes_its_prompt_once() -> None:
    target = decoder(slots=8, batch=8)
    prompt = random_prompt(0, 30)
    requests = [put(target, prompt, 1, seed=n, temperature=1.0) for n in range(8)]
    run(target)
    assert target.counts.num_computed_tokens == 30 + 7  # each other member computes its last token
    assert [result(request).num_cached_tokens for request in requests] == [0] + [29] * 7
    assert len({int(result(request).completion_ids[0]) for request in requests}) > 1


def test_prompts_with_a_common_beginning_compute_it_once() -> None:
    target = decoder(slots=4, batch=4)
    shots = random_prompt(0, 40)
    for n in range(4):
        put(target, [*shots, *random_prompt(n + 1, 6)], 1)
    run(target)
    assert target.counts.num_computed_tokens == 46 + 3 * 6


def test_a_short_common_beginning_is_not_worth_waiting_for() -> None:
    target = decoder(slots=4, batch=4)
    for n in range(4):
        put(target, [1, 2, 3, *random_prompt(n, 10)], 1)
    target.step(0)
    assert target.waiting == type(target.waiting)()
    assert target.counts.num_steps == 1


def test_a_next_turn_computes_only_what_is_new() -> None:
    target = decoder(slots=2, batch=2)
    first = put(target, random_prompt(0, 20), 5)
    other = put(target, random_prompt(1, 20), 5)
    run(target)
    before = target.counts.num_computed_tokens
    turns = [
        put(target, [*request.prompt, *result(request).completion_ids, 7, 8, 9], 1)
        for request in (other, first)
    ]
    run(target)
    assert [result(turn).num_cached_tokens for turn in turns] == [24, 24]  # all but the last id
    assert target.counts.num_computed_tokens - before == 2 * 4
    for turn in turns:
        assert result(turn).completion_ids.tolist() == greedy(shared_model(), turn.prompt, 1)


def test_a_conversation_is_not_overwritten_by_one_that_shares_little() -> None:
    target = decoder(slots=3, batch=1)
    history = random_prompt(0, 40)
    put(target, history, 1)
    put(target, [*history[:10], 1, 2, 3], 1)
    run(target)
    again = put(target, [*history, 5], 1)
    run(target)
    assert result(again).num_cached_tokens == 40


def test_the_oldest_conversation_is_evicted() -> None:
    target = decoder(slots=2, batch=1)
    histories = [random_prompt(n, 20) for n in range(3)]
    for history in histories:
        put(target, history, 1)
        run(target)
    cached = []
    for history in (histories[2], histories[1], histories[0]):
        request = put(target, history, 1)
        run(target)
        cached.append(result(request).num_cached_tokens)
    assert cached == [19, 19, 0]


def test_forgetting_computes_everything_again() -> None:
    target = decoder()
    prompt = random_prompt(0, 20)
    put(target, prompt, 1)
    run(target)
    target.slots.forget()
    request = put(target, prompt, 1)
    run(target)
    assert result(request).num_cached_tokens == 0
    assert target.counts.num_computed_tokens == 40


def test_a_long_prompt_is_computed_in_chunks_beside_others() -> None:
    target = decoder(chunk=8)
    short = put(target, random_prompt(1, 3), 10)
    target.step(0)
    long = put(target, random_prompt(0, 30), 1)
    steps = 0
    while not long.future.done():
        target.step(0)
        steps += 1
    assert steps == 4  # 8 + 8 + 8 + 6
    assert target.counts.num_sampled_tokens == 1 + 4 + 1  # the short one went on in each of them
    run(target)
    assert result(short).completion_ids.tolist() == greedy(shared_model(), short.prompt, 10)
    assert result(long).completion_ids.tolist() == greedy(shared_model(), long.prompt, 1)


def test_holes_are_closed_when_they_are_many() -> None:
    target = decoder(slots=8, batch=8)
    requests = [put(target, random_prompt(n, 5), 2 if n < 6 else 12) for n in range(8)]
    for _ in range(4):
        target.step(0)
    assert target.slots.active() == [0, 1]
    run(target)
    for request in requests:
        count = len(result(request).completion_ids)
        assert result(request).completion_ids.tolist() == greedy(
            shared_model(), request.prompt, count
        )
    later = put(target, [*requests[0].prompt, *result(requests[0]).completion_ids], 1)
    run(target)
    assert result(later).num_cached_tokens == 6  # moved, not lost


def test_no_more_than_max_batch_decode_together() -> None:
    target = decoder(slots=6, batch=2)
    for n in range(5):
        put(target, random_prompt(n, 4), 3)
    most = 0
    while target.busy:
        target.step(0)
        most = max(most, len(target.slots.active()))
    assert most <= 2
    assert target.counts.num_sampled_tokens == 15


def test_a_cancelled_request_leaves_the_batch() -> None:
    target = decoder(slots=1, batch=1)
    first, second = put(target, [1, 2], 50), put(target, [3, 4], 2)
    for _ in range(3):
        target.step(0)
    first.future.cancel()
    target.drop_cancelled()
    run(target)
    assert result(second).completion_ids.tolist() == greedy(shared_model(), [3, 4], 2)
    assert target.counts.num_sampled_tokens == 3 + 2


def test_a_cancelled_request_leaves_the_queue() -> None:
    target = decoder(slots=1, batch=1)
    put(target, [1, 2], 3)
    waiting = put(target, [3, 4], 2)
    target.step(0)
    waiting.future.cancel()
    target.drop_cancelled()
    run(target)
    assert target.counts.num_sampled_tokens == 3


def test_logits_that_are_not_finite_fail_one_request_and_leave_no_trace() -> None:
    model = new_model()
    target = decoder(model, slots=2, batch=2)
    kept = model.model.layers[0].self_attn.v_proj.weight.detach().clone()
    broken = put(target, random_prompt(0, 10), 5)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    run(target)
    with pytest.raises(ModelError, match="not finite"):
        result(broken)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.copy_(kept)
    target.slots.forget()
    healthy = [put(target, random_prompt(n, 3), 12) for n in (1, 2)]
    run(target)
    for request in healthy:
        assert result(request).completion_ids.tolist() == greedy(model, request.prompt, 12)


def test_the_window_ends_an_answer() -> None:
    target = decoder(capacity=16)
    request = put(target, random_prompt(0, 13), 50)
    run(target)
    found = result(request)
    assert found.finish_reason == FinishReason.LENGTH
    assert found.completion_ids.tolist() == greedy(shared_model(), request.prompt, 3)


def test_end_tokens_and_stop_ids_end_an_answer_and_belong_to_it() -> None:
    target = decoder()
    continuation = greedy(shared_model(), [1, 2, 3], 6)
    third = continuation[2]
    at = continuation.index(third)
    stopped = put(target, [1, 2, 3], 6, stop_token_ids=(third,))
    run(target)
    assert result(stopped).completion_ids.tolist() == continuation[: at + 1]
    assert result(stopped).finish_reason == FinishReason.STOP
    assert result(stopped).stop == third
    target.is_end[third] = True
    ended = put(target, [1, 2, 3], 6)
    run(target)
    assert result(ended).completion_ids.tolist() == continuation[: at + 1]
    assert result(ended).finish_reason == FinishReason.STOP
    assert result(ended).stop is None


def test_a_stop_at_the_last_allowed_token_is_a_stop() -> None:
    target = decoder()
    continuation = greedy(shared_model(), [1, 2, 3], 3)
    request = put(target, [1, 2, 3], 3, stop_token_ids=(continuation[2],))
    run(target)
    if continuation[2] not in continuation[:2]:
        assert len(result(request).completion_ids) == 3
    assert result(request).finish_reason == FinishReason.STOP


def test_versions_are_those_of_the_steps() -> None:
    target = decoder()
    request = put(target, [1, 2], 4)
    for version in (3, 3, 4, 5):
        target.step(version)
    assert result(request).versions.tolist() == [3, 3, 4, 5]
    assert request.prompt.tolist() == ids(1, 2).tolist()
