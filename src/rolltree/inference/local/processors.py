"""Sampling settings beyond temperature, top_k and top_p, as transformers' logits processors.

They come in a request's `extra`, under the names that servers give them. Each is applied to its own
row only, in Python: a request that uses none pays nothing. The module knows nothing about batches.
It leaves out constrained decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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

from rolltree.errors import UnsupportedSetting


@dataclass(frozen=True, slots=True)
class Processors:
    """What changes one request's logits: `before` temperature and cuts, and `after` them.

    Each takes ids int64 `[1, _T]` and logits float32 `[1, _V]`, and returns logits.
    """

    before: LogitsProcessorList
    after: LogitsProcessorList


@dataclass(frozen=True, slots=True)
class _Asked:
    """A setting's value, and what else a processor may need to know of its request."""

    value: Any
    num_prompt: int
    end_ids: list[int]
    vocab_size: int
    device: torch.device


class _CountPenalty(LogitsProcessor):  # type: ignore[misc]
    """Lower the logits of tokens that were sampled before, by `each` per time and `once` for any.

    OpenAI's frequency and presence penalties: the prompt does not count.
    """

    def __init__(self, num_prompt: int, *, each: float = 0.0, once: float = 0.0) -> None:
        self._num_prompt, self._each, self._once = num_prompt, each, once

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed logits."""
        sampled, counts = torch.unique(input_ids[0, self._num_prompt :], return_counts=True)
        changed = scores.clone()
        changed[0, sampled] -= self._each * counts + self._once
        return changed


def _bias(asked: _Asked) -> LogitsProcessor:
    biases = {int(token): float(bias) for token, bias in dict(asked.value).items()}
    if any(not 0 <= token < asked.vocab_size for token in biases):
        raise ValueError("a token id is outside the vocabulary")
    return SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])


def _min_tokens(asked: _Asked) -> LogitsProcessor:
    return MinNewTokensLengthLogitsProcessor(
        asked.num_prompt, asked.value, asked.end_ids, device=str(asked.device)
    )


_BEFORE: dict[str, tuple[object, Callable[[_Asked], LogitsProcessor]]] = {
    "logit_bias": ({}, _bias),
    "repetition_penalty": (1, lambda asked: RepetitionPenaltyLogitsProcessor(float(asked.value))),
    "frequency_penalty": (
        0,
        lambda asked: _CountPenalty(asked.num_prompt, each=float(asked.value)),
    ),
    "presence_penalty": (
        0,
        lambda asked: _CountPenalty(asked.num_prompt, once=float(asked.value)),
    ),
    "min_tokens": (0, _min_tokens),
}
_AFTER: dict[str, tuple[object, Callable[[_Asked], LogitsProcessor]]] = {
    "min_p": (0, lambda asked: MinPLogitsWarper(float(asked.value))),
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
) -> Processors | None:
    """Return what the settings in `extra` ask for; None where that is nothing.

    `end_ids` are those that `min_tokens` keeps away. Names outside `PROCESSED` are not looked at.

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
                made[-1].append(make(_Asked(value, num_prompt, end_ids, vocab_size, device)))
            except (TypeError, ValueError) as error:
                raise UnsupportedSetting(
                    f"{name} = {value!r} cannot be sampled with ({error}). Correct the value."
                ) from error
    return Processors(*made) if any(made) else None
