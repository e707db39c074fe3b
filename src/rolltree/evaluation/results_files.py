"""`results.jsonl` and `metadata.json` with the fields that verifiers 0.1.8 writes.

For tools that read those files; the run store holds more. One line per rollout. It knows states
and reports and nothing about engines. A rollout that failed has `reward: null` and its `error`,
where verifiers had no line at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rolltree.evaluation.report import EvalReport
from rolltree.store import redact, to_plain
from rolltree.types import RolloutResult, State


def results_line(result: RolloutResult, state: State | None) -> dict[str, Any]:
    """Return one line: the input, the completion, the reward, times, and a field per metric."""
    source = result.request.input if state is None else state["input"]
    own: Mapping[str, Any] = {} if state is None else state
    timing = own.get("timing") or {}
    line = {
        "example_id": source["example_id"],
        "prompt": source["prompt"],
        "completion": own.get("completion"),
        "task": source["task"],
        "reward": own.get("reward"),
        **{name: timing.get(name, 0.0) for name in ("generation_ms", "scoring_ms", "total_ms")},
    }
    line.update({name: source[name] for name in ("answer", "info") if source.get(name)})
    line.update(own.get("metrics") or {})
    if result.error is not None:
        line["error"] = redact({"type": result.error.type, "message": result.error.message})
    return line


def write_results(
    folder: str | Path,
    results: Iterable[RolloutResult],
    report: EvalReport,
    *,
    env_args: Mapping[str, Any] | None = None,
    base_url: str | None = None,
    rollouts_per_example: int = 1,
    sampling_args: Mapping[str, Any] | None = None,
) -> Path:
    """Write both files into `folder` and return it. Secrets in the arguments are cut out.

    `metadata.avg_reward` is the report's mean: over scored rollouts, null when there are none.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with (target / "results.jsonl").open("w", encoding="utf-8") as file:
        for result in results:
            for state in result.states or (None,):
                line = to_plain(results_line(result, state))
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    metadata = {
        "env_id": report.env_id,
        "env_args": redact(dict(env_args or {})),
        "model": report.model,
        "base_url": redact(base_url),
        "num_examples": report.num_examples,
        "rollouts_per_example": rollouts_per_example,
        "sampling_args": redact(dict(sampling_args or {})),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "time_ms": 1000.0 * report.elapsed_s,
        "avg_reward": None if report.reward is None else report.reward.mean,
        "avg_metrics": {name: metric.mean for name, metric in report.metrics.items()},
        "num_failed": report.num_failed,
        "state_columns": [],
        "path_to_save": str(target),
    }
    (target / "metadata.json").write_text(
        json.dumps(to_plain(metadata), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return target
