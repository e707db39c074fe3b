"""Shows stored runs in the terminal: a list, a table of phases, and transcripts of rollouts."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolltree.narrator.detectors import Advice, advised
from rolltree.reports.formatting import counts, duration, number_text, safe_text, text_table
from rolltree.rollouts.conversation import conversation_of
from rolltree.store import Run, RunSummary, to_plain
from rolltree.values.types import RolloutResult, State

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def run_lines(run: RunSummary, health: Mapping[str, Any] | None = None) -> list[str]:
    """Return a run as lines: its path, its state and contents, its health, and its error.

    `health` is the sentence that `records.glance.run_glance` returns.
    """
    # A training run may have dozens of evaluations; a line has room for a few. Most of interest are
    # the first and the last ones: before and after training.
    shown = [*run.phases[:2], *run.phases[2:][-2:]]
    phases = [f"{phase.phase} {number_text(phase.mean_reward)}" for phase in shown]
    if num := len(run.phases) - len(shown):
        phases.insert(2, f"{num} more phase{'' if num == 1 else 's'}")
    age = duration(max(0.0, time.time() - run.last_written))
    facts = [f"{run.state}, {age} ago", run.kind, *run.env_ids, *_progress(run), *phases]
    lines = [str(run.path), "  " + "  ".join(facts)]
    # An error is the last line, and the story would repeat it.
    if health is not None and not run.error:
        lines += [f"  {line.plain}" for line in story_lines([{**health, "advice": ""}])]
    if run.error:
        # An error message may be pages long.
        lines.append(f"  {' '.join(run.error.split())[:200]}")
    return lines


def _progress(run: RunSummary) -> list[str]:
    """Return the progress of a run: its steps, and the phases that are not complete."""
    said = []
    if run.num_steps or run.num_planned_steps:
        planned = f"/{run.num_planned_steps}" if run.num_planned_steps else ""
        said.append(f"{run.num_steps}{planned} steps")
    for phase in run.phases:
        if phase.num_planned is not None and phase.num_requests < phase.num_planned:
            said.append(f"{phase.phase} {phase.num_requests}/{phase.num_planned} rollouts")
    return said


def phases_table(run: RunSummary) -> Table:
    """Return one line per phase of a run."""
    heads = ("phase", "episodes", "mean reward", "failed", "truncated", "prompt", "sampled")
    rows = [
        (
            phase.phase,
            str(phase.num_requests),
            number_text(phase.mean_reward),
            str(phase.num_errors),
            str(phase.num_truncated),
            f"{phase.num_prompt_tokens:,}",
            f"{phase.num_completion_tokens:,}",
        )
        for phase in run.phases
    ]
    return text_table(heads, rows, "lrrrrrr")


def overview_line(overview: Mapping[str, Any]) -> str:
    """Return a run's state, reward with interval, and failures, from `records.overview`."""
    reward, said = overview["reward"], [f"{overview['state']}"]
    if reward is not None:
        ends = "" if reward["low"] is None else f" [{reward['low']:.3f}, {reward['high']:.3f}]"
        said.append(f"reward {reward['mean']:.3f}{ends} ({reward['of']})")
    number = overview["num_rollouts"]
    said.append(f"{number:,} rollout{'' if number == 1 else 's'}")
    if overview["num_failed"]:
        said.append(f"{overview['num_failed']:,} failed: {counts(overview['failures'])}")
    return "  ".join(said)


