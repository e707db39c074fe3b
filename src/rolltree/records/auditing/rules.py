"""Further consistency rules of an audit, as two tables: for one rollout, and for a whole run.

A row says what is compared, the cause of a finding, and its sentence. For each problem, the rule's
function yields the values that the sentence is formatted with.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rolltree.evaluation import Settings
from rolltree.evaluation.report import stored_report
from rolltree.records.auditing.report import Place, grouped
from rolltree.records.values import number_of
from rolltree.seeds import derive_seed
from rolltree.store import Run
from rolltree.store.metric_names import numbers
from rolltree.store.weights import noted_part
from rolltree.training.config import TrainConfig
from rolltree.training.plan import PHASE
from rolltree.types import RolloutRequest

if TYPE_CHECKING:
    from rolltree.records.auditing.rollout import RolloutAudit, RolloutFacts

Words: TypeAlias = Mapping[str, object]
InRollout: TypeAlias = "Callable[[RolloutAudit, RolloutRequest], Iterator[Words]]"
InRun: TypeAlias = "Callable[[Stored], Iterator[Found]]"
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
    """A comparison: what is compared, the cause and sentence of a finding, and who looks for it."""

    check: str
    cause: str
    compares: str
    sentence: str
    find: Find


@dataclass(frozen=True, slots=True)
class Found:
    """A problem that a rule of the run found: the values of its sentence, rollout and step."""

    words: Words
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


def _negative_times(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
    for name in _TIMES:
        value = getattr(audit.row, name)
        if value is not None and not 0 <= value < math.inf:
            yield {"name": name, "value": value}


def _backward_times(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
    row = audit.row
    if row.started_at is not None and row.started_at > row.created_at + CLOCK_S:
        yield {"late_s": row.started_at - row.created_at}


def _long_times(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
    row, clock_ms = audit.row, 1e3 * CLOCK_S
    # Environments that score nothing, or by their own code, may leave the total at 0.
    if 0 < row.total_ms < row.generation_ms - 1:
        yield {
            "name": "total_ms",
            "value": row.total_ms,
            "other": row.generation_ms,
            "of": "engine time is",
        }
    if row.started_at is None:
        return
    there_ms = 1e3 * (row.created_at - row.started_at)
    if 0 <= there_ms < row.generation_ms - clock_ms:
        words = {"name": "time until it was stored", "value": there_ms}
        yield {**words, "other": row.generation_ms, "of": "engine time is"}
    sent = [number_of(call.answer.get("sent_s")) for call in audit.calls]
    latest_ms = 1e3 * max((value for value in sent if value is not None), default=0.0)
    if there_ms >= 0 and latest_ms > there_ms + clock_ms:
        words = {"name": "time until it was stored", "value": there_ms}
        yield {**words, "other": latest_ms, "of": "last call was sent after"}


def _weighted_sum(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
    row = audit.row
    if row.reward is None:
        return
    part = noted_part(
        audit.expected.settings.weights,
        env_id=row.env_id,
        task=row.task,
        agent=row.agent,
        created_at=row.created_at,
    )
    paid = {} if part is None or not part.is_sum else {n: w for n, w in part.functions if w}
    # A delegated rollout that no rubric scored has no values of these functions.
    if not paid or not paid.keys() <= row.metrics.keys():
        return
    values = {name: number_of(row.metrics[name]) for name in paid}
    known = [paid[name] * value for name, value in values.items() if value is not None]
    right = math.fsum(known)
    size = max(1.0, *map(abs, known), abs(row.reward)) if known else 1.0
    if len(known) < len(paid) or abs(row.reward - right) > 1e-6 * size:
        said = ", ".join(f"{paid[name]:g} * {name} = {value}" for name, value in values.items())
        yield {"reward": row.reward, "right": right, "said": said}


def _planned_sampling(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
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
            yield {"name": name, "given": given, "wanted": wanted, "phase": row.phase}


def _planned_seed(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
    row = audit.row
    evaluation = audit.expected.settings.evaluations.get(row.phase)
    index = row.group_id.rpartition("/")[2]
    if evaluation is None or not index.isdecimal() or not isinstance(evaluation.get("seed"), int):
        return
    split = str(evaluation.get("split"))
    seeds = _evaluation_seeds(evaluation["seed"], str(evaluation.get("env_id")), split, index)
    own = derive_seed(seeds[1], "member", row.index_in_group)
    if (request.seed, request.sampling_seed) != (seeds[0], own):
        yield {"world": request.seed, "sampling": request.sampling_seed, "right": (seeds[0], own)}


@lru_cache(maxsize=64)
def _evaluation_seeds(seed: int, env_id: str, split: str, index: str) -> tuple[int, int]:
    world = derive_seed(seed, env_id, split, int(index))
    return world, derive_seed(world, "sampling")


def _other_environment(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
    evaluation = audit.expected.settings.evaluations.get(audit.row.phase)
    wanted = None if evaluation is None else evaluation.get("env_id")
    if wanted is not None and audit.row.env_id != wanted:
        yield {"found": audit.row.env_id, "wanted": wanted}


def _labels(audit: RolloutAudit, request: RolloutRequest) -> Iterator[Words]:
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
            if said is not None and label is not None and said != label:
                yield {"call": call.index, "name": name, "said": said, "label": str(label)}


ROLLOUT_RULES: tuple[AuditRule[InRollout], ...] = (
    AuditRule(
        *("times", "negative_time", "times and durations with 0"),
        "its {name} is {value:g}; times must be finite and not negative",
        _negative_times,
    ),
    AuditRule(
        *("times", "backward_time", "the time of storing with the time of the start"),
        "it began {late_s:.0f} s after it was stored",
        _backward_times,
    ),
    AuditRule(
        *("times", "longer_than_its_whole", "times of the engine and of calls with the rollout's"),
        "its {name} is {value:.0f} ms, but its {of} {other:.0f} ms",
        _long_times,
    ),
    AuditRule(
        *("rewards", "not_the_sum", "the reward with its functions' values and weights"),
        "its reward is {reward:g}, but its functions give {right:g} ({said})",
        _weighted_sum,
    ),
    AuditRule(
        *("sampler", "other_settings", "the request's sampling with the settings of its phase"),
        "it was requested with {name} = {given!r}, but {phase} is sampled with {wanted!r}",
        _planned_sampling,
    ),
    AuditRule(
        *("sampler", "seed", "the seeds of an evaluation with its plan"),
        "it was played with the seeds {world} and {sampling}; its evaluation's seed gives {right} "
        "for this example, so it is not the rollout that was planned",
        _planned_seed,
    ),
    AuditRule(
        *("groups", "foreign_environment", "the environment of an evaluation with its settings"),
        "its environment is {found!r}, but its evaluation's is {wanted!r}",
        _other_environment,
    ),
    AuditRule(
        *("tokens", "label_differs", "agent, turn and versions of a call with its tokens"),
        "the {name} of call {call} is {said!r} in its record, but {label} in its tokens",
        _labels,
    ),
)


# -- groups, phases and events ---------------------------------------------------------------------


def _by_group(stored: Stored) -> Iterable[list[RolloutFacts]]:
    """Return the members of each planned group, each by its first trajectory."""
    planned = {*stored.settings.evaluations, *([PHASE] if stored.config is not None else ())}
    return grouped(
        ((item.phase, item.group_id), item)
        for item in stored.facts
        if item.phase in planned and item.trajectory_index == 0
    ).values()


def _most_common(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def _mixed_groups(stored: Stored) -> Iterator[Found]:
    for items in _by_group(stored):
        known = [item.asked for item in items if item.asked is not None]
        if len(set(known)) < 2:
            continue
        usual = _most_common(known)
        for item in items:
            if item.asked not in (None, usual):
                yield Found({"group": item.group_id, "num": len(items)}, item.place)


def _foreign_answers(stored: Stored) -> Iterator[Found]:
    for items in _by_group(stored):
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
            yield Found({"group": other.group_id}, other.place)


def _changed_examples(stored: Stored) -> Iterator[Found]:
    known: defaultdict[tuple[Any, ...], list[RolloutFacts]] = defaultdict(list)
    for items in _by_group(stored):
        evaluation = stored.settings.evaluations.get(items[0].phase)
        if evaluation is not None:
            index = items[0].group_id.rpartition("/")[2]
            key = evaluation.get("env_id"), evaluation.get("split"), index
            known[key] += [item for item in items if item.asked is not None]
    for items in known.values():
        asked = [item.asked for item in items]
        if len(set(asked)) < 2 or len({item.phase for item in items}) < 2:
            continue
        usual = _most_common(asked)
        for item in items:
            if item.asked != usual:
                others = next(other.request_id for other in items if other.asked == usual)
                yield Found({"other": others}, item.place)


def _unusual_completions(stored: Stored) -> Iterator[Found]:
    """Find completions that lack a call's answer, if most others of the phase are complete."""
    known = ((item.phase, item) for item in stored.facts if item.has_answers is not None)
    for phase, items in grouped(known).items():
        wrong = [item for item in items if not item.has_answers]
        # An environment may write its own completions, but then it does so in every rollout.
        if len(items) >= _LEAST_USUAL and len(wrong) <= len(items) * _MOST_UNUSUAL:
            for item in wrong:
                yield Found({"num": len(items) - len(wrong), "phase": phase}, item.place)


