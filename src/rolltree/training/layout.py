"""Lays samples side by side for one forward pass, and finds which blocks attend to which.

Depth-first order gives a key that is on a path a contiguous range of queries: token j is attended
by the tokens `j .. subtree_end[j] - 1`. So attention over a tree is a short list of dense
rectangles, with a mask only when a block meets itself or the edge of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rolltree.samples import join_samples
from rolltree.tokens import ROUTED_EXPERTS
from rolltree.values.errors import TokenError
from rolltree.values.types import Records, Sample

BoolArray: TypeAlias = NDArray[np.bool_]
LongArray: TypeAlias = NDArray[np.int64]
FloatColumn: TypeAlias = NDArray[np.float32]

NO_RECORDS = (
    "there is no loss record in these samples, so there is nothing to train on. Check that the "
    "rollouts carry token ids and that credit left some of them to train."
)
DEFAULT_BLOCK = 64
"""Keys per block. Measured on CPU: 32 costs calls, 256 costs masked work (design/0003)."""

_FAR = 16
"""Length of a path, in blocks, above which its pieces have twice as many keys."""


_GAP = 32
"""Smaller gaps between two ranges of queries are computed and masked, in one call for both."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """How far back a layer looks: the last `window` tokens, the tokens of its `chunk`, or both.

    Token i sees its ancestor j if `depth[i] - depth[j] < window` and
    `depth[i] // chunk == depth[j] // chunk`.
    """

    window: int | None = None
    chunk: int | None = None

    def __getitem__(self, index: Any) -> Pattern:
        """Return itself: it stands for a mask, and models cut masks to the queries that they keep.

        Raises:
            TypeError: the slice leaves queries out.
        """
        if any(part not in (slice(None), slice(0, None)) for part in index):
            raise TypeError("the model drops queries inside its layers, and a tree needs them all")
        return self

    def limit(self, depth: NDArray[np.int32]) -> LongArray | None:
        """Return the depth from which no token sees a key of this `depth`; None: no limit."""
        limits = []
        if self.window is not None:
            limits.append(depth.astype(np.int64) + self.window)
        if self.chunk is not None:
            limits.append((depth.astype(np.int64) // self.chunk + 1) * self.chunk)
        # A pattern longer than every path hides nothing, so its layers share the full blocks.
        if not limits or min(limit.min() for limit in limits) > depth.max():
            return None
        limit: LongArray = np.minimum.reduce(limits)
        return None if (limit > depth.max()).all() else limit

    def __and__(self, other: Pattern) -> Pattern:
        windows = [w for w in (self.window, other.window) if w is not None]
        chunks = {c for c in (self.chunk, other.chunk) if c is not None}
        if len(chunks) > 1:
            raise ValueError(f"two chunk sizes in one layer: {sorted(chunks)}")
        return Pattern(min(windows, default=None), next(iter(chunks), None))


FULL = Pattern()


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys `first .. stop - 1` and queries `start .. reach - 1`, which are computed together.

    Each of `masks` is the first query that it applies to, and the keys that this query and the next
    ones see, bool `[queries, stop - first]`. The other queries see every key of the block.
    """

    first: int
    stop: int
    start: int
    reach: int
    masks: tuple[tuple[int, BoolArray], ...]


@dataclass(frozen=True, slots=True)
class Forest:
    """Several samples as one row of tokens.

    `ids`, `positions`, `subtree_end` are int32 `[_T]`. `rows` are the positions whose logits are
    needed, int64 `[_S]`, each with its `row_temperature`; record r reads row `record_row[r]`.
    `routed_experts`, int32 `[_T, layers, experts per token]`, has the choices of the engine's
    routers, -1 if they were not recorded; None: they were not recorded for any token.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    subtree_end: NDArray[np.int32]
    records: Records
    rows: LongArray
    row_temperature: NDArray[np.float32]
    record_row: LongArray
    routed_experts: NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that one forward pass computes."""
        return len(self.ids)

    @property
    def is_path(self) -> bool:
        """Whether the forest is one unbranched sequence, for which causal attention is exact."""
        return bool((self.subtree_end == len(self.ids)).all())


def collate(samples: Sequence[Sample]) -> Forest:
    """Lay samples side by side; no token of one sees a token of another.

    Raises:
        TokenError: there is no record at all, or a record points outside its sample.
    """
    # Check before joining: afterwards such a record would read another sample's logits.
    for index, sample in enumerate(samples):
        source = sample.records.source
        if len(source) and (source.min() < 0 or source.max() >= len(sample.ids)):
            raise TokenError(
                f"sample {index} ({rollout_names(sample)}) has {len(sample.ids)} tokens and a loss "
                f"record at position {int(source.max())}; its logits would come from another "
                "sample. Build samples with rolltree.samples.build_samples."
            )
    joined = join_samples(samples)
    records = joined.records
    if not len(records):
        raise TokenError(NO_RECORDS)
    # One row of logits per position and temperature, however many records read it.
    key = np.stack([records.source.astype(np.float64), records.temperature.astype(np.float64)])
    unique, inverse = np.unique(key, axis=1, return_inverse=True)
    return Forest(
        ids=joined.ids,
        positions=joined.positions,
        subtree_end=joined.subtree_end,
        records=records,
        rows=unique[0].astype(np.int64),
        row_temperature=unique[1].astype(np.float32),
        # numpy 2.0.0 returns the inverse with two dimensions, other versions with one.
        record_row=np.asarray(inverse, np.int64).reshape(-1),
        routed_experts=_routed_experts(joined),
    )


