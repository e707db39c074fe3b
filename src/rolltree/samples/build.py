"""`build_samples`: turns trajectories into samples of one of four scopes, with a report."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from rolltree.samples.assemble import Streams, flat_sample, on_one_tree, tree_sample
from rolltree.samples.report import Skipped, SkipReason, make_report
from rolltree.samples.resolve import (
    Advantages,
    Group,
    ResolvedRollout,
    ResolvedStep,
    resolve_rollout,
)
from rolltree.samples.streams import tree_streams
from rolltree.samples.truncation import (
    TruncationEffect,
    TruncationMode,
    TruncationPolicy,
    truncation_effect,
)
from rolltree.tokens import Break, Decoder, Place, TokenTree
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import Records, Sample, Scope, State, TrajectoryStep

DEFAULT_SCOPE: Scope = "tree"
"""The scope of `build_samples`, `generate_batch`, the training configuration and reports.

`tree` computes every token once, even if the history is rewritten, and its gradient is that of
training each call on its own. For rows, which hold one path each, use `interleave`.
"""

GroupKey = Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples, and an account of every call.

    `report` is a flat dict of metrics (see `make_report`), `breaks` says where and why a prompt did
    not extend the call before it, and `skipped` which sampled tokens are in no sample.

    `Sample.info` holds `scope`, `rollouts` (the rollout index of each origin), `streams` (name to
    `SampleStream`), in a flat sample `break` (the `Break` that began it, also if the call was only
    sampled again or begins another conversation, which `breaks` leaves out; or None), if
    `max_seq_len` cut it, the keys that `cap_sample` adds, and, if a call was not sampled from the
    model's own distribution, `changed_sampling`: (rollout index, call, settings) of each such call.
    `left_out` has (rollout index, call, reason) of calls whose `extras["left_out"]` says why they
    are not to be trained, if there are any.
    """

    samples: list[Sample]
    report: dict[str, float]
    breaks: tuple[Break, ...]
    skipped: tuple[Skipped, ...]


def build_samples(
    trajectories: Sequence[State | Sequence[TrajectoryStep]],
    scope: Scope = DEFAULT_SCOPE,
    *,
    advantages: Sequence[Advantages] | None = None,
    truncation: TruncationPolicy | TruncationMode | Sequence[TruncationEffect] | None = None,
    max_seq_len: int | None = None,
    group_key: GroupKey | None = None,
    inputs: Sequence[str] = (),
    decode: Decoder | None = None,
    skip_invalid: bool = False,
) -> SampleBatch:
    """Turn trajectories into training samples, without changing the trajectories.

    A record's advantage comes from `advantages`; without them, from its step, else from the state,
    else it is 0 (counted in `num_calls_without_advantage`). In scope `turn` it is that of the
    turn's last step. A logprob that the engine did not return is NaN; in a turn, one missing
    logprob makes all of them NaN. A rollout with an error keeps its tokens with weight 0.

    Args:
        trajectories: states, or plain lists of steps. `records.rollout` is the index in this list.
        scope: `step`, `turn`, `interleave` or `tree`.
        advantages: an array per trajectory with a value per step, from `assign_credit`'s report.
        truncation: what to do with truncated rollouts: a policy or its mode (default: keep them),
            or the decision for each trajectory, from the `effects` of `assign_credit`'s report.
        max_seq_len: cut every path to this many tokens.
        group_key: in scope `tree`, trajectories with equal keys share one sample, for example
            `lambda state: state["example_id"]`. Default: one sample per trajectory.
        inputs: names of per-token streams that a loss reads (`Loss.inputs`); `records.extra` has
            their values.
        skip_invalid: leave out steps whose tokens contradict themselves, and list them in
            `skipped`, as training does.
        decode: ids to text, for the texts in `breaks` and the cause `retokenized`.

    Raises:
        ConfigError: the scope is unknown, a `group_key` is given for another scope than `tree`,
            `max_seq_len` is below 2, or the numbers of effects or advantages do not match the
            trajectories or their steps.
        TokenError: a step's tokens contradict themselves.
    """
    _check_options(scope, max_seq_len, group_key)
    effects = _effects(trajectories, truncation, max_seq_len)
    given = _advantages(trajectories, advantages)
    rollouts = [
        resolve_rollout(index, trajectory, effect, mine, skip_invalid=skip_invalid)
        for index, (trajectory, effect, mine) in enumerate(
            zip(trajectories, effects, given, strict=True)
        )
    ]
    skipped: list[Skipped] = []
    openings: list[Break] = []
    samples: list[Sample] = []
    trees: dict[Hashable, list[ResolvedRollout]] = {}
    num_extendable = 0
    for rollout, trajectory in zip(rollouts, trajectories, strict=True):
        # Breaks are reported in every scope, and are those that interleaving would have.
        turns = turns_of(rollout) if scope == "turn" else [list(rollout.calls)]
        opened: dict[int, Break] = {}
        turn_groups = [by_prefix(rollout.tree, calls) for calls in turns]
        for calls, groups in zip(turns, turn_groups, strict=True):
            num_extendable += max(0, len(calls) - 1)
            opened |= {item.call: item for item in _openings(rollout, groups, decode)}
        openings.extend(opened.values())
        # Before a rollout is left out, because the report accounts for every sampled token.
        skipped.extend(_skipped(rollout))
        if not rollout.calls or not rollout.effect.counts:
            continue
        if scope == "tree":
            key = rollout.index if group_key is None else ("group", group_key(trajectory))
            trees.setdefault(key, []).append(rollout)
            continue
        if scope == "step":
            turn_groups = [[[call] for call in rollout.calls]]
        # Of the whole rollout, since a sample needs the streams of its context, too, whichever call
        # recorded them.
        streams = tree_streams(rollout.tree)
        for groups in turn_groups:
            samples.extend(_flat(rollout, groups, scope, streams, inputs, opened))
    for members in trees.values():
        shared = on_one_tree(members)
        parts = [(rollout, rollout.calls) for rollout in shared]
        samples.append(tree_sample(parts, tree_streams(shared[0].tree), inputs))
    kept: list[Sample] = []
    for sample in samples:
        capped: Sample | None = sample
        if max_seq_len is not None:
            from rolltree.samples.cutting import cap_sample

            capped, lost = cap_sample(sample, max_seq_len)
            skipped.extend(Skipped(r, c, SkipReason.MAX_SEQ_LEN, n) for r, c, n in lost)
        # A sample without records trains nothing, and computing it would be wasted.
        if capped is not None and len(capped.records):
            kept.append(capped)
    report = make_report(rollouts, kept, openings, skipped, num_extendable)
    breaks = tuple(item for item in openings if item.is_break)
    return SampleBatch(kept, report, breaks, tuple(skipped))


