"""`build_samples`: trajectories to training samples in one of four scopes, with a report.

Pure: reads states, never changes them. Knows every stage of this room and calls them in order:
resolve, apply the truncation policy, group, build, cut, count. Leaves out packing (`packing.py`)
and where advantages come from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rolltree.errors import ConfigError, did_you_mean
from rolltree.samples.breaks import find_breaks
from rolltree.samples.capping import Cut, cap_sample
from rolltree.samples.report import Skipped, SkipReason, make_report
from rolltree.samples.rollout import Rollout, resolve
from rolltree.samples.scopes import SCOPES, Plan, threads_of
from rolltree.samples.truncation import TruncationPolicy, truncation_effect
from rolltree.tokens import Break, Decoder
from rolltree.types import Records, Sample, Scope, State, TrajectoryStep

GroupKey = Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples and the account of what became of every call.

    `report` is a flat dict of metrics (see `report.make_report`), `breaks` says where and why the
    exact prefix did not hold, `skipped` which sampled tokens are in no sample.

    `Sample.info` holds `scope`, `spans` (a `CallSpan` per call), `rollouts` (the rollout index of
    each origin), `step_rewards`, `streams` (name to `SampleStream`), `break` (the `Break` that
    opened a flat sample, or None) and, where `max_seq_len` cut it, `seq_len_truncated`,
    `seq_len_original`, `seq_len_kept` and `seq_len_lost`.
    """

    samples: list[Sample]
    report: dict[str, float]
    breaks: tuple[Break, ...]
    skipped: tuple[Skipped, ...]


def build_samples(
    trajectories: Sequence[State | Sequence[TrajectoryStep]],
    scope: Scope = "interleave",
    *,
    truncation: TruncationPolicy | None = None,
    max_seq_len: int | None = None,
    group_key: GroupKey | None = None,
    decode: Decoder | None = None,
) -> SampleBatch:
    """Turn trajectories into training samples.

    A record's advantage is its step's, or the state's when the step has none, or 0 (counted in
    `num_calls_without_advantage`); in scope `turn` it is that of the turn's last step. A logprob
    the engine did not give is NaN; in a turn one missing logprob makes all of them NaN. A rollout
    with an error keeps its tokens with weight 0.

    Args:
        trajectories: states, or plain lists of spec-1 steps. `records.rollout` is the index here.
        scope: `step`, `turn`, `interleave` or `tree`.
        truncation: what to do with truncated rollouts; default: keep them.
        max_seq_len: cut every path to this many tokens.
        group_key: in scope `tree`, trajectories with equal keys share one sample, for example
            `lambda state: state["example_id"]`. Default: one sample per trajectory.
        decode: ids to text, for the texts in `breaks` and the cause `retokenized`.

    Raises:
        ConfigError: an unknown scope, a `group_key` with another scope than `tree`, or a
            `max_seq_len` below 2.
        TokenError: a step's tokens contradict themselves.
    """
    _check_options(scope, max_seq_len, group_key)
    policy = truncation or TruncationPolicy()
    rollouts = [resolve(index, trajectory) for index, trajectory in enumerate(trajectories)]
    effects = [
        truncation_effect(_as_state(t, r), policy, max_seq_len=max_seq_len)
        for t, r in zip(trajectories, rollouts, strict=True)
    ]
    skipped: list[Skipped] = []
    plans: list[Plan] = []
    breaks: list[Break] = []
    num_extendable = 0
    for rollout, effect, trajectory in zip(rollouts, effects, trajectories, strict=True):
        threads = threads_of(rollout, scope)
        for thread in threads:
            breaks.extend(find_breaks(rollout, thread.groups, decode))
            num_extendable += max(0, sum(map(len, thread.groups)) - 1)
        skipped.extend(_skipped(rollout, effect.has_sample))
        if effect.has_sample:
            key = rollout.index if group_key is None else ("group", group_key(trajectory))
            factor = float(rollout.trains and effect.in_loss)
            plans.append(Plan(rollout, threads, factor, key))
    openers = {(item.rollout, item.call): item for item in breaks}
    samples: list[Sample] = []
    for sample in SCOPES[scope](plans, openers):
        cut = Cut(sample, None) if max_seq_len is None else cap_sample(sample, max_seq_len)
        if cut.lost is not None:
            skipped.extend(_lost(cut.lost))
        if cut.sample is not None and len(cut.sample.records):
            samples.append(cut.sample)
    report = make_report(rollouts, effects, samples, breaks, skipped, num_extendable)
    return SampleBatch(samples, report, tuple(breaks), tuple(skipped))


def _check_options(scope: str, max_seq_len: int | None, group_key: GroupKey | None) -> None:
    if scope not in SCOPES:
        raise ConfigError(
            f"{scope!r} is not a scope of training samples.{did_you_mean(scope, SCOPES)}"
        )
    if group_key is not None and scope != "tree":
        raise ConfigError(
            f"scope {scope!r} does not share samples between rollouts, so group_key would be "
            "ignored. Remove it, or use scope 'tree'."
        )
    if max_seq_len is not None and max_seq_len < 2:
        raise ConfigError(
            f"max_seq_len is {max_seq_len}; a sample needs a prompt token and a sampled one. Give "
            "at least 2."
        )


def _as_state(trajectory: Any, rollout: Rollout) -> Mapping[str, Any]:
    if isinstance(trajectory, Mapping):
        return trajectory
    return {
        "trajectory": trajectory,
        "truncated": rollout.truncated,
        "truncation_reason": rollout.truncation_reason,
    }


def _skipped(rollout: Rollout, has_sample: bool) -> list[Skipped]:
    """Return what of a rollout is in no sample, before any cutting."""
    skipped = [
        Skipped(rollout.index, step, SkipReason.NO_TOKENS, 0)
        for step in rollout.steps_without_tokens
    ]
    for call in rollout.calls:
        count = rollout.tree.num_sampled(call.handle)
        if not count:
            skipped.append(Skipped(rollout.index, call.step, SkipReason.EMPTY_COMPLETION, 0))
        elif not has_sample:
            reason = SkipReason.TRUNCATION_POLICY
            skipped.append(Skipped(rollout.index, call.step, reason, count))
        elif not rollout.tree.prompt_len(call.handle):
            skipped.append(Skipped(rollout.index, call.step, SkipReason.NO_SOURCE, 1))
    return skipped


def _lost(records: Records) -> list[Skipped]:
    """Return the records that cutting lost, per call."""
    pairs = np.stack([records.rollout, records.call], axis=1)
    calls, counts = np.unique(pairs, axis=0, return_counts=True)
    return [
        Skipped(rollout, call, SkipReason.MAX_SEQ_LEN, count)
        for (rollout, call), count in zip(calls.tolist(), counts.tolist(), strict=True)
    ]