def story_lines(sentences: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return the story of a run, a line per sentence and one below it if there is advice.

    Problems and warnings begin with `!`. Print them with `soft_wrap`: advice ends with a command.
    """
    marks = {"error": ("! ", "red"), "warning": ("! ", "yellow"), "good": ("  ", "green")}
    found = []
    for each in sentences:
        mark, style = marks.get(each["severity"], ("  ", ""))
        found.append(Text(mark, style=style) + safe_text(each["text"]))
        if each["advice"]:
            found.append(safe_text(f"    {Advice(each['kind'], each['advice'], each['page'])}"))
    return found


def headlines(run: Run, *, idle_gpu: bool = False) -> list[Text]:
    """Return the three most important lines of a run's story, and those with the first advice."""
    # Imported here because `show --phase` has no story.
    from rolltree.records.story import run_story

    told = run_story(run, idle_gpu=idle_gpu)["sentences"]
    chosen = advised(told)
    return story_lines([each for at, each in enumerate(told) if at < 3 or each in chosen])


def transcript(
    result: RolloutResult,
    *,
    limit: int = 600,
    title: str = "",
    rewards: Sequence[Mapping[str, Any]] = (),
) -> RenderableType:
    """Return a panel with the prompt, the completion and the ending of each trajectory.

    Messages are cut at `limit` characters. `rewards` has the parts of each trajectory's reward, as
    `records.reward_parts` returns them.
    """
    lines = Table.grid(padding=(0, 1))
    # The longest role, "assistant".
    lines.add_column(no_wrap=True, width=9)
    lines.add_column(overflow="fold")
    # Each agent of an episode has its own trajectory.
    for at, state in enumerate(result.states):
        breakdown = rewards[at] if at < len(rewards) else None
        if len(result.states) > 1:
            lines.add_row(Text("agent", style="bold"), _speaker(state))
        for message in itertools.chain(*conversation_of(state)):
            role = str(message.get("role", "?"))
            style = _STYLES.get(role, "")
            lines.add_row(safe_text(role, style=f"bold {style}"), _body(message, style, limit))
        if breakdown is not None and breakdown["functions"]:
            lines.add_row(Text("reward", style="bold"), _breakdown_table(breakdown))
        for error in (state.get("scoring_errors") or {}).values():
            # The error that ended the rollout is shown only once, below.
            if result.error is None or error["message"] != result.error.message:
                said = safe_text(f"{error['type']}: {error['message']}", limit=limit)
                lines.add_row(Text("scoring", style="bold red"), said)
        extras = (step.get("extras") or {} for step in state.get("trajectory") or ())
        if "program" in state or any("left_out" in each for each in extras):
            from rolltree.reports.programs import agent_rows  # most rollouts have none

            for name, row in agent_rows(state, limit):
                lines.add_row(Text(name, style="bold"), row)
        lines.add_row(Text("ending", style="bold"), _ending(state, breakdown))
    if result.error is not None:
        said = safe_text(f"{result.error.type}: {result.error.message}", limit=limit)
        lines.add_row(Text("failed", style="bold red"), said)
    name = title or result.request.request_id
    return Panel(lines, title=safe_text(name), title_align="left", border_style="dim")


def _speaker(state: State) -> Text:
    """Return the agent of a rollout, and its subtask if another agent delegated it."""
    name = str(state.agent or "agent")
    if state.parent_rollout is None:
        return safe_text(name)
    return safe_text(f"{name}, asked by {state['parent_rollout']}: {state.get('subtask', '')}")


def _body(message: Mapping[str, Any], style: str, limit: int) -> Text:
    parts = []
    if message.get("reasoning_content"):
        thought = str(message["reasoning_content"])
        parts.append(safe_text(thought, limit=limit, style="dim italic"))
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        parts.append(safe_text(content, limit=limit, style=style))
    # Content parts, such as images, are shown as JSON.
    elif content and not isinstance(content, str):
        parts.append(safe_text(json.dumps(to_plain(content)), limit=limit, style=style))
    for call in message.get("tool_calls") or ():
        parts.append(safe_text(f"calls {json.dumps(to_plain(call))}", limit=limit, style="yellow"))
    return Text("\n").join(parts) if parts else Text("(empty)", style="dim")


def _breakdown_table(breakdown: Mapping[str, Any]) -> Table:
    """Return the reward functions with value, weight, and contribution to the reward."""
    heads = ("function", "value", "weight", "contribution")
    rows = [
        [each["name"], *(number_text(each[name], ".3g") for name in heads[1:])]
        for each in breakdown["functions"]
    ]
    if breakdown["rest"]:
        rows.append(["not by a function", "", "", number_text(breakdown["rest"], ".3g")])
    return text_table(heads, rows, "lrrr", limit=60, padding=(0, 2, 0, 0))


def _ending(state: State, breakdown: Mapping[str, Any] | None) -> Text:
    parts = [f"reward {state['reward']:.3f}" if _is_number(state.reward) else "no reward"]
    metrics = (state.metrics or {}) if breakdown is None else breakdown["metrics"]
    parts += [f"{name} {value:.3g}" for name, value in metrics.items() if _is_number(value)]
    if state.stop_condition:
        parts.append(f"ended by {state['stop_condition']}")
    if state.truncated:
        parts.append(f"truncated: {state.get('truncation_reason')}")
    if breakdown is not None and metrics and not breakdown["is_recorded"]:
        parts.append("(weights not recorded)")
    return safe_text("   ".join(parts))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
