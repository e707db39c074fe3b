"""Accounts for every sampled token: the metrics of a batch, and the metadata of each sample.

Every sampled token is trained, masked or skipped; the three counts add up to the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rolltree.samples.resolve import ResolvedRollout
from rolltree.tokens import Break, BreakCause, peek
from rolltree.tokens.breaks import UNBROKEN
from rolltree.values.types import Sample, TruncationReason

_SEQ_LEN_KEYS = ("seq_len_original", "seq_len_kept", "seq_len_lost")


class SkipReason(StrEnum):
    """Why sampled tokens, or a whole step, are in no sample."""

    # The server returned no ids for this step.
    NO_TOKENS = "no_tokens"
    # The step's tokens contradict themselves, as an environment may have assigned them.
    INVALID_TOKENS = "invalid_tokens"
    # The model sampled nothing.
    EMPTY_COMPLETION = "empty_completion"
    # The first token of a call without a prompt.
    NO_SOURCE = "no_source"
    # Beyond `max_seq_len`.
    MAX_SEQ_LEN = "max_seq_len"
    # The rollout was truncated and the policy drops it.
    TRUNCATION_POLICY = "truncation_policy"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Sampled tokens of one step that are in no sample; `problem` says more, if it is known."""

    rollout: int
    call: int
    reason: SkipReason
    num_tokens: int
    problem: str = ""


def make_report(
    rollouts: Sequence[ResolvedRollout],
    samples: Sequence[Sample],
    openings: Sequence[Break],
    skipped: Sequence[Skipped],
    num_extendable: int,
) -> dict[str, float]:
    """Return the metrics of a batch.

    `num_tokens` counts the tokens of a forward pass over all samples, `num_raw_tokens` the prompt
    and completion tokens of all calls. `break_rate/<cause>` is the number of breaks per call that
    follows another. `begun/<cause>` counts prompts that began something new and broke nothing.
    """
    breaks = [item for item in openings if item.is_break]
    calls = [(rollout, call) for rollout in rollouts for call in rollout.calls]
    reasons = Counter(skip.reason for skip in skipped)
    skipped_tokens: Counter[SkipReason] = Counter()
    for skip in skipped:
        skipped_tokens[skip.reason] += skip.num_tokens
    trained = sum(int((sample.records.weight != 0).sum()) for sample in samples)
    in_samples = sum(len(sample.records) for sample in samples)
    rewards = [
        rollout.reward
        for rollout in rollouts
        if rollout.reward is not None and not rollout.failed and rollout.effect.counts
    ]
    report: dict[str, float] = {
        "num_rollouts": len(rollouts),
        "num_failed_rollouts": sum(rollout.failed for rollout in rollouts),
        "num_truncated_rollouts": sum(rollout.effect.truncated for rollout in rollouts),
        "num_truncated_completions": sum(r.effect.is_completion_cut for r in rollouts),
        "num_masked_completions": sum(r.effect.is_completion_masked for r in rollouts),
        "num_dropped_rollouts": sum(not rollout.effect.counts for rollout in rollouts),
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
            # Logprobs are always stored as arrays, so a negative offset means that none are known.
            rollout.tree.sampled["logprob"].offset[call.handle] < 0
            for rollout, call in calls
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
    causes = Counter(item.cause for item in openings)
    for cause in BreakCause:
        if cause in UNBROKEN:
            report[f"begun/{cause}"] = causes[cause]
            continue
        report[f"breaks/{cause}"] = causes[cause]
        report[f"break_rate/{cause}"] = causes[cause] / num_extendable if num_extendable else 0.0
    return report


def sample_meta(sample: Sample, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metadata of each origin of a sample that `build_samples(states, ...)` made.

    `terminated` and `truncated` are the flags of the origin's last step in this sample;
    `truncated` is also set if `max_seq_len` cut one of the origin's calls. `episode_truncated` and
    `truncation_reason` are the episode's; the reason is "max_seq_len" for a cut origin whose
    episode has none. `finish_reason` says only why the model stopped. `seq_len_truncated` says
    whether `max_seq_len` cut tokens of the origin; if so, `seq_len_original`, `seq_len_kept` and
    `seq_len_lost` are the token counts of the whole sample.
    """
    metas = []
    cut = sample.info.get("seq_len_cut", (False,) * len(sample.origins))
    for origin, index, is_cut in zip(sample.origins, sample.info["rollouts"], cut, strict=True):
        state = states[index]
        steps = state["trajectory"]
        last = origin.calls[-1]
        extras = peek(steps[last], "extras") or {}
        is_end = last == len(steps) - 1
        episode_truncated = bool(state.get("truncated"))
        # A last step without its own flag gets the episode's.
        is_truncated = bool(extras.get("truncated", is_end and episode_truncated))
        reason = state.get("truncation_reason")
        if is_cut and not reason:
            reason = TruncationReason.MAX_SEQ_LEN
        meta: dict[str, Any] = {
            "rollout_id": origin.rollout_id,
            "agent": origin.agent,
            "calls": origin.calls,
            "reward": origin.reward,
            "advantage": steps[last].get("advantage"),
            "terminated": bool(extras.get("terminated", is_end and bool(state.get("terminated")))),
            "truncated": is_truncated or is_cut,
            "episode_truncated": episode_truncated,
            "truncation_reason": None if reason is None else str(reason),
            "finish_reason": origin.finish_reason,
            "incomplete_completion": bool(extras.get("incomplete_completion", False)),
            "seq_len_truncated": is_cut,
        }
        if is_cut:
            meta |= {key: sample.info[key] for key in _SEQ_LEN_KEYS}
        for key in ("parent_rollout", "parent_step", "depth", "subtask"):
            if state.get(key) is not None:
                meta[key] = state[key]
        metas.append(meta)
    return metas
