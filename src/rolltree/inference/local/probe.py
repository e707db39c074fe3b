"""Tries ways to run a model, and finds the fastest that gives the model's own logits.

`choose_route` tries the ways from the fastest to the slowest on a trial copy (`shell.py`): the
forward pass of `lean.py`, transformers with the slots' attention, and row by row, with the model's
own cache or with none. It takes the first whose logits match those of teacher-forced passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rolltree.inference.local.runner import ModelRunner
from rolltree.inference.local.shell import MOVING_ROPE, SHORT, cache_of, shell_of, trial_copy
from rolltree.inference.local.slots import DummyLayer, KvShape, LayerShape
from rolltree.values.errors import UnsupportedSetting
from rolltree.values.types import IntArray

if TYPE_CHECKING:
    from rolltree.inference.local.rows import RowMode, RowRunner

    Runner = ModelRunner | RowRunner

# Tolerances for logits, relative to the largest logit, in fp32 and in lower precision. A correct
# runner stays below 3e-6 in fp32; a layer with wrong positions differs by 5e-2 (design/0002).
_FP32_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-4, 0.1
# The errors of a model's own code when it is run in a way that it does not support.
_FAILURES = (
    *(TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError),
    *(NotImplementedError, ArithmeticError, UnsupportedSetting),
)
_PROBE_LEN, _CAPACITY = 4 * SHORT, 5 * SHORT


@dataclass(frozen=True, slots=True)
class Route:
    """How to run a model: in slots of `shape` (`lean` or not), or row by row in `row_mode`."""

    shape: KvShape | None
    lean: bool = False
    row_mode: RowMode | None = None
    # The memory of a row's two states at full length; 0 without a cache.
    row_bytes: int = 0
    # Why the faster ways do not work.
    reason: str = ""

    def slot_bytes(self, capacity: int) -> int:
        """Return the memory of one row of `capacity` tokens."""
        return self.row_bytes if self.shape is None else self.shape.token_bytes * capacity

    def runner(
        self,
        model: Any,
        num_slots: int,
        capacity: int,
        *,
        packed: bool = False,
        invariant: bool = False,
    ) -> Runner:
        """Make the runner that computes this model's logits."""
        if self.shape is None:
            from rolltree.inference.local.rows import RowRunner

            assert self.row_mode is not None
            return RowRunner(model, self.row_mode, num_slots)
        return ModelRunner(
            model,
            self.shape,
            num_slots,
            capacity,
            lean=self.lean,
            packed=packed,
            invariant=invariant,
        )


@torch.inference_mode()
def choose_route(model: Any, max_context: int, packed: bool = False) -> Route:
    """Return the fastest way to run `model` that gives its own logits.

    `packed` is passed on to `LeanForward`.

    Raises:
        UnsupportedSetting: none works; the message says why.
    """
    check_positions(model, max_context)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < _PROBE_LEN:
        raise _refusal(model, f"has {positions} positions, and the probe needs {_PROBE_LEN}")
    try:
        # Copies made in inference mode could not be changed in place outside it.
        with torch.inference_mode(False):
            trial = trial_copy(model, max_context)
        trials: list[_Trial] = [(trial, _Expected(trial))]
        # A small model's trial copy is in float32; the model's own dtype is probed as well.
        if trial.dtype != model.dtype or model.dtype not in (torch.float32, torch.float64):
            plain = shell_of(model)
            trials.append((plain, _Expected(plain)))
    except _FAILURES as error:
        raise _refusal(model, f"does not run on token ids alone ({error})") from error
    # The fastest first. `counts` is for models that derive positions from the length of their
    # cache (Llama 4).
    for lean, counts in ((True, False), (False, True), (False, False)):
        reason = _slots_reason(trials, lean=lean, counts=counts, packed=packed)
        if reason is None:
            return Route(replace(_kv_shape(shell_of(model)), counts=counts), lean)
    from rolltree.inference.local.rows import RowMode, RowRunner

    slower = None
    for mode in RowMode:
        makers = [partial(RowRunner, tried, mode, 3) for tried, _ in trials]
        before, slower = slower, _first_reason(trials, makers)
        if slower is None:
            if mode is RowMode.WHOLE:
                reason = f"{reason}, and every token computes its whole row again: it {before}"
            row_bytes = _row_bytes(model, mode, max_context)
            return Route(None, row_mode=mode, row_bytes=row_bytes, reason=reason or "")
    raise _refusal(model, slower or "")


