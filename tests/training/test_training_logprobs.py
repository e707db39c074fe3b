import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from training_kit import group, tiny_model, trainer, tree

from rolltree.training import forward
from rolltree.training.logprobs import gather_logprobs

V = 7


def naive(hidden, weight, temperature, row, target):
    """One record at a time, straight from the definition."""
    logprobs, entropies = [], []
    for at, token in zip(row.tolist(), target.tolist(), strict=True):
        logits = weight @ hidden[at] / temperature[at]
        logprob = logits - logits.exp().sum().log()
        logprobs.append(logprob[token])
        entropies.append(-(logprob.exp() * logprob).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@st.composite
def problems(draw):
    num_rows = draw(st.integers(1, 9))
    num_records = draw(st.integers(1, 20))
    row = draw(st.lists(st.integers(0, num_rows - 1), min_size=num_records, max_size=num_records))
    target = draw(st.lists(st.integers(0, V - 1), min_size=num_records, max_size=num_records))
    at = st.sampled_from([0.5, 1.0, 1.7])
    temperature = draw(st.lists(at, min_size=num_rows, max_size=num_rows))
    return (
        draw(st.integers(0, 1000)),
        num_rows,
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(row),
        torch.tensor(target),
        draw(st.integers(1, 10)),
    )


@given(problems())
@settings(max_examples=80, deadline=None)
def test_values_and_gradients_are_those_of_the_definition(problem):
    seed, num_rows, temperature, row, target, chunk_rows = problem
    torch.manual_seed(seed)
    hidden = torch.randn(num_rows, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, 5, dtype=torch.float64, requires_grad=True)
    got = gather_logprobs(
        hidden, lambda part: part @ weight.t(), temperature, row, target, chunk_rows=chunk_rows
    )
    logprob, entropy = naive(hidden, weight, temperature, row, target)
    assert torch.allclose(got.logprob, logprob)
    assert torch.allclose(got.entropy, entropy)
    direction = torch.randn(len(row), dtype=torch.float64)
    ours = torch.autograd.grad((got.logprob * direction).sum(), (hidden, weight))
    theirs = torch.autograd.grad((logprob * direction).sum(), (hidden, weight))
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right)


def test_by_hand():
    # logits ln 1, ln 2, ln 5 at temperature 1: probabilities 1/8, 2/8, 5/8
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    got = gather_logprobs(
        logits, lambda part: part, torch.ones(1), torch.tensor([0, 0]), torch.tensor([2, 0])
    )
    assert got.logprob.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 8)])
    p = [1 / 8, 2 / 8, 5 / 8]
    assert got.entropy.tolist() == pytest.approx([-sum(x * math.log(x) for x in p)] * 2)


def test_temperature_flattens():
    # at temperature 0.5 the probabilities are those squared: 1, 4, 25 of 30
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    got = gather_logprobs(
        logits, lambda part: part, torch.tensor([0.5]), torch.tensor([0]), torch.tensor([1])
    )
    assert got.logprob.tolist() == pytest.approx([math.log(4 / 30)])


def test_two_siblings_at_one_position_add_their_gradients():
    logits = torch.zeros(1, 4, requires_grad=True)
    got = gather_logprobs(
        logits, lambda part: part, torch.ones(1), torch.tensor([0, 0]), torch.tensor([1, 2])
    )
    (gradient,) = torch.autograd.grad((got.logprob * torch.tensor([1.0, -3.0])).sum(), logits)
    # sum of weights -2, each token's share of it 1/4: (0.5, 0.5, 0.5, 0.5) + (0, 1, -3, 0)
    assert gradient.tolist()[0] == pytest.approx([0.5, 1.5, -2.5, 0.5])


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_the_head_never_sees_more_rows_than_a_chunk(chunk_rows):
    seen = []
    weight = torch.randn(V, 3, requires_grad=True)

    def head(part):
        seen.append(len(part))
        return part @ weight.t()

    hidden = torch.randn(10, 3, requires_grad=True)
    row, target = torch.arange(10), torch.zeros(10, dtype=torch.long)
    got = gather_logprobs(hidden, head, torch.ones(10), row, target, chunk_rows=chunk_rows)
    forward = list(seen)
    got.logprob.sum().backward()
    assert max(seen) <= chunk_rows
    assert sum(forward) == 10
    recomputed = len(seen) - len(forward)
    assert recomputed == (0 if chunk_rows == 100 else len(forward))


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        got = gather_logprobs(
            torch.randn(6, V),
            lambda part: part,
            torch.ones(6),
            torch.arange(6),
            torch.zeros(6, dtype=torch.long),
            chunk_rows=2,
        )
    assert not got.logprob.requires_grad


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    got = gather_logprobs(
        logits, lambda part: part, torch.ones(1), torch.tensor([0, 0]), torch.tensor([0, 1])
    )
    assert got.logprob.tolist() == [0.0, -1e4]
    got.logprob.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_half_precision_logits_are_reduced_in_float32():
    logits = torch.randn(3, 50).bfloat16()
    row, target = torch.arange(3), torch.tensor([1, 2, 3])
    got = gather_logprobs(logits, lambda part: part, torch.ones(3), row, target)
    assert got.logprob.dtype == torch.float32
    expected = logits.float().log_softmax(-1)[row, target]
    assert torch.allclose(got.logprob, expected, atol=1e-6)


WIDE = 997
"""A vocabulary that no other dimension can be mistaken for."""


class Largest(TorchDispatchMode):
    """The most rows over the vocabulary that any tensor had, forward and backward.

    The embedding and its gradient have the vocabulary first, so they do not count.
    """

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[-1] == WIDE:
                self.rows = max(self.rows, value.numel() // WIDE)
        return out


@pytest.mark.parametrize("chunk_rows", [4, 16])
@pytest.mark.parametrize("kl", ["k3", "full"])
def test_the_vocabulary_never_exists_for_more_tokens_than_a_chunk(chunk_rows, kl, monkeypatch):
    """A whole step of the trainer, with reference, entropy and backward passes."""
    sizes = {"hidden_size": 16, "vocab_size": WIDE}  # the transposed head has 16 rows
    worker = trainer(
        tiny_model("llama", **sizes),
        tiny_model("llama", 1, **sizes),
        algorithm={"kl_coef": 0.1, "kl": kl, "entropy_coef": 0.1},
    )
    chunked = partial(gather_logprobs, chunk_rows=chunk_rows)
    monkeypatch.setattr(forward, "gather_logprobs", chunked)
    with Largest() as seen:
        metrics = worker.step([tree(group(6, turns=2, length=8))], 1)
    assert metrics["train/num_records"] > 2 * 16
    assert seen.rows == 16
