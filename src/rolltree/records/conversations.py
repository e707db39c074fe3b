"""Rollouts with their messages, and data sets for supervised fine-tuning, as rows of a table."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rolltree.records.columns import SFT
from rolltree.records.table import MESSAGE_TEXTS, Batch
from rolltree.records.token_rows import state_of
from rolltree.records.values import clean_text, json_text, values_of_rows
from rolltree.rollouts.conversation import message_list
from rolltree.rollouts.decode import decode_rollout
from rolltree.samples import Skipped, SkipReason, build_samples
from rolltree.store import Run, StoredRollout
from rolltree.values.types import Sample, State

logger = logging.getLogger(__name__)

_BATCH_ROWS = 256
# The label that torch's cross-entropy ignores, and therefore every trainer.
_IGNORED = -100


def message_rows(messages: Any, role: str) -> list[dict[str, Any]]:
    """Return messages as a column of kind `messages` holds them; a text is one message of `role`.

    Content that is not text (images, parts) becomes JSON; keys that the column does not have become
    JSON in `extra`.
    """
    return [_message(each) for each in message_list(messages, role)]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in message.items():
        if value is None:
            continue
        if key == "tool_calls":
            found[key] = [_tool_call(call) for call in value]
        elif key in MESSAGE_TEXTS and key != "extra":
            found[key] = clean_text(value) if isinstance(value, str) else json_text(value)
        else:
            rest[key] = value
    return {**found, "extra": json_text(rest)} if rest else found


def tool_call_parts(call: Any) -> dict[str, str | None]:
    """Return the id, the name and the arguments (JSON as the model wrote it) of a tool call."""
    plain = call if isinstance(call, Mapping) else getattr(call, "model_dump", dict)()
    function = plain.get("function")
    about = function if isinstance(function, Mapping) else plain
    arguments = about.get("arguments")
    return {
        **{name: _text(each.get(name)) for name, each in (("id", plain), ("name", about))},
        "arguments": arguments if isinstance(arguments, str) else json_text(arguments),
    }


def _tool_call(call: Any) -> dict[str, Any]:
    found = tool_call_parts(call)
    kind = call.get("type") if isinstance(call, Mapping) else None
    return {"id": found.pop("id"), "type": _text(kind or "function"), "function": found}


def _text(value: Any) -> str | None:
    return None if value is None else clean_text(str(value))


def conversation_batches(
    run: Run, filters: Mapping[str, Any], names: Sequence[str]
) -> Iterator[Batch]:
    """Yield the rows of table `conversations`."""
    rows = run.rollouts(**filters)
    light = [name for name in names if name not in ("prompt", "completion")]
    while page := list(islice(rows, _BATCH_ROWS)):
        batch = values_of_rows(run, light, page) | {"prompt": [], "completion": []}
        for row in page:
            result = decode_rollout(row, tokens=False)
            state = result.states[0] if result.states else None
            prompt = result.request.input["prompt"] if state is None else state.get("prompt")
            said = None if state is None else state.get("completion")
            batch["prompt"].append(message_rows(prompt, "user"))
            batch["completion"].append(message_rows(said, "assistant"))
        yield batch


# -- supervised fine-tuning ------------------------------------------------------------------------


def sft_batches(
    run: Run, min_reward: float | None, best_of_group: bool, filters: Mapping[str, Any]
) -> Iterator[Batch]:
    """Yield the rows of table `sft`; see `RunData.sft`."""
    chosen = _chosen(run, min_reward, best_of_group, filters)
    skipped: list[Skipped] = []
    for at in range(0, len(chosen), _BATCH_ROWS):
        # By name instead of by offset: rows may be stored between two pages.
        page = chosen[at : at + _BATCH_ROWS]
        ids = list(dict.fromkeys(request_id for request_id, _ in page))
        stored = {
            (row.request_id, row.trajectory_index): row for row in run.rollouts(request_id=ids)
        }
        rows = [row for key in page if key in stored for row in _sft_rows(stored[key], skipped)]
        if rows:
            yield {column.name: [row[column.name] for row in rows] for column in SFT}
    if skipped:
        logger.warning(
            "%d calls are left out, because their tokens cannot be read; the first: call %d of %s",
            *(len(skipped), skipped[0].call, skipped[0].problem),
        )


def _chosen(
    run: Run, min_reward: float | None, best_of_group: bool, filters: Mapping[str, Any]
) -> list[tuple[str, int]]:
    """Return the names of the rollouts that are chosen by their rewards."""
    names = ("request_id", "trajectory_index", "group_id", "agent", "phase", "reward", "status")
    found: list[tuple[str, int]] = []
    best: dict[tuple[str, str, str], tuple[float, tuple[str, int]]] = {}
    for request_id, index, group_id, agent, phase, reward, status in run.columns(names, **filters):
        if status != "ok" or reward is None or (min_reward is not None and reward < min_reward):
            continue
        name = (request_id, index)
        if not best_of_group:
            found.append(name)
            continue
        group = (phase, group_id or request_id, agent)
        # Strictly greater keeps the first of equals, whatever is stored later.
        if group not in best or reward > best[group][0]:
            best[group] = (reward, name)
    return found or [name for _, name in best.values()]


def _sft_rows(row: StoredRollout, skipped: list[Skipped]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a rollout; calls whose tokens contradict themselves go to `skipped`."""
    state = state_of(row)
    if state is None:
        return
    state.setdefault("request_id", row.request_id)  # for messages
    light = {
        "request_id": row.request_id,
        "trajectory_index": row.trajectory_index,
        "env_id": row.env_id,
        "example_id": None if row.example_id is None else str(row.example_id),
        "task": row.task,
        "agent": row.agent,
        "reward": row.reward,
    }
    batch = build_samples([state], "interleave", skip_invalid=True)
    skipped += [each for each in batch.skipped if each.reason is SkipReason.INVALID_TOKENS]
    for number, sample in enumerate(batch.samples):
        learned = _learned(sample)
        if learned.any():
            yield {
                **light,
                "sample": number,
                "messages": _spoken(state, sample),
                "input_ids": sample.ids.tolist(),
                "labels": np.where(learned, sample.ids, _IGNORED).tolist(),
                "loss_mask": learned.astype(int).tolist(),
            }


def _learned(sample: Sample) -> Any:
    """Return which tokens of a flat sample are learned, bool `[_T]`."""
    learned = np.zeros(sample.num_tokens, bool)
    # A record's source is the position before its token, whose logits predict it.
    left_out = [call for _, call, _ in sample.info.get("left_out", ())]
    trained = (sample.records.weight > 0) & ~np.isin(sample.records.call, left_out)
    learned[sample.records.source[trained] + 1] = True
    return learned


def _spoken(state: State, sample: Sample) -> list[dict[str, Any]]:
    """Return the conversation up to the end of a sample's last call."""
    last = max(call for origin in sample.origins for call in origin.calls)
    step = state["trajectory"][last]
    return [
        *message_rows(step["prompt"], "user"),
        *message_rows(step["completion"], "assistant"),
    ]
