"""Further consistency rules of an audit, as two tables: for one rollout, and for a whole run.

A row has the check and the cause of its findings, and the function that yields one per problem.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rolltree.evaluation import Settings
from rolltree.evaluation.report import stored_report
from rolltree.insight.auditing.report import Place, grouped
from rolltree.store import Run
from rolltree.store.metric_names import number_of, numbers
from rolltree.training.config import TrainConfig
from rolltree.training.plan import PHASE, group_seed
from rolltree.values.seeds import derive_seed
from rolltree.values.types import RolloutRequest

if TYPE_CHECKING:
    from rolltree.insight.auditing.rollout import RolloutAudit, RolloutFacts

InRollout: TypeAlias = "Callable[[RolloutAudit, RolloutRequest], Iterator[str]]"
InRun: TypeAlias = "Callable[[Stored], Iterator[RunProblem]]"
Find = TypeVar("Find", bound=Callable[..., Iterator[Any]])
_TIMES = ("started_at", "created_at", "generation_ms", "scoring_ms", "total_ms")
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed")
# Clocks of two machines may differ by this much, and so may a clock that was set in between.
CLOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class PlannedSettings:
    """The settings of a run's rollouts that are stored before any of them is played."""

    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by phase
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of training rollouts
    weights: Any = None  # the notes of `store.weights`


@dataclass(frozen=True, slots=True)
class AuditRule(Generic[Find]):
    """A comparison: check and cause of its findings, and the function that makes them."""

    check: str
    cause: str
    find: Find


