"""`rt.compare`: compares evaluations of stored runs, and finds the examples that flipped.

An arm names evaluations of runs: `[NAME=]RUN[:PHASE]`. The statistics are those of
`rolltree.evaluation`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rolltree._helpers.html_view import html_lines
from rolltree._helpers.redact import redact
from rolltree.environments.parsers import text_of
from rolltree.evaluation import Comparison, EvalReport, Settings, compare_reports, stored_report
from rolltree.evaluation.comparison import (
    Clusters,
    ExampleChange,
    are_same_runs,
    compare_environments,
    compare_values,
    example_changes,
    measure_names,
)
from rolltree.evaluation.reducers import columns
from rolltree.rollouts.conversation import conversation_of
from rolltree.rollouts.decode import decode_results, decode_rollout
from rolltree.samples import build_samples
from rolltree.store import Run, dumps, to_plain
from rolltree.store.settings import flat_config
from rolltree.store.weights import phase_parts
from rolltree.training.config import is_unchanged
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.estimate import CONFIDENCE, COUNT

NUM_EXAMPLES = 5
# Breaks are counted in at most about this many rollouts of several calls; each takes 0.8 ms.
NUM_BREAK_ROLLOUTS = 5_000


@dataclass(frozen=True, slots=True)
class RunPhase:
    """One evaluation: a run directory and a phase; a held-out evaluation also has a `step`."""

    path: Path
    phase: str
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.phase}"


ArmName: TypeAlias = str | Path | RunPhase | Sequence[str | Path | RunPhase]


@dataclass(frozen=True, slots=True)
class ComparedArm:
    """One side of a comparison: its name, and its evaluations, one per run."""

    name: str
    runs: tuple[RunPhase, ...]
    reports: tuple[EvalReport, ...]
    # Broken prefixes by example, and a hash of each example's dataset row (answer, info), per run.
    breaks: tuple[Clusters, ...]
    inputs: tuple[dict[Hashable, int], ...]
    # Of each run: its settings by dotted name, and the weights of its reward functions by name,
    # None if they were not stored.
    settings: tuple[Mapping[str, Any], ...] = ()
    weights: tuple[Mapping[str, float] | None, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the arm's name, its runs and each run's reward, None if nothing was scored."""
        rewards = [report.reward for report in self.reports]
        return {
            "name": self.name,
            "runs": list(map(str, self.runs)),
            "rewards": [reward and reward.as_dict() for reward in rewards],
        }


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A rollout that illustrates a change: where it is stored, its question and answers."""

    run: Path
    request_id: str
    # Of an episode with several trajectories, the first.
    trajectory_index: int
    # The last user message of the prompt, and the assistant's messages.
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """One arm against the baseline."""

    a: str
    b: str
    # By name, the reward first.
    measures: Mapping[str, Comparison]
    # The examples whose reward changed: first the lost, then the won, then the others.
    changes: tuple[ExampleChange, ...]
    # For each of the first changes, a rollout of A and one of B: the best of the arm that is
    # ahead, the worst of the other.
    shown: tuple[tuple[ShownRollout, ShownRollout], ...]
    # Common examples whose dataset rows (answer, info) differ although their ids are equal.
    num_other_inputs: int
    # The settings that differ, each with its value in the two arms (None: not set).
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    # How the two arms were scored differently, "" if they were not, or if that is not known.
    scoring: str = ""

    @property
    def reward(self) -> Comparison:
        """The comparison of mean rewards."""
        return self.measures["reward"]

    @property
    def num_lost(self) -> int:
        """Examples that most rollouts passed in A but not in B."""
        return sum(change.flip == "lost" for change in self.changes)

    @property
    def num_won(self) -> int:
        """Examples that most rollouts passed in B but not in A."""
        return sum(change.flip == "won" for change in self.changes)

    @property
    def sentences(self) -> list[str]:
        """The result in words: the reward first, then what limits the comparison."""
        return self.sentences_for(self.a, self.b)

    def sentences_for(self, a: str, b: str) -> list[str]:
        """Return the sentences with other names for the two arms."""
        reward = self.reward
        sentences = [reward.sentence(a, b)]
        if self.scoring:
            sentences.append(
                f"The two were scored differently: {self.scoring.format(a=a, b=b)}. Their rewards "
                "are not comparable; compare a metric that both have."
            )
        if self.num_other_inputs:
            sentences.append(
                f"{self.num_other_inputs} of {reward.difference.num_examples} examples have the "
                "same id but different contents in the two arms: they are different questions."
            )
        if reward.num_only_a or reward.num_only_b:
            sentences.append(
                f"{reward.num_only_a} examples of {a} and {reward.num_only_b} of {b} are left out: "
                "they are not scored in every run of both."
            )
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Return the pair as JSON-ready data."""
        return {
            "a": self.a,
            "b": self.b,
            "sentences": self.sentences,
            "measures": {name: found.as_dict() for name, found in self.measures.items()},
            "num_lost": self.num_lost,
            "num_won": self.num_won,
            "num_other_inputs": self.num_other_inputs,
            "settings": {
                name: [to_plain(redact({name: each})[name]) for each in pair]
                for name, pair in self.settings.items()
            },
            "changes": [{**asdict(change), "flip": change.flip} for change in self.changes],
            "shown": [[{**asdict(one), "run": str(one.run)} for one in two] for two in self.shown],
        }


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Every other arm compared with the first.

    With several pairs, the intervals are widened so that all of them hold together at `confidence`
    (Bonferroni): two pairs at 95 % have intervals of 97.5 %.
    """

    arms: tuple[ComparedArm, ...]
    pairs: tuple[ComparedPair, ...]
    confidence: float

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-ready data."""
        return {
            "confidence": self.confidence,
            "arms": [arm.as_dict() for arm in self.arms],
            "pairs": [pair.as_dict() for pair in self.pairs],
        }

    def _repr_html_(self) -> str:
        return html_lines(str(self).splitlines())

    def __str__(self) -> str:
        return "\n".join(line for pair in self.pairs for line in pair.sentences)


