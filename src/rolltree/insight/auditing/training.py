"""The checks of training steps: each token trained once, with the advantage that rewards give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from rolltree.insight.auditing.loss_weights import (
    differing_weights,
    minibatches,
    note_weights_of_calls,
    used_tokens,
)
from rolltree.insight.auditing.older_intervals import older_interval
from rolltree.insight.auditing.report import Ledger, Place, grouped, some, tolerance
from rolltree.insight.auditing.rollout import Call, RolloutFacts, TrainedFacts
from rolltree.insight.auditing.token_metrics import metrics_of_tokens, note_sums
from rolltree.records.trained_steps import LEDGER
from rolltree.store import Run, StepRow
from rolltree.store.trained import TrainedRollout
from rolltree.store.weights import noted_environments
from rolltree.training.advantages import CreditReport, averages_of, credit_group, join_credit
from rolltree.training.algorithms import Algorithm
from rolltree.training.batches import staleness_limit
from rolltree.training.config import TrainConfig
from rolltree.training.metrics import rollout_metrics
from rolltree.training.plan import PHASE, group_name
from rolltree.values.errors import RolltreeError
from rolltree.values.types import RolloutResult

# The entropy limit if the run's vocabulary is not known: that of a million tokens.
MOST_ENTROPY = math.log(2**20)
# A softmax in 16 bits may leave [0, 1] by this much.
_ROUNDING = 1e-2
# Reasons to mask a call that depend on the model, or on settings that may change.
_NOT_STORED = (
    *("vocabulary", "length", "input", "weight"),
    *("advantage", "misspelled", "routing"),
)
_Where: TypeAlias = tuple[Place, int]
"""A rollout, and the step that trained it."""


@dataclass(slots=True)
class TrainingAudit:
    """Checks the steps of a training run, after its rollouts were read.

    `first` is the step after which it began: 0, or the step of the checkpoint that was forked.
    """

    run: Run
    config: TrainConfig
    ledger: Ledger
    first: int = 0
    taken: dict[int, Mapping[str, Any]] = field(init=False)  # step -> its groups
    records_tokens: bool = field(init=False)  # whether the run stored what it trained, by token
    recorded_steps: set[int] = field(init=False)  # those that did: a later start may change that
    most_entropy: float = MOST_ENTROPY  # of a token, in nats
    algorithm: Algorithm = field(init=False)
    environments: tuple[str, ...] = field(init=False)  # of a group

    def __post_init__(self) -> None:
        self.algorithm = self.config.algorithm.resolve()
        self.environments = noted_environments(self.run, PHASE)
        events = self.run.events(LEDGER)
        self.taken = {event.step: event.data for event in events if event.step is not None}
        self.records_tokens = any(True for _ in self.run.trained())

    # -- one rollout and what the table `trained` has of it ----------------------------------------

    def check_trained(
        self, facts: RolloutFacts, calls: Sequence[Call], rows: Iterable[TrainedRollout]
    ) -> None:
        """Compare the trained tokens of one trajectory with its sampled tokens."""
        sizes = [call.num_sampled for call in calls]
        calls = [call for call in calls if call.num_sampled]
        for row in rows:
            self.ledger.count("advantages")
            where = facts.place, row.step
            known = TrainedFacts(row.step, [], num_tokens=row.num_tokens)
            facts.trained.append(known)
            if [n for n in row.num_sampled.tolist() if n] != [n for n in sizes if n]:
                self.ledger.find(
                    *("advantages", "tokens_differ"),
                    f"step {row.step} trained {row.num_tokens} tokens of its calls, but they "
                    f"sampled {sum(sizes)}",
                    *where,
                )
                continue
            known.advantages = self._of_calls(row, where)
            known.is_weighted = True
            if sum(sizes):
                lag = self._lag(row, calls, where)
                engine = _engine_logprobs(calls)
                self._impossible(row, where)
                self._weights(known, row, calls, lag, engine, where)
                note_sums(known, row, lag, engine, self.algorithm)
                if known.num_fresh:
                    self.ledger.count("logprobs")
                    known.mismatch = known.sums["size"] / known.num_fresh

    def _of_calls(self, row: TrainedRollout, where: _Where) -> list[float | None]:
        """Return the advantage of each call; credit gives all tokens of a call the same."""
        advantages: list[float | None] = []
        at = 0
        for index, size in enumerate(row.num_sampled.tolist()):
            part = row.advantage[at : at + size]
            at += size
            advantages.append(float(part[0]) if size else None)
            if size > 1 and not (part == part[0]).all():
                self.ledger.find(
                    *("advantages", "advantage_differs"),
                    f"the tokens of call {index} were trained with advantages from "
                    f"{part.min():g} to {part.max():g}; credit gives a call only one",
                    *where,
                )
        return advantages

    def _impossible(self, row: TrainedRollout, where: _Where) -> None:
        """Check that the trainer's values of tokens are possible for a distribution."""
        for name, low, high in (
            ("logprob", -math.inf, _ROUNDING),
            ("reference", -math.inf, _ROUNDING),
            ("entropy", -_ROUNDING, self.most_entropy + _ROUNDING),
            ("kl", -_ROUNDING, math.inf),
            ("weight", 0.0, math.inf),
        ):
            values = getattr(row, name)
            # Almost every row is right, and comparing minimum and maximum costs the least.
            if values is None or (values.min() >= low and values.max() <= high):
                continue
            wrong = (values < low) | (values > high)
            wrong |= np.isnan(values) & np.isfinite(row.logprob)
            if wrong.any():
                span = f"at least {max(low, 0):g}" if high == math.inf else f"at most {high:.4g}"
                self.ledger.find(
                    *("logprobs", "impossible"),
                    f"step {row.step} has the {name} {values[wrong][0]:.4g} for {int(wrong.sum())} "
                    f"of its tokens; it is {span} in any distribution",
                    *where,
                )

    def _weights(
        self,
        known: TrainedFacts,
        row: TrainedRollout,
        calls: Sequence[Call],
        lag: NDArray[Any] | None,
        engine: NDArray[np.float64],
        where: _Where,
    ) -> None:
        section = self.config.train
        tokens = used_tokens(
            row,
            calls,
            lag if section.async_steps else None,
            staleness_limit(self.config),
            section.max_seq_len,
            is_supervised=self.algorithm.supervised,
        )
        masked = self._masked(row, calls, where)
        masked |= self._changed_sampling(row, calls, where)
        if tokens.is_known and not masked and (wrong := ~tokens.used & (row.weight != 0)).any():
            self.ledger.find(
                *("alignment", "unused_token_trained"),
                f"{int(wrong.sum())} tokens were trained that are older than train.max_lag or "
                "beyond train.max_seq_len",
                *where,
            )
        note_weights_of_calls(known, row, tokens, engine, self.config, self.algorithm)

    def _changed_sampling(self, row: TrainedRollout, calls: Sequence[Call], where: _Where) -> bool:
        """Whether tokens were trained that the model's own distribution did not give: a finding."""
        trained = np.add.reduceat(row.weight != 0, _starts(calls), dtype=np.int64)
        for call, count in zip(calls, trained.tolist(), strict=True):
            if count and (changes := call.changed_sampling) and not self.algorithm.supervised:
                self.ledger.find(
                    *("sampler", "not_the_models_own"),
                    f"call {call.handle} was sampled with {changes}, and step {row.step} trained "
                    f"{count} tokens of it; their ratios are wrong",
                    *where,
                )
                return True
        return False

    def _masked(self, row: TrainedRollout, calls: Sequence[Call], where: _Where) -> bool:
        """Whether tokens with mask 0, or of calls that are left out, were trained: a finding."""
        left_out = [call.left_out is not None for call in calls]
        if all(all(call.value_range("weight") or ()) for call in calls) and not any(left_out):
            return False
        mask = np.concatenate([call.tokens.tree.mask(call.handle) for call in calls])
        mask[np.repeat(left_out, [call.num_sampled for call in calls])] = 0
        wrong = (row.weight != 0) & (mask == 0)
        if wrong.any():
            self.ledger.find(
                *("alignment", "masked_token_trained"),
                f"{int(wrong.sum())} tokens have mask 0, or are of calls that are left out, but "
                "were trained",
                *where,
            )
        return bool(wrong.any())

    def _lag(
        self, row: TrainedRollout, calls: Sequence[Call], where: _Where
    ) -> NDArray[np.int64] | None:
        """Return each token's age in versions, int64 `[_T]`; None if all of them are 0."""
        # The weights before step n are version n - 1: a token of version v has the lag n - 1 - v.
        ranges = [call.value_range("version") for call in calls]
        if all(each in (None, (row.step - 1, row.step - 1)) for each in ranges):
            return None
        versions = np.concatenate([call.versions for call in calls]).astype(np.int64)
        lag, used = row.step - 1 - versions, row.weight != 0
        if (used & (lag < 0)).any():
            self.ledger.find(
                *("versions", "too_new"),
                f"step {row.step} trained tokens that say version {int(versions.max())} sampled "
                f"them, but the newest version then was {row.step - 1}",
                *where,
            )
        if (used & (lag > staleness_limit(self.config))).any() and self.config.train.async_steps:
            self.ledger.find(
                *("versions", "stale_token_trained"),
                f"step {row.step} trained tokens of version {int(versions[used].min())}, older "
                f"than train.max_lag allows",
                *where,
            )
        return lag

    # -- all rollouts of a step -----------------------------------------------------

    def check_steps(self, facts: Sequence[RolloutFacts]) -> None:
        """Check every step, after all rollouts were read."""
        steps = self.run.steps()
        self._contiguous(steps)
        # In the trainer's order, by which it cuts mini-batches; rollouts are stored as they finish.
        facts = sorted(facts, key=lambda item: (item.row.index_in_group, item.row.trajectory_index))
        self.recorded_steps = {known.step for item in facts for known in item.trained}
        by_group = grouped((item.row.group_id, item) for item in facts)
        by_step = grouped((item.row.train_step, item) for item in facts)
        # The baseline of a step is the average that the previous step left, so steps are checked in
        # order; those before a fork are in the run that was forked.
        averages: dict[str, float] = {}
        roles = {item.state.get("agent") for item in facts if item.state is not None}
        for row in steps:
            if row.step > self.first:
                self._check_step(row, by_step.get(row.step, []), by_group, averages)
            averages = averages_of(row.metrics, roles)
        self._check_mismatch(facts)
        self._check_taken(facts)

    def _contiguous(self, steps: Sequence[StepRow]) -> None:
        last = steps[-1].step if steps else 0
        missing = sorted(set(range(1, last + 1)) - {row.step for row in steps})
        self.ledger.count("steps", len(steps))
        for step in missing:
            self.ledger.find(
                "steps", "missing_step", f"step {step} of {last} has no metrics", step=step
            )
        for row in steps:
            version = row.metrics.get("policy/version", row.step)
            if version != row.step:
                said = f"step {row.step} says that its weights are version {version:g}"
                self.ledger.find("steps", "wrong_version", said, step=row.step)

    def _check_step(
        self,
        row: StepRow,
        planned: Sequence[RolloutFacts],
        by_group: Mapping[str, Sequence[RolloutFacts]],
        averages: dict[str, float],
    ) -> None:
        section = self.config.algorithm
        # Asynchronous steps take groups as they finish, so an event says which; others take those
        # that were planned for them, and what replaced them.
        if self.config.train.async_steps:
            data = self.taken.get(row.step, {})
            names, others = list(data.get("groups", ())), list(data.get("dropped", ()))
        else:
            named = dict.fromkeys(item.row.group_id for item in planned)
            names = sorted(name for name in named if _number(name, "g") is not None)
            others = sorted(set(named) - set(names))
            wanted = [group_name(row.step, f"g{n:02d}") for n in range(section.groups_per_step)]
            names = list(dict.fromkeys((*wanted, *names)))
        self._members(row.step, names, by_group)
        groups = [[*by_group.get(name, ())] for name in (*names, *others)]
        sampled = [item for group in groups for item in group]
        is_dynamic = bool(section.dynamic_sampling_max) and not self.config.train.async_steps
        if not is_dynamic:
            groups = groups[: len(names)]
        num_trained = len(names) if is_dynamic else None
        self._credit(row, [group for group in groups if group], num_trained, sampled, averages)

    def _members(
        self, step: int, names: Sequence[str], by_group: Mapping[str, Sequence[RolloutFacts]]
    ) -> None:
        size = self.config.algorithm.group_size
        for name in names:
            there = {item.row.request_id for item in by_group.get(name, ())}
            planned = {f"{name}/{index}" for index in range(size)}
            self.ledger.count("counted_once", size)
            for request_id in sorted(planned - there):
                self.ledger.find(
                    *("counted_once", "missing_rollout"),
                    f"step {step} was to have it, but it is missing",
                    (request_id, 0),
                    step,
                )
            for request_id in sorted(there - planned):
                self.ledger.find(
                    *("counted_once", "unplanned_rollout"),
                    f"group {name} has {size} members, but this is not one of them",
                    (request_id, 0),
                    step,
                )

    def _credit(
        self,
        row: StepRow,
        groups: Sequence[list[RolloutFacts]],
        num_trained: int | None,
        sampled: Sequence[RolloutFacts],
        averages: Mapping[str, float],
    ) -> None:
        """Compare a step with the credit of its groups.

        Dynamic sampling trains `num_trained` groups: those with a signal, then the last others.
        """
        section = self.config.algorithm
        policy, credit = section.policy(self.config.train.max_seq_len), section.resolve().credit
        try:
            taken = [(group, credit_group(_results(group), credit, policy)) for group in groups]
            if num_trained is not None:
                useful = [each for each in taken if each[1].has_signal]
                flat = [each for each in taken if not each[1].has_signal]
                missing = max(0, num_trained - len(useful))
                taken = [*useful, *flat[len(flat) - missing :]]
            results = [result for _, each in taken for result in each.results]
            played = [
                [item for item in members if item.state is not None]
                for group, _ in taken
                for members in _by_request(group)
            ]
            report = join_credit(results, [each for _, each in taken], policy, averages)
        except RolltreeError as error:
            self.ledger.find("advantages", "no_credit", str(error), step=row.step)
            return
        self._metrics(row, sampled, report.metrics)
        if row.step not in self.recorded_steps:
            return
        items = [played[result][index] for result, index in report.places]
        self._tokens_of_step(row, items, report)
        for item, values in zip(items, report.advantages, strict=True):
            rows = [known for known in item.trained if known.step == row.step]
            where = item.place, row.step
            if not rows and item.num_sampled:
                said = f"step {row.step} was to train it, but trained none of its tokens"
                self.ledger.find("counted_once", "not_trained", said, *where)
            for known in rows:
                self._compare(known, values.tolist(), where)

    def _compare(self, known: TrainedFacts, wanted: Sequence[float], where: _Where) -> None:
        for index, (got, right) in enumerate(zip(known.advantages, wanted, strict=False)):
            # Stored advantages are float32, and a step may sum a group in another order.
            if got is not None and not math.isclose(got, right, rel_tol=1e-4, abs_tol=1e-6):
                self.ledger.find(
                    *("advantages", "advantage_differs"),
                    f"call {index} was trained with the advantage {got:g}, but the group's "
                    f"rewards give {right:g}",
                    *where,
                )
                return

    def _metrics(
        self, row: StepRow, sampled: Sequence[RolloutFacts], credit: Mapping[str, float]
    ) -> None:
        # By the function that training used. Without a state of any rollout, only errors count.
        try:
            played = rollout_metrics(_results(sampled), self.environments)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            said = (
                f"the metrics of step {row.step} cannot be computed: a record was changed ({error})"
            )
            self.ledger.find("steps", "metrics_differ", said, step=row.step)
            return
        is_played = any(item.state is not None for item in sampled)
        groups = grouped(
            (item.row.group_id, item.row.reward)
            for item in sampled
            if item.row.parent_rollout is None
            and item.state is not None
            and item.row.reward is not None
        )
        ends = older_interval(list(groups.values())) if groups else None
        older: dict[str, list[float]] = {}
        for name, end in zip(("reward/low", "reward/high"), ends or (), strict=False):
            # The oldest versions did not cut them, so they lie anywhere beyond 0 and 1.
            stored = float(row.metrics.get(name, end))
            older[name] = [end, stored] if end in (0.0, 1.0) and not 0 < stored < 1 else [end]
        right = dict(credit)
        right |= {name: played[name] for name in played if is_played or name.startswith("error/")}
        for name, value in right.items():
            if name != "memory/peak_rss_bytes":
                self._metric(row, name, value, older=older.get(name, ()))
        for name in row.metrics:
            if name.startswith(("metrics/", "error/")) and name not in right:
                self.ledger.find(
                    *("steps", "metrics_differ"),
                    f"{name} of step {row.step} is {row.metrics[name]}, but none of its rollouts "
                    "has this metric: one of the two was changed",
                    step=row.step,
                )

    def _metric(
        self,
        row: StepRow,
        name: str,
        value: float,
        relative: float = 1e-6,
        absolute: float = 1e-7,
        older: Sequence[float] = (),
    ) -> None:
        """Compare a stored metric with its `value`, or with those that older versions computed."""
        stored = row.metrics.get(name)
        if stored is None:
            return
        self.ledger.count("steps")
        if all(
            not math.isclose(float(stored), each, rel_tol=relative, abs_tol=absolute)
            for each in (value, *older)
        ):
            self.ledger.find(
                *("steps", "metrics_differ"),
                f"{name} of step {row.step} is {stored:g}, but its rollouts give {value:g}: "
                "one of the two was changed",
                step=row.step,
            )

    def _tokens_of_step(
        self, row: StepRow, items: Sequence[RolloutFacts], report: CreditReport
    ) -> None:
        """Compare loss weights with the aggregation, and token metrics with the trained tokens."""
        if row.metrics.get("train/skipped_step"):
            return  # nothing was trained, and tokens were recorded only until the step failed
        trained: list[tuple[RolloutFacts, TrainedFacts, bool]] = []
        for item, effect in zip(items, report.effects, strict=True):
            known = [each for each in item.trained if each.step == row.step]
            if len(known) != 1:
                return  # missing and duplicate rows are found elsewhere
            known[0].num_counted = sum(known[0].used) * effect.in_loss
            trained.append((item, known[0], effect.in_loss))
        rows = [known for _, known, _ in trained]
        in_loss = [each for _, _, each in trained]
        section = self.config.train
        # Why calls were left out for these reasons is not stored with the rollout.
        is_known = not any(row.metrics.get(f"masked/{reason}") for reason in _NOT_STORED)
        first = [*range(len(rows))]
        if section.minibatches > 1:
            parts = minibatches(rows, in_loss, self.config) if is_known else None
            first = parts[0] if parts else []
            for index in {*range(len(rows))}.difference(first):
                # The other parts are read after the first update, with other weights.
                rows[index].mismatch = None
        for name, value, relative, absolute in metrics_of_tokens(
            rows, [rows[index] for index in first], self.algorithm
        ):
            # This metric covers only tokens that were not cut.
            is_cut = name == "rollout/entropy" and section.max_seq_len is not None
            is_unknown = name == "train/num_skipped_records" and not is_known
            if not (is_cut or is_unknown):
                self._metric(row, name, value, relative, absolute)
        if not is_known:
            return
        wrong = differing_weights(rows, in_loss, self.config, self.algorithm)
        for index, call, right in wrong:
            item, mine, _ = trained[index]
            name = f"call {mine.sampling_calls[call]}"
            self.ledger.find(
                *("alignment", "weight_differs"),
                f"{name} was trained with loss weights of {mine.least[call]:.4g} or more, "
                f"but the aggregation {self.algorithm.aggregation!r} of the step's tokens gives "
                f"{right:.4g}"
                if mine.least[call] > right
                else f"a token of {name} was trained with a loss weight of at most "
                f"{mine.most[call]:.4g}, but the aggregation {self.algorithm.aggregation!r} of "
                f"the step's tokens gives {right:.4g}",
                item.place,
                row.step,
            )

    def _check_mismatch(self, facts: Sequence[RolloutFacts]) -> None:
        sizes = [
            (known.mismatch, item, known.step)
            for item in facts
            for known in item.trained
            if known.mismatch is not None
        ]
        if not sizes:
            return
        noise, limit = tolerance((size for size, _, _ in sizes), self.config.train.max_mismatch)
        for size, item, step in sizes:
            if size > limit:
                self.ledger.find(
                    *("logprobs", "engine_differs"),
                    f"its engine logprobs differ from the trainer's by {size:.2g} on average; "
                    f"{noise:.2g} is usual in this run",
                    item.place,
                    step,
                )

    def _check_taken(self, facts: Sequence[RolloutFacts]) -> None:
        """Check that nothing was trained by two steps, and that no trained rollout is missing."""
        for item in facts:
            taken = sorted({known.step for known in item.trained})
            if len(taken) > 1:
                self.ledger.find(
                    *("counted_once", "trained_twice"),
                    f"it was trained by several steps: {some(taken)}",
                    item.place,
                )
        steps_of = grouped(
            (name, step) for step, data in self.taken.items() for name in data.get("groups", ())
        )
        for name, taken in steps_of.items():
            if len(taken) > 1:
                said = f"group {name} was trained by several steps: {some(sorted(taken))}"
                self.ledger.find("counted_once", "trained_twice", said, step=max(taken))
        if not self.records_tokens:
            return
        known = {item.place for item in facts}
        sql = "SELECT DISTINCT request_id, trajectory_index FROM trained"
        for row in self.run.query(sql):
            place = row["request_id"], row["trajectory_index"]
            if place not in known:
                said = "a step trained tokens of it, but the rollout is missing"
                self.ledger.find("counted_once", "missing_rollout", said, place)


