"""Logits to tokens, for a batch whose rows each have their own settings.

Pure functions on tensors: the randomness is an argument (one uniform number per row), so a row's
draw depends on its own seed and logits and on nothing else in the batch. Temperature, then top-k,
then top-p, each on what the one before left, as in transformers' warpers. The module knows nothing
about requests. It leaves out penalties and constrained decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sampled(NamedTuple):
    """One token per row. Tensors of shape `[_B]`."""

    ids: Tensor  # int64
    logprobs: Tensor  # of the distribution sampled from
    raw_logprobs: Tensor  # of the softmax of the logits as they came


def sample(
    logits: Tensor, uniforms: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Sampled:
    """Draw one token per row by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: float32 `[_B, _V]`.
        uniforms: float32 `[_B]` in [0, 1).
        temperature: float32 `[_B]`; 0 takes the most likely token, and its logprob is then that of
            temperature 1 (of the distribution that was maximised).
        top_k: int64 `[_B]`; 0 is off.
        top_p: float32 `[_B]`; 1 is off.
    """
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)
    plain = bool((scale == 1).all())
    scaled = logits if plain else logits / scale[:, None]
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    if bool(cut.any()):
        rows = cut.nonzero()[:, 0]
        kept = keep_top_p(keep_top_k(scaled[rows], top_k[rows]), top_p[rows])
        scaled, plain = scaled.index_copy(0, rows, kept), False
    probs = scaled.softmax(-1)
    if bool(greedy.all()):
        ids = logits.argmax(-1)
    else:
        ids = _invert(probs, uniforms)
        if bool(greedy.any()):
            ids = torch.where(greedy, logits.argmax(-1), ids)
    logprobs = probs.gather(-1, ids[:, None])[:, 0].log()
    raw = logprobs if plain else logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)
    return Sampled(ids, logprobs, raw)


def _invert(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative probability exceeds the row's uniform number."""
    cumulative = probs.cumsum(-1)
    target = uniforms.clamp(max=1 - 2**-22)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)
    # A parallel scan may round so that a token of probability zero is hit: take the likeliest.
    return torch.where(probs.gather(-1, ids[:, None])[:, 0] > 0, ids, probs.argmax(-1))


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Set all but each row's `top_k` largest logits to -inf; ties with the last one stay."""
    if not bool((top_k > 0).any()):
        return logits
    k = torch.where(top_k > 0, top_k, logits.shape[-1]).clamp(max=logits.shape[-1])
    largest = logits.topk(int(k.max()), dim=-1).values
    return logits.masked_fill(logits < largest.gather(-1, k[:, None] - 1), float("-inf"))


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Set logits outside each row's nucleus to -inf (Holtzman et al. 2019, "nucleus sampling").

    The nucleus is the smallest set of likeliest tokens whose probability reaches `top_p`.
    """
    if not bool((top_p < 1).any()):
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    outside = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False
    return logits.masked_fill(outside.scatter(-1, index, outside), float("-inf"))