def compare(
    *arms: ArmName,
    confidence: float = CONFIDENCE,
    pass_threshold: float = 1.0,
    price: tuple[float, float] | None = None,
    num_examples: int = NUM_EXAMPLES,
) -> RunComparison:
    """Compare evaluations of stored runs with the first, example by example.

    An arm is `"[NAME=]RUN[:PHASE]"`, several of these with commas between them (runs of one
    recipe with several seeds), or a list of them. A phase is a name (`eval_after`) or the step of
    a held-out evaluation (`28`). The default is the last held-out evaluation, or the only phase.
    One run alone is compared with itself: its first and its last held-out evaluation.

    Measures are those of `rolltree.evaluation.compare_reports`; `breaks`, how often per rollout a
    prompt did not extend the previous call; and with `price`, `cost`: dollars per rollout, at these
    prices of a million prompt and a million sampled tokens. Rollouts are shown for the first
    `num_examples` changed examples.

    >>> print(compare("runs/demo"))  # doctest: +SKIP
    The reward of step 28 is higher than that of step 0, +0.730 [+0.608, +0.814] over 100 examples:
    not noise.

    Raises:
        ConfigError: no such phase, fewer than two arms, or no scored example in common.
        StoreError: not a run.
    """
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"confidence is {confidence}; an interval needs one between 0 and 1.")
    sides = read_arms(arms, Settings(confidence=confidence, pass_threshold=pass_threshold))
    each = 1 - (1 - confidence) / (len(sides) - 1)
    with ExitStack() as stack:
        opened = {
            run.path: stack.enter_context(Run.open(run.path, mode="r"))
            for arm in sides
            for run in arm.runs
        }
        pairs = []
        for arm in sides[1:]:
            changes = example_changes(sides[0].reports, arm.reports)
            pairs.append(
                ComparedPair(
                    a=sides[0].name,
                    b=arm.name,
                    measures=_measures(sides[0], arm, each, price),
                    changes=tuple(changes),
                    shown=tuple(
                        (
                            _shown(sides[0], change, opened, best=change.gain < 0),
                            _shown(arm, change, opened, best=change.gain > 0),
                        )
                        for change in changes[:num_examples]
                    ),
                    num_other_inputs=_num_other_inputs(sides[0], arm),
                    settings=_differences(sides[0].settings[0], arm.settings[0]),
                    scoring=_scored_differently(sides[0].weights[0], arm.weights[0]),
                )
            )
    return RunComparison(sides, tuple(pairs), confidence)


