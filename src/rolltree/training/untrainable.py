"""Masks model calls that cannot be trained: their tokens are context for others, not loss records.

One odd call must not end a training. Its rollout's reward still counts in the baseline of its
group, and metrics and a notice say how many calls are left out, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rolltree.samples import Skipped, prune_sample, take_records
from rolltree.tokens import ROUTED_EXPERTS
from rolltree.training.algorithms import Algorithm
from rolltree.training.layout import BoolArray, LongArray, rollout_names
from rolltree.values.errors import TrainingError
from rolltree.values.types import Records, Sample

CHANGED_SAMPLING = "changed_sampling"
_ADVICE = {
    "left_out": "is left out: {detail}. Its session's train_calls says so (docs/gateway.md).",
    CHANGED_SAMPLING: (
        "was sampled with {detail}. Importance ratios are computed from the full distribution "
        "(temperature above 0, nothing cut off, penalised or biased). Take the setting out of what "
        "the environment, agent or caller passes for that call; evaluation takes it."
    ),
    "misspelled": "is not what the model was asked or said: {detail}",
    "logprob": (
        "has a token whose logprob of the engine is {detail} (nan: it gave none). Training needs "
        "the logprobs of the distribution that was sampled from; check the server's settings."
    ),
    "vocabulary": (
        "has the token id {detail}. Does the engine serve another model, or one with added tokens?"
    ),
    "routing": "carries routed experts that cannot be replayed: {detail}",
    "length": (
        "is on a path of {detail} tokens, and a forward pass has a limit of {limit}. Raise "
        "train.max_tokens, or cut paths with train.max_seq_len; where the model's rotary angles "
        "change with the length of the sequence, that is the limit."
    ),
    "advantage": (
        "has the advantage {detail}, so its gradient would destroy the weights. Its reward is the "
        "source; look at that rollout."
    ),
    "weight": "has the loss weight {detail}. Whoever sets its completion mask is the source.",
    "input": (
        "has a token without {detail}, which the loss reads of every token. Record it as a stream "
        "of each call (docs/token-tree.md), and pass build_samples(..., inputs=({detail},))."
    ),
}
"""Reason -> what is said about the first such call."""

_Fault: TypeAlias = tuple[str, BoolArray, Callable[[int], object]]
"""A reason, which records `[_R]` it concerns, and what to say about one of them."""


ForeignRouting: TypeAlias = Callable[[Any], tuple[BoolArray, str]]
"""Routed experts `[_T, ...]` -> which tokens' cannot be replayed, and why."""


@dataclass(frozen=True, slots=True)
class TrainableLimits:
    """What a model can train: ids below `vocab_size`, paths of up to `max_length` tokens.

    `foreign_routing` is None if routed experts are left alone.
    """

    vocab_size: int
    max_length: int
    foreign_routing: ForeignRouting | None = None