@dataclass(frozen=True, slots=True)
class RunProblem:
    """A problem that a rule of the run found: what is wrong, and in which rollout or step."""

    message: str
    place: Place = (None, 0)
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A run whose rollouts were read; `config` is None without readable training settings."""

    run: Run
    settings: PlannedSettings
    config: TrainConfig | None
    facts: Sequence[RolloutFacts]

    @property
    def first(self) -> int:
        """The step after which the run began: 0, or the step of the forked checkpoint."""
        return int((self.run.meta.get("forked_from") or {}).get("step", 0))


# -- one rollout -----------------------------------------------------------------------------------


def _negative_times(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    for name in _TIMES:
        value = getattr(audit.row, name)
        if value is not None and not 0 <= value < math.inf:
            yield f"its {name} is {value:g}; times must be finite and not negative"
    for call in audit.calls:
        for name in ("sent_s", "time_s", "wait_s"):
            value = call.answer.get(name)
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                yield (
                    f"the {name} of call {call.index} is {value:g}; times must be finite and not "
                    "negative"
                )


def _cached_tokens(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    for call in audit.calls:
        info = call.answer.get("info")
        num = number_of(info.get("num_cached_tokens")) if isinstance(info, Mapping) else None
        num_prompt = call.tokens.tree.prompt_len(call.handle)
        if num is not None and not 0 <= num <= num_prompt:
            yield (
                f"call {call.index} found {num:g} tokens in the prefix cache, but its prompt has "
                f"{num_prompt}"
            )


def _backward_times(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    row = audit.row
    if row.started_at is not None and row.started_at > row.created_at + CLOCK_S:
        yield f"it began {row.started_at - row.created_at:.0f} s after it was stored"


def _long_times(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    row, clock_ms = audit.row, 1e3 * CLOCK_S
    engine = f"engine time is {row.generation_ms:.0f} ms"
    # Environments that score nothing, or by their own code, may leave the total at 0.
    if 0 < row.total_ms < row.generation_ms - 1:
        yield f"its total_ms is {row.total_ms:.0f} ms, but its {engine}"
    if row.started_at is None:
        return
    there_ms = 1e3 * (row.created_at - row.started_at)
    there = f"its time until it was stored is {there_ms:.0f} ms"
    if 0 <= there_ms < row.generation_ms - clock_ms:
        yield f"{there}, but its {engine}"
    sent = [number_of(call.answer.get("sent_s")) for call in audit.calls]
    latest_ms = 1e3 * max((value for value in sent if value is not None), default=0.0)
    if there_ms >= 0 and latest_ms > there_ms + clock_ms:
        yield f"{there}, but its last call was sent after {latest_ms:.0f} ms"


def _weighted_sum(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    row, part = audit.row, audit.part
    if row.reward is None:
        return
    paid = {n: w for n, w in part.functions if w} if part.is_sum else {}
    # A delegated rollout that no rubric scored has no values of these functions.
    if not paid or not paid.keys() <= row.metrics.keys():
        return
    values = {name: number_of(row.metrics[name]) for name in paid}
    known = [paid[name] * value for name, value in values.items() if value is not None]
    right = sum(known)
    size = max(1.0, *map(abs, known), abs(row.reward)) if known else 1.0
    if len(known) < len(paid) or abs(row.reward - right) > 1e-6 * size:
        said = ", ".join(f"{paid[name]:g} * {name} = {value}" for name, value in values.items())
        yield f"its reward is {row.reward:g}, but its functions give {right:g} ({said})"


def _planned_sampling(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    row, settings = audit.row, audit.expected.settings
    planned: Mapping[str, Any] = settings.sampling if row.phase == PHASE else {}
    if evaluation := settings.evaluations.get(row.phase):
        planned = {
            name: evaluation[f"sampling.{name}"]
            for name in _SAMPLING
            if f"sampling.{name}" in evaluation
        }
    for name, wanted in planned.items():
        given = getattr(request.sampling, name)
        given = list(given) if isinstance(given, tuple) else given
        wanted = list(wanted) if isinstance(wanted, list | tuple) else wanted
        if (given or None) != (wanted or None):
            yield (
                f"it was requested with {name} = {given!r}, but {row.phase} is sampled with "
                f"{wanted!r}"
            )


def _planned_seed(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    row, expected = audit.row, audit.expected
    evaluation = expected.settings.evaluations.get(row.phase)
    label = row.group_id.rpartition("/")[2]
    if row.phase == PHASE and expected.run_seed is not None:
        if not label[1:].isdecimal() or label[0] not in "gx" or row.train_step is None:
            return
        whose, world = "the run's", _group_seed(expected.run_seed, row.train_step, label)
    elif evaluation is not None and label.isdecimal() and isinstance(evaluation.get("seed"), int):
        names = str(evaluation.get("env_id")), str(evaluation.get("split"))
        whose, world = "its evaluation's", _derived(evaluation["seed"], *names, int(label))
    else:
        return
    own = derive_seed(_derived(world, "sampling"), "member", row.index_in_group)
    if (request.seed, request.sampling_seed) != (world, own):
        yield (
            f"it was played with the seeds {request.seed} and {request.sampling_seed}; {whose} "
            f"seed gives {world} and {own} for this place, so it is not the rollout that was "
            "planned"
        )


# The members of a group follow each other.
_group_seed, _derived = lru_cache(maxsize=64)(group_seed), lru_cache(maxsize=64)(derive_seed)


def _other_environment(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    evaluation = audit.expected.settings.evaluations.get(audit.row.phase)
    wanted = None if evaluation is None else evaluation.get("env_id")
    if wanted is not None and audit.row.env_id != wanted:
        yield f"its environment is {audit.row.env_id!r}, but its evaluation's is {wanted!r}"


def _labels(audit: RolloutAudit, request: RolloutRequest) -> Iterator[str]:
    for call in audit.calls:
        tree, extras = call.tokens.tree, call.extras
        low, high = call.value_range("version") or (None, None)
        for name, label in (
            ("agent", tree.agent(call.handle)),
            ("turn", tree.turn(call.handle)),
            ("policy_version_min", low),
            ("policy_version_max", high),
        ):
            said = extras.get(name)
            # An environment may write something of its own there.
            if type(said) is (str if name == "agent" else int) and label not in (None, said):
                yield (
                    f"the {name} of call {call.index} is {said!r} in its record, but {label} in "
                    "its tokens"
                )


ROLLOUT_RULES: tuple[AuditRule[InRollout], ...] = (
    AuditRule("times", "negative_time", _negative_times),
    AuditRule("times", "backward_time", _backward_times),
    AuditRule("times", "longer_than_its_whole", _long_times),
    AuditRule("alignment", "more_cached_than_prompt", _cached_tokens),
    AuditRule("rewards", "not_the_sum", _weighted_sum),
    AuditRule("sampler", "other_settings", _planned_sampling),
    AuditRule("sampler", "seed", _planned_seed),
    AuditRule("groups", "foreign_environment", _other_environment),
    AuditRule("tokens", "label_differs", _labels),
)


# -- groups, phases and events ---------------------------------------------------------------------


def _by_group(stored: Stored) -> Iterable[list[RolloutFacts]]:
    """Return the members of each planned group, each by its first trajectory."""
    planned = {*stored.settings.evaluations, *([PHASE] if stored.config is not None else ())}
    return grouped(
        ((item.row.phase, item.row.group_id), item)
        for item in stored.facts
        if item.row.phase in planned and item.row.trajectory_index == 0
    ).values()


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _mixed_groups(stored: Stored) -> Iterator[RunProblem]:
    for items in _by_group(stored):
        known = [item.asked for item in items if item.asked is not None]
        if len(set(known)) < 2:
            continue
        usual = _most_common(known)
        for item in items:
            if item.asked not in (None, usual):
                yield RunProblem(
                    "its question or its answer differs from that of most of the "
                    f"{len(items)} members of {item.row.group_id}",
                    item.place,
                )


def _foreign_answers(stored: Stored) -> Iterator[RunProblem]:
    groups = list(_by_group(stored))
    asked = Counter(prompt for items in groups for prompt in {item.first_prompt for item in items})
    for items in groups:
        known = [item for item in items if item.first_prompt is not None]
        prompts = Counter(item.first_prompt for item in known)
        if len(known) < 3 or len(prompts) < 2:
            continue
        usual, number = prompts.most_common(1)[0]
        # The members share a world, so their first prompts are equal. If a world draws its own
        # random numbers, a prompt may differ, but then it shows the question of its row.
        if number == len(known) - 1 and all(
            item.is_as_asked == (item.first_prompt == usual) for item in known
        ):
            (other,) = (item for item in known if item.first_prompt != usual)
            # An environment may have dropped its first call; then no other group begins like it.
            if asked[other.first_prompt] < 2:
                continue
            yield RunProblem(
                "its calls do not begin with the question of its group "
                f"{other.row.group_id}: it holds the tokens of another rollout",
                other.place,
            )


def _changed_examples(stored: Stored) -> Iterator[RunProblem]:
    known: defaultdict[tuple[Any, ...], list[RolloutFacts]] = defaultdict(list)
    for items in _by_group(stored):
        evaluation = stored.settings.evaluations.get(items[0].row.phase)
        if evaluation is not None:
            index = items[0].row.group_id.rpartition("/")[2]
            key = evaluation.get("env_id"), evaluation.get("split"), index
            known[key] += [item for item in items if item.asked is not None]
    for items in known.values():
        asked = [item.asked for item in items]
        if len(set(asked)) < 2 or len({item.row.phase for item in items}) < 2:
            continue
        usual = _most_common(asked)
        for item in items:
            if item.asked != usual:
                others = next(other.row.request_id for other in items if other.asked == usual)
                yield RunProblem(
                    f"its question or its answer differs from that of {others}, which has the same "
                    "example",
                    item.place,
                )


def _unusual_completions(stored: Stored) -> Iterator[RunProblem]:
    """Find completions that lack a call's answer, if most others of the phase are complete."""
    known = ((item.row.phase, item) for item in stored.facts if item.has_answers is not None)
    for phase, items in grouped(known).items():
        wrong = [item for item in items if not item.has_answers]
        # An environment may write its own completions, but then it does so in every rollout.
        if len(items) >= _LEAST_USUAL and len(wrong) <= len(items) * _MOST_UNUSUAL:
            for item in wrong:
                yield RunProblem(
                    f"its completion lacks an answer of its calls; {len(items) - len(wrong)} "
                    f"others of {phase} have all of them",
                    item.place,
                )


