"""Part of a sample as a sample: some tokens in their order, some records, everything moved along.

Knows every array of a sample and what its info holds by position. Leaves out which tokens to keep:
cutting (`capping.py`), splitting (`split.py`) and pruning (here) say so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltree.samples.records import take_records
from rolltree.samples.stream_views import move_streams
from rolltree.types import Sample


def subset(
    sample: Sample, keep: NDArray[np.bool_], records: NDArray[np.bool_], **info: Any
) -> Sample:
    """Return the sample of the tokens in `keep` `[_T]` and the records in `records` `[_R]`.

    `keep` must hold every ancestor of what it keeps and the sources of the kept records. `info` is
    added to the sample's.
    """
    before = np.concatenate([[0], np.cumsum(keep)]).astype(np.int32)
    position_of = np.where(keep, before[:-1], -1).astype(np.int32)
    spans = (
        replace(span, start=int(before[span.start]), end=int(before[span.end]))
        for span in sample.info.get("spans", ())
    )
    return Sample(
        ids=sample.ids[keep],
        positions=sample.positions[keep],
        subtree_end=before[sample.subtree_end[keep]],
        records=take_records(
            sample.records, records, source=before[sample.records.source[records]]
        ),
        origins=sample.origins,
        info={
            **sample.info,
            "spans": tuple(span for span in spans if span.end > span.start),
            "streams": move_streams(sample.info.get("streams", {}), position_of),
            **info,
        },
    )


def prune_sample(sample: Sample) -> Sample:
    """Drop the tokens that no record needs: those with no source at or below them.

    The last sampled token of a path is one: its logits train nothing. Saves computing it.

    Example: ids `[5 6 7 8 9]` with `subtree_end` `[5 5 3 5 5]` and sources 1 and 3 keep `[5 6 8]`.
    """
    is_source = np.zeros(sample.num_tokens + 1, np.int64)
    is_source[sample.records.source + 1] = 1
    before = np.cumsum(is_source)
    keep = before[sample.subtree_end] > before[:-1]
    if keep.all():
        return sample
    return subset(sample, keep, np.ones(len(sample.records), np.bool_))
