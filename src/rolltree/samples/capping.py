"""Cutting samples at `max_seq_len`, by depth, so that every scope loses the same tokens.

A token is cut when it stands at depth `max_seq_len` or more on its path; what is cut is a set of
whole subtrees, so the rest is a valid sample. Knows the sample's arrays. Leaves out the policy for
truncated rollouts (`truncation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rolltree.samples.records import take_records
from rolltree.samples.spans import CallSpan
from rolltree.samples.stream_views import move_streams
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
    before = np.concatenate([[0], np.cumsum(keep)]).astype(np.int32)
    records = sample.records
    inside = sample.positions[records.source] + 1 < max_seq_len
    kept = take_records(records, inside, source=before[records.source[inside]])
    lost = take_records(records, ~inside)
    if (records.weight > 0).any() and not (kept.weight > 0).any():
        return Cut(None, records)
    position_of = np.where(keep, before[:-1], -1).astype(np.int32)
    cut_calls = {(int(r), int(c)) for r, c in zip(lost.rollout, lost.call, strict=True)}
    spans = _cut_spans(sample, before)
    info: dict[str, Any] = {
        **sample.info,
        "spans": spans,
        "streams": move_streams(sample.info.get("streams", {}), position_of),
        "seq_len_truncated": True,
        "seq_len_original": sample.num_tokens,
        "seq_len_kept": int(keep.sum()),
        "seq_len_lost": len(lost),
    }
    return Cut(
        Sample(
            ids=sample.ids[keep],
            positions=sample.positions[keep],
            subtree_end=before[sample.subtree_end[keep]],
            records=kept,
            origins=_cut_origins(sample, cut_calls),
            info=info,
        ),
        lost,
    )


def _cut_spans(sample: Sample, before: np.ndarray[Any, Any]) -> tuple[CallSpan, ...]:
    moved = (
        replace(span, start=int(before[span.start]), end=int(before[span.end]))
        for span in sample.info.get("spans", ())
    )
    return tuple(span for span in moved if span.end > span.start)


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