_LEAST_USUAL, _MOST_UNUSUAL = 4, 0.25


def _foreign_environments(stored: Stored) -> Iterator[RunProblem]:
    items = [item for item in stored.facts if item.row.phase == PHASE and stored.config is not None]
    if len({item.row.env_id for item in items}) < 2:
        return
    usual = _most_common([item.row.env_id for item in items])
    for item in items:
        if item.row.env_id != usual:
            message = f"its environment is {item.row.env_id!r}, but the run trains on {usual!r}"
            yield RunProblem(message, item.place)


def _parents(stored: Stored) -> Iterator[RunProblem]:
    by_name = {
        (item.row.request_id, item.rollout_id): item
        for item in stored.facts
        if item.rollout_id is not None
    }
    for item in stored.facts:
        parent = by_name.get((item.row.request_id, item.row.parent_rollout or ""))
        if parent is None:
            continue
        if item.row.depth != parent.row.depth + 1:
            message = f"its depth is {item.row.depth}, but its parent has depth {parent.row.depth}"
            yield RunProblem(message, item.place)
        if item.parent_step is not None and not 0 <= item.parent_step < max(
            1, parent.row.num_calls
        ):
            calls = f"{parent.row.num_calls} calls"
            message = f"its parent_step is {item.parent_step}, but its parent has {calls}"
            yield RunProblem(message, item.place)


