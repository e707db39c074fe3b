"""What a training run did, read back from its store: curve, held-out gain, transcripts.

It needs no trainer, no torch and no live environment, so a stored run can be reported again at any
time. It leaves out what is not stored.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from rolltree.evaluation import EvalReport, compare, stored_report
from rolltree.reports.curves import Curve, save_curve, terminal_curve
from rolltree.reports.evaluation import comparison_table, evaluation_table
from rolltree.reports.transcript import transcript
from rolltree.rollouts.record import decode_results
from rolltree.store import Run

BEFORE, AFTER = "eval_before", "eval_after"
CURVE_FILE = "reward_curve.png"


def reward_curve(run: Run) -> Curve | None:
    """Return the mean training reward of every step and the held-out means; None without steps."""
    points = [
        (row.step, float(row.metrics["reward/mean"]))
        for row in run.steps()
        if _is_finite(row.metrics.get("reward/mean"))
    ]
    if not points:
        return None
    held_out = {}
    for event in run.events("evaluation"):
        report = stored_report(run, event.data["phase"])
        if report.reward is not None and event.step is not None:
            held_out[event.step] = report.reward
    return Curve(
        title=f"mean reward, {', '.join(_env_ids(run))}",
        steps=[step for step, _ in points],
        rewards=[reward for _, reward in points],
        held_out=sorted(held_out.items(), key=lambda item: item[0]),
    )


def save_reward_curve(run: Run) -> Path | None:
    """Draw the reward curve into the run directory; None when there is nothing to draw.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    curve = reward_curve(run)
    return None if curve is None else save_curve(curve, run.path / CURVE_FILE)


def training_report(run: Run, *, num_transcripts: int = 2) -> list[RenderableType]:
    """Return what a person wants to see at the end of a run, top to bottom."""
    parts: list[RenderableType] = []
    curve = reward_curve(run)
    if curve is not None:
        parts += [Text(terminal_curve(curve), no_wrap=True), ""]
    before, after = (_held_out(run, phase) for phase in (BEFORE, AFTER))
    if before is not None and after is not None and before.reward and after.reward:
        parts += [Text("Held-out examples", style="bold"), comparison_table(compare(before, after))]
    else:
        parts += [evaluation_table(found) for found in (before, after) if found is not None]
    parts += _transcripts(run, num_transcripts)
    return parts


def next_commands(run: Run, train_command: Sequence[str]) -> list[str]:
    """Return three commands to try: look closer, measure the trained model, go on.

    `train_command` is the command that made the run, as a list of words.
    """
    config, path = run.config, str(run.path)
    env = config.get("env") or {}
    measure = ["rolltree", "eval", str(env.get("id", "ENV")), "-m", f"{path}/model", "-n", "50"]
    if env.get("args"):
        measure += ["-a", json.dumps(env["args"])]
    num_steps = int((config.get("train") or {}).get("num_steps", len(run.steps())))
    further = [word for word in train_command if not word.startswith("train.num_steps=")]
    further.append(f"train.num_steps={max(num_steps, len(run.steps())) * 2}")
    look = ["rolltree", "show", path, "--phase", AFTER, "--transcripts", "5"]
    return [shlex.join(words) for words in (look, measure, further)]


def _held_out(run: Run, phase: str) -> EvalReport | None:
    model = (run.config.get("model") or {}).get("name", "")
    report = stored_report(run, phase, model=f"{model} ({phase})")
    return report if report.num_rollouts else None


def _transcripts(run: Run, num: int) -> list[RenderableType]:
    """Return the first held-out examples before and after: the first ones, not the best ones."""
    if num < 1:
        return []
    chosen: list[int | str | None] = []
    for row in run.rollouts(phase=BEFORE, blobs=False):
        if row.example_id not in chosen:
            chosen.append(row.example_id)
    chosen = sorted(chosen, key=lambda example: (str(type(example)), example))[:num]
    parts: list[RenderableType] = []
    for example in chosen:
        for phase in (BEFORE, AFTER):
            rows = run.rollouts(phase=phase, example_id=example, index_in_group=0)
            parts += [
                transcript(result, title=f"example {example}, {phase}", limit=400)
                for result in decode_results(rows)
            ]
    return parts


def _env_ids(run: Run) -> list[str]:
    rows = run.query("SELECT DISTINCT env_id FROM rollouts ORDER BY env_id")
    return [str(row["env_id"]) for row in rows]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
