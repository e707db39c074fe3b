"""The tables of model calls, tokens and breaks, from the token trees of stored rollouts.

Prompt tokens that an earlier call of the rollout already had are left out unless whole contexts are
requested, so a rollout of T turns has O(unique tokens) rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from rolltree.records.columns import BREAKS, CALLS, TOKENS
from rolltree.records.table import Batch, Column
from rolltree.rollouts.decode import decode_rollout
from rolltree.samples.build import trajectory_breaks
from rolltree.samples.resolve import ResolvedRollout, ResolvedStep, resolve_rollout
from rolltree.store import Run, StoredRollout, TrainedRollout
from rolltree.tokens import Decoder, TokenTree, peek
from rolltree.values.errors import StoreError
from rolltree.values.types import IntArray, State

BATCH_ROWS = 65_536
_KINDS = {column.name: column.kind for column in TOKENS}


def state_of(row: StoredRollout) -> State | None:
    """Return the one state of a stored row; None when the request failed before it made one."""
    states = decode_rollout(row).states
    return states[0] if states else None


# -- calls -----------------------------------------------------------------------------------------


def call_batches(rows: Iterable[StoredRollout]) -> Iterator[Batch]:
    """Yield the rows of table `calls`."""
    yield from _row_batches(rows, CALLS, call_rows)


def call_rows(state: State) -> Iterator[dict[str, Any]]:
    """Yield the rows of table `calls` of one rollout, without its name."""
    rollout = resolve_rollout(0, state, skip_invalid=True)
    shown = _Shown(rollout.tree)
    for step, source in zip(rollout.steps, state["trajectory"], strict=True):
        extras = peek(source, "extras") or {}
        response = peek(source, "response")
        yield {
            "call": step.index,
            "agent": step.agent,
            "turn": step.turn,
            "num_new_tokens": None,
            "min_version": None,
            "max_version": None,
            "mean_logprob": None,
            "num_prompt_tokens": _whole(extras.get("num_prompt_tokens")),
            "num_completion_tokens": _whole(extras.get("num_completion_tokens")),
            "finish_reason": step.finish_reason,
            "temperature": _real(extras.get("temperature")),
            "sent_ms": _ms(response, "sent_s"),
            "time_ms": _ms(response, "time_s"),
            "wait_ms": _ms(response, "wait_s"),
            "reward": _real(source.get("reward")),
            "advantage": _real(source.get("advantage")),
            "left_out": step.left_out,
            **(_sampled_facts(rollout.tree, step.handle, shown) if step.handle >= 0 else {}),
        }


def _ms(response: Any, name: str) -> float | None:
    seconds: float | None = getattr(response, name, None)
    return None if seconds is None else 1000.0 * seconds


def _sampled_facts(tree: TokenTree, call: int, shown: _Shown) -> dict[str, Any]:
    prompt_len, count = tree.prompt_len(call), tree.num_sampled(call)
    versions, logprobs = tree.versions(call), tree.logprobs(call)
    return {
        "num_prompt_tokens": prompt_len,
        "num_new_tokens": prompt_len - min(shown.add(call), prompt_len),
        "num_completion_tokens": count,
        "min_version": int(versions.min()) if count else None,
        "max_version": int(versions.max()) if count else None,
        "mean_logprob": float(logprobs.mean()) if logprobs is not None and count else None,
    }


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _real(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


# -- breaks ----------------------------------------------------------------------------------------


def break_batches(rows: Iterable[StoredRollout], decode: Decoder | None) -> Iterator[Batch]:
    """Yield the rows of table `breaks`; with a decoder (ids to text) their texts too."""
    # A single call has no prefix to break, so such rollouts need not be decoded.
    several = (row for row in rows if row.num_calls > 1)
    yield from _row_batches(several, BREAKS, partial(break_rows, decode=decode))


def break_rows(state: State, decode: Decoder | None) -> list[dict[str, Any]]:
    """Return the rows of table `breaks` of one rollout, without its name."""
    return [
        {
            "call": found.call,
            "previous_call": found.previous,
            "agent": found.agent,
            "position": found.position,
            "cause": str(found.cause),
            "previous_ids": found.previous_ids.tolist(),
            "current_ids": found.current_ids.tolist(),
            "previous_text": found.previous_text,
            "current_text": found.current_text,
        }
        for found in trajectory_breaks(state, decode)
    ]


def _row_batches(
    rows: Iterable[StoredRollout],
    columns: Sequence[Column],
    read: Callable[[State], Iterable[dict[str, Any]]],
) -> Iterator[Batch]:
    """Yield the rows that `read` returns for each rollout, as columns."""
    batch: dict[str, list[Any]] = {column.name: [] for column in columns}
    for row in rows:
        state = state_of(row)
        for found in () if state is None else read(state):
            found |= {"request_id": row.request_id, "trajectory_index": row.trajectory_index}
            for name, values in batch.items():
                values.append(found[name])
        if len(batch["call"]) >= BATCH_ROWS // 8:
            yield batch
            batch = {name: [] for name in batch}
    if batch["call"]:
        yield batch


# -- tokens ----------------------------------------------------------------------------------------


class _Shown:
    """The tokens of a tree that were in the contexts of the calls so far."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._seen = np.zeros(tree.num_tokens, bool)

    def add(self, call: int) -> int:
        """Add a call's path; return how many of its first tokens had been added already."""
        tree = self._tree
        known = tree.path_len(call)
        # From the end of the path backwards, up to the first run of the arena with a seen token.
        for low, high in reversed(tree.arena.slices(tree.calls.end(call), known)):
            num_new = high - low - int(self._seen[low:high].sum())
            self._seen[high - num_new : high] = True
            known -= num_new
            # Paths share only their beginnings, so all tokens before this one were seen, too.
            if num_new < high - low:
                break
        return known


