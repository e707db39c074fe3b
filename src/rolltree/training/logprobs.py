"""Logprobs of sampled tokens without materializing the logits of every token.

The language model head runs only at positions that a loss record reads, in chunks, and each chunk
is recomputed in the backward pass, so at most `chunk_rows` x `_V` logits exist at a time. The
distribution is the full one: the config has no top-k and no top-p for training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ROWS = 256
"""Twice as many need more memory, and save 2 % of the time (design/0003)."""


@dataclass(frozen=True, slots=True)
class RecordLogprobs:
    """Float32 `[_R]` each: `logprob` and `kl` with gradient, `entropy` with one if requested.

    `kl` is the KL of the whole distribution to a teacher's, None without a teacher.
    """

    logprob: Tensor
    entropy: Tensor
    kl: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Teacher:
    """The factors of a frozen model's logits: its `hidden` `[_S, _D]` and its head."""

    hidden: Tensor
    head: Callable[[Tensor], Tensor]


class _Gather(torch.autograd.Function):
    """The log softmax at the target of each record, and the entropy of each row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, row: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """`logits` `[_S, _V]`, `row` and `target` `[_R]` -> logprob `[_R]`, entropy `[_S]`."""
        log_total = logits.logsumexp(-1, keepdim=True)
        logprob = logits[row, target] - log_total[row, 0]
        probability = (logits - log_total).exp_()
        # A matrix product, because `probability * logits` would be one more `[_S, _V]` tensor.
        expected = torch.bmm(probability[:, None, :], logits[:, :, None]).view(-1)
        entropy = log_total[:, 0] - expected
        # The only `[_S, _V]` tensor that is kept; autograd would keep several.
        ctx.save_for_backward(probability, row, target)
        # If its gradient is needed, `_entropy` computes the entropy again.
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probability, row, target = ctx.saved_tensors
        of_row = torch.zeros(len(probability), device=grad.device, dtype=grad.dtype)
        of_row.index_add_(0, row, grad)
        d_logits = probability * -of_row[:, None]
        # Several records may share a row and a target.
        d_logits.index_put_((row, target), grad, accumulate=True)
        return d_logits, None, None


def _entropy(logits: Tensor) -> Tensor:
    """Return the entropy `[_S]` of each row, with its gradient."""
    logprob = logits.log_softmax(-1)
    return -(logprob.exp() * logprob).sum(-1)


def _reverse_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return `sum p (log p - log q)` `[_S]`, p of `logits` and q of `teacher`, `[_S, _V]` each.

    `teacher` may have fewer ids: then p is over those, too.
    """
    logprob = logits[:, : teacher.shape[1]].log_softmax(-1)
    return (logprob.exp() * (logprob - teacher.log_softmax(-1))).sum(-1)


def gather_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    row_temperature: Tensor,
    record_row: Tensor,
    target: Tensor,
    *,
    chunk_rows: int = CHUNK_ROWS,
    entropy_gradient: bool = False,
    teacher: Teacher | None = None,
) -> RecordLogprobs:
    """Return each record's logprob under softmax(head(hidden) / temperature).

    Args:
        hidden: `[_S, _D]`, one row per distinct (position, temperature).
        head: `[n, _D]` -> logits `[n, _V]`.
        row_temperature: `[_S]`, above 0.
        record_row: `[_R]`, the row that each record reads, ascending or not.
        target: `[_R]`, token ids.
        chunk_rows: rows whose logits exist at the same time.
        entropy_gradient: whether the entropy has a gradient.
        teacher: its rows match `hidden`; the KL is to its distribution at the same temperature.
    """
    tempered = bool((row_temperature != 1).any())

    def logits_of(head: Callable[[Tensor], Tensor], part: Tensor, temperature: Tensor) -> Tensor:
        logits = head(part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits / temperature[:, None] if tempered else logits

    def chunk(
        part: Tensor, temperature: Tensor, row: Tensor, wanted: Tensor, other: Tensor | None
    ) -> Any:
        logits = logits_of(head, part, temperature)
        logprob, entropy = _Gather.apply(logits, row, wanted)  # type: ignore[no-untyped-call]
        if entropy_gradient:
            entropy = _entropy(logits)
        if teacher is None or other is None:
            return logprob, entropy[row]
        with torch.no_grad():
            target = logits_of(teacher.head, other, temperature)
        return logprob, entropy[row], _reverse_kl(logits, target)[row]

    num_rows = len(hidden)
    # Sorted by row, the records of a chunk of rows are one range.
    order = torch.argsort(record_row, stable=True)
    bounds = [*list(range(0, num_rows, chunk_rows)), num_rows]
    edges = torch.searchsorted(record_row[order], torch.tensor(bounds, device=record_row.device))
    columns = []
    for index, (first, stop) in enumerate(itertools.pairwise(bounds)):
        chosen = order[edges[index] : edges[index + 1]]
        args = (
            hidden[first:stop],
            row_temperature[first:stop],
            record_row[chosen] - first,
            target[chosen],
            None if teacher is None else teacher.hidden[first:stop],
        )
        # A single chunk may keep its logits: recomputing it would not lower the peak.
        if len(bounds) > 2 and torch.is_grad_enabled():
            columns.append(checkpoint(chunk, *args, use_reentrant=False))
        else:
            columns.append(chunk(*args))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return RecordLogprobs(*(torch.cat(parts)[back] for parts in zip(*columns, strict=True)))
