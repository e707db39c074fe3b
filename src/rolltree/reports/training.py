"""The report of a stored training run in the terminal: curve, held-out gain, transcripts.

It is read only from the run store, so it can be printed again at any time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rolltree._helpers.redact import shown_command
from rolltree.evaluation import Comparison, compare_environments, compare_reports, stored_report
from rolltree.reports.curves import CurveView, reward_curve, save_reward_curve
from rolltree.reports.formatting import interval, meter, only_shows, safe_text, say, text_table
from rolltree.reports.runs import headlines, transcript
from rolltree.rollouts.decode import decode_results
from rolltree.store import Run, StoredEvaluation
from rolltree.training import TrainReport


def training_report(run: Run, *, num_transcripts: int = 2) -> list[RenderableType]:
    """Return the report of a run: curve, held-out results, transcripts, headlines with advice."""
    made: dict[str, Callable[[Run], Sequence[RenderableType]]] = {
        "the reward curve": _curve,
        "the held-out results": _held_out,
        "the transcripts": partial(_transcripts, num=num_transcripts),
        "what happened": lambda run: headlines(run, idle_gpu=TrainReport.read(run).idle_gpu),
    }
    parts: list[RenderableType] = []
    for what, make in made.items():
        # One part at a time: a curve that cannot be drawn must not hide the transcripts.
        with only_shows(what):
            parts += make(run)
    return parts


def print_report(
    run: Run,
    out: Console,
    *,
    num_transcripts: int = 2,
    train_command: Sequence[str] | None = None,
    has_env_object: bool = False,
) -> None:
    """Print the result of a training run: `training_report`, the path of its curve, what to try.

    A part that cannot be drawn or printed is left out with a warning; nothing is raised. The last
    two arguments are those of `next_commands`.
    """
    with only_shows("the report"):
        for part in training_report(run, num_transcripts=num_transcripts):
            out.print(part, soft_wrap=isinstance(part, Text))
        say(out, f"run    {run.path}")
        curve: object
        try:
            curve = save_reward_curve(run)
        except Exception as error:  # noqa: BLE001  no matplotlib, or what it raises; the run is done
            curve = f"{error} ({type(error).__name__})"
        if curve is not None:
            say(out, f"curve  {curve}")
        say(out, "next")
        for line in next_commands(run, train_command, has_env_object=has_env_object):
            say(out, f"  {line}")


def next_commands(
    run: Run, train_command: Sequence[str] | None, *, has_env_object: bool = False
) -> list[str]:
    """Return commands to try next: look closer, measure the trained model, continue training.

    `train_command` has the words of the command that made the run; None: a Python call made it. An
    environment that was given as an object has no name that a command could load, and a run that
    does not export its model has nothing to measure.
    """
    config, path = run.config, str(run.path)
    env = config.get("env") or {}
    measure = ["rolltree", "eval", str(env.get("id", "ENV")), "-m", f"{path}/model", "-n", "50"]
    if env.get("args"):
        measure += ["-a", json.dumps(env["args"])]
    num_steps = int((config.get("train") or {}).get("num_steps", len(run.steps())))
    more = f"train.num_steps={max(num_steps, len(run.steps())) * 2}"
    # At the end of a schedule the learning rate is zero, so more steps need a new run, whose
    # schedule is longer.
    if (config.get("optim") or {}).get("schedule", "constant") != "constant":
        further = ["rolltree", "fork", path, f"--set={more}"]
    elif train_command is not None:
        kept = (w for w in train_command if "train.num_steps=" not in w)
        further = [*kept, f"--set={more}" if "fork" in train_command[:2] else more]
    else:
        further = []
    phase = [word for done in run.evaluations()[-1:] for word in ("--phase", done.phase)]
    look = ["rolltree", "show", path, *phase, "--transcripts", "5"]
    is_exported = (config.get("checkpoint") or {}).get("export", True)
    can_measure = is_exported and not has_env_object
    commands = [look, *([measure] if can_measure else []), *([further] if further else [])]
    by_call = [] if further else [f"the same call with {more.removeprefix('train.')}"]
    return [*(shown_command(words) for words in commands), *by_call]


def _curve(run: Run) -> list[RenderableType]:
    curve = reward_curve(run)
    return [] if curve is None else [CurveView(curve), ""]


def _held_out(run: Run) -> list[RenderableType]:
    """Return the first and the last evaluation, compared if both have rewards."""
    found = _first_and_last(run)
    reports = [
        stored_report(run, done.phase, model=f"{run.model_name}, {done.phase}") for done in found
    ]
    if len(reports) < 2 or any(report.reward is None for report in reports):
        from rolltree.reports.evaluation import evaluation_table

        return [evaluation_table(report) for report in reports]
    names = (f"step {found[0].step}", f"step {found[1].step}")
    table = comparison_table(compare_reports(*reports), names=names)
    parts: list[RenderableType] = [Text("Held-out examples", style="bold"), table]
    for name, own in compare_environments(*reports).items():
        parts += [safe_text(f"Held-out examples of {name}"), comparison_table(own, names=names)]
    return parts


def comparison_table(comparison: Comparison, names: tuple[str, str] = ("before", "after")) -> Table:
    """Return before, after and the paired difference."""
    gain = comparison.difference
    said = {"noise": "includes 0: not clear", "too few examples": "too few examples"}
    verdict = f"{said.get(comparison.verdict, 'excludes 0')} ({gain.num_examples} pairs)"
    rows = [
        (name, f"{value.mean:.3f}", interval(value), meter(value.mean))
        for name, value in zip(names, (comparison.before, comparison.after), strict=True)
    ]
    rows.append(("difference", f"{gain.mean:+.3f}", interval(gain), verdict))
    table = text_table(("", "mean reward", "interval", ""), rows, "lrll")
    table.columns[0].style = "bold"
    return table


def _transcripts(run: Run, num: int) -> list[RenderableType]:
    """Return the first held-out examples (not the best), at the first and the last evaluation."""
    found = _first_and_last(run)
    if num < 1 or not found:
        return []
    rows = run.rollouts(phase=found[0].phase, blobs=False)
    # Not the best examples, which would flatter the run.
    examples = sorted({row.example_id for row in rows}, key=lambda key: (str(type(key)), key))
    parts: list[RenderableType] = []
    for example in examples[:num]:
        for done in found:
            title = f"example {example}, step {done.step} ({done.phase})"
            shown = run.rollouts(phase=done.phase, example_id=example, index_in_group=0)
            parts += [
                transcript(result, title=title, limit=400)
                for result in decode_results(shown, tokens=False)
            ]
    return parts


def _first_and_last(run: Run) -> list[StoredEvaluation]:
    found = run.evaluations()
    return [*found[:1], *found[1:][-1:]]