_LEAST_USUAL, _MOST_UNUSUAL = 4, 0.25


def _foreign_environments(stored: Stored) -> Iterator[Found]:
    items = [item for item in stored.facts if item.phase == PHASE and stored.config is not None]
    if len({item.env_id for item in items}) < 2:
        return
    usual = _most_common([item.env_id for item in items])
    for item in items:
        if item.env_id != usual:
            yield Found({"found": item.env_id, "usual": usual}, item.place)


def _parents(stored: Stored) -> Iterator[Found]:
    by_name = {
        (item.request_id, item.rollout_id): item
        for item in stored.facts
        if item.rollout_id is not None
    }
    for item in stored.facts:
        parent = by_name.get((item.request_id, item.parent_rollout or ""))
        if parent is None:
            continue
        if item.depth != parent.depth + 1:
            words = {"name": "depth", "value": item.depth, "other": f"depth {parent.depth}"}
            yield Found(words, item.place)
        if item.parent_step is not None and not 0 <= item.parent_step < max(1, parent.num_calls):
            words = {
                "name": "parent_step",
                "value": item.parent_step,
                "other": f"{parent.num_calls} calls",
            }
            yield Found(words, item.place)


def _trained_on_test(stored: Stored) -> Iterator[Found]:
    phases = {item.place: item.phase for item in stored.facts if item.phase != PHASE}
    if stored.config is None or not phases:
        return
    sql = "SELECT DISTINCT request_id, trajectory_index, step FROM trained"
    for row in stored.run.query(sql):
        place = row["request_id"], row["trajectory_index"]
        if place in phases:
            yield Found({"step": row["step"], "phase": phases[place]}, place, row["step"])


