"""Token data as rollouts, for supervised fine-tuning through the trainer: `algorithm.name = "sft"`.

    states = supervised_states([[(prompt_ids, completion_ids), ...], ...])
    trainer.step(build_samples(states, "tree").samples, step)

Prompts are context, completions are trained; shared prefixes are computed once. Render text to
token ids with the tokenizer's chat template first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rolltree.tokens import Trajectory
from rolltree.values.types import FinishReason, ModelResponse, State

TokenIds = Sequence[int] | NDArray[np.integer]


def supervised_states(conversations: Iterable[Iterable[tuple[TokenIds, TokenIds]]]) -> list[State]:
    """Return one rollout per conversation, one call per `(prompt_ids, completion_ids)` of it.

    The tokens have no behaviour logprob (NaN), so every loss but a supervised one rejects them.

    >>> [len(state["trajectory"]) for state in supervised_states([[([1, 2], [3]), ([1, 9], [4])]])]
    [2]
    """
    states = []
    for index, conversation in enumerate(conversations):
        trajectory = Trajectory()
        for turn, (prompt, completion) in enumerate(conversation):
            response = ModelResponse(
                message={},
                text="",
                finish_reason=FinishReason.STOP,
                prompt_ids=np.asarray(prompt, np.int32),
                completion_ids=np.asarray(completion, np.int32),
                logprobs=None,
                versions=None,
                # The trainer divides logits by the temperature.
                temperature=1.0,
                call_id=turn,
            )
            trajectory.append_call(prompt=[], completion=[], response=response, turn=turn)
        # 0 instead of None, which samples report as a missing advantage.
        for step in trajectory:
            step["advantage"] = 0.0
        states.append(State(trajectory=trajectory, request_id=f"data/{index}", advantage=0.0))
    return states
