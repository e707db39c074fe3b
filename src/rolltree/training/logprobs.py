"""Logprobs of sampled tokens without the vocabulary of every token.

The language model head runs only at positions that a loss record reads, in chunks, and each chunk
is recomputed in the backward pass, so at most `chunk_rows` x `_V` logits exist at a time. It knows
nothing about attention or losses. It leaves out top-k and top-p: a truncated distribution is
refused before training, by `config.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

DEFAULT_CHUNK_ROWS = 512


@dataclass(frozen=True, slots=True)
class RecordLogprobs:
    """`logprob` float32 `[_R]` with gradient; `entropy` float32 `[_R]` without."""

    logprob: Tensor
    entropy: Tensor


class _Gather(torch.autograd.Function):
    """log softmax of each row, at one target per record, and each row's entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, row: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """`logits` `[_S, _V]`, `row` and `target` `[_R]` -> logprob `[_R]`, entropy `[_S]`."""
        log_total = logits.logsumexp(-1, keepdim=True)
        logprob = logits[row, target] - log_total[row, 0]
        probability = torch.exp(logits - log_total)
        expected = torch.bmm(probability[:, None, :], logits[:, :, None]).view(-1)
        entropy = log_total[:, 0] - expected
        ctx.save_for_backward(probability, row, target)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probability, row, target = ctx.saved_tensors
        of_row = torch.zeros(len(probability), device=grad.device, dtype=grad.dtype)
        of_row.index_add_(0, row, grad)
        d_logits = probability * -of_row[:, None]
        d_logits.index_put_((row, target), grad, accumulate=True)
        return d_logits, None, None


def gather_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    row_temperature: Tensor,
    record_row: Tensor,
    target: Tensor,
    *,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> RecordLogprobs:
    """Return each record's logprob under softmax(head(hidden) / temperature).

    Args:
        hidden: `[_S, _D]`, one row per distinct (position, temperature).
        head: `[n, _D]` -> logits `[n, _V]`.
        row_temperature: `[_S]`, above 0.
        record_row: `[_R]`, the row that each record reads, ascending or not.
        target: `[_R]`, token ids.
        chunk_rows: rows whose logits exist at the same time.
    """
    tempered = bool((row_temperature != 1).any())

    def chunk(part: Tensor, temperature: Tensor, row: Tensor, wanted: Tensor) -> Any:
        logits = head(part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if tempered:
            logits = logits / temperature[:, None]
        return _Gather.apply(logits, row, wanted)  # type: ignore[no-untyped-call]

    num_rows = len(hidden)
    order = torch.argsort(record_row, stable=True)
    bounds = [*list(range(0, num_rows, chunk_rows)), num_rows]
    edges = torch.searchsorted(record_row[order], torch.tensor(bounds, device=record_row.device))
    logprobs, entropies = [], []
    for index, (first, stop) in enumerate(itertools.pairwise(bounds)):
        chosen = order[edges[index] : edges[index + 1]]
        row = record_row[chosen] - first
        args = (hidden[first:stop], row_temperature[first:stop], row, target[chosen])
        if len(bounds) > 2 and torch.is_grad_enabled():
            logprob, entropy = checkpoint(chunk, *args, use_reentrant=False)
        else:
            logprob, entropy = chunk(*args)
        logprobs.append(logprob)
        entropies.append(entropy[row])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return RecordLogprobs(torch.cat(logprobs)[back], torch.cat(entropies)[back].detach())