def _trained_on_test(stored: Stored) -> Iterator[RunProblem]:
    phases = {item.place: item.row.phase for item in stored.facts if item.row.phase != PHASE}
    if stored.config is None or not phases:
        return
    sql = "SELECT DISTINCT request_id, trajectory_index, step FROM trained"
    for row in stored.run.query(sql):
        place = row["request_id"], row["trajectory_index"]
        if place in phases:
            yield RunProblem(
                f"step {row['step']} trained it, but it is a rollout of {phases[place]}: test data "
                "was trained on",
                place,
                row["step"],
            )


def _missing_evaluations(stored: Stored) -> Iterator[RunProblem]:
    config, run, played = stored.config, stored.run, stored.run.phases()
    evaluated = [event for event in run.events() if event.kind in _EVALUATED]
    # A run without held-out examples evaluates nothing, whatever its settings say.
    if config is None or not (evaluated or stored.settings.evaluations):
        return
    last = max((row.step for row in run.steps()), default=0)
    first = stored.first
    done = {event.step for event in evaluated}
    phases = {str(event.data.get("phase")) for event in evaluated}
    section = config.eval
    owed = [
        (step, f"eval/{step:06d}")
        for step in range(first + 1, last)
        # Without the last step: its evaluation may be in progress, or is `eval_after`.
        if section.every and step % section.every == 0 and step not in done
    ]
    if section.before and last > first and not phases & {"eval_before"}:
        owed.insert(0, (first, "eval_before"))
    if section.after and run.events("finished") and last not in done:
        owed.append((last, "eval_after"))
    for step, phase in owed:
        there = "its rollouts are stored" if phase in played else "no rollout of it is stored"
        yield RunProblem(
            f"the settings ask for {phase} after step {step}, but its result is missing; {there}",
            step=step,
        )


_EVALUATED = ("evaluation", "evaluation_skipped")


def _missing_rollouts(stored: Stored) -> Iterator[RunProblem]:
    """Compare the requests of each finished evaluation with its plan."""
    planned: Mapping[str, Any] = stored.run.meta.get("planned") or {}
    played = grouped((item.row.phase, item.row.request_id) for item in stored.facts)
    for done in stored.run.evaluations():
        number, there = planned.get(f"phase/{done.phase}"), len({*played.get(done.phase, ())})
        if isinstance(number, int) and there < number:
            yield RunProblem(
                f"{done.phase} was to play {number} requests and is finished, but {there} are "
                "stored",
                step=done.step,
            )


def _evaluation_numbers(stored: Stored) -> Iterator[RunProblem]:
    played = stored.run.phases()
    for evaluation in stored.run.evaluations():
        told = evaluation.metrics
        if "num_rollouts" not in told or evaluation.phase not in played:
            continue
        settings = {name: told[name] for name in _SETTINGS if isinstance(told.get(name), float)}
        found = stored_report(stored.run, evaluation.phase, settings=Settings(**settings)).as_dict()
        for difference in _other_numbers(told, found):
            message = f"the evaluation {evaluation.phase} reported {difference}"
            yield RunProblem(message, step=evaluation.step)


def _kept_reports(stored: Stored) -> Iterator[RunProblem]:
    for phase in stored.run.phases():
        if not stored.run.kept_report(phase):
            continue
        kept = stored_report(stored.run, phase, outcomes=False).as_dict()
        for difference in _other_numbers(kept, stored_report(stored.run, phase).as_dict()):
            yield RunProblem(f"the report of {phase} says {difference}")