def token_batches(run: Run, rows: Iterable[StoredRollout], *, full: bool) -> Iterator[Batch]:
    """Yield the rows of table `tokens`; with `full`, every call's whole context."""
    parts: list[dict[str, Any]] = []
    num_rows = 0
    for row in rows:
        state = state_of(row)
        if state is None:
            continue
        name = {"request_id": row.request_id, "trajectory_index": row.trajectory_index}
        rollout = resolve_rollout(0, state, skip_invalid=True)
        for part in _token_parts(rollout, full, trained_tokens(run, row)):
            parts.append({**name, **part})
            num_rows += len(part["token_id"])
        if num_rows >= BATCH_ROWS:
            yield _joined(parts)
            parts, num_rows = [], 0
    if num_rows:
        yield _joined(parts)


_TRAINED = {
    "advantage": "advantage",
    "loss_weight": "weight",
    "trainer_logprob": "logprob",
    "entropy": "entropy",
    "reference_logprob": "reference",
    "kl": "kl",
}
"""The array of `TrainedRollout` that each column shows."""
FACTS = ("logprob", "version", "mask", "trained_step", *_TRAINED)
"""The columns that only sampled tokens have."""


def trained_tokens(run: Run, row: StoredRollout) -> TrainedRollout | None:
    """Return what training recorded about a rollout's tokens; of several steps, the last."""
    if row.train_step is None:
        return None
    found = run.trained(request_id=row.request_id, trajectory_index=row.trajectory_index)
    # Two steps train a rollout only if something is wrong, which `audit` reports.
    return max(found, key=lambda trained: trained.step, default=None)


def mean_advantage(trained: TrainedRollout) -> float | None:
    """Return the mean advantage of a rollout's sampled tokens; None without any."""
    if not trained.num_tokens:
        return None
    return float(trained.advantage.astype(np.float64).mean())


def _token_parts(
    rollout: ResolvedRollout, full: bool, trained: TrainedRollout | None
) -> Iterator[dict[str, Any]]:
    """Yield one part per call: name to one value for all of its rows, or an array of `[num rows]`.

    `facts` are arrays of `[num sampled]`, or None.
    """
    tree = rollout.tree
    shown = _Shown(tree)
    # By arena index: the call that sampled a token first, -1 for the environment's tokens.
    sampler = np.full(tree.num_tokens, -1, np.int32)
    for step in rollout.calls:
        call = step.handle
        prompt_len, length = tree.prompt_len(call), tree.path_len(call)
        known = shown.add(call)
        start = 0 if full else min(known, prompt_len)
        at = places(tree, call, length - start)
        new = at[prompt_len - start :]
        sampler[new] = np.where(sampler[new] < 0, step.index, sampler[new])
        yield {
            "call": step.index,
            "agent": step.agent,
            "position": np.arange(start, length, dtype=np.int32),
            "token_id": tree.arena.ids[at],
            "is_sampled": np.arange(start, length) >= prompt_len,
            "sampled_in": sampler[at],
            "facts": sampled_facts(tree, step, trained),
        }