def _slots_reason(trials: list[_Trial], *, lean: bool, counts: bool, packed: bool) -> str | None:
    """Return the reason why slots do not reproduce the trials' logits, or None."""
    try:
        shapes = [replace(_kv_shape(tried), counts=counts) for tried, _ in trials]
        routes = [Route(shape, lean) for shape in shapes]
    except _FAILURES as error:
        return str(error)
    makers = [
        partial(route.runner, tried, 3, _CAPACITY, packed=packed)
        for route, (tried, _) in zip(routes, trials, strict=True)
    ]
    return _first_reason(trials, makers)


def _first_reason(trials: Sequence[_Trial], makers: Sequence[Callable[[], Runner]]) -> str | None:
    found = (trial[1].difference(make) for trial, make in zip(trials, makers, strict=True))
    return next((reason for reason in found if reason is not None), None)


class _Expected:
    """Reference logits of three sequences, from plain teacher-forced passes.

    The third sequence shares a prefix with the first and copies it from the first one's cache. All
    are several times as long as the short windows of a trial copy.
    """

    _SHARED = 19
    _STEPS: tuple[tuple[list[int], list[int], list[int]], ...] = (
        ([0, 1], [0, 0], [5, 21]),
        ([0, 1], [5, 21], [1, 1]),
        ([0, 1], [6, 22], [14, 1]),
        ([0, 1], [20, 23], [1, 7]),
        ([2], [_SHARED], [9]),
        ([0, 1, 2], [21, 30, 28], [1, 1, 1]),
    )

    def __init__(self, model: Any) -> None:
        vocabulary = model.config.get_text_config().vocab_size
        ids = np.random.default_rng(0).integers(0, 2**20, (3, _CAPACITY)) % (vocabulary - 2) + 2
        ids[2, : self._SHARED] = ids[0, : self._SHARED]
        self.ids: IntArray = ids.astype(np.int32)
        tokens = torch.from_numpy(ids[:, :_PROBE_LEN]).to(model.device)
        self._logits = [
            model(input_ids=row[None], use_cache=False).logits[0].float() for row in tokens
        ]
        self._largest = max(float(logits.abs().max()) for logits in self._logits)
        self._exact = model.dtype in (torch.float32, torch.float64)
        self._limit = (_FP32_TOLERANCE if self._exact else _LOW_PRECISION_TOLERANCE) * self._largest

    def difference(self, make_runner: Callable[[], Runner]) -> str | None:
        """Compare a runner of three rows with the plain passes; return the difference, or None."""
        try:
            gaps = list(self._gaps(make_runner()))
        except _FAILURES as error:
            return f"fails with a cache: {type(error).__name__}: {error}"
        gap = max(gaps)
        # In low precision, an MoE router may choose a different expert for an occasional token,
        # whose logits then differ by any amount.
        judged = gap if self._exact or gap == float("inf") else float(np.median(gaps))
        if judged <= self._limit:
            return None
        return f"gives different logits in a batch with a cache than alone (by up to {gap:.1e})"

    def _gaps(self, runner: Runner) -> Iterator[float]:
        for rows, start, counts in self._STEPS:
            if rows == [2]:
                # As members of a group copy the prompt from the row that computed it.
                runner.cache.copy(0, 2, self._SHARED)
            found = runner.forward(rows, self.ids, np.array(start), np.array(counts))
            for row, first, count, logits in zip(rows, start, counts, found, strict=True):
                gap = float((logits - self._logits[row][first + count - 1]).abs().max())
                # NaN would pass the comparison with the limit.
                yield gap if gap == gap else float("inf")


_Trial = tuple[Any, _Expected]


