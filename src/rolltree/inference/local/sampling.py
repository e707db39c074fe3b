"""Samples tokens from logits, for a batch in which each row has its own settings.

Temperature, top-k and top-p are applied in this order, each to the result of the previous one, as
in transformers' warpers; a row's own logits processors (`extra` settings such as `min_p`) come
before and after. Randomness is an argument (one uniform number per row), so a row's draw depends
only on its own seed and logits, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from rolltree.values.errors import UnsupportedSetting

# Larger nuclei need a sort of the whole vocabulary, which costs seven times as much.
_NUCLEUS = 1024


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of one request's logits: `before` temperature and cuts, and `after` them.

    Each takes ids int64 `[1, _T]` and logits float32 `[1, _V]`, and returns logits.
    """

    before: LogitsProcessorList
    after: LogitsProcessorList


class SampledTokens(NamedTuple):
    """One token per row. Tensors of shape `[_B]`; `top` and `raw_top` are of the rows that ask."""

    ids: Tensor  # int64
    logprobs: Tensor  # of the distribution sampled from
    raw_logprobs: Tensor  # of the softmax of the unchanged logits
    top: Any = None
    raw_top: Any = None


class Adjusted(NamedTuple):
    """A row with logits processors; `ids`, int64 `[1, _T]`, are its prompt and answer so far."""

    row: int
    ids: Tensor
    processors: Processors


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    adjusted: Sequence[Adjusted] = (),
    top_rows: Sequence[int] = (),
    num_top: int = 0,
) -> SampledTokens:
    """Draw one token per row by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: float32 `[_B, _V]`; overwritten, since a copy costs as much as the arithmetic.
        uniforms: float32 `[_B]` in [0, 1).
        temperature: float32 `[_B]`; 0 takes the most likely token, with its logprob at
            temperature 1 (after the `before` processors).
        top_k: int64 `[_B]`; 0 is off.
        top_p: float32 `[_B]`; 1 is off.
        adjusted: rows with further settings.
        top_rows: rows whose `num_top` likeliest tokens are returned, too.
    """
    greedy = temperature == 0
    # Avoids a division by 0.
    scale = torch.where(greedy, 1.0, temperature)
    cut = ~greedy & ((top_k > 0) | (top_p < 1))
    changed = cut | (scale != 1)
    if adjusted:
        changed[[row for row, *_ in adjusted]] = True
    # The model's own logprobs are returned, too. If no row changes its logits, they are the same
    # numbers and nothing is copied.
    raw = logits.clone() if bool(changed.any()) else None
    if raw is not None:
        for row, ids, processors in adjusted:
            logits[row] = processors.before(ids, logits[row, None])[0]
        logits /= scale[:, None]
        if bool(cut.any()):
            rows = cut.nonzero()[:, 0]
            # Only for the rows that are cut, since both functions sort.
            logits[rows] = keep_top_p(keep_top_k(logits[rows], top_k[rows]), top_p[rows])
        for row, ids, processors in adjusted:
            # Skipped for greedy rows: these processors cut the distribution, and a cut never
            # removes the maximum.
            if not bool(greedy[row]):
                logits[row] = processors.after(ids, logits[row, None])[0]
    largest, likeliest = logits.max(-1)
    # In place, since a copy of a vocabulary of 150,000 costs as much as the arithmetic. Without
    # subtracting the maximum, `exp` would overflow.
    weights = logits.sub_(largest[:, None]).exp_()
    blocks = _blocks(weights)
    sums = blocks.sum(-1)
    ids = likeliest
    if not bool(greedy.all()):
        ids = torch.where(greedy, likeliest, _invert(blocks, sums, uniforms, likeliest))
    # From the weights that were drawn from, since a log-softmax would differ in the last bits.
    logprobs = (weights.gather(-1, ids[:, None])[:, 0] / sums.sum(-1)).log()
    top = likeliest_tokens(weights, sums.sum(-1), top_rows, num_top) if top_rows else None
    if raw is None:
        return SampledTokens(ids, logprobs, logprobs, top, top)
    # By the same operations as for rows whose logits were not changed.
    largest = raw.amax(-1)
    raw_weights = raw.sub_(largest[:, None]).exp()
    total = _blocks(raw_weights).sum(-1).sum(-1)
    own = raw.gather(-1, ids[:, None])[:, 0] - total.log()
    raw_top = likeliest_tokens(raw_weights, total, top_rows, num_top) if top_rows else None
    return SampledTokens(ids, logprobs, torch.where(changed, own, logprobs), top, raw_top)


