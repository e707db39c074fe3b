"""Detects model calls sampled from a distribution that the trainer does not compute.

The trainer divides logits by the temperature and takes their softmax. Settings that cut tokens off,
penalise or bias them give different probabilities, so the ratios of such calls would be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rolltree.errors import TokenError, TrainingError
from rolltree.inference.spelling import check_messages
from rolltree.inference.vocabulary import Vocabulary
from rolltree.tokens import peek
from rolltree.types import State

# Calls checked per step. A server with a different template or tokenizer is wrong in every call, so
# a sample of the calls is enough.
_NUM_SPELLED = 32


def not_the_models_own(temperature: float, changes: Mapping[str, Any]) -> str | None:
    """Return the settings that rule training out, as text, or None.

    Args:
        temperature: the divisor of the logits.
        changes: see `rolltree.inference.request_fields.distribution_changes`.

    >>> not_the_models_own(0.0, {"top_p": 0.9})
    'temperature = 0.0, top_p = 0.9'
    """
    settings = {"temperature": temperature, **changes} if temperature <= 0 else changes
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items()) or None


def _trains(tokens: Any) -> bool:
    """Whether a call has sampled tokens that its mask does not leave out."""
    return tokens is not None and any(tokens.get("completion_mask") or ())


def check_sampled(rollouts: Iterable[tuple[str, State]]) -> None:
    """Check the settings that each recorded call was really sampled with, wherever they were set.

    Calls without tokens, and those that are masked out, are not trained and may be anything.

    `rollouts` are states, each with the id of its request.

    Raises:
        TrainingError: a call was not sampled from the model's own distribution.
    """
    for name, state in rollouts:
        for index, step in enumerate(state.get("trajectory") or ()):
            # `peek`, because a step keeps the values that it builds when its keys are read.
            extras = peek(step, "extras") or {}
            changes = extras.get("sampling") or {}
            settings = not_the_models_own(extras.get("temperature", 1.0), changes)
            if settings and _trains(peek(step, "tokens")):
                raise TrainingError(
                    f"call {index} of {name} was sampled with {settings}. Training needs the full "
                    "distribution (temperature above 0, nothing cut off, penalised or biased), "
                    "because importance ratios are computed from it. Take the setting out of what "
                    "the environment, agent or caller passes for that call; evaluation takes it."
                )


def check_spelled(rollouts: Iterable[tuple[str, State]], vocabulary: Vocabulary) -> None:
    """Check that a sample of the calls has ids that spell their messages.

    For clients whose server renders prompts; other clients know the ids that they sent.

    Raises:
        TrainingError: the ids of a call spell a different prompt or answer.
    """
    calls = [
        (f"call {index} of {name}", step)
        for name, state in rollouts
        for index, step in enumerate(state.get("trajectory") or ())
        if _trains(peek(step, "tokens"))
    ]
    for where, step in calls[:: max(1, len(calls) // _NUM_SPELLED)]:
        tokens, prompt, said = step["tokens"], step["prompt"], step["completion"]
        # Steps store ids as lists.
        prompt_ids, ids = (
            np.array(tokens[name], np.int32) for name in ("prompt_ids", "completion_ids")
        )
        asked = None if isinstance(prompt, str) or not prompt else prompt[-1]
        answer = {"content": said} if isinstance(said, str) else next(iter(said), {})
        try:
            check_messages(vocabulary, prompt_ids, ids, asked, answer, where=where)
        except TokenError as error:
            raise TrainingError(str(error)) from error