def held_out_gain(run: Run) -> dict[str, Any] | None:
    """Return how the last held-out evaluation of a run differs from its first, by example.

    `before`, `after` and `difference` are as in a comparison, and so are those of each environment
    of a group in `environments`. None if there are fewer than two evaluations.

    Raises:
        StoreError: a row is damaged.
    """
    done = run.evaluations()
    if len(done) < 2:
        return None
    ends = done[0], done[-1]
    reports = [stored_report(run, each.phase) for each in ends]
    try:
        found = compare_reports(*reports)
    except ConfigError:  # nothing is scored in both
        return None
    environments = {name: each.as_dict() for name, each in compare_environments(*reports).items()}
    names = [f"step {each.step}" for each in ends]
    return {
        "a": names[0],
        "b": names[1],
        "phases": [each.phase for each in ends],
        "sentence": found.sentence(*names),
        "environments": environments,
        **found.as_dict(),
    }


def _measures(
    a: ComparedArm, b: ComparedArm, confidence: float, price: tuple[float, float] | None
) -> dict[str, Comparison]:
    """Return all measures, without pass@k if nothing passes in either arm."""
    names = measure_names((*a.reports, *b.reports))
    measures = {
        name: compare_reports(a.reports, b.reports, measure=name, confidence=confidence)
        for name in names
    }
    # 0 of 100 against 0 of 100 carries no information, at any k.
    empty = [
        name
        for name, each in measures.items()
        if name.startswith("pass") and not each.before.mean and not each.after.mean
    ]
    for name in empty:
        del measures[name]
    extra: dict[str, tuple[Sequence[Clusters], ...]] = {"breaks": (a.breaks, b.breaks)}
    if price is not None:
        extra["cost"] = tuple([_costs(each, price) for each in arm.reports] for arm in (a, b))
    # Two phases of the same runs are paired by run as well as by example (design/0024).
    same_runs = are_same_runs(a.reports, b.reports)
    own = a.reports[0].settings.confidence
    for name, (before, after) in extra.items():
        other = compare_values(
            *(before, after),
            confidence=confidence,
            own_confidence=own,
            bounds=COUNT,
            same_runs=same_runs,
        )
        if other is not None:
            measures[name] = other
    return measures


def _costs(report: EvalReport, price: tuple[float, float]) -> Clusters:
    """Return dollars per rollout by example."""
    found: dict[Any, list[float]] = {}
    names = ("example", "num_prompt_tokens", "num_completion_tokens")
    for example, prompt, sampled in columns(report.outcomes, *names):
        cost = (prompt * price[0] + sampled * price[1]) / 1e6
        found.setdefault(example, []).append(cost)
    return found


def _shown(
    arm: ComparedArm, change: ExampleChange, opened: Mapping[Path, Run], *, best: bool
) -> ShownRollout:
    """Return the best or the worst scored rollout of an example."""
    scored = [
        (reward, -number, request_id)
        for number, report in enumerate(arm.reports)
        for request_id, example, reward in columns(
            report.outcomes, "request_id", "example", "reward"
        )
        if example == change.example and reward is not None
    ]
    _, number, request_id = max(scored) if best else min(scored)
    run = arm.runs[-number]
    rows = list(opened[run.path].rollouts(request_id=request_id, phase=run.phase))
    (result,) = decode_results(rows, tokens=False)
    prompt, completion = conversation_of(result.states[0]) if result.states else ([], [])
    question = [m for m in prompt if m.get("role") == "user"]
    answers = [m for m in completion if m.get("role") == "assistant"]
    return ShownRollout(
        run=run.path,
        request_id=request_id,
        trajectory_index=rows[0].trajectory_index,
        question=_text(question[-1]) if question else "",
        answers=tuple(map(_text, answers)),
    )


def _text(message: Mapping[str, Any]) -> str:
    return " ".join([text_of(message), *map(str, message.get("tool_calls") or ())]).strip()


def _num_other_inputs(a: ComparedArm, b: ComparedArm) -> int:
    first, *others = (*a.inputs, *b.inputs)
    return sum(
        any(other.get(example, given) != given for other in others)
        for example, given in first.items()
    )


