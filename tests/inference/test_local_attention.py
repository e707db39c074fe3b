from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree.errors import UnsupportedSetting
from rolltree.inference.local.attention import AttentionPlan, attend, make_plan, slot_attention

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


def slow_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
) -> torch.Tensor:
    """One query, one head at a time."""
    group = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query)
    for token, (row, position) in enumerate(zip(plan.rows, plan.positions, strict=True)):
        for head in range(query.shape[1]):
            seen = keys[row, head // group, : position + 1]
            weights = (seen @ query[token, head] * scaling).softmax(-1)
            out[token, head] = weights @ values[row, head // group, : position + 1]
    return out


@given(st.data(), st.sampled_from([1, 2, 3]))
@settings(max_examples=40, deadline=None)
def test_attention_over_any_plan_is_attention(data: st.DataObject, group: int) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, 5), min_size=1)))
    counts = [data.draw(st.sampled_from([1, 1, 2, 5])) for _ in rows]
    start = [data.draw(st.sampled_from([0, 0, 3, 11])) for _ in rows]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    keys, values = torch.randn(2, 6, 2, 100, 4, generator=generator)
    query = torch.randn(sum(counts), 2 * group, 4, generator=generator)
    plan = plan_of(rows, counts, start)
    found = attend(query, keys, values, plan, 0.5)
    assert torch.allclose(found, slow_attention(query, keys, values, plan, 0.5), atol=1e-4)
    through, _ = slot_attention(
        None, query.transpose(0, 1)[None], keys, values, None, scaling=0.5, plan=plan
    )
    assert torch.equal(through[0], found)


def test_what_lies_behind_a_rows_last_token_does_not_matter() -> None:
    keys, values = torch.randn(2, 6, 2, 100, 4)
    query = torch.randn(4, 2, 4)
    plan = plan_of([0, 2, 3], [1, 1, 2], [9, 2, 4])
    before = attend(query, keys, values, plan, 0.5)
    for row, last in ((0, 9), (2, 2), (3, 5)):
        keys[row, :, last + 1 :] = 1e6
        values[row, :, last + 1 :] = -1e6
    assert torch.equal(attend(query, keys, values, plan, 0.5), before)


@pytest.mark.parametrize("special", [{"softcap": 30.0}, {"s_aux": torch.ones(2)}])
def test_attention_that_is_not_plain_is_refused(special: dict[str, object]) -> None:
    tensor = torch.zeros(1, 2, 1, 4)
    with pytest.raises(UnsupportedSetting, match="not plain"):
        slot_attention(None, tensor, tensor, tensor, None, plan=plan_of([0], [1], [0]), **special)


def test_attention_without_a_plan_is_refused() -> None:
    tensor = torch.zeros(1, 2, 1, 4)
    with pytest.raises(UnsupportedSetting, match="no plan"):
        slot_attention(None, tensor, tensor, tensor, None)
