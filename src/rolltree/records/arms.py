"""Which evaluations of which runs are meant: `[NAME=]RUN[:PHASE]`, and what is read of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rolltree.errors import ConfigError, did_you_mean
from rolltree.evaluation import EvalReport, Settings, stored_report
from rolltree.evaluation.comparison import Clusters
from rolltree.rollouts.decode import decode_rollout
from rolltree.samples import build_samples
from rolltree.store import Run, dumps

# Breaks are counted in about this many rollouts of several calls at most; each takes 0.8 ms.
NUM_BREAK_ROLLOUTS = 5_000


@dataclass(frozen=True, slots=True)
class RunPhase:
    """One evaluation: a run directory and a phase of it; `step` is that of a held-out one."""

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

    def as_dict(self) -> dict[str, Any]:
        """Return its name, its runs and the reward of each, None if nothing was scored."""
        rewards = [report.reward for report in self.reports]
        return {
            "name": self.name,
            "runs": list(map(str, self.runs)),
            "rewards": [reward and reward.as_dict() for reward in rewards],
        }


def read_arms(arms: Sequence[ArmName], settings: Settings) -> tuple[ComparedArm, ...]:
    """Return what the arms name. A single run is two: its first and last held-out evaluation.

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
            "One arm has nothing to be compared with. Name two or more: rolltree compare RUN_A "
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
    # Names of folders may have commas, colons and equals signs: what is a run is never split.
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
            f"{path} has {'one held-out evaluation' if found else 'no held-out evaluation'}, and a "
            "run alone is compared with itself: the first one with the last. Name a second run or "
            f"phase: rolltree compare {path} OTHER_RUN."
        )
    return [("", [(path, phase)]) for phase in (found[0], found[-1])]


def _phase_of(path: Path, wanted: str) -> RunPhase:
    """Return the phase of this name or step, or the one that is meant without either.

    Raises:
        ConfigError: there is no such phase, or several may be meant.
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
                f"{path} has no phase {wanted!r}, and no evaluation at such a step."
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
    reports, breaks, inputs = [], [], []
    for each in runs:
        with Run.open(each.path, mode="r") as run:
            model = str(run.config.get("model", ""))
            reports.append(stored_report(run, each.phase, settings=settings, model=model))
            breaks.append(_breaks(run, each.phase))
            inputs.append(_inputs(run, each.phase))
    return ComparedArm(name, tuple(runs), tuple(reports), tuple(breaks), tuple(inputs))


_KEY = ("env_id", "task", "example_id")


def _breaks(run: Run, phase: str) -> Clusters:
    """Return the broken prefixes of each rollout by example; of every nth if there are many.

    A rollout without token ids says nothing. One of a single call has none.
    """
    found: dict[Hashable, list[float]] = {}
    several: dict[Hashable, int] = {}
    names = (*_KEY, "num_calls", "num_unique_tokens")
    for *parts, num_calls, num_tokens in run.columns(names, phase=phase):
        example: Hashable = tuple(parts)
        if num_tokens and num_calls < 2:
            found.setdefault(example, []).append(0.0)
        elif num_tokens:
            several[example] = several.get(example, 0) + 1
    # Whole examples are left out, never single rollouts: means are over examples, and every nth of
    # them is as good a sample in both arms (design/0024).
    every = -(-sum(several.values()) // NUM_BREAK_ROLLOUTS)
    counted = {key for at, key in enumerate(several) if at % every == 0} if several else set()
    for example in several.keys() - counted:
        found.pop(example, None)
    if counted:
        for row in run.rollouts(phase=phase):
            example = (row.env_id, row.task, row.example_id)
            if row.num_calls >= 2 and row.tokens and example in counted:
                made = build_samples(decode_rollout(row).states, "interleave")
                found.setdefault(example, []).append(float(len(made.breaks)))
    return found


def _inputs(run: Run, phase: str) -> dict[Hashable, int]:
    """Return a hash of each example's dataset row, of its first rollout."""
    found: dict[Hashable, int] = {}
    for *key, given in run.columns((*_KEY, "input"), phase=phase):
        if tuple(key) not in found:
            found[tuple(key)] = hash(dumps(dict(sorted(given.items()))))
    return found
