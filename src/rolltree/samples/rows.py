"""Rows of lists, as in verifiers: one `TrainingExample` per step, or per flat sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolltree.tokens import mask_list, peek, readable_floats
from rolltree.values.errors import TokenError
from rolltree.values.types import Sample, TrainingExample


def process_trajectories_for_training(
    states: Sequence[Mapping[str, Any]], mask_prompts: bool = True
) -> list[TrainingExample]:
    """Return one training row per trajectory step (verifiers' horizontal processing).

    Args:
        states: rollouts with a `trajectory`; steps whose `tokens` are None are left out.
        mask_prompts: use the steps' masks; False trains every token, even those of prompts.

    Returns:
        Rows of equal-length lists `[_T]`: ids, logprobs (0.0 for prompts, NaN if the engine
        returned none), mask, and the step's reward (0.0 if the step lacks the key) and advantage.

    Raises:
        TokenError: a step's masks or logprobs do not fit its ids.
    """
    examples: list[TrainingExample] = []
    for state in states:
        for step in state.get("trajectory") or ():
            tokens = peek(step, "tokens")
            if tokens is None:
                continue
            # `peek`, so that reading does not build and keep the lists of every step.
            tokens = {key: peek(tokens, key) for key in tokens}
            prompt_ids, completion_ids = tokens["prompt_ids"], tokens["completion_ids"]
            # NaN instead of 0, which would mean a probability of 1.
            logprobs = _filled(tokens, "completion_logprobs", len(completion_ids), math.nan)
            mask = [1] * (len(prompt_ids) + len(completion_ids))
            if mask_prompts:
                mask = _filled(tokens, "prompt_mask", len(prompt_ids), 0)
                mask += _filled(tokens, "completion_mask", len(completion_ids), 1)
            examples.append(
                TrainingExample(
                    token_ids=[*prompt_ids, *completion_ids],
                    logprobs=[0.0] * len(prompt_ids) + logprobs,
                    mask=mask,
                    reward=step.get("reward", 0.0),
                    advantage=step.get("advantage"),
                )
            )
    return examples


def _filled(tokens: Mapping[str, Any], key: str, count: int, missing: Any) -> list[Any]:
    """Return the list under `key`, or `missing` for each token if there is no list."""
    values = tokens.get(key)
    if values is None or not len(values):
        return [missing] * count
    if len(values) != count:
        raise TokenError(
            f"step['tokens'][{key!r}] has {len(values)} values for {count} tokens, so a row would "
            "train the wrong tokens. Give one per token, or an empty list."
        )
    return list(values)


def to_examples(samples: Sequence[Sample]) -> list[TrainingExample]:
    """Return flat samples as rows; logprob and mask are at the sampled token, and 0 elsewhere.

    A row's advantage is that of the sample's records if all are equal, else None.

    Raises:
        TokenError: a sample has branches, while a row is one path.
    """
    examples = []
    for index, sample in enumerate(samples):
        records = sample.records
        # On a path, a sampled token directly follows its source.
        at = records.source + 1
        # Only the positions of a path count up without a jump.
        if not np.array_equal(sample.positions, np.arange(len(sample.ids))):
            raise TokenError(
                f"sample {index} is a tree and a row is one path; flattening it would change what "
                "tokens attend to. Build the samples with scope 'interleave'."
            )
        logprobs = np.zeros(len(sample.ids), np.float32)
        weights = np.zeros(len(sample.ids), np.float32)
        logprobs[at] = records.logprob
        weights[at] = records.weight
        same = len(records) > 0 and bool((records.advantage == records.advantage[0]).all())
        examples.append(
            TrainingExample(
                token_ids=sample.ids.tolist(),
                logprobs=readable_floats(logprobs),
                mask=mask_list(weights),
                reward=sample.origins[0].reward,
                advantage=float(records.advantage[0]) if same else None,
            )
        )
    return examples