def _missing_evaluations(stored: Stored) -> Iterator[Found]:
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
        yield Found({"phase": phase, "number": step, "there": there}, step=step)


_EVALUATED = ("evaluation", "evaluation_skipped")


def _evaluation_numbers(stored: Stored) -> Iterator[Found]:
    played = stored.run.phases()
    for evaluation in stored.run.evaluations():
        told = evaluation.metrics
        if "num_rollouts" not in told or evaluation.phase not in played:
            continue
        settings = {name: told[name] for name in _SETTINGS if isinstance(told.get(name), float)}
        found = stored_report(stored.run, evaluation.phase, settings=Settings(**settings)).as_dict()
        for words in _other_numbers(told, found):
            yield Found({"phase": evaluation.phase, **words}, step=evaluation.step)


def _kept_reports(stored: Stored) -> Iterator[Found]:
    for phase in stored.run.phases():
        if not stored.run.kept_report(phase):
            continue
        kept = stored_report(stored.run, phase, outcomes=False).as_dict()
        for words in _other_numbers(kept, stored_report(stored.run, phase).as_dict()):
            yield Found({"phase": phase, **words})


_SETTINGS = ("confidence", "pass_threshold")


def _other_numbers(told: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Words]:
    """Yield the counts, means and intervals of a report that differ from its rollouts'."""
    said, found = _numbers(told), _numbers(right)
    for name in sorted(said.keys() | found.keys()):
        # Another version of rolltree may report fewer or more families of numbers. In a family of
        # counts, a kind of failure that only one side has is a difference.
        family = name.partition(".")[0]
        if family not in told or family not in right:
            continue
        one, other = said.get(name, 0.0), found.get(name, 0.0)
        is_compared = (name in said and name in found) or family in _COUNTED
        if is_compared and not _close(one, other):
            yield {"name": name, "said": one, "right": other}


_COUNTED = ("failures", "truncations", "stops")


def _numbers(report: Mapping[str, Any]) -> dict[str, float]:
    flat = numbers({name: report[name] for name in report if name not in _OWN})
    # Older versions computed the interval of pass@1 over examples instead of rollouts.
    named = {name.replace("/", "."): value for name, value in flat.items()}
    is_old = re.compile(r"pass_at\.1\.(?!mean)").match
    return {name: value for name, value in named.items() if not is_old(name)}


