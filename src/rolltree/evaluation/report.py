"""Evaluation reports, built from stored rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, is_dataclass, replace
from typing import Any

from rolltree._helpers.finished import Finished
from rolltree._helpers.html_view import html_lines, html_table
from rolltree.evaluation.reducers import (
    REDUCERS,
    EpisodeOutcome,
    Outcomes,
    Reducer,
    Settings,
    columns,
    per_environment,
    values,
)
from rolltree.narrator.detectors import Advice, advise
from rolltree.narrator.facts import NAMES, Facts, Looked
from rolltree.store import Run, StoredRollout, projection
from rolltree.store.weights import noted_environments
from rolltree.values.errors import StoreError
from rolltree.values.estimate import Estimate

# What the narrator reads of an outcome.
_COLUMNS = (
    *("reward", "error_type", "truncation_reason", "finish_reason", "num_calls"),
    *("num_completion_tokens", "task", "scoring_ms"),
)


@dataclass(frozen=True, slots=True)
class EvalReport(Finished):
    """One evaluation; the properties name the usual results."""

    env_id: str
    model: str
    phase: str
    # Episodes, and the number of different examples among them.
    num_rollouts: int
    num_examples: int
    # Episodes that ended with an error, and those that finished without a reward.
    num_failed: int
    num_unscored: int
    # Episodes that were cut before their true end.
    num_truncated: int
    # Empty if only aggregates were read.
    outcomes: Sequence[EpisodeOutcome]
    # What each reducer returned, by its name.
    results: Mapping[str, Any]
    settings: Settings = field(default_factory=Settings)
    # Episodes that an earlier start of the same run had stored.
    num_resumed: int = 0
    elapsed_s: float = 0.0
    run_path: str | None = None
    # The machine has a GPU, but the model was on the CPU.
    idle_gpu: bool = False

    @property
    def reward(self) -> Estimate | None:
        """Mean reward over examples; None if nothing was scored."""
        result: Estimate | None = self.results.get("reward")
        return result

    @property
    def pass_at(self) -> dict[int, Estimate]:
        """pass@k by k."""
        return dict(self.results.get("pass_at", {}))

    @property
    def tasks(self) -> dict[str, Estimate]:
        """Mean reward by task."""
        return dict(self.results.get("tasks", {}))

    @property
    def metrics(self) -> dict[str, Estimate]:
        """Mean of each metric."""
        return dict(self.results.get("metrics", {}))

    @property
    def environments(self) -> dict[str, dict[str, Any]]:
        """The reward and the metrics of each environment of a group, if there are several.

        Example: `report.environments["a"]["reward"]`, `report.environments["a"]["metrics"]["f"]`.
        """
        return dict(self.results.get("env", {}))

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What to do next, judging by the outcomes; each entry names its page of the docs.

        Empty if only aggregates were read.
        """
        make_row = projection(NAMES)
        rollouts = [
            make_row(
                str(place),
                status="ok" if found[1] is None else "error",
                truncated=found[2] is not None,
                env_id=example[0],
                example_id=example[2],
                **dict(zip(_COLUMNS, found, strict=True)),
            )
            for place, (example, *found) in enumerate(columns(self.outcomes, "example", *_COLUMNS))
        ]
        raised = values(self.outcomes, "scoring_errors")
        looked = [Looked(*each) for each in zip(rollouts, raised, strict=True)]
        return advise(Facts(self.phase, {}, rollouts, looked, idle_gpu=self.idle_gpu))

    def _repr_html_(self) -> str:
        """Return the results as a table for a notebook, with advice on what to do next."""
        rows = [("reward", self.reward), *((f"pass@{k}", each) for k, each in self.pass_at.items())]
        rows += [*self.metrics.items()]
        table = html_table(
            f"{self.env_id} · {self.model}",
            ("", "mean", f"{self.settings.confidence:.0%} interval", "examples"),
            [
                (name, f"{each.mean:.3f}", str(each).partition(" ")[2], each.num_examples)
                for name, each in rows
                if each is not None
            ],
        )
        counts = f"{self.num_rollouts} rollouts, {self.num_failed} failed"
        return table + html_lines([counts, *(f"next: {each}" for each in self.advice)])

    def as_dict(self) -> dict[str, Any]:
        """Return the aggregates as JSON-ready data, without the outcomes."""
        names = (
            *("env_id", "model", "phase", "num_examples", "num_rollouts", "num_failed"),
            *("num_unscored", "num_truncated", "num_resumed", "elapsed_s"),
        )
        return {
            **{name: getattr(self, name) for name in names},
            "run": self.run_path,
            **asdict(self.settings),
            **{name: _data(value) for name, value in self.results.items()},
            "advice": [asdict(each) for each in self.advice],
        }