def likeliest_tokens(
    weights: Tensor, total: Tensor, rows: Sequence[int], number: int
) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens of some rows with their logprobs; none of probability 0."""
    largest, ids = weights[list(rows)].topk(min(number, weights.shape[-1]), dim=-1)
    logprobs = (largest / total[list(rows), None]).log()
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -torch.inf] for row in pairs]


def _blocks(weights: Tensor) -> Tensor:
    """View `[_B, _V]` as `[_B, blocks, width]`."""
    # torch splits the sum over a single large row among its threads and so adds in a different
    # order than for a row of a batch: the last bits would depend on the other rows.
    size = weights.shape[1]
    width = next(width for width in range(min(512, size), 0, -1) if size % width == 0)
    return weights.view(len(weights), -1, width)


def _invert(blocks: Tensor, sums: Tensor, uniforms: Tensor, likeliest: Tensor) -> Tensor:
    """Return the first index whose share of the cumulative weight exceeds the uniform number.

    It searches for the block first and then inside it, so as to read the `[_B, _V]` weights once.
    """
    num_rows, _, width = blocks.shape
    weights = blocks.view(num_rows, -1)
    if blocks.shape[1] == 1:
        upto = blocks[:, 0].cumsum(-1)
        ids = torch.searchsorted(upto, uniforms[:, None] * upto[:, -1:], right=True)
        return _possible(weights, ids.clamp_(max=width - 1), likeliest)
    upto = sums.cumsum(-1)
    target = uniforms[:, None] * upto[:, -1:]
    block = torch.searchsorted(upto, target, right=True).clamp(max=upto.shape[1] - 1)
    inside = blocks[torch.arange(num_rows, device=weights.device), block[:, 0]].cumsum(-1)
    # Clamped, since rounding can make it slightly negative.
    rest = (target - (upto - sums).gather(-1, block)).clamp(min=0)
    ids = block * width + torch.searchsorted(inside, rest, right=True).clamp(max=width - 1)
    return _possible(weights, ids, likeliest)


def _possible(weights: Tensor, ids: Tensor, likeliest: Tensor) -> Tensor:
    """Replace ids of probability 0 by the likeliest id."""
    # Rounding can put the target after the last weight, or on a token that top_p cut.
    return torch.where(weights.gather(-1, ids) > 0, ids, likeliest[:, None])[:, 0]


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Set all but each row's `top_k` largest logits to -inf; ties with the smallest stay."""
    if not bool((top_k > 0).any()):
        return logits
    # Rows without top_k keep everything.
    k = torch.where(top_k > 0, top_k, logits.shape[-1]).clamp(max=logits.shape[-1])
    largest = logits.topk(int(k.max()), dim=-1).values
    return logits.masked_fill(logits < largest.gather(-1, k[:, None] - 1), float("-inf"))


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Set logits outside each row's nucleus to -inf (Holtzman et al. 2019, "nucleus sampling").

    The nucleus is the smallest set of likeliest tokens whose probability reaches `top_p`.
    """
    cut = (top_p < 1)[:, None]
    if not bool(cut.any()):
        return logits
    probs = logits.softmax(-1)
    likeliest, index = probs.topk(min(_NUCLEUS, logits.shape[-1]), dim=-1)
    # Most nuclei are small; everything is sorted only if one of them is not.
    if bool((cut[:, 0] & (likeliest.sum(-1) < top_p)).any()):
        likeliest, index = probs.sort(dim=-1, descending=True)
    inside = likeliest.cumsum(-1) - likeliest < top_p[:, None]
    # The likeliest token is kept even if `top_p` is 0.
    inside[:, 0] = True
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, inside)
    return logits.masked_fill(cut & ~kept, float("-inf"))


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting's value, and the data of the request that a processor may need."""

    value: Any
    num_prompt: int
    end_ids: list[int]
    vocab_size: int
    device: torch.device