# Values of one start of the evaluation, which do not follow from its rollouts.
_OWN = (*_SETTINGS, "elapsed_s", "num_resumed", "advice", "scoring_errors", "failure_messages")


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _future_versions(stored: Stored) -> Iterator[Found]:
    if stored.config is None:
        return
    last = max((row.step for row in stored.run.steps()), default=0)
    most = max(last + 1, stored.config.train.num_steps)
    for item in stored.facts:
        if item.max_version is not None and item.max_version > most:
            yield Found({"version": item.max_version, "most": most}, item.place)


def _before_the_run(stored: Stored) -> Iterator[Found]:
    began = stored.run.meta.get("created_at")
    if stored.config is None or not isinstance(began, int | float):
        return
    for item in stored.facts:
        first = min(item.created_at, item.started_at or item.created_at)
        if first < began - CLOCK_S:
            yield Found({"early_s": began - first}, item.place)


def _backward_steps(stored: Stored) -> Iterator[Found]:
    latest, number = -math.inf, 0
    stored_at: defaultdict[int, float] = defaultdict(lambda: -math.inf)
    for item in stored.facts:
        for known in item.trained:
            stored_at[known.step] = max(stored_at[known.step], item.created_at)
    for row in stored.run.steps():
        if row.created_at < latest - CLOCK_S:
            other = f"step {number}"
            yield Found({"what": other, "early_s": latest - row.created_at}, step=row.step)
        elif row.created_at < stored_at[row.step] - CLOCK_S:
            early_s = stored_at[row.step] - row.created_at
            yield Found({"what": "a rollout that it trained", "early_s": early_s}, step=row.step)
        if row.created_at > latest:
            latest, number = row.created_at, row.step


RUN_RULES: tuple[AuditRule[InRun], ...] = (
    AuditRule(
        *("groups", "mixed_group", "question and answer of a group's members"),
        "its question or its answer differs from that of most of the {num} members of {group}",
        _mixed_groups,
    ),
    AuditRule(
        *("groups", "foreign_answer", "the first prompts of a group's members, and its question"),
        "its calls do not begin with the question of its group {group}: it holds the tokens of "
        "another rollout",
        _foreign_answers,
    ),
    AuditRule(
        *("groups", "changed_example", "question and answer of an example in all evaluations"),
        "its question or its answer differs from that of {other}, which has the same example",
        _changed_examples,
    ),
    AuditRule(
        *("spans", "completion_differs", "the completion with what the calls answered"),
        "its completion lacks an answer of its calls; {num} others of {phase} have all of them",
        _unusual_completions,
    ),
    AuditRule(
        *("groups", "foreign_environment", "the environment of all training rollouts"),
        "its environment is {found!r}, but the run trains on {usual!r}",
        _foreign_environments,
    ),
    AuditRule(
        *("groups", "wrong_parent", "depth and step of a delegation with the parent"),
        "its {name} is {value}, but its parent has {other}",
        _parents,
    ),
    AuditRule(
        *("counted_once", "trained_on_test", "trained rollouts with their phase"),
        "step {step} trained it, but it is a rollout of {phase}: test data was trained on",
        _trained_on_test,
    ),
    AuditRule(
        *("counted_once", "missing_evaluation", "evaluations with `eval.every` and the phases"),
        "the settings ask for {phase} after step {number}, but its result is missing; {there}",
        _missing_evaluations,
    ),
    AuditRule(
        *("rewards", "evaluation_differs", "counts and means of an evaluation with its rollouts"),
        "the evaluation {phase} reported {name} = {said:g}, but its rollouts give {right:g}: one "
        "of the two was changed",
        _evaluation_numbers,
    ),
    AuditRule(
        *("rewards", "report_differs", "the kept report of a phase with its rollouts"),
        "the report of {phase} says {name} = {said:g}, but its rollouts give {right:g}: one of "
        "the two was changed",
        _kept_reports,
    ),
    AuditRule(
        *("versions", "future_version", "policy versions with the steps of the run"),
        "its tokens say that version {version} sampled them, but the run's versions end at {most}",
        _future_versions,
    ),
    AuditRule(
        *("times", "before_the_run", "the time of storing with the start of the run"),
        "it began or was stored {early_s:.0f} s before the run began, so it is from another run",
        _before_the_run,
    ),
    AuditRule(
        *("times", "backward_step", "the times of steps with each other and with their rollouts"),
        "it was stored {early_s:.0f} s before {what}, which came first",
        _backward_steps,
    ),
)
