"""What an evaluation found: aggregates, and the light rows that they came from.

Pure: built from rows, wherever these were read. It knows nothing about clients or about how a
report is shown. It leaves out messages and tokens, which stay in the run store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from rolltree.evaluation.estimate import Estimate
from rolltree.evaluation.outcomes import Outcome, outcomes
from rolltree.evaluation.reducers import REDUCERS, Reducer, Settings
from rolltree.store import Run, StoredRollout


@dataclass(frozen=True, slots=True)
class EvalReport:
    """One evaluation.

    `num_rollouts` counts episodes, `num_failed` those that ended with an error, `num_unscored`
    those that finished without a reward. `num_resumed` were stored by an earlier start of the
    same run. `results` holds what each reducer returned; the properties name the usual ones.
    """

    env_id: str
    model: str
    phase: str
    outcomes: tuple[Outcome, ...]
    results: Mapping[str, Any]
    settings: Settings = field(default_factory=Settings)
    num_resumed: int = 0
    elapsed_s: float = 0.0
    run_path: str | None = None

    @property
    def num_rollouts(self) -> int:
        """How many episodes were run."""
        return len(self.outcomes)

    @property
    def num_examples(self) -> int:
        """How many different examples they played."""
        return len({outcome.example for outcome in self.outcomes})

    @property
    def num_failed(self) -> int:
        """How many ended with an error."""
        return sum(outcome.failed for outcome in self.outcomes)

    @property
    def num_unscored(self) -> int:
        """How many finished, but have no reward."""
        return sum(not o.failed and o.reward is None for o in self.outcomes)

    @property
    def num_truncated(self) -> int:
        """How many were cut before their true end."""
        return sum(outcome.truncation_reason is not None for outcome in self.outcomes)

    @property
    def reward(self) -> Estimate | None:
        """Mean reward over examples; None when nothing was scored."""
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

    def as_dict(self) -> dict[str, Any]:
        """Return the aggregates as JSON-ready data, without the outcomes."""
        return {
            "env_id": self.env_id,
            "model": self.model,
            "phase": self.phase,
            "num_examples": self.num_examples,
            "num_rollouts": self.num_rollouts,
            "num_failed": self.num_failed,
            "num_unscored": self.num_unscored,
            "num_truncated": self.num_truncated,
            "num_resumed": self.num_resumed,
            "elapsed_s": self.elapsed_s,
            "run": self.run_path,
            "confidence": self.settings.confidence,
            "pass_threshold": self.settings.pass_threshold,
            **{name: _data(value) for name, value in self.results.items()},
        }


def build_report(
    rows: Iterable[StoredRollout],
    *,
    env_id: str = "",
    model: str = "",
    phase: str = "eval",
    settings: Settings | None = None,
    reducers: Mapping[str, Reducer] = REDUCERS,
    num_resumed: int = 0,
    elapsed_s: float = 0.0,
    run_path: str | None = None,
) -> EvalReport:
    """Reduce rows to a report. `env_id` defaults to that of the first row."""
    settings = settings or Settings()
    found = outcomes(rows)
    return EvalReport(
        env_id=env_id or (found[0].example[0] if found else ""),
        model=model,
        phase=phase,
        outcomes=tuple(found),
        results={name: reduce(found, settings) for name, reduce in reducers.items()},
        settings=settings,
        num_resumed=num_resumed,
        elapsed_s=elapsed_s,
        run_path=run_path,
    )


def stored_report(run: Run, phase: str = "eval", **options: Any) -> EvalReport:
    """Build the report of one phase of a stored run; options as in `build_report`."""
    return build_report(
        run.rollouts(phase=phase, blobs=False),
        phase=phase,
        run_path=str(run.path),
        **{"model": str(run.config.get("model", "")), **options},
    )


def _data(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _data(item) for key, item in value.items()}
    return value
