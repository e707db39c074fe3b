import numpy as np
import torch
from hybrid_kit import token_by_token
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training_layout import forests, seen_by_definition
from training_kit import difference

from rolltree.training.models.recurrence_layout import RecurrenceLayout, parents
from rolltree.training.models.tree_recurrence import convolution, linear_attention


@given(forests())
def test_the_parent_is_the_last_token_before_that_sees(end):
    seen = seen_by_definition(end)
    for token, above in enumerate(parents(end)):
        assert above == max(np.flatnonzero(seen[token, :token]), default=-1)


@given(forests(), st.integers(1, 9))
@settings(deadline=None)
def test_a_chunk_starts_from_one_state(end, size):
    layout = RecurrenceLayout(end)
    chunks = layout.chunks(size)
    token = chunks.token.numpy()
    exits = token[:0]
    assert sorted(token[token < len(end)]) == list(range(len(end)))
    assert (token.flatten()[chunks.place.numpy()] == np.arange(len(end))).all()
    for level in chunks.levels:
        for chunk in range(level.first, level.stop):
            inside = token[chunk][token[chunk] < len(end)]
            outside = {layout.parent[t] for t in inside} - set(inside)
            assert len(outside) == 1
            if level.entry is None:
                assert outside == {-1}
            else:
                assert outside == {exits[level.entry[chunk - level.first]]}
        exits = token.flatten()[chunks.exit_place.numpy()[level.exit_first : level.exit_stop]]


@given(forests(), st.integers(1, 9), st.sampled_from([(4, 4), (1, 3), (2, 4)]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_states_and_gradients_equal_the_recurrence_token_by_token(end, size, heads, delta):
    torch.manual_seed(len(end))
    num_keys, num_values = heads
    count = len(end)
    shapes = [(count, num_keys, 5), (count, num_keys, 5), (count, num_values, 3)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    decay = -2 * torch.rand(count, num_values, dtype=torch.float64)
    beta = torch.rand(count, num_values, dtype=torch.float64)
    inputs = [q, k / 2, v, decay] + [beta] * delta
    for tensor in inputs:
        tensor.requires_grad_()
    arguments = inputs if delta else [*inputs, None]
    layout = RecurrenceLayout(end)
    expected = token_by_token(*arguments, layout.parent)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    got = linear_attention(*arguments, layout, size)
    assert difference(got.detach(), expected.detach()) < 1e-10
    ours = torch.autograd.grad((got * weight).sum(), inputs)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert float((mine - theirs).norm()) < 1e-9 * (1 + float(theirs.norm()))


@given(forests(), st.integers(1, 5), st.sampled_from([None, "silu"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_convolutions_read_the_last_tokens_of_the_path(end, width, activation, biased):
    torch.manual_seed(len(end))
    layout = RecurrenceLayout(end)
    x = torch.randn(1, 3, len(end), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True) if biased else None
    columns = []
    for token in range(len(end)):
        total, at = torch.zeros(3, dtype=torch.float64) if bias is None else bias, token
        for tap in range(width):
            total, at = (
                (total + x[0, :, at] * weight[:, -1 - tap], int(layout.parent[at]))
                if at >= 0
                else (total, at)
            )
        columns.append(total)
    expected = torch.stack(columns, -1)[None]
    expected = torch.nn.functional.silu(expected) if activation else expected
    got = convolution(layout, x, weight, bias, activation)
    assert torch.allclose(got, expected, atol=1e-12)
    inputs = [x, weight] + [bias] * biased
    graded = torch.randn_like(got)
    ours = torch.autograd.grad((got * graded).sum(), inputs)
    theirs = torch.autograd.grad((expected * graded).sum(), inputs)
    assert all(torch.allclose(*pair, atol=1e-10) for pair in zip(ours, theirs, strict=True))
