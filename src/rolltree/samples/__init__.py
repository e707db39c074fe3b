"""Trajectories to training samples, in four scopes over one token tree. numpy only."""

from rolltree.samples.batch import SampleBatch, build_samples
from rolltree.samples.spans import CallSpan
from rolltree.samples.stream_views import SampleStream

__all__ = ["CallSpan", "SampleBatch", "SampleStream", "build_samples"]