# -- arms ------------------------------------------------------------------------------------------


def read_arms(arms: Sequence[ArmName], settings: Settings) -> tuple[ComparedArm, ...]:
    """Read the named arms. A single run makes two: its first and last held-out evaluation.

    Raises:
        ConfigError: no such phase, or fewer than two arms.
        StoreError: not a run.
    """
    parsed = [_parsed(arm) for arm in arms]
    runs = [run for _, each in parsed for run in each]
    if len(runs) == 1 and not runs[0][1]:
        parsed = _first_and_last(runs[0][0])
    if len(parsed) < 2:
        raise ConfigError(
            "A single arm cannot be compared. Name two or more: rolltree compare RUN_A "
            "RUN_B, or RUN:PHASE_A RUN:PHASE_B."
        )
    chosen = [tuple(_phase_of(path, phase) for path, phase in runs) for _, runs in parsed]
    names = _names([name for name, _ in parsed], chosen)
    return tuple(_read(name, runs, settings) for name, runs in zip(names, chosen, strict=True))


_Parsed: TypeAlias = tuple[str, list[tuple[Path, str]]]


def _parsed(arm: ArmName) -> _Parsed:
    """Return the name of an arm, "" without one, and its run directories and phases."""
    if isinstance(arm, RunPhase):
        return "", [(arm.path, arm.phase)]
    if isinstance(arm, Path) or (isinstance(arm, str) and _is_run(arm)):
        return "", [(Path(arm), "")]
    if not isinstance(arm, str):
        return "", [run for item in arm for run in _parsed(item)[1]]
    name, sign, rest = arm.partition("=")
    if not sign or "/" in name:
        name, rest = "", arm
    runs = []
    # Folder names may contain commas, colons and equals signs, so the path of a run is not split.
    for text in [rest] if _is_run(rest) else rest.split(","):
        path, sign, phase = text.rpartition(":")
        runs.append((Path(path), phase) if sign and not _is_run(text) else (Path(text), ""))
    return name, runs


def _is_run(text: str) -> bool:
    return (Path(text) / "run.db").is_file()


def _first_and_last(path: Path) -> list[_Parsed]:
    with Run.open(path, mode="r") as run:
        found = [done.phase for done in run.evaluations()]
    if len(found) < 2:
        raise ConfigError(
            f"{path} has {'one held-out evaluation' if found else 'no held-out evaluation'}, but a "
            "single run needs two: its first is compared with its last. Name a second run or "
            f"phase: rolltree compare {path} OTHER_RUN."
        )
    return [("", [(path, phase)]) for phase in (found[0], found[-1])]


def _phase_of(path: Path, wanted: str) -> RunPhase:
    """Return the phase with this name or step; without either, the default one.

    Raises:
        ConfigError: there is no such phase, or several could be meant.
    """
    with Run.open(path, mode="r") as run:
        phases = run.phases()
        held_out = [(done.step, done.phase) for done in run.evaluations() if done.phase in phases]
    # An evaluation is named by its phase or by its step: `RUN:28`.
    steps = {phase: step for step, phase in held_out}
    at = {str(step): phase for step, phase in held_out}
    if wanted:
        phase = wanted if wanted in phases else at.get(wanted)
        if phase is None:
            known = [*phases, *at]
            raise ConfigError(
                f"{path} has no phase {wanted!r}, and no evaluation at that step."
                f"{did_you_mean(wanted, known)}"
            )
    elif held_out:
        phase = held_out[-1][1]
    elif len(phases) == 1 or "eval" in phases:
        phase = "eval" if "eval" in phases else phases[0]
    else:
        said = f"the phases {', '.join(phases)}" if phases else "no rollouts"
        raise ConfigError(
            f"{path} has {said} and no held-out evaluation, so it is not clear what to compare. "
            "Name the phase: RUN:PHASE."
        )
    return RunPhase(path, phase, steps.get(phase))