class _CountPenalty(LogitsProcessor):  # type: ignore[misc]
    """Lowers the logits of already sampled tokens by `once`, and by `each` per occurrence.

    These are OpenAI's presence and frequency penalties; the prompt does not count.
    """

    def __init__(self, num_prompt: int, *, each: float = 0.0, once: float = 0.0) -> None:
        self._num_prompt, self._each, self._once = num_prompt, each, once

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed logits."""
        sampled, counts = torch.unique(input_ids[0, self._num_prompt :], return_counts=True)
        changed = scores.clone()
        changed[0, sampled] -= self._each * counts + self._once
        return changed


# Larger settings, or penalties below its inverse, can make logits infinite in float32.
_LARGEST = 1e30


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) <= _LARGEST:
        raise ValueError(f"not within +-{_LARGEST:g}")
    return number


def _penalty(value: Any) -> float:
    number = _number(value)
    if not number >= 1 / _LARGEST:
        raise ValueError("too small")
    return number


def _bias(setting: _Setting) -> LogitsProcessor:
    biases = {int(token): _number(bias) for token, bias in dict(setting.value).items()}
    if any(not 0 <= token < setting.vocab_size for token in biases):
        raise ValueError("a token id is outside the vocabulary")
    return SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])


def _min_tokens(setting: _Setting) -> LogitsProcessor:
    return MinNewTokensLengthLogitsProcessor(
        setting.num_prompt, setting.value, setting.end_ids, device=str(setting.device)
    )


_BEFORE: dict[str, tuple[object, Callable[[_Setting], LogitsProcessor]]] = {
    "logit_bias": ({}, _bias),
    "repetition_penalty": (
        1,
        lambda setting: RepetitionPenaltyLogitsProcessor(_penalty(setting.value)),
    ),
    "frequency_penalty": (
        0,
        lambda setting: _CountPenalty(setting.num_prompt, each=_number(setting.value)),
    ),
    "presence_penalty": (
        0,
        lambda setting: _CountPenalty(setting.num_prompt, once=_number(setting.value)),
    ),
    "min_tokens": (0, _min_tokens),
}
_AFTER: dict[str, tuple[object, Callable[[_Setting], LogitsProcessor]]] = {
    "min_p": (0, lambda setting: MinPLogitsWarper(float(setting.value))),
}
"""Per setting: the value that changes nothing, and how to make its processor."""
PROCESSED = frozenset((*_BEFORE, *_AFTER))


def make_processors(
    extra: Mapping[str, Any],
    *,
    num_prompt: int,
    end_ids: list[int],
    vocab_size: int,
    device: torch.device,
    mask: LogitsProcessor | None = None,
) -> Processors | None:
    """Make the processors for the settings in `extra`; None if they change nothing.

    `end_ids` are the ids that `min_tokens` suppresses. Names outside `PROCESSED` are ignored.
    `mask` comes before temperature and cuts, after biases and penalties.

    Raises:
        UnsupportedSetting: a value cannot be used.
    """
    made: list[LogitsProcessorList] = []
    for table in (_BEFORE, _AFTER):
        made.append(LogitsProcessorList())
        for name, (neutral, make) in table.items():
            value = extra.get(name, neutral)
            if value in (None, neutral):
                continue
            try:
                made[-1].append(make(_Setting(value, num_prompt, end_ids, vocab_size, device)))
            except (TypeError, ValueError) as error:
                raise UnsupportedSetting(
                    f"{name} = {shown(value)} is not a valid setting ({error})."
                ) from error
    if mask is not None:
        made[0].append(mask)
    return Processors(*made) if any(made) else None