def _routed_experts(sample: Sample) -> NDArray[np.int32] | None:
    stream = sample.info["streams"].get(ROUTED_EXPERTS)
    if stream is None:
        return None
    values = stream.values
    if isinstance(values, tuple) or values.ndim != 3 or values.dtype.kind not in "iu":
        raise TokenError(
            f"the stream {ROUTED_EXPERTS!r} of a sample is not one array of integers [layers, "
            "experts per token] per token, so it cannot be replayed. Record it as the engines do, "
            "or give the stream another name."
        )
    dense = np.full((len(sample.ids), *values.shape[1:]), -1, np.int32)
    dense[stream.positions] = values
    return dense


def key_blocks(
    subtree_end: NDArray[np.int32],
    max_block: int = DEFAULT_BLOCK,
    depth: NDArray[np.int32] | None = None,
    limit: LongArray | None = None,
) -> tuple[KeyBlock, ...]:
    """Cut a forest, `[_T]` in depth-first order, into blocks that together cover each pair once.

    A block's keys are either a run of whole small subtrees (nothing outside sees them) or a piece
    of a path that is longer than a block (everything below sees them all, as far as `limit`, a
    pattern's, allows). If many queries are below, twice `max_block` keys save calls, and the masked
    part of the block is small in comparison.
    """
    ends = subtree_end.tolist()
    num_tokens = len(ends)
    blocks: list[KeyBlock] = []
    first = 0
    while first < num_tokens:
        end = ends[first]
        if end - first <= max_block:
            # Take whole subtrees while they fit: no query outside the run sees its keys.
            stop = end
            while stop < num_tokens and ends[stop] - first <= max_block:
                stop = ends[stop]
            reach = stop
        else:
            # Take a piece of a path: while subtrees end at the same token, nothing branches off.
            stop = first + 1
            far = end - first
            if depth is not None and limit is not None:
                # Queries beyond the window are not computed, so they do not count for the width.
                far = min(far, int(limit[first] - depth[first]))
            most = 2 * max_block if far > _FAR * max_block else max_block
            while stop - first < most and stop < num_tokens and ends[stop] == end:
                stop += 1
            reach = end
        index = np.arange(first, stop)
        # `[queries, keys]` of the block's own square.
        own = (index[:, None] >= index) & (index[:, None] < subtree_end[first:stop])
        if depth is None or limit is None:
            blocks.append(KeyBlock(first, stop, first, reach, ((first, own),)))
        else:
            blocks += _limited(first, stop, reach, own, depth, limit)
        first = stop
    return tuple(blocks)


def _limited(
    first: int, stop: int, reach: int, own: BoolArray, depth: NDArray[np.int32], limit: LongArray
) -> list[KeyBlock]:
    """Return the ranges of queries that see keys `first .. stop - 1`; `own` is their own square."""
    limits = limit[first:stop]
    below = depth[stop:reach]
    # A query sees some key of the block if it is less deep than the largest limit, and all of them
    # if it is less deep than the smallest (design/0003).
    seen = np.concatenate([np.ones(stop - first, np.bool_), below < limits.max()])
    partly = np.concatenate([np.ones(stop - first, np.bool_), below >= limits.min()])
    blocks = []
    # `_runs` fills small gaps, whose queries see nothing. They are in `partly`, so they get a mask.
    for start, end in _runs(seen):
        masks = []
        for top, bottom in _runs(partly[start:end]):
            rows = np.arange(first + start + top, first + start + bottom)
            mask = depth[rows][:, None] < limits
            inside = rows < stop
            mask[inside] &= own[rows[inside] - first]
            masks.append((int(rows[0]), mask))
        blocks.append(KeyBlock(first, stop, first + start, first + end, tuple(masks)))
    return blocks


def _runs(wanted: BoolArray) -> list[tuple[int, int]]:
    """Return the ranges in which `wanted` is true, joined if they are less than `_GAP` apart."""
    # `diff` of booleans is True at each change, so starts and stops alternate.
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).reshape(-1, 2)
    runs: list[tuple[int, int]] = []
    for start, stop in edges.tolist():
        if runs and start - runs[-1][1] < _GAP:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def rollout_names(sample: Sample) -> str:
    """Return the ids of the rollouts of a sample, for messages."""
    names = list(dict.fromkeys(origin.rollout_id for origin in sample.origins)) or ["unnamed"]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
