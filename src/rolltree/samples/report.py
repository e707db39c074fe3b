"""What happened to every sampled token, counted: the metrics of one batch of samples.

Every token that a call sampled is trained, masked or skipped; the three add up. Knows rollouts,
samples and breaks. Leaves out formatting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rolltree.samples.rollout import Rollout
from rolltree.samples.truncation import TruncationEffect
from rolltree.tokens import Break, BreakCause
from rolltree.types import Sample


class SkipReason(StrEnum):
    """Why sampled tokens, or a whole step, are in no sample."""

    NO_TOKENS = "no_tokens"  # the server gave no ids for this step
    EMPTY_COMPLETION = "empty_completion"  # the model sampled nothing
    NO_SOURCE = "no_source"  # the first token of a call without a prompt
    MAX_SEQ_LEN = "max_seq_len"  # beyond the cap
    TRUNCATION_POLICY = "truncation_policy"  # the rollout was truncated and the policy drops it


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step, or part of one, that is in no sample: `num_tokens` sampled tokens of it."""

    rollout: int
    call: int
    reason: SkipReason
    num_tokens: int


def make_report(
    rollouts: Sequence[Rollout],
    effects: Sequence[TruncationEffect],
    samples: Sequence[Sample],
    breaks: Sequence[Break],
    skipped: Sequence[Skipped],
    num_extendable: int,
) -> dict[str, float]:
    """Return the metrics of a batch.

    `num_tokens` is what one forward pass over all samples computes, `num_raw_tokens` what the
    calls' prompts and completions add up to, `break_rate/<cause>` breaks per call that had a call
    before it.
    """
    calls = [(rollout, call) for rollout in rollouts for call in rollout.calls]
    reasons = Counter(skip.reason for skip in skipped)
    skipped_tokens: Counter[SkipReason] = Counter()
    for skip in skipped:
        skipped_tokens[skip.reason] += skip.num_tokens
    trained = sum(int((sample.records.weight != 0).sum()) for sample in samples)
    in_samples = sum(len(sample.records) for sample in samples)
    rewards = [
        rollout.reward
        for rollout, effect in zip(rollouts, effects, strict=True)
        if rollout.reward is not None and rollout.trains and effect.in_statistics
    ]
    report: dict[str, float] = {
        "num_rollouts": len(rollouts),
        "num_failed_rollouts": sum(not rollout.trains for rollout in rollouts),
        "num_truncated_rollouts": sum(effect.truncated for effect in effects),
        "num_dropped_rollouts": sum(not effect.has_sample for effect in effects),
        "num_calls": len(calls),
        "num_samples": len(samples),
        "num_tokens": sum(sample.num_tokens for sample in samples),
        "num_raw_tokens": sum(rollout.tree.path_len(call.handle) for rollout, call in calls),
        "num_sampled_tokens": sum(rollout.tree.num_sampled(call.handle) for rollout, call in calls),
        "num_trained_tokens": trained,
        "num_masked_tokens": in_samples - trained,
        "num_skipped_tokens": sum(skipped_tokens.values()),
        "num_calls_without_advantage": sum(call.advantage is None for _, call in calls),
        "num_calls_without_logprobs": sum(
            rollout.tree.sampled["logprob"].offset[call.handle] < 0 for rollout, call in calls
        ),
        "num_seq_len_truncated": sum(bool(s.info.get("seq_len_truncated")) for s in samples),
        "num_breaks": len(breaks),
        "break_rate": len(breaks) / num_extendable if num_extendable else 0.0,
    }
    if rewards:
        report["reward_mean"] = sum(rewards) / len(rewards)
    for reason in SkipReason:
        report[f"skipped/{reason}"] = reasons[reason]
        report[f"skipped_tokens/{reason}"] = skipped_tokens[reason]
    causes = Counter(item.cause for item in breaks)
    for cause in BreakCause:
        report[f"breaks/{cause}"] = causes[cause]
        report[f"break_rate/{cause}"] = causes[cause] / num_extendable if num_extendable else 0.0
    return report