_SETTINGS = ("confidence", "pass_threshold")


def _other_numbers(stored: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[str]:
    """Yield the counts, means and intervals of a report that differ from its rollouts'."""
    said, found = _numbers(_comparable(stored, right)), _numbers(right)
    for name in sorted(said.keys() | found.keys()):
        # Another version of rolltree may report fewer or more families of numbers. In a family of
        # counts, a kind of failure that only one side has is a difference.
        family = name.partition(".")[0]
        if family not in stored or family not in right:
            continue
        one, other = said.get(name, 0.0), found.get(name, 0.0)
        is_compared = (name in said and name in found) or family in _COUNTED
        if is_compared and not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{name} = {one:g}, but its rollouts give {other:g}: one of the two was changed"


_COUNTED = ("failures", "truncations", "stops")


def _comparable(stored: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was stored without intervals that another version computed by another method."""
    is_other = stored.get("method") != right.get("method")
    return {
        name: _comparable(value, right[name])
        if isinstance(value, Mapping) and isinstance(right.get(name), Mapping)
        else value
        for name, value in stored.items()
        if not (is_other and name in ("low", "high", "num_values"))
    }


def _numbers(report: Mapping[str, Any]) -> dict[str, float]:
    flat = numbers({name: report[name] for name in report if name not in _OWN})
    return {name.replace("/", "."): value for name, value in flat.items()}


# Values of one start of the evaluation, which do not follow from its rollouts.
_OWN = (*_SETTINGS, "elapsed_s", "num_resumed", "advice", "scoring_errors", "failure_messages")


def _future_versions(stored: Stored) -> Iterator[RunProblem]:
    if stored.config is None:
        return
    last = max((row.step for row in stored.run.steps()), default=0)
    most = max(last + 1, stored.config.train.num_steps)
    for item in stored.facts:
        if item.row.max_version is not None and item.row.max_version > most:
            yield RunProblem(
                f"its tokens say that version {item.row.max_version} sampled them, but the run's "
                f"versions end at {most}",
                item.place,
            )


def _before_the_run(stored: Stored) -> Iterator[RunProblem]:
    began = stored.run.meta.get("created_at")
    if stored.config is None or not isinstance(began, int | float):
        return
    for item in stored.facts:
        first = min(item.row.created_at, item.row.started_at or item.row.created_at)
        if first < began - CLOCK_S:
            yield RunProblem(
                f"it began or was stored {began - first:.0f} s before the run began, so it is from "
                "another run",
                item.place,
            )


def _backward_steps(stored: Stored) -> Iterator[RunProblem]:
    latest, number = -math.inf, 0
    stored_at: defaultdict[int, float] = defaultdict(lambda: -math.inf)
    for item in stored.facts:
        for known in item.trained:
            stored_at[known.step] = max(stored_at[known.step], item.row.created_at)
    for row in stored.run.steps():
        for at, what in (
            (latest, f"step {number}"),
            (stored_at[row.step], "a rollout that it trained"),
        ):
            if row.created_at < at - CLOCK_S:
                early = f"{at - row.created_at:.0f} s"
                yield RunProblem(
                    f"it was stored {early} before {what}, which came first", step=row.step
                )
                break
        if row.created_at > latest:
            latest, number = row.created_at, row.step


RUN_RULES: tuple[AuditRule[InRun], ...] = (
    AuditRule("groups", "mixed_group", _mixed_groups),
    AuditRule("groups", "foreign_answer", _foreign_answers),
    AuditRule("groups", "changed_example", _changed_examples),
    AuditRule("spans", "completion_differs", _unusual_completions),
    AuditRule("groups", "foreign_environment", _foreign_environments),
    AuditRule("groups", "wrong_parent", _parents),
    AuditRule("counted_once", "trained_on_test", _trained_on_test),
    AuditRule("counted_once", "missing_evaluation", _missing_evaluations),
    AuditRule("counted_once", "missing_rollout", _missing_rollouts),
    AuditRule("rewards", "evaluation_differs", _evaluation_numbers),
    AuditRule("rewards", "report_differs", _kept_reports),
    AuditRule("versions", "future_version", _future_versions),
    AuditRule("times", "before_the_run", _before_the_run),
    AuditRule("times", "backward_step", _backward_steps),
)
