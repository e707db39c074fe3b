"""Checks the loss weight of every trained token against masks, aggregation and correction.

A token's weight is the coefficient that the aggregation gives its call, times the correction of its
importance ratio. A stored row bounds that coefficient for each call; all rows of a step give its
value, computed by the functions that training used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rolltree.insight.auditing.rollout import Call, TrainedFacts
from rolltree.store.trained import TrainedRollout
from rolltree.training.algorithms import Algorithm
from rolltree.training.coefficients import coefficients, get_correction
from rolltree.training.config import TrainConfig

# Stands for infinity, which JSON, used between the processes of an audit, cannot hold.
_NO_LIMIT = 3e38
# Two forward passes of a model give logprobs that differ by about this; a correction reads those of
# the first.
_LOGPROB_NOISE = 1e-3
_RELATIVE = 1e-4
# Recorded values that an environment may replace, and with them what the tokens are.
_TOKEN_LISTS = frozenset(("prompt_ids", "completion_ids"))


@dataclass(frozen=True, slots=True)
class UsedTokens:
    """Which sampled tokens of a trajectory are in the loss, bool `[_T]`.

    `is_known`: the stored values determine it, which they do only if masks are 0 or 1.
    """

    used: NDArray[np.bool_]
    is_known: bool = True


def used_tokens(
    row: TrainedRollout,
    calls: Sequence[Call],
    lag: NDArray[Any] | None,
    max_lag: int,
    max_seq_len: int | None,
    *,
    is_supervised: bool = False,
) -> UsedTokens:
    """Return which tokens masks, `lag` (None: all 0) and `max_seq_len` leave in the loss.

    Calls that were not sampled from the model's own distribution, or without logprobs, are left out
    as a whole, except for supervised losses; calls that their session leaves out, for all losses.
    """
    used = np.ones(row.num_tokens, np.bool_)
    at, is_known = 0, True
    for call in calls:
        size, prompt = call.num_sampled, call.tokens.tree.prompt_len(call.handle)
        if not call.is_valid:
            used[at : at + size] = False
            at += size
            continue
        mask: Any = None
        if "completion_mask" in call.tokens.assigned:
            mask = call.tokens["completion_mask"]
        elif call.value_range("weight") != (1.0, 1.0):
            mask = call.tokens.tree.mask(call.handle)
        is_known = is_known and not _TOKEN_LISTS & {*call.tokens.assigned}
        if mask is not None and np.size(mask):  # an empty one, as None, says nothing
            values = np.broadcast_to(np.asarray(mask, np.float32), size)
            if not np.isin(values, (0.0, 1.0)).all():
                is_known = False
            else:
                used[at : at + size] = values != 0
        if not prompt:  # the first token has no context to be predicted from
            used[at : at + 1] = False
        is_own = not call.changed_sampling and call.logprobs is not None
        if call.left_out is not None or not (is_supervised or is_own):
            used[at : at + size] = False
        if max_seq_len is not None and prompt + size > max_seq_len:
            used[at + max(0, max_seq_len - prompt) : at + size] = False
        at += size
    if lag is not None:
        used &= lag <= max_lag
    return UsedTokens(used, is_known)


def note_weights_of_calls(
    known: TrainedFacts,
    row: TrainedRollout,
    tokens: UsedTokens,
    engine: NDArray[np.float64],
    config: TrainConfig,
    algorithm: Algorithm,
) -> None:
    """Note how many tokens of each call are used, and the bounds of the call's coefficient."""
    used = tokens.used
    known.is_weighted = tokens.is_known
    sizes = row.num_sampled[row.num_sampled > 0].astype(np.int64)
    if not tokens.is_known or not len(sizes):
        return
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    known.used = np.add.reduceat(used, starts, dtype=np.int64).tolist()
    weight = row.weight.astype(np.float64)
    least = most = weight
    if algorithm.correction is not None:
        if config.train.minibatches > 1:
            # Later mini-batches are corrected by logprobs from before the first update, but the
            # stored ones are from after it.
            known.is_weighted = False
            return
        low, high = _factors(row, used, engine, algorithm)
        least = weight / np.maximum(high, 1e-30)
        most = np.where(low > 0, weight / np.maximum(low, 1e-30), _NO_LIMIT)
    if not used.all():
        least, most = np.where(used, least, 0.0), np.where(used, most, _NO_LIMIT)
    known.least = np.maximum.reduceat(least, starts).tolist()
    known.most = np.minimum.reduceat(most, starts).tolist()


