"""What `generate` and `evaluate` return: states, columns over them, and metadata.

It knows states. It knows nothing about files; the store and the evaluation room write them. It
leaves out confidence intervals and pass@k, which are evaluation's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rolltree.errors import did_you_mean
from rolltree.types import INPUT_FIELDS, RolloutResult, SamplingArgs, State


@dataclass(frozen=True, slots=True)
class GenerateMetadata:
    """What was run, and the means over it.

    `avg_reward` is the mean over the rollouts that have a reward, None when none has. A failed
    rollout counts in `num_failed` and never as 0.
    """

    env_id: str
    model: str
    sampling_args: SamplingArgs
    num_examples: int
    rollouts_per_example: int
    num_rollouts: int
    num_failed: int
    num_truncated: int
    avg_reward: float | None
    avg_metrics: dict[str, float | None]
    time_ms: float
    seed: int

    def __getitem__(self, name: str) -> Any:
        if name not in self.__slots__:
            raise KeyError(f"metadata have no {name!r}.{did_you_mean(name, self.__slots__)}")
        return getattr(self, name)


@dataclass(frozen=True, slots=True, repr=False)
class GenerateResults:
    """Finished rollouts in the order of their inputs, with one list per column.

    `results.state`, `results.reward`, `results.metrics["name"]`; `results["reward"]` is the same.
    """

    state: list[State]
    metadata: GenerateMetadata
    results: list[RolloutResult] = field(default_factory=list)

    @property
    def prompt(self) -> list[Any]:
        """The prompts."""
        return self._column("prompt")

    @property
    def completion(self) -> list[Any]:
        """The completions."""
        return self._column("completion")

    @property
    def answer(self) -> list[Any]:
        """The reference answers, "" where there is none."""
        return self._column("answer", "")

    @property
    def task(self) -> list[str]:
        """The tasks."""
        return self._column("task")

    @property
    def info(self) -> list[dict[str, Any]]:
        """The `info` dicts, empty where there is none."""
        return self._column("info", {})

    @property
    def example_id(self) -> list[int]:
        """The example ids; the rollouts of one example share theirs."""
        return self._column("example_id")

    @property
    def reward(self) -> list[float | None]:
        """The rewards; None for a rollout that failed or whose scoring failed."""
        return self._column("reward")

    @property
    def stop_conditions(self) -> list[str | None]:
        """The name of the stop condition that ended each rollout; None where none did."""
        return self._column("stop_condition")

    @property
    def metrics(self) -> dict[str, list[float | None]]:
        """One list per metric; None where a rollout has no value."""
        return metric_columns(self.state)

    def __getitem__(self, column: str) -> Any:
        known = {*INPUT_FIELDS, *_OWN_COLUMNS}
        if column not in known:
            raise KeyError(f"results have no column {column!r}.{did_you_mean(column, known)}")
        return getattr(self, column)

    def __repr__(self) -> str:
        found = self.metadata
        return (
            f"GenerateResults({found.num_rollouts} rollouts of {found.env_id!r} with "
            f"{found.model!r}, avg_reward={found.avg_reward}, num_failed={found.num_failed})"
        )

    def __len__(self) -> int:
        return len(self.state)

    def _column(self, key: str, default: Any = None) -> list[Any]:
        return [state.get(key, default) for state in self.state]


_OWN_COLUMNS = ("state", "completion", "reward", "metrics", "stop_conditions", "metadata")


def metric_columns(states: Sequence[State]) -> dict[str, list[float | None]]:
    """Return one list per metric that some state has."""
    names = dict.fromkeys(name for state in states for name in state.get("metrics") or ())
    return {name: [(state.get("metrics") or {}).get(name) for state in states] for name in names}


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known, or None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def summarize(
    states: Sequence[State],
    *,
    env_id: str,
    model: str,
    sampling_args: SamplingArgs,
    rollouts_per_example: int,
    time_ms: float,
    seed: int,
) -> GenerateMetadata:
    """Return the metadata of finished rollouts."""
    return GenerateMetadata(
        env_id=env_id,
        model=model,
        sampling_args=sampling_args,
        num_examples=len({(state["task"], state["example_id"]) for state in states}),
        rollouts_per_example=rollouts_per_example,
        num_rollouts=len(states),
        num_failed=sum(state.get("error") is not None for state in states),
        num_truncated=sum(bool(state.get("truncated")) for state in states),
        avg_reward=mean([state["reward"] for state in states]),
        avg_metrics={name: mean(values) for name, values in metric_columns(states).items()},
        time_ms=time_ms,
        seed=seed,
    )
