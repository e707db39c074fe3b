"""Detects model calls whose ids do not spell their messages, as from a server's own renderer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rolltree.inference.spelling import check_messages
from rolltree.inference.vocabulary import Vocabulary
from rolltree.tokens import peek
from rolltree.values.errors import TokenError
from rolltree.values.types import RolloutResult

# Calls checked per step. A server with a different template or tokenizer is wrong in every call, so
# a sample of the calls is enough.
_NUM_SPELLED = 32


def _trains(tokens: Any) -> bool:
    """Whether a call has sampled tokens that its mask does not leave out."""
    return tokens is not None and any(tokens.get("completion_mask") or ())


def misspelled(
    results: Sequence[RolloutResult], vocabulary: Vocabulary
) -> dict[tuple[int, int, int], str]:
    """Return what is wrong with calls whose ids do not spell their messages.

    For clients whose server renders prompts; other clients know the ids that they sent. A sample of
    the calls is checked, and all of them if one is wrong.

    Args:
        results: the rollouts of a step.
        vocabulary: of the model that is trained.

    Returns:
        What is wrong, by the index of the result, that of its state and that of the call.
    """
    calls = [
        ((number, place, index), f"call {index} of {result.request.request_id}", step)
        for number, result in enumerate(results)
        for place, state in enumerate(result.states)
        for index, step in enumerate(state.get("trajectory") or ())
        if _trains(peek(step, "tokens"))
    ]
    some = _misspelled(calls[:: max(1, len(calls) // _NUM_SPELLED)], vocabulary)
    return _misspelled(calls, vocabulary) if some else some


def _misspelled(
    calls: Iterable[tuple[tuple[int, int, int], str, Any]], vocabulary: Vocabulary
) -> dict[tuple[int, int, int], str]:
    wrong = {}
    for place, where, step in calls:
        tokens, prompt, completion = step["tokens"], step["prompt"], step["completion"]
        # Steps store ids as lists.
        prompt_ids, ids = (
            np.array(tokens[name], np.int32) for name in ("prompt_ids", "completion_ids")
        )
        asked = None if isinstance(prompt, str) or not prompt else prompt[-1]
        answer = (
            {"content": completion} if isinstance(completion, str) else next(iter(completion), {})
        )
        try:
            check_messages(vocabulary, prompt_ids, ids, asked, answer, where=where)
        except TokenError as error:
            wrong[place] = str(error)
    return wrong
