"""Trajectories to training samples, in four scopes over one token tree. numpy only."""

from rolltree.samples.batch import SampleBatch, build_samples
from rolltree.samples.metadata import sample_meta
from rolltree.samples.packing import PackedSamples, pack
from rolltree.samples.report import Skipped, SkipReason
from rolltree.samples.spans import CallSpan
from rolltree.samples.spec1 import process_trajectories_for_training, to_examples
from rolltree.samples.split import join_samples, split_sample
from rolltree.samples.stream_views import SampleStream
from rolltree.samples.subset import prune_sample
from rolltree.samples.truncation import (
    TruncationEffect,
    TruncationPolicy,
    truncation_effect,
    truncation_effects,
)

__all__ = [
    "CallSpan",
    "PackedSamples",
    "SampleBatch",
    "SampleStream",
    "SkipReason",
    "Skipped",
    "TruncationEffect",
    "TruncationPolicy",
    "build_samples",
    "join_samples",
    "pack",
    "prune_sample",
    "sample_meta",
    "process_trajectories_for_training",
    "split_sample",
    "to_examples",
    "truncation_effect",
    "truncation_effects",
]