def _kv_shape(model: Any) -> KvShape:
    """Return the shape of one token's keys and values.

    Raises:
        ValueError: the model caches anything else.
    """
    ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    output = model(input_ids=ids, use_cache=True)
    layers = getattr(cache_of(output), "layers", [])
    if not any(isinstance(layer, DynamicLayer) for layer in layers):
        raise ValueError("returned no cache of keys and values")
    shapes: list[LayerShape | None] = []
    for index, layer in enumerate(layers):
        if type(layer) is DummyLayer:
            shapes.append(None)
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            (_, num_heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[3]
            if layer.values.shape[1] != num_heads:
                raise ValueError(f"has different numbers of key and value heads in layer {index}")
            shapes.append(LayerShape(num_heads, key_dim, value_dim))
        else:
            raise ValueError(f"keeps a {type(layer).__name__} in layer {index}")
    keys = next(layer.keys for layer in layers if type(layer) is not DummyLayer)
    return KvShape(tuple(shapes), keys.dtype, keys.device)


def _row_bytes(model: Any, mode: RowMode, max_context: int) -> int:
    """Return the memory of a row's two states at full length, extrapolated from 4 and 8 tokens."""
    from rolltree.inference.local.rows import RowMode, RowRunner, state_bytes

    if mode is RowMode.WHOLE:
        return 0
    sizes = []
    for length in (4, 8):
        runner = RowRunner(model, mode, 1)
        ids = np.arange(2, 2 + length, dtype=np.int32)[None]
        runner.forward([0], ids, np.array([0]), np.array([length]))
        sizes.append(state_bytes(runner.cache.newest[0].cache))
    # Recurrent states do not grow with the length; keys and values do.
    per_token = max(0, sizes[1] - sizes[0]) // 4
    return 2 * (sizes[1] + per_token * max(0, max_context - 8))


def check_positions(model: Any, max_context: int) -> None:
    """Check that a token's position embedding does not depend on the later length of the sequence.

    Raises:
        UnsupportedSetting: it does within `max_context` tokens.
    """
    limit = max_stable_positions(model)
    if limit is not None and max_context > limit:
        raise _refusal(
            model,
            f"has position embeddings that change when a sequence passes {limit} tokens, so "
            f"tokens sampled before would then have different logits; use max_context={limit}",
        )


def max_stable_positions(model: Any) -> int | None:
    """Return the length up to which position embeddings stay the same; None: any length.

    LongRoPE: Ding et al. 2024, arXiv:2402.13753.
    """
    config = model.config.get_text_config()
    found = getattr(config, "rope_parameters", None) or {}
    limits = []
    for rope in (found, *(part for part in found.values() if isinstance(part, dict))):
        if rope.get("rope_type") in MOVING_ROPE:
            original = rope.get("original_max_position_embeddings")
            # Dynamic NTK scaling grows beyond the configured maximum; LongRoPE changes its factors
            # beyond the original training length.
            limits.append(int(original or config.max_position_embeddings))
    return min(limits, default=None)


@torch.inference_mode()
def check_invariance(model: Any, route: Route, packed: bool = False) -> None:
    """Check that a sequence has bitwise equal logits alone and in a batch with others.

    Raises:
        UnsupportedSetting: they differ.
    """
    if route.shape is None:
        raise UnsupportedSetting(
            f"batch_invariant is not supported by {type(model).__name__}, which runs row by row "
            f"because it {route.reason}. Leave batch_invariant out."
        )
    vocabulary = model.config.get_text_config().vocab_size
    ids = (np.arange(120).reshape(3, 40) * 7 % vocabulary).astype(np.int32)
    found = []
    for steps in (
        [([1], [0], [39]), ([1], [39], [1])],
        [
            ([0, 1], [0, 0], [38, 11]),
            ([1, 2], [11, 0], [28, 17]),
            ([0, 1, 2], [38, 39, 17], [1] * 3),
        ],
    ):
        runner = route.runner(model, 3, 40, packed=packed, invariant=True)
        for rows, start, counts in steps:
            logits = runner.forward(rows, ids, np.array(start), np.array(counts))
        found.append(logits[rows.index(1)])
    # Bitwise, since the setting promises it.
    if not torch.equal(*found):
        gap = float((found[0] - found[1]).abs().max())
        raise UnsupportedSetting(
            f"batch_invariant is not supported by {type(model).__name__} in {model.dtype} on "
            f"{model.device}: a sequence's logits change with the batch (by up to {gap:.1e}). "
            "Try float32, or leave batch_invariant out."
        )


def _refusal(model: Any, reason: str) -> UnsupportedSetting:
    return UnsupportedSetting(
        f"the embedded engine cannot run {type(model).__name__}: it {reason}. Samples "
        "might not follow the model's distribution. Serve this model with vLLM and use its URL."
    )