def _starts(calls: Sequence[Call]) -> list[int]:
    """Return where the sampled tokens of each call begin among those of all."""
    return list(accumulate((call.num_sampled for call in calls[:-1]), initial=0))


def _engine_logprobs(calls: Sequence[Call]) -> NDArray[np.float64]:
    """Return the engine's logprobs of sampled tokens, float64 `[_T]`; NaN if they are unknown."""
    pairs = [(call.logprobs, call.num_sampled) for call in calls]
    found = [np.full(size, np.nan) if each is None else np.asarray(each) for each, size in pairs]
    return np.concatenate(found).astype(np.float64)


def _by_request(facts: Sequence[RolloutFacts]) -> list[list[RolloutFacts]]:
    """Return the trajectories of each request, in their order."""
    requests = grouped((item.row.request_id, item) for item in facts).values()
    return [sorted(members, key=lambda item: item.row.trajectory_index) for members in requests]


def _results(facts: Sequence[RolloutFacts]) -> list[RolloutResult]:
    """Return the results that credit and metrics are computed from, of all their trajectories."""
    results = []
    for members in _by_request(facts):
        asked = {"task": members[0].row.task}
        request_id = members[0].row.request_id
        request = SimpleNamespace(
            request_id=request_id, group_id=members[0].row.group_id, input=asked
        )
        states = tuple(item.state for item in members if item.state is not None)
        kind = (
            members[0].row.error_type
            if any(item.row.status == "error" for item in members)
            else None
        )
        error = None if kind is None else SimpleNamespace(type=kind)
        results.append(RolloutResult(cast(Any, request), cast(Any, states), cast(Any, error)))
    return results


def _number(group_id: str, kind: str) -> int | None:
    """Return the number of a group of a kind ("g": planned, "x": a replacement), or None."""
    label = group_id.rpartition("/")[2]
    return int(label[1:]) if label[:1] == kind and label[1:].isdecimal() else None