def _factors(
    row: TrainedRollout, used: NDArray[np.bool_], engine: NDArray[np.float64], algorithm: Algorithm
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds of each token's correction, float64 `[_T]`; 1 if it was not computed."""
    assert algorithm.correction is not None
    correction = get_correction(algorithm.correction)
    low, high = np.ones(len(used)), np.ones(len(used))
    computed = used & np.isfinite(row.logprob) & np.isfinite(engine)
    if not computed.any():
        return low, high
    difference = (row.logprob - engine)[computed].astype(np.float32)
    records = cast(Any, SimpleNamespace(rollout=np.zeros(len(difference), np.int32)))
    found = [
        correction.fn(records, difference + np.float32(noise), algorithm.correction_parameters)
        for noise in (-_LOGPROB_NOISE, 0.0, _LOGPROB_NOISE)
    ]
    low[computed], high[computed] = np.minimum.reduce(found), np.maximum.reduce(found)
    return low, high


def minibatches(
    rows: Sequence[TrainedFacts], in_loss: Sequence[bool], config: TrainConfig
) -> list[list[int]] | None:
    """Return which rows each mini-batch of a step has, as `split_rollouts` cuts them.

    Rows that train nothing are in none. None if it is not known what the rows train.
    """
    if not all(len(row.used) == len(row.sampling_calls) for row in rows):
        return None
    trained = [at for at, row in enumerate(rows) if in_loss[at] and any(row.used)]
    parts = np.array_split(trained, max(1, min(config.train.minibatches, len(trained))))
    return [part.tolist() for part in parts]


def differing_weights(
    rows: Sequence[TrainedFacts], in_loss: Sequence[bool], config: TrainConfig, algorithm: Algorithm
) -> list[tuple[int, int, float]]:
    """Return the calls of a step that were trained with other weights than the aggregation's.

    Args:
        rows: what the step trained, in the trainer's order.
        in_loss: whether the truncation policy leaves each of them in the loss.
        config: the run's settings.
        algorithm: the run's algorithm, resolved.

    Returns:
        `(row, call, the right coefficient)` for the first call of each row that differs; `call`
        counts only calls that sampled tokens.
    """
    parts = minibatches(rows, in_loss, config)
    if parts is None or not all(row.is_weighted for row in rows):
        return []
    used = [
        np.array(row.used, np.float32) * is_in for row, is_in in zip(rows, in_loss, strict=True)
    ]
    place = np.repeat(np.arange(len(rows)), [len(each) for each in used])
    call = np.concatenate([np.arange(len(each)) for each in used]) if used else np.empty(0)
    weight = np.concatenate(used) if used else np.empty(0, np.float32)
    right = np.zeros(len(weight))
    for part in parts:
        at = np.flatnonzero(np.isin(place, part) & (weight > 0))
        if not len(at):
            continue
        records = cast(
            Any, SimpleNamespace(weight=weight[at], rollout=place[at], call=call[at].astype(int))
        )
        found = coefficients(records, algorithm.aggregation, algorithm.fixed_length)
        if algorithm.over_rollout:
            _, group = np.unique(place[at], return_inverse=True)
            mean = np.bincount(group, found) / np.bincount(group, weight[at])
            found = (mean[group] * weight[at]).astype(np.float32)
        right[at] = found / weight[at]
    least = np.concatenate([row.least for row in rows]) if len(rows) else np.empty(0)
    most = np.concatenate([row.most for row in rows]) if len(rows) else np.empty(0)
    # A call without used tokens has no upper bound; `least` or an earlier check finds its weights.
    most = np.where(weight > 0, most, _NO_LIMIT)
    wrong = (least > right * (1 + _RELATIVE) + 1e-12) | (most < right * (1 - _RELATIVE) - 1e-12)
    first: dict[int, tuple[int, int, float]] = {}
    for index in np.flatnonzero(wrong).tolist():
        where = int(place[index])
        first.setdefault(where, (where, int(call[index]), float(right[index])))
    return list(first.values())