def _names(given: Sequence[str], chosen: Sequence[tuple[RunPhase, ...]]) -> list[str]:
    """Return a name per arm: the given one, or the shortest kind that tells all of them apart."""
    is_one_run = len({run.path.resolve() for runs in chosen for run in runs}) == 1
    if is_one_run and all(runs[0].step is not None for runs in chosen):
        kinds = [[f"step {runs[0].step}" for runs in chosen]]
    else:
        kinds = [[runs[0].phase for runs in chosen]] if is_one_run else []
    kinds += [
        [_listed([run.path.resolve().name for run in runs]) for runs in chosen],
        [_listed([f"{run.path.resolve().name}:{run.phase}" for run in runs]) for runs in chosen],
        [_listed(list(map(str, runs))) for runs in chosen],
    ]
    for kind in kinds:
        names = [name or made for name, made in zip(given, kind, strict=True)]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _read(name: str, runs: Sequence[RunPhase], settings: Settings) -> ComparedArm:
    found = []
    for each in runs:
        with Run.open(each.path, mode="r") as run:
            report = stored_report(run, each.phase, settings=settings)
            breaks, inputs = _breaks(run, each.phase), _inputs(run, each.phase)
            weights = _weights(run, each.phase)
            found.append((report, breaks, inputs, _settings_of(run), weights))
    return ComparedArm(name, tuple(runs), *zip(*found, strict=True))


def _settings_of(run: Run) -> dict[str, Any]:
    """Return a run's settings by their dotted names."""
    # A setting that newer runs lack differs only if it had another value than theirs.
    found = flat_config(run.config)
    return {name: value for name, value in found.items() if not is_unchanged(name, value)}


def _weights(run: Run, phase: str) -> dict[str, float] | None:
    """Return the nonzero weights of the reward functions of a phase; None if none were noted."""
    parts = phase_parts(run, phase)
    if parts is None:
        return None
    found: dict[str, float] = {}
    for part in parts:
        where = " of ".join(["", *(str(part[key]) for key in ("task", "agent") if part[key])])
        found |= {f"{name}{where}": weight for name, weight in part["functions"] if weight}
    return found


_PLACES = ("run.dir", "run_dir", "out", "output_dir")
"""Settings that differ between any two runs."""


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted((a.keys() | b.keys()) - set(_PLACES))
    pairs = {name: (a.get(name), b.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _scored_differently(a: Mapping[str, float] | None, b: Mapping[str, float] | None) -> str:
    if a is None or b is None:
        return ""
    said = []
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            one, other = (f"{each.get(name, 0.0):g}" for each in (a, b))
            told = name.replace("{", "{{").replace("}", "}}")
            said.append(f"{told} has weight {one} in {{a}} and {other} in {{b}}")
    return "; ".join(said)


_KEY = ("env_id", "task", "example_id")


def _breaks(run: Run, phase: str) -> Clusters:
    """Return the broken prefixes of each rollout by example; of every nth example if many.

    Rollouts without token ids are left out. Those of a single call have no broken prefixes.
    """
    counted_breaks: dict[Hashable, list[float]] = {}
    several: dict[Hashable, int] = {}
    names = (*_KEY, "num_calls", "num_unique_tokens")
    for *parts, num_calls, num_tokens in run.columns(names, phase=phase):
        example: Hashable = tuple(parts)
        if num_tokens and num_calls < 2:
            counted_breaks.setdefault(example, []).append(0.0)
        elif num_tokens:
            several[example] = several.get(example, 0) + 1
    # Whole examples are left out, never single rollouts: means are over examples, and every nth
    # example is an equally good sample in both arms (design/0024).
    every = -(-sum(several.values()) // NUM_BREAK_ROLLOUTS)
    counted = {key for at, key in enumerate(several) if at % every == 0} if several else set()
    for example in several.keys() - counted:
        counted_breaks.pop(example, None)
    if counted:
        for row in run.rollouts(phase=phase):
            example = (row.env_id, row.task, row.example_id)
            if row.num_calls >= 2 and row.tokens and example in counted:
                made = build_samples(decode_rollout(row).states, "interleave", skip_invalid=True)
                counted_breaks.setdefault(example, []).append(float(len(made.breaks)))
    return counted_breaks


def _inputs(run: Run, phase: str) -> dict[Hashable, int]:
    """Return a hash of each example's dataset row, as its first rollout stored it."""
    found: dict[Hashable, int] = {}
    for *key, given in run.columns((*_KEY, "input"), phase=phase):
        if tuple(key) not in found:
            found[tuple(key)] = hash(dumps(dict(sorted(given.items()))))
    return found