def build_report(
    rows: Iterable[StoredRollout] | Outcomes,
    *,
    env_id: str = "",
    model: str = "",
    phase: str = "eval",
    settings: Settings | None = None,
    reducers: Mapping[str, Reducer] = REDUCERS,
    environments: Sequence[str] = (),
    num_resumed: int = 0,
    elapsed_s: float = 0.0,
    run_path: str | None = None,
    idle_gpu: bool = False,
) -> EvalReport:
    """Reduce rows, or the outcomes of rows, to a report; `env_id` defaults to the first row's.

    `environments` names those of a group; if there are several, the result `env` has the reward and
    the metrics of each.
    """
    settings = settings or Settings()
    outcomes = rows if isinstance(rows, Outcomes) else Outcomes.of(rows)
    results = {name: reduce(outcomes, settings) for name, reduce in reducers.items()}
    if len(environments) > 1:
        results["env"] = per_environment(outcomes, settings, environments)
    return EvalReport(
        env_id=env_id or (outcomes[0].example[0] if outcomes else ""),
        model=model,
        phase=phase,
        num_rollouts=len(outcomes),
        num_examples=len(set(outcomes.each("example"))),
        num_failed=sum(kind is not None for kind in outcomes.each("error_type")),
        num_unscored=sum(
            error is None and reward is None
            for error, reward in columns(outcomes, "error_type", "reward")
        ),
        num_truncated=sum(why is not None for why in outcomes.each("truncation_reason")),
        outcomes=outcomes,
        results=results,
        settings=settings,
        num_resumed=num_resumed,
        elapsed_s=elapsed_s,
        run_path=run_path,
        idle_gpu=idle_gpu,
    )


def stored_report(
    run: Run, phase: str = "eval", *, outcomes: bool = True, **options: Any
) -> EvalReport:
    """Build the report of one phase of a stored run; options as in `build_report`.

    Without `outcomes` the report has only aggregates, and the rollouts are not read if the
    evaluation ended with the same settings and its phase has not changed since.
    """
    options = {"model": run.model_name, "run_path": str(run.path), **options}
    if not outcomes:
        kept = _kept(run, phase, options)
        # Without outcomes in either case, so that the result does not depend on whether a report
        # was kept.
        return kept or replace(stored_report(run, phase, **options), outcomes=())
    return build_report(
        Outcomes.stored(run, phase),
        phase=phase,
        environments=noted_environments(run, phase),
        **options,
    )


_KEPT_VERSION = 4
"""Version of the reducers' results and their stored form; other versions are not read."""
_KEPT_COUNTS = ("num_rollouts", "num_examples", "num_failed", "num_unscored", "num_truncated")


def keep_report(run: Run, report: EvalReport) -> None:
    """Store the aggregates of a whole phase, made by the usual reducers, for `stored_report`.

    A full disk is ignored here, since the rollouts are already stored.
    """
    data = {
        "version": _KEPT_VERSION,
        "settings": asdict(report.settings),
        "env_id": report.env_id,
        **{name: getattr(report, name) for name in _KEPT_COUNTS},
        "results": {name: _plain(value) for name, value in report.results.items()},
    }
    # The kept report only saves time.
    with contextlib.suppress(StoreError):
        run.keep_report(report.phase, data, num_requests=report.num_rollouts)


def _kept(run: Run, phase: str, options: Mapping[str, Any]) -> EvalReport | None:
    """Return the kept report, or None if there is none or its settings differ."""
    more = dict(options)
    settings = more.pop("settings", None) or Settings()
    is_usual = more.pop("reducers", REDUCERS) == REDUCERS
    data = run.kept_report(phase)
    if not (is_usual and data and data["version"] == _KEPT_VERSION):
        return None
    if data["settings"] != asdict(settings):
        return None
    results = {name: _from_plain(name, value) for name, value in data["results"].items()}
    return EvalReport(
        env_id=more.pop("env_id", "") or data["env_id"],
        phase=phase,
        **{name: data[name] for name in _KEPT_COUNTS},
        outcomes=(),
        results=results,
        settings=settings,
        **more,
    )


def _plain(value: Any) -> Any:
    """Return a result as it is kept: with pairs for mappings, whose keys redaction would read."""
    if isinstance(value, Estimate):
        return list(astuple(value))
    if isinstance(value, Mapping):
        return [[key, _plain(item)] for key, item in value.items()]
    return value


def _from_plain(name: str, value: Any) -> Any:
    """Return a result, by the name of its reducer, from its kept form."""
    if name == "reward":
        return None if value is None else Estimate(*value)
    if name == "scoring_errors":
        return {function: dict(raised) for function, raised in value}
    if name == "env":
        return {
            environment: {key: _from_plain(key, item) for key, item in own}
            for environment, own in value
        }
    are_estimates = name in ("pass_at", "tasks", "metrics")
    return {key: Estimate(*item) if are_estimates else item for key, item in value}


def _data(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _data(item) for key, item in value.items()}
    return value
