"""The token lens: every token in the exact context of one model call, with all recorded values.

The values are those of table `tokens`. A token of the prompt that an earlier call sampled has the
values of that call, so one context shows what the whole conversation up to there earned.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rolltree.insight.page.pages import Offset
from rolltree.records.token_rows import (
    FACTS,
    break_rows,
    places,
    sampled_facts,
    state_of,
    trained_tokens,
)
from rolltree.records.tokenizer import RunTokenizer, shown_tokenizer, why_raw
from rolltree.samples.resolve import ResolvedRollout, resolve_rollout
from rolltree.store import Run, StoredRollout, TrainedRollout
from rolltree.tokens.break_causes import NEIGHBOURHOOD_TOKENS
from rolltree.values.errors import UnknownName
from rolltree.values.types import IntArray, State

# The lens's columns: a value per token, or None if no token of the rollout has a value.
COLUMNS = ("ids", "texts", "bytes", "author", "is_sampled", "sampled_in", *FACTS, "difference")
_WHOLE = ("version", "trained_step")


def one_rollout(run: Run, request_id: str, trajectory_index: int = 0) -> StoredRollout:
    """Return the stored row with this name.

    Raises:
        UnknownName: the run has no such rollout.
    """
    for row in run.rollouts(request_id=request_id, trajectory_index=trajectory_index):
        return row
    raise UnknownName(f"{run.path} has no rollout {request_id!r} with index {trajectory_index}.")


def token_lens(
    run: Run,
    id: str,
    index: Offset = 0,
    call: Offset = 0,
    *,
    offset: Offset = 0,
    limit: Annotated[int, Meta(ge=1)] | None = None,
) -> dict[str, Any]:
    """Return the tokens `offset`, ... of a call's prompt and completion as columns, JSON-ready.

    A column without a value in the rollout is None; so are `texts` and `bytes` without a
    tokenizer.

    Raises:
        UnknownName: the run has no such rollout, or the rollout has no such call with tokens.
    """
    row = one_rollout(run, id, index)
    state = state_of(row)
    rollout = None if state is None else resolve_rollout(0, state, skip_invalid=True)
    if state is None or rollout is None or all(step.index != call for step in rollout.calls):
        known = [] if rollout is None else [step.index for step in rollout.calls]
        raise UnknownName(
            f"rollout {id!r} has no tokens of a call {call}; its calls with tokens are "
            f"{known or 'none'}."
        )
    tokenizer = shown_tokenizer(run)
    tree = rollout.tree
    sampled_in, values = _known(rollout, trained_tokens(run, row), call)
    handle = next(step.handle for step in rollout.calls if step.index == call)
    length = tree.path_len(handle)
    end = length if limit is None else min(length, offset + limit)
    at = places(tree, handle, length)[offset:end]
    ids = tree.arena.ids[at]
    texts, spelled = (None, None) if tokenizer is None else tokenizer.pieces(ids)
    by = sampled_in[at]
    columns = {name: column[at] for name, column in values.items()}
    if "trainer_logprob" in columns and "logprob" in columns:
        columns["difference"] = columns["trainer_logprob"] - columns["logprob"]
    return {
        "request_id": id,
        "trajectory_index": index,
        "call": call,
        # For navigation from call to call on the page.
        "calls": _calls(rollout),
        "num_calls": len(rollout.steps),
        "num_tokens": length,
        "num_prompt_tokens": tree.prompt_len(handle),
        "offset": offset,
        "ids": ids.tolist(),
        "texts": texts,
        "why_raw": why_raw(run) if tokenizer is None else None,
        # In hexadecimal: a token may hold a part of a character.
        "bytes": spelled,
        "author": np.where(by >= 0, "model", "environment").tolist(),
        "is_sampled": (np.arange(offset, offset + len(at)) >= tree.prompt_len(handle)).tolist(),
        "sampled_in": _listed(by, by < 0),
        **{name: _values(name, columns.get(name)) for name in (*FACTS, "difference")},
        # The place where this call's prompt stops extending the call before, with both sides.
        "breaks": [each for each in rollout_breaks(state, tokenizer) if each["call"] == call],
    }


def rollout_breaks(state: State, tokenizer: RunTokenizer | None) -> list[dict[str, Any]]:
    """Return the rows of table `breaks` of a rollout, and both sides cut where they diverge.

    `num_common` is how many ids both sides begin with. `common_text` is their text, and
    `previous_after` and `current_after` what follows on each side; None without a tokenizer.
    """
    rows = break_rows(state, None if tokenizer is None else tokenizer.decode)
    for row in rows:
        shared = min(NEIGHBOURHOOD_TOKENS, row["position"])
        sides = {
            "common_text": row["previous_ids"][:shared],
            "previous_after": row["previous_ids"][shared:],
            "current_after": row["current_ids"][shared:],
        }
        row["num_common"] = shared
        row |= {
            name: None if tokenizer is None else tokenizer.decode(ids)
            for name, ids in sides.items()
        }
    return rows


def _calls(rollout: ResolvedRollout) -> list[dict[str, Any]]:
    tree = rollout.tree
    return [
        {
            "call": step.index,
            "agent": step.agent,
            "turn": step.turn,
            "num_tokens": tree.path_len(step.handle),
            "num_prompt_tokens": tree.prompt_len(step.handle),
        }
        for step in rollout.calls
    ]


def _known(
    rollout: ResolvedRollout, trained: TrainedRollout | None, call: int
) -> tuple[IntArray, dict[str, NDArray[np.float64]]]:
    """Return which call sampled each token of the arena first, and the token's values.

    Tokens that `call` sampled again have that call's values. Values are float64, which holds
    float32 and versions exactly; NaN is a missing value.
    """
    tree = rollout.tree
    sampled_in = np.full(tree.num_tokens, -1, np.int32)
    values: dict[str, NDArray[np.float64]] = {}
    # A token that was sampled in two branches has one place in the tree but two logprobs. The lens
    # of a call shows that call's, so this call comes last.
    own = [step for step in rollout.calls if step.index == call]
    for step in [*(step for step in rollout.calls if step.index != call), *own]:
        at = places(tree, step.handle, tree.num_sampled(step.handle))
        known = sampled_in[at]
        is_first = (known < 0) | (step.index < known)
        sampled_in[at[is_first]] = step.index
        wanted = np.ones(len(at), bool) if step in own else is_first
        for name, column in sampled_facts(tree, step, trained).items():
            if column is not None:
                if name not in values:
                    values[name] = np.full(tree.num_tokens, np.nan)
                values[name][at[wanted]] = column[wanted]
    return sampled_in, values


def _values(name: str, column: NDArray[np.float64] | None) -> list[Any] | None:
    """Return a column as a list; None if no token of the rollout has a value."""
    if column is None:
        return None
    missing = np.isnan(column)
    whole = np.where(missing, 0.0, column).astype(np.int64) if name in _WHOLE else column
    return _listed(whole, missing)


def _listed(column: NDArray[Any], missing: NDArray[np.bool_]) -> list[Any]:
    """Return a column as a list with None if there is no value."""
    whole = column.astype(object)
    whole[missing] = None
    found: list[Any] = whole.tolist()
    return found
