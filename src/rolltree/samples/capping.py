"""Cutting samples at `max_seq_len`, by depth, so that every scope loses the same tokens.

A token is cut when it stands at depth `max_seq_len` or more on its path; what is cut is a set of
whole subtrees, so the rest is a valid sample. Knows the sample's arrays. Leaves out the policy for
truncated rollouts (`truncation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rolltree.samples.records import take_records
from rolltree.samples.subset import subset
from rolltree.types import Records, Sample, SampleOrigin, TruncationReason


@dataclass(frozen=True, slots=True)
class Cut:
    """The capped sample (None when nothing trainable is left) and the records that were lost."""

    sample: Sample | None
    lost: Records | None


def cap_sample(sample: Sample, max_seq_len: int) -> Cut:
    """Cut a sample at `max_seq_len` tokens per path.

    A cut sample has `info["seq_len_truncated"]` True, `seq_len_original` and `seq_len_kept` in
    tokens, `seq_len_lost` in sampled tokens, and its cut origins say `truncated` with reason
    `max_seq_len` where the episode gave none. A sample that would keep no trainable token is None.
    """
    keep = sample.positions < max_seq_len
    if keep.all():
        return Cut(sample, None)
    records = sample.records
    inside = sample.positions[records.source] + 1 < max_seq_len
    if (records.weight != 0).any() and not (records.weight[inside] != 0).any():
        return Cut(None, records)
    lost = take_records(records, ~inside)
    cut = subset(
        sample,
        keep,
        inside,
        seq_len_truncated=True,
        seq_len_original=sample.num_tokens,
        seq_len_kept=int(keep.sum()),
        seq_len_lost=len(lost),
    )
    cut_calls = {(int(r), int(c)) for r, c in zip(lost.rollout, lost.call, strict=True)}
    return Cut(replace(cut, origins=_cut_origins(sample, cut_calls)), lost)


def _cut_origins(sample: Sample, cut_calls: set[tuple[int, int]]) -> tuple[SampleOrigin, ...]:
    indices = sample.info["rollouts"]
    return tuple(
        replace(
            origin,
            truncated=True,
            truncation_reason=origin.truncation_reason or str(TruncationReason.MAX_SEQ_LEN),
        )
        if any((index, call) in cut_calls for call in origin.calls)
        else origin
        for index, origin in zip(indices, sample.origins, strict=True)
    )
