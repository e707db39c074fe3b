from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rolltree.inference.local.sampling import SampledTokens, keep_top_k, keep_top_p, sample

torch.set_num_threads(1)
LOGITS = torch.tensor([[0.5, 0.3, 0.2]]).log()


def draw(
    logits: torch.Tensor,
    uniforms: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> SampledTokens:
    size = len(uniforms)
    return sample(
        logits.repeat(size, 1) if len(logits) == 1 else logits.clone(),
        torch.tensor(uniforms),
        torch.full((size,), temperature),
        torch.full((size,), top_k),
        torch.full((size,), top_p),
    )


def test_a_uniform_number_chooses_by_cumulative_probability() -> None:
    found = draw(LOGITS, [0.0, 0.49, 0.51, 0.79, 0.81, 0.9999])
    assert found.ids.tolist() == [0, 0, 1, 1, 2, 2]
    expected = [math.log(p) for p in (0.5, 0.5, 0.3, 0.3, 0.2, 0.2)]
    assert found.logprobs.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.raw_logprobs.tolist() == found.logprobs.tolist()


def test_temperature_scales_and_both_logprobs_are_reported() -> None:
    # At temperature 0.5 probabilities square: .25 .09 .04, over their sum .38.
    found = draw(LOGITS, [0.6, 0.7, 0.95], temperature=0.5)
    assert found.ids.tolist() == [0, 1, 2]
    assert found.logprobs.exp().tolist() == pytest.approx([25 / 38, 9 / 38, 4 / 38], abs=1e-6)
    assert found.raw_logprobs.exp().tolist() == pytest.approx([0.5, 0.3, 0.2], abs=1e-6)


def test_top_k_keeps_the_likeliest_and_renormalises() -> None:
    found = draw(LOGITS, [0.6, 0.7, 0.99], top_k=2)
    assert found.ids.tolist() == [0, 1, 1]
    assert found.logprobs.exp().tolist() == pytest.approx([0.625, 0.375, 0.375], abs=1e-6)
    assert found.raw_logprobs.exp().tolist() == pytest.approx([0.5, 0.3, 0.3], abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert draw(LOGITS, [0.99], top_p=0.5).ids.tolist() == [0]
    assert draw(LOGITS, [0.99], top_p=0.51).ids.tolist() == [1]
    assert draw(LOGITS, [0.99], top_p=0.81).ids.tolist() == [2]


def test_greedy_takes_the_likeliest_with_the_models_own_logprob() -> None:
    found = draw(LOGITS, [0.99, 0.0], temperature=0.0, top_k=1, top_p=0.1)
    assert found.ids.tolist() == [0, 0]
    assert found.logprobs.exp().tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


def test_settings_are_each_rows_own() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300) * 3
    temperature = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0])
    top_k = torch.tensor([0, 0, 0, 7, 0])
    top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.6])
    uniforms = torch.tensor([0.3, 0.6, 0.2, 0.9, 0.4])
    together = sample(logits.clone(), uniforms, temperature, top_k, top_p)
    for row in range(5):
        at = slice(row, row + 1)
        alone = sample(logits[at].clone(), uniforms[at], temperature[at], top_k[at], top_p[at])
        assert together.ids[row] == alone.ids[0]
        assert together.logprobs[row].item() == pytest.approx(alone.logprobs[0].item(), abs=1e-6)
        assert together.raw_logprobs[row].item() == pytest.approx(
            alone.raw_logprobs[0].item(), abs=1e-6
        )


@given(st.integers(2, 700), st.integers(0, 10**6), st.floats(0.3, 3.0))
@settings(max_examples=40)
def test_an_even_grid_of_uniforms_reproduces_the_distribution(
    size: int, seed: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, size, generator=generator) * 2
    steps = 2000
    found = draw(logits, [(n + 0.5) / steps for n in range(steps)], temperature)
    share = torch.bincount(found.ids, minlength=size) / steps
    expected = (logits[0] / temperature).softmax(-1)
    assert (share - expected).abs().max() <= 1.01 / steps
    assert torch.allclose(found.logprobs, expected.log()[found.ids], atol=1e-4)


@given(st.integers(0, 10**6), st.integers(2, 2000), st.floats(0.0, 1.0))
@settings(max_examples=60)
def test_what_was_cut_off_is_never_sampled(seed: int, size: int, uniform: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, size, generator=generator)
    allowed = torch.rand(1, size, generator=generator) < 0.2
    allowed[0, seed % size] = True
    found = draw(logits.masked_fill(~allowed, float("-inf")), [min(uniform, 1 - 2**-24)])
    assert allowed[0, found.ids[0]]
    assert torch.isfinite(found.logprobs).all()


@given(
    st.integers(0, 10**6),
    st.integers(2, 400),
    st.integers(0, 50),
    st.floats(0.05, 1.0),
    st.floats(0.3, 2.0),
)
@settings(max_examples=60)
def test_cuts_agree_with_transformers(
    seed: int, size: int, top_k: int, top_p: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, size, generator=generator).double() * 3
    ours = logits / temperature
    ours = keep_top_p(
        keep_top_k(ours, torch.full((3,), top_k)), torch.full((3,), top_p, dtype=torch.float64)
    )
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(min(top_k, size))(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-5)


def test_a_nucleus_of_thousands_is_found_too() -> None:
    logits = torch.linspace(0, 1e-3, 6000)[None]
    kept = torch.isfinite(keep_top_p(logits, torch.tensor([0.5])))
    assert int(kept.sum()) == pytest.approx(3000, abs=2)
    assert bool(kept[0, -2990:].all())


def test_rows_without_a_cut_keep_everything() -> None:
    logits = torch.randn(2, 50)
    kept = keep_top_p(keep_top_k(logits, torch.tensor([0, 3])), torch.tensor([1.0, 1.0]))
    assert torch.equal(kept[0], logits[0])
    assert int(torch.isfinite(kept[1]).sum()) == 3
