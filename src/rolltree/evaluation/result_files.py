"""An evaluation as files: `results.jsonl` and `metadata.json`.

They have the fields that verifiers 0.1.8 writes, for tools that read those files. A failed rollout
has `reward: null` and its `error`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rolltree._helpers.files import whole_file, write_whole
from rolltree._helpers.redact import redact
from rolltree.evaluation.report import EvalReport
from rolltree.store import to_plain
from rolltree.store.export import write_lines
from rolltree.values.types import RolloutResult, State


def results_line(result: RolloutResult, state: State | None) -> dict[str, Any]:
    """Return one line of `results.jsonl`: input, completion, reward, times, and the metrics."""
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
    more = {name: to_plain(source.get(name)) for name in ("answer", "info")}
    line.update({name: value for name, value in more.items() if value})
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
    ended_at: float | None = None,
) -> Path:
    """Write both files into `folder` and return it. Secrets in the arguments are redacted.

    `metadata.avg_reward` is the report's mean over scored rollouts, or null if there are none.
    `ended_at` is the time of the evaluation's end, in seconds since the epoch; None: now.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # Written to a temporary file and renamed, so that readers never see half a file.
    with whole_file(target / "results.jsonl") as part:
        write_lines(
            part,
            (
                to_plain(results_line(result, state))
                for result in results
                for state in result.states or (None,)
            ),
        )
    ended = datetime.now() if ended_at is None else datetime.fromtimestamp(ended_at)
    metadata = {
        "env_id": report.env_id,
        "env_args": redact(dict(env_args or {})),
        "model": report.model,
        "base_url": redact(base_url),
        "num_examples": report.num_examples,
        "rollouts_per_example": rollouts_per_example,
        "sampling_args": redact(dict(sampling_args or {})),
        "date": ended.astimezone().isoformat(timespec="seconds"),
        "time_ms": 1000.0 * report.elapsed_s,
        "avg_reward": None if report.reward is None else report.reward.mean,
        "avg_metrics": {name: metric.mean for name, metric in report.metrics.items()},
        "num_failed": report.num_failed,
        "state_columns": [],
        "path_to_save": str(target),
    }
    text = json.dumps(to_plain(metadata), indent=2, ensure_ascii=False) + "\n"
    write_whole(target / "metadata.json", text)
    return target