@dataclass(slots=True)
class MaskedCalls:
    """How many calls were masked, by reason, with a sentence about the first of each."""

    num_calls: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    sentences: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return the counts; a reason that did not occur is absent."""
        return {
            "masked/num_calls": float(self.num_calls.total()),
            "masked/num_tokens": float(self.num_tokens),
            **{f"masked/{reason}": float(count) for reason, count in self.num_calls.items()},
        }

    def add_skipped(self, skipped: Sequence[Skipped]) -> None:
        """Count calls that are in no sample: without ids, or with invalid tokens."""
        for each in skipped:
            if each.problem:
                self.num_calls[each.reason] += 1
                sentence = f"call {each.call} of {each.problem}"
                self.sentences.setdefault(each.reason, sentence)

    def check(self) -> None:
        """Raise unless every call was sampled from the model's own distribution.

        Raises:
            TrainingError: naming the first that was not.
        """
        if CHANGED_SAMPLING in self.sentences:
            raise TrainingError(
                f"{self.sentences[CHANGED_SAMPLING]} train.changed_sampling = 'mask' leaves such "
                "calls out of the loss instead."
            )


def note_misspelled(
    samples: Sequence[Sample],
    places: Sequence[tuple[int, int]],
    wrong: Mapping[tuple[int, int, int], str],
) -> list[Sample]:
    """Return samples of the states at `places` with the calls that `misspelled` has found."""
    index_of = {place: index for index, place in enumerate(places)}
    marks = tuple(
        (index_of[result, state], call, text)
        for (result, state, call), text in wrong.items()
        if (result, state) in index_of
    )
    return [replace(sample, info={**sample.info, "misspelled": marks}) for sample in samples]


def mask_untrainable(
    samples: Sequence[Sample], algorithm: Algorithm, limits: TrainableLimits
) -> tuple[list[Sample], MaskedCalls]:
    """Leave out the records of calls that cannot be trained, and tokens that only they needed.

    A call is masked as a whole. A supervised loss reads neither ratios nor advantages, so for it
    only ids, lengths, masks and its own inputs count.
    """
    masked = MaskedCalls()
    kept = [_masked(sample, algorithm, limits, masked) for sample in samples]
    return [sample for sample in kept if sample is not None], masked


def _masked(
    sample: Sample, algorithm: Algorithm, limits: TrainableLimits, masked: MaskedCalls
) -> Sample | None:
    """Return the sample without its calls that cannot be trained, None if nothing is left."""
    records = sample.records
    counts = records.weight != 0
    calls = _calls(records)
    left_out = np.zeros(len(records), np.bool_)
    for reason, bad, detail_of in _unusable(sample, algorithm, limits):
        bad = bad & counts & ~left_out
        if not bad.any():
            continue
        chosen = np.unique(calls[bad])
        masked.num_calls[reason] += len(chosen)
        if reason not in masked.sentences:
            at = int(bad.argmax())
            advice = _ADVICE[reason].format(detail=detail_of(at), limit=limits.max_length)
            masked.sentences[reason] = (
                f"call {int(records.call[at])} of rollout "
                f"{_name(sample, int(records.rollout[at]))} {advice}"
            )
        left_out |= np.isin(calls, chosen)
    if not left_out.any():
        return sample
    masked.num_tokens += int((left_out & counts).sum())
    keep = counts & ~left_out
    if not keep.any():
        return None
    # Pruned, because no model can compute an id that it does not have, even as context.
    return prune_sample(replace(sample, records=take_records(records, keep)))


def _unusable(sample: Sample, algorithm: Algorithm, limits: TrainableLimits) -> Iterator[_Fault]:
    """Yield the records that cannot be trained, by reason."""
    records, supervised = sample.records, algorithm.supervised
    for name in ("left_out",) if supervised else ("left_out", CHANGED_SAMPLING, "misspelled"):
        texts = {(rollout << 32) | call: text for rollout, call, text in sample.info.get(name, ())}
        if texts:
            calls = _calls(records)
            yield name, np.isin(calls, list(texts)), partial(_noted, texts, calls)
    warm = np.isfinite(records.temperature) & (records.temperature > 0)
    yield CHANGED_SAMPLING, ~warm, lambda at: f"temperature = {records.temperature[at]:g}"
    outside = (sample.ids < 0) | (sample.ids >= limits.vocab_size)
    wrong = (records.target < 0) | (records.target >= limits.vocab_size)
    # What attends to such a token cannot be computed, either.
    wrong |= _below(sample, outside)[records.source]
    yield "vocabulary", wrong, lambda at: _first_outside(sample, at, outside)
    stream = sample.info.get("streams", {}).get(ROUTED_EXPERTS)
    if stream is not None and limits.foreign_routing is not None:
        bad, why = limits.foreign_routing(stream.values)
        foreign = np.zeros(len(sample.ids), np.bool_)
        foreign[stream.positions[bad]] = True
        yield "routing", _below(sample, foreign)[records.source], partial(_constant, why)
    length = sample.positions[records.source] + 1
    yield "length", length > limits.max_length, lambda at: int(length[at])
    for name in ("weight",) if supervised else ("logprob", "advantage", "weight"):
        values = getattr(records, name)
        yield name, ~np.isfinite(values), values.__getitem__
    for name in algorithm.loss_inputs:
        given = records.extra.get(name)
        missing = np.ones(len(records), np.bool_) if given is None else ~np.isfinite(given)
        yield "input", missing, partial(_constant, repr(name))


def _below(sample: Sample, tokens: BoolArray) -> BoolArray:
    """Return the tokens `[_T]` whose paths hold one of `tokens`, themselves included."""
    begins = np.zeros(len(tokens) + 1, np.int64)
    begins[:-1] += tokens
    np.subtract.at(begins, sample.subtree_end[tokens], 1)
    return np.cumsum(begins)[:-1] > 0


def _first_outside(sample: Sample, record: int, outside: BoolArray) -> int:
    """Return the first id on the path of a record, its target included, that no model has."""
    source = int(sample.records.source[record])
    above = outside[: source + 1] & (sample.subtree_end[: source + 1] > source)
    return int(sample.ids[above.argmax()] if above.any() else sample.records.target[record])


def _noted(texts: Mapping[int, str], calls: LongArray, record: int) -> str:
    return texts[int(calls[record])]


def _constant(text: str, record: int) -> str:
    return text


def _calls(records: Records) -> LongArray:
    """Return a number per record, the same for the records of one call."""
    return (records.rollout.astype(np.int64) << 32) | records.call


def _name(sample: Sample, rollout: int) -> str:
    places = zip(sample.info.get("rollouts", ()), sample.origins, strict=False)
    names = (origin.rollout_id for index, origin in places if index == rollout)
    return next(names, rollout_names(sample))
