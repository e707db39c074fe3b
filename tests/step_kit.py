"""Steps (recorded model calls) as plain data, for tests that need their tokens and not a model."""

from __future__ import annotations

from typing import Any


def step(
    prompt_ids: list[int] | None,
    completion_ids: list[int] | None = None,
    *,
    prompt: list[dict[str, Any]] | None = None,
    completion: list[dict[str, Any]] | None = None,
    logprobs: list[float] | None = None,
    mask: list[float] | None = None,
    advantage: float | None = None,
    reward: float | None = None,
    **extras: Any,
) -> Any:
    """Return a step; prompt ids of None make one without tokens."""
    tokens = None
    if prompt_ids is not None and completion_ids is not None:
        size = len(completion_ids)
        tokens = {
            "prompt_ids": prompt_ids,
            "prompt_mask": [0] * len(prompt_ids),
            "completion_ids": completion_ids,
            "completion_mask": [1] * size if mask is None else mask,
            "completion_logprobs": [-0.5] * size if logprobs is None else logprobs,
        }
    return {
        "prompt": prompt or [],
        "completion": completion or [],
        "response": None,
        "tokens": tokens,
        "reward": reward,
        "advantage": advantage,
        "extras": extras,
    }


def answer(
    prompt_ids: list[int],
    completion_ids: list[int],
    said: str = "!",
    *,
    logprobs: list[float] | None = None,
    policy_version: int = 0,
    turn: int = 0,
    **extras: Any,
) -> Any:
    """Return a step that answers "?" and ended by itself, with the extras of a stored one."""
    return step(
        prompt_ids,
        completion_ids,
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": said}],
        logprobs=logprobs,
        policy_version=policy_version,
        finish_reason="stop",
        turn=turn,
        **extras,
    )
