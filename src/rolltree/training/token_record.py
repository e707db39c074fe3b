"""Collects the values that a step had for each sampled token, for the run store.

The trainer knows loss records in the order of its packs, and only those that it computed; the store
gets an array per rollout over all of its sampled tokens, in call order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from rolltree.samples.resolve import resolve_tokens
from rolltree.store import TrainedRollout
from rolltree.tokens import StepTokens, peek
from rolltree.training.advantages import CreditReport
from rolltree.training.batches import Batch
from rolltree.training.layout import FloatColumn, LongArray
from rolltree.training.metrics import RecordStats
from rolltree.values.types import Records, RolloutResult, State

_NONE = np.empty(0, np.float32)


class TokenRecord:
    """Collects the values that one step computes for its tokens.

    Args:
        results: the rollouts of the step.
        credit: which of them it trains, in the order of `records.rollout`, and their advantages.
    """

    def __init__(self, results: Sequence[RolloutResult], credit: CreditReport) -> None:
        self._states = credit.trained
        self._advantages = credit.advantages
        self._names = [(results[at].request.request_id, index) for at, index in credit.places]
        self._seen: list[tuple[Records, Records, RecordStats]] = []

    def add(self, batch: Batch, stats: RecordStats) -> None:
        """Keep the values of the first update on a batch; nothing is computed here."""
        self._seen.append((batch.counted, batch.records, stats))

    def rows(self, step: int) -> list[TrainedRollout]:
        """Return a row for each trained rollout of step `step`."""
        sampled = [self._num_sampled(state) for state in self._states]
        counts = np.array([n for calls in sampled for n in calls], np.int64)
        # `[_C + 1]`, where the sampled tokens of each call begin in the columns; `first_call` is
        # `[num_rollouts + 1]`, the number of each rollout's first call.
        starts = np.cumsum([0, *counts])
        first_call = np.array([*accumulate(map(len, sampled), initial=0)], np.int64)
        size = int(starts[-1])
        given = np.concatenate([_NONE, *self._advantages], dtype=np.float32)
        columns: dict[str, FloatColumn] = {
            # Every sampled token has its call's advantage. A token that is not trained has weight
            # 0, and NaN for the trainer's values.
            "advantage": np.repeat(given, counts),
            "weight": np.zeros(size, np.float32),
            "logprob": np.full(size, np.nan, np.float32),
            "entropy": np.full(size, np.nan, np.float32),
        }

        def place(records: Records) -> LongArray:
            places: LongArray = starts[first_call[records.rollout] + records.call] + records.offset
            return places

        for counted, computed, stats in self._seen:
            # `counted` has more records than were computed: those of rollouts without an advantage
            # count in the normalizers.
            at = place(counted)
            columns["advantage"][at] = counted.advantage
            columns["weight"][at] = counted.weight
            at = place(computed)
            if stats.factor is not None:
                columns["weight"][at] *= stats.factor
            known = {"logprob": stats.logprob, "entropy": stats.entropy}
            known |= {"reference": stats.reference} if stats.reference is not None else {}
            # Not needed with the reference's logprob, from which the KL can be computed.
            known |= {"kl": stats.kl} if stats.kl is not None and stats.reference is None else {}
            for name, values in known.items():
                column = columns.setdefault(name, np.full(size, np.nan, np.float32))
                column[at] = values
        edges = starts[first_call]
        rows = []
        for (request_id, index), calls, low, high in zip(
            self._names, sampled, edges[:-1], edges[1:], strict=True
        ):
            rows.append(
                TrainedRollout(
                    request_id=request_id,
                    trajectory_index=index,
                    step=step,
                    num_sampled=np.array(calls, np.int32),
                    **{name: column[low:high] for name, column in columns.items()},
                )
            )
        return rows

    @staticmethod
    def _num_sampled(state: State) -> list[int]:
        tree, handles = resolve_tokens(0, state["trajectory"], {})
        return [
            tree.num_sampled(handle) if handle >= 0 else _num_recorded(step)
            for handle, step in zip(handles, state["trajectory"], strict=True)
        ]


def _num_recorded(step: Any) -> int:
    """Return how many tokens a step sampled whose tokens, as assigned later, cannot be used."""
    tokens = peek(step, "tokens")
    return tokens.tree.num_sampled(tokens.call) if isinstance(tokens, StepTokens) else 0
