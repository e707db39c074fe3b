"""Turns trajectories into training samples, in four scopes over one token tree."""

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.samples.build import DEFAULT_SCOPE, SampleBatch, build_samples
from rolltree.samples.packing import PackedSamples, pack_samples
from rolltree.samples.report import Skipped, SkipReason, sample_meta
from rolltree.samples.streams import SampleStream
from rolltree.samples.transform import (
    concat_records,
    join_samples,
    prune_sample,
    split_sample,
    take_records,
)
from rolltree.samples.truncation import TruncationEffect, TruncationPolicy, truncation_effect

if TYPE_CHECKING:
    from rolltree.samples.rows import (
        process_trajectories_for_training as process_trajectories_for_training,
    )
    from rolltree.samples.rows import to_examples as to_examples

__getattr__ = loader(__name__, {"rows": "process_trajectories_for_training to_examples"})

__all__ = [
    "DEFAULT_SCOPE",
    "PackedSamples",
    "SampleBatch",
    "SampleStream",
    "SkipReason",
    "Skipped",
    "TruncationEffect",
    "TruncationPolicy",
    "build_samples",
    "concat_records",
    "join_samples",
    "pack_samples",
    "process_trajectories_for_training",
    "prune_sample",
    "sample_meta",
    "split_sample",
    "take_records",
    "to_examples",
    "truncation_effect",
]