def sampled_facts(
    tree: TokenTree, step: ResolvedStep, trained: TrainedRollout | None
) -> dict[str, Any]:
    """Return the facts about one call's sampled tokens: column to array `[_C]` or None."""
    call = step.handle
    return {
        "logprob": tree.logprobs(call),
        "version": tree.versions(call),
        "mask": tree.mask(call),
        **_trained_facts(trained, step, tree.num_sampled(call)),
    }


def _trained_facts(
    trained: TrainedRollout | None, step: ResolvedStep, count: int
) -> dict[str, Any]:
    """Return what training recorded about one call's sampled tokens."""
    if trained is None:
        return dict.fromkeys(("trained_step", *_TRAINED))
    at = trained.num_sampled
    if step.index >= len(at) or at[step.index] != count:
        raise StoreError(
            f"the trained tokens of rollout {trained.request_id!r} do not match its calls: call "
            f"{step.index} sampled {count} tokens. `rolltree audit RUN` shows what is wrong."
        )
    start = int(at[: step.index].sum())
    # Trained tokens lie in the order of calls, without the prompts between them.
    found: dict[str, Any] = {"trained_step": np.full(count, trained.step)}
    for column, name in _TRAINED.items():
        values = getattr(trained, name)
        found[column] = None if values is None else values[start : start + count]
    return found


def places(tree: TokenTree, call: int, count: int) -> IntArray:
    """Return the arena indices of the last `count` tokens of a call's path."""
    parts = tree.arena.slices(tree.calls.end(call), count)
    if not parts:
        return np.empty(0, np.int32)
    return np.concatenate([np.arange(low, high, dtype=np.int32) for low, high in parts])


def _joined(parts: list[dict[str, Any]]) -> Batch:
    """Return parts as one batch."""
    counts = np.array([len(part["token_id"]) for part in parts])
    batch: dict[str, Any] = {}
    for name in ("position", "token_id", "is_sampled", "sampled_in"):
        batch[name] = np.concatenate([part[name] for part in parts])
    for name in ("request_id", "trajectory_index", "call", "agent"):
        dtype = object if _KINDS[name] == "string" else _KINDS[name]
        batch[name] = np.repeat(np.array([part[name] for part in parts], dtype), counts)
    by_model = batch["sampled_in"] >= 0
    batch["author"] = np.where(by_model, "model", "environment").astype(object)
    batch["sampled_in"] = np.ma.MaskedArray(batch["sampled_in"], mask=~by_model)
    rows = np.flatnonzero(batch["is_sampled"])
    num_sampled = [int(part["is_sampled"].sum()) for part in parts]
    for name in parts[0]["facts"]:
        values = [part["facts"][name] for part in parts]
        batch[name] = _of_samples(values, num_sampled, rows, int(counts.sum()), _KINDS[name])
    return batch


def _of_samples(
    values: list[Any], num_sampled: list[int], rows: Any, num_rows: int, kind: str
) -> Any:
    """Return a column with values for the sampled tokens only, which are at `rows`.

    `values` has an array per call, or None if its values are unknown; NaN is one unknown value.
    """
    column, missing = np.zeros(num_rows, kind), np.ones(num_rows, bool)
    if any(each is not None for each in values):
        pairs = list(zip(values, num_sampled, strict=True))
        found = [np.zeros(size, kind) if each is None else each for each, size in pairs]
        unknown = np.repeat([each is None for each in values], num_sampled)
        column[rows] = np.concatenate(found)
        missing[rows] = unknown | np.isnan(column[rows])
    return np.ma.MaskedArray(column, mask=missing)
