from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from rolltree.inference.local.attention import (
    Extras,
    LayerMask,
    attend,
    slot_attention,
    slot_mask,
    use_plan,
)
from rolltree.inference.local.plan import AttentionPlan, invariant_plans, make_plan
from rolltree.values.errors import UnsupportedSetting

torch.set_num_threads(1)
CPU = torch.device("cpu")


def plan_of(rows: list[int], counts: list[int], start: list[int]) -> AttentionPlan:
    ids = np.arange(600, dtype=np.int32).reshape(6, 100)
    return make_plan(rows, np.array(counts), np.array(start), ids, torch.float32, CPU)


def test_a_plan_puts_single_tokens_first_and_equal_shapes_together() -> None:
    plan = plan_of([0, 1, 3, 4], [2, 1, 1, 2], [5, 7, 0, 5])
    assert plan.rows.tolist() == [1, 3, 0, 0, 4, 4]
    assert plan.positions.tolist() == [7, 0, 5, 6, 5, 6]
    assert plan.tokens.tolist() == [107, 300, 5, 6, 405, 406]
    assert plan.newest.tolist() == [0, 1, 3, 5]
    assert plan.in_order is not None
    assert plan.in_order.tolist() == [2, 0, 1, 3]  # of `newest`, for rows 0, 1, 3, 4
    assert plan.decode is not None
    assert (plan.decode.num_tokens, plan.decode.num_rows, plan.decode.length) == (2, 4, 8)
    assert plan.decode.rows is not None
    assert plan.decode.rows.tolist() == [1, 3]
    assert [prefill.rows for prefill in plan.prefills] == [[0, 4]]
    assert plan.prefills[0].tokens == slice(2, 6)


def test_rows_without_a_gap_need_no_index() -> None:
    plan = plan_of([0, 1, 2], [1, 1, 1], [3, 4, 5])
    assert plan.decode is not None
    assert plan.decode.rows is None
    assert plan.in_order is None
    assert plan.prefills == ()
    assert (plan.decode.hidden[:, 0, 0] == 0).sum(-1).tolist() == [4, 5, 6]


Seen = Callable[[int, int], bool]


def slow_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    seen: Seen = lambda query, key: True,
    extras: Extras | None = None,
) -> torch.Tensor:
    """One query, one head at a time."""
    group = query.shape[1] // keys.shape[1]
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    for token, (row, position) in enumerate(zip(plan.rows, plan.positions, strict=True)):
        at = [key for key in range(int(position) + 1) if seen(int(position), key)]
        for head in range(query.shape[1]):
            scores = keys[row, head // group, at] @ query[token, head] * scaling
            if extras is not None and extras.softcap is not None:
                scores = torch.tanh(scores / extras.softcap) * extras.softcap
            if extras is not None and extras.sinks is not None:
                scores = torch.cat([scores, extras.sinks[head, None]])
            weights = scores.softmax(-1)[: len(at)]
            out[token, head] = weights @ values[row, head // group, at]
    return out


@given(st.data(), st.sampled_from([1, 2, 3]))
@settings(max_examples=40, deadline=None)
def test_attention_over_any_plan_is_attention(data: st.DataObject, group: int) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, 5), min_size=1)))
    counts = [data.draw(st.sampled_from([1, 1, 2, 5])) for _ in rows]
    start = [data.draw(st.sampled_from([0, 0, 3, 11])) for _ in rows]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    keys = torch.randn(6, 2, 100, 4, generator=generator)
    values = torch.randn(6, 2, 100, data.draw(st.sampled_from([4, 3])), generator=generator)
    query = torch.randn(sum(counts), 2 * group, 4, generator=generator)
    extras = data.draw(
        st.sampled_from([None, Extras(0.7, None), Extras(None, torch.randn(2 * group))])
    )
    mask, seen = data.draw(st.sampled_from(MASKS))
    plan = plan_of(rows, counts, start)
    if data.draw(st.booleans()):
        ids = np.zeros((6, 100), np.int32)
        ((plan, _),) = invariant_plans(rows, np.array(counts), np.array(start), ids, CPU)
        query = torch.cat([query, query[-1:].expand(32 - len(query), -1, -1)])
    expected = slow_attention(query, keys, values, plan, 0.5, seen, extras)
    masked = plan if mask is None else mask.applied(plan)
    found = attend(query, keys, values, masked, 0.5, extras)
    assert torch.allclose(found, expected, atol=1e-4)
    named = {} if extras is None else {"softcap": extras.softcap, "s_aux": extras.sinks}
    with use_plan(plan):
        through, _ = slot_attention(
            None, query.transpose(0, 1)[None], keys, values, mask, scaling=0.5, **named
        )
    assert torch.equal(through[0], found)


MASKS: list[tuple[LayerMask | None, Seen]] = [
    (None, lambda query, key: True),
    (LayerMask(sliding_window_causal_mask_function(4), 4), lambda query, key: query - key < 4),
    (LayerMask(sliding_window_causal_mask_function(1), 1), lambda query, key: query == key),
    (
        LayerMask(chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.int64)), 6),
        lambda query, key: query // 6 == key // 6,
    ),
]


def test_positions_before_a_window_are_not_read() -> None:
    plan = plan_of([0, 2, 3], [1, 1, 4], [30, 40, 20])
    masked = LayerMask(sliding_window_causal_mask_function(4), 4).applied(plan)
    assert masked.decode is not None
    assert (masked.decode.first, masked.decode.length) == (27, 41)
    assert (masked.prefills[0].first, masked.prefills[0].length) == (17, 24)
    assert LayerMask(sliding_window_causal_mask_function(41), 41).applied(plan) is plan


def test_a_mask_of_more_than_positions_is_refused() -> None:
    window = sliding_window_causal_mask_function(4)
    for options in (
        {"mask_function": window, "local_size": 4, "use_vmap": True},
        {"mask_function": window, "local_size": 4, "attention_mask": torch.ones(1, 4)},
        {"mask_function": window},
    ):
        with pytest.raises(UnsupportedSetting, match="its mask"):
            slot_mask(**options)


def test_what_lies_behind_a_rows_last_token_does_not_matter() -> None:
    keys, values = torch.randn(2, 6, 2, 100, 4)
    query = torch.randn(4, 2, 4)
    plan = plan_of([0, 2, 3], [1, 1, 2], [9, 2, 4])
    before = attend(query, keys, values, plan, 0.5)
    for row, last in ((0, 9), (2, 2), (3, 5)):
        keys[row, :, last + 1 :] = 1e6
        values[row, :, last + 1 :] = -1e6
    assert torch.equal(attend(query, keys, values, plan, 0.5), before)


@pytest.mark.parametrize(
    "special", [{"position_bias": torch.ones(2)}, {"is_causal": False}, {"new_idea": 1}]
)
def test_attention_that_is_not_plain_is_refused(special: dict[str, object]) -> None:
    tensor = torch.zeros(1, 2, 1, 4)
    with (
        use_plan(plan_of([0], [1], [0])),
        pytest.raises(UnsupportedSetting, match="not plain"),
    ):
        slot_attention(None, tensor, tensor, tensor, None, **special)


def test_attention_without_a_plan_is_refused() -> None:
    tensor = torch.zeros(1, 2, 1, 4)
    with pytest.raises(UnsupportedSetting, match="no plan"):
        slot_attention(None, tensor, tensor, tensor, None)
