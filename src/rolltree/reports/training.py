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
    held_out = [(step, stored_report(run, phase).reward) for step, phase in evaluations(run)]
    return Curve(
        title=f"mean reward, {', '.join(_env_ids(run))}",
        steps=[step for step, _ in points],
        rewards=[reward for _, reward in points],
        held_out=[(step, found) for step, found in held_out if found is not None],
    )


def evaluations(run: Run) -> list[tuple[int, str]]:
    """Return the step and phase of every held-out evaluation of a training run, by step."""
    found = {event.data["phase"]: event.step or 0 for event in run.events("evaluation")}
    return sorted((step, phase) for phase, step in found.items())


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
    found = evaluations(run)
    reports = [_held_out(run, phase) for _, phase in found[:1] + found[1:][-1:]]
    if len(reports) == 2 and all(report.reward is not None for report in reports):
        names = tuple(f"step {step}" for step, _ in (found[0], found[-1]))
        parts.append(Text("Held-out examples", style="bold"))
        parts.append(comparison_table(compare(*reports), names=(names[0], names[1])))
    else:
        parts += [evaluation_table(report) for report in reports]
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
    phase = [["--phase", name] for _, name in evaluations(run)[-1:]]
    look = ["rolltree", "show", path, *(phase[0] if phase else []), "--transcripts", "5"]
    return [shlex.join(words) for words in (look, measure, further)]


def _held_out(run: Run, phase: str) -> EvalReport:
    model = (run.config.get("model") or {}).get("name", "")
    return stored_report(run, phase, model=f"{model}, {phase}")


def _transcripts(run: Run, num: int) -> list[RenderableType]:
    """Return the same held-out examples first and last: the first examples, not the best ones."""
    found = evaluations(run)
    if num < 1 or not found:
        return []
    phases = found[:1] + found[1:][-1:]
    rows = run.rollouts(phase=phases[0][1], blobs=False)
    examples = sorted({row.example_id for row in rows}, key=lambda key: (str(type(key)), key))
    parts: list[RenderableType] = []
    for example in examples[:num]:
        for step, phase in phases:
            shown = run.rollouts(phase=phase, example_id=example, index_in_group=0)
            parts += [
                transcript(result, title=f"example {example}, step {step} ({phase})", limit=400)
                for result in decode_results(shown)
            ]
    return parts


def _env_ids(run: Run) -> list[str]:
    rows = run.query("SELECT DISTINCT env_id FROM rollouts ORDER BY env_id")
    return [str(row["env_id"]) for row in rows]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