def trajectory_breaks(
    trajectory: State | Sequence[TrajectoryStep], decode: Decoder | None = None
) -> list[Break]:
    """Return where the calls of one trajectory do not extend earlier ones, in call order.

    It returns `build_samples([trajectory], "interleave", decode=decode, skip_invalid=True).breaks`,
    but builds no samples.
    """
    rollout = resolve_rollout(0, trajectory, skip_invalid=True)
    openings = _openings(rollout, by_prefix(rollout.tree, rollout.calls), decode)
    return [item for item in openings if item.is_break]


def _openings(
    rollout: ResolvedRollout, groups: Sequence[Group], decode: Decoder | None
) -> list[Break]:
    if len(groups) < 2:
        return []  # as in most rollouts
    from rolltree.samples.openings import find_openings

    return find_openings(rollout, groups, decode)


def _check_options(scope: str, max_seq_len: int | None, group_key: GroupKey | None) -> None:
    if scope not in get_args(Scope):
        raise ConfigError(
            f"{scope!r} is not a scope of training samples.{did_you_mean(scope, get_args(Scope))}"
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


def _advantages(
    trajectories: Sequence[Any], advantages: Sequence[Advantages] | None
) -> Sequence[Advantages | None]:
    if advantages is None:
        return [None] * len(trajectories)
    steps = [t["trajectory"] if isinstance(t, Mapping) else t for t in trajectories]
    if list(map(len, advantages)) != list(map(len, steps)):
        raise ConfigError(
            f"advantages has {list(map(len, advantages))} values, and the trajectories have "
            f"{list(map(len, steps))} steps, so they cannot be matched. Pass an array per "
            "trajectory with a value per step, as the report of assign_credit has them."
        )
    return advantages


def _effects(
    trajectories: Sequence[Any],
    truncation: TruncationPolicy | TruncationMode | Sequence[TruncationEffect] | None,
    max_seq_len: int | None,
) -> Sequence[TruncationEffect]:
    if isinstance(truncation, str):
        truncation = TruncationPolicy(truncation)
    if truncation is None or isinstance(truncation, TruncationPolicy):
        policy = truncation or TruncationPolicy()
        return [truncation_effect(t, policy, max_seq_len=max_seq_len) for t in trajectories]
    if len(truncation) != len(trajectories):
        raise ConfigError(
            f"there are {len(truncation)} truncation effects for {len(trajectories)} trajectories, "
            "so they cannot be matched. Pass one per trajectory, in the same order."
        )
    return truncation


def _flat(
    rollout: ResolvedRollout,
    groups: Sequence[Group],
    scope: Scope,
    streams: Streams,
    inputs: Sequence[str],
    opened: Mapping[int, Break],
) -> list[Sample]:
    """Return a flat sample per group; in scope `turn`, all of the logprobs are known or none."""
    made = [
        flat_sample(rollout, group, scope, streams, inputs, **{"break": opened.get(group[0].index)})
        for group in groups
    ]
    # Over all samples of the turn, because a break may have split it.
    if scope == "turn" and _lacks_logprobs([sample.records for sample in made], groups):
        made = [
            replace(s, records=replace(s.records, logprob=np.full_like(s.records.logprob, np.nan)))
            for s in made
        ]
    return made


def _lacks_logprobs(parts: Sequence[Records], groups: Sequence[Group]) -> bool:
    unknown = [part for part in parts if np.isnan(part.logprob).any()]
    if not unknown:
        return False
    # What is not trained anyway, because of its mask or its sampling, takes no others with it.
    trained = [call.index for group in groups for call in group if call.changed_sampling is None]
    return any(
        (np.isnan(part.logprob) & (part.weight != 0) & np.isin(part.call, trained)).any()
        for part in unknown
    )


_NO_IDS = "it came without token ids (docs/inference.md, Servers, says how to get them)"


def _skipped(rollout: ResolvedRollout) -> list[Skipped]:
    """Return the tokens of a rollout that are in no sample, before samples are cut."""
    skipped = []
    for step in rollout.steps:
        reason, count = None, 0
        if step.problem is not None:
            reason = SkipReason.INVALID_TOKENS
        elif step.handle < 0:
            reason = SkipReason.NO_TOKENS
        elif not (count := rollout.tree.num_sampled(step.handle)):
            reason = SkipReason.EMPTY_COMPLETION
        elif not rollout.effect.counts:
            reason = SkipReason.TRUNCATION_POLICY
        elif not rollout.tree.prompt_len(step.handle):
            # Only the first token is lost, since the others have a token before them.
            reason, count = SkipReason.NO_SOURCE, 1
        if reason is not None:
            no_ids = _NO_IDS if reason is SkipReason.NO_TOKENS else ""
            why = step.problem or no_ids
            problem = f"rollout {rollout.rollout_id}: {why}" if why else ""
            skipped.append(Skipped(rollout.index, step.index, reason, count, problem))
    return skipped


# -- which calls share a flat sample ---------------------------------------------------------------


class OpenEnds:
    """The ends of samples that a later prompt may extend.

    An end is an arena index. `take` walks up from a prompt; the deepest open end on its path is the
    longest open prefix.
    """

    __slots__ = ("_by_run", "_tree")

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._by_run: dict[int, list[tuple[int, int]]] = {}

    def open(self, end: Place, sample: int) -> None:
        """Let `sample` be extended at `end`."""
        # A call without tokens has no end that others could extend.
        if end.run >= 0:
            insort(self._by_run.setdefault(end.run, []), (end.token, sample))

    def take(self, prompt_end: Place) -> int | None:
        """Close the deepest open end on the path to `prompt_end`; return its sample.

        If several samples have this end, the last one opened is taken.
        """
        arena, by_run = self._tree.arena, self._by_run
        token, run = prompt_end
        parents, parent_runs = arena.run_parent, arena.run_parent_run
        while run >= 0:
            ends = by_run.get(run)
            if ends:
                # `1 << 62` exceeds every sample number, so an end at this token is found, too.
                position = bisect_right(ends, (token, 1 << 62))
                if position:
                    _, sample = ends.pop(position - 1)
                    return sample
            # In the run above, only ends before the token where the path leaves it count.
            token, run = parents[run], parent_runs[run]
        return None


def by_prefix(tree: TokenTree, calls: Sequence[ResolvedStep]) -> list[Group]:
    """Interleave calls as far as possible: each joins the longest open sample its prompt extends.

    A prompt that equals an open sample extends it, too. A prompt that extends no open sample begins
    a new one; older samples stay open.
    """
    ends = OpenEnds(tree)
    groups: list[Group] = []
    for call in calls:
        sample = ends.take(tree.calls.prompt_end(call.handle))
        if sample is None:
            sample = len(groups)
            groups.append([])
        groups[sample].append(call)
        ends.open(tree.calls.end(call.handle), sample)
    return groups


def turns_of(rollout: ResolvedRollout) -> list[Group]:
    """Return the calls of each turn, by first call, with the advantage of the turn's last step.

    A turn is identified by an agent and a turn number; a call without one is its own turn.
    """
    turns: dict[tuple[str, int | None, int], list[ResolvedStep]] = {}
    for step in rollout.steps:
        key = (step.agent, step.turn, step.index if step.turn is None else -1)
        turns.setdefault(key, []).append(step)
    groups = [
        # From the turn's last step, even if that one has no tokens.
        [replace(step, advantage=steps[-1].advantage) for step in steps if step.handle >= 0]
        for steps in turns.values()
    ]
    return sorted(filter(None, groups), key=lambda calls: calls[0].index)
