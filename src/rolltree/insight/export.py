"""`export_run`: whole rollouts of a run as files for other programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rolltree._helpers.files import check_replaced, whole_folder
from rolltree.records.read import RunData, read_run
from rolltree.records.table import TABLE_SUFFIXES, Table, is_export
from rolltree.store import Run
from rolltree.values.errors import ConfigError, UnknownName, did_you_mean

_SHARD = "data/train-00000-of-00001.parquet"


def export_run(
    path: str | Path,
    target: str | Path,
    kind: str = "rollouts",
    *,
    min_reward: float | None = None,
    best_of_group: bool = False,
    **filters: Any,
) -> int:
    """Write the rollouts of a run for another program and return how many rows were written.

    Args:
        path: the run.
        target: a file for `rollouts`, a folder for `results`; for `dataset` and `sft` a new folder,
            or a file whose suffix names its format (`.parquet`, `.arrow`, `.jsonl`, `.csv`).
        kind: `rollouts`: JSON lines with every message and token id. `results`: `results.jsonl`
            and `metadata.json` of one phase, as verifiers writes them. `dataset`: a Hugging Face
            data set of conversations. `sft`: the same for supervised fine-tuning (`RunData.sft`).
        min_reward, best_of_group: choose the rollouts of `sft` by their rewards.
        filters: those of `RunData`; for `results` only the phase.

    Raises:
        ConfigError: an unknown kind, or one that does not take these choices; or a file is there
            that is not an earlier export.
        StoreError: there is no run, a file cannot be written, or rows are damaged.
    """
    if kind not in EXPORT_KINDS:
        raise UnknownName(f"{kind!r} is not a kind of export.{did_you_mean(kind, EXPORT_KINDS)}")
    choice: dict[str, Any] = {"min_reward": min_reward, "best_of_group": best_of_group or None}
    choice = {name: value for name, value in choice.items() if value is not None}
    if choice and kind != "sft":
        raise ConfigError(
            f"{' and '.join(choice)} choose rollouts for kind 'sft' only, so {kind!r} would "
            "have all of them. Use where='reward >= ...' there."
        )
    with read_run(path) as data:
        return EXPORT_KINDS[kind](data, Path(target), {**choice, **filters})


def _rollouts(data: RunData, target: Path, filters: dict[str, Any]) -> int:
    from rolltree.rollouts.decode import export_line

    check_replaced(target, is_export)
    return data.run.export(target, render=export_line, **filters)


def _results(data: RunData, target: Path, filters: dict[str, Any]) -> int:
    from rolltree.evaluation import stored_report, write_results
    from rolltree.rollouts.decode import decode_results

    run = data.run
    phase = _phase_of(run, filters)
    check_replaced(target / "results.jsonl", lambda file: is_export(file) or _is_result(file))
    check_replaced(target / "metadata.json", lambda file: b'"avg_reward"' in file.read_bytes())
    ended_at, elapsed_s = _times(run, phase)
    report, config = stored_report(run, phase, elapsed_s=elapsed_s), run.config
    env = config.get("env")  # the name in an evaluation's settings, a section in training's
    section = env if isinstance(env, dict) else {"args": config.get("env_args")}
    per_example = Counter(outcome.example for outcome in report.outcomes)
    write_results(
        target,
        decode_results(run.rollouts(phase=phase)),
        report,
        env_args=section.get("args"),
        base_url=config.get("base_url"),
        rollouts_per_example=max(per_example.values(), default=1),
        sampling_args=config.get("sampling"),
        ended_at=ended_at,
    )
    return report.num_rollouts


def _is_result(file: Path) -> bool:
    with file.open("rb") as lines:
        start = lines.read(4096)
    return start.startswith(b"{") and b'"example_id"' in start


def _times(run: Run, phase: str) -> tuple[float | None, float]:
    """Return when a phase ended, and for how many seconds its rollouts were played.

    Time in which none was played, such as that between two starts of a run, does not count.
    """
    spans = sorted(
        (created if started is None else min(started, created), created)
        for started, created in run.columns(("started_at", "created_at"), phase=phase)
    )
    played, end = 0.0, -math.inf
    for start, stop in spans:
        played += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return (end if spans else None), played


def _phase_of(run: Run, filters: dict[str, Any]) -> str:
    others = [name for name, value in filters.items() if name != "phase" and value is not None]
    if others:
        raise ConfigError(
            f"kind 'results' has the report of a whole phase, so it takes no {others[0]}. Leave it "
            "out, or use another kind."
        )
    phases = run.phases()
    phase = filters.get("phase") or (phases[0] if len(phases) == 1 else None)
    if phase is None:
        raise ConfigError(
            f"{run.path} has the phases {', '.join(map(repr, phases)) or '(none)'}, and kind "
            "'results' is one phase with its report. Name it: phase='eval_after'."
        )
    if phase not in phases:
        raise UnknownName(f"{run.path} has no phase {phase!r}.{did_you_mean(phase, phases)}")
    return str(phase)


def _dataset(
    data: RunData, target: Path, filters: dict[str, Any], *, kind: str = "conversations"
) -> int:
    """Write a table as one file, or as a folder that `datasets.load_dataset` reads."""
    table: Table = getattr(data, kind)(**filters)
    if target.suffix.lower() in TABLE_SUFFIXES:
        return table.write(target)
    # Raises before anything is written if pyarrow is missing.
    table.arrow_schema()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(
            f"{target} exists already, and a data set in it would be mixed with its contents. "
            f"Choose a new folder, or a file that ends with {', '.join(TABLE_SUFFIXES)}."
        )
    # `load_dataset` reads every file of a folder, so half a data set must never be there.
    with whole_folder(target) as folder:
        (folder / _SHARD).parent.mkdir()
        number = table.write(folder / _SHARD)
        (folder / "README.md").write_text(_card(data, table, number), encoding="utf-8")
    return number


def _card(data: RunData, table: Table, number: int) -> str:
    """Return the data set's card: its configuration, where it is from, its columns."""
    columns = "".join(
        f"| `{each.name}` | {each.kind} | {each.description} |\n" for each in table.columns
    )
    envs = ", ".join(sorted({total.env_id for total in data.run.totals()}))
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: data/train-*\ntags:\n- rolltree\n---\n\n# {table.name}\n\n"
        f"{number} rows of the run `{data.run.path.name}` (environment: {envs}), written by "
        f"rolltree.\n\n| column | type | what it holds |\n|---|---|---|\n{columns}"
    )


EXPORT_KINDS: dict[str, Callable[[RunData, Path, dict[str, Any]], int]] = {
    "rollouts": _rollouts,
    "results": _results,
    "dataset": _dataset,
    "sft": partial(_dataset, kind="sft"),
}
