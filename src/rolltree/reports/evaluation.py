"""Shows an evaluation in the terminal: its results and its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from rolltree.reports.formatting import (
    counts,
    duration,
    interval,
    meter,
    safe_text,
    text_table,
)

if TYPE_CHECKING:
    from rolltree.evaluation import Estimate, EvalReport


def evaluation_table(report: EvalReport) -> Table:
    """Return the result table of one evaluation."""
    title = safe_text(f"{report.env_id} · {report.model}")
    heads = ("", "mean", f"{report.settings.confidence:.0%} interval", "examples", "")
    table = text_table(heads, (), "lrlrl", title=title)
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    if report.reward is None:
        table.add_row("reward", "-", "no rollout was scored")
    else:
        _estimate_row(table, "reward", report.reward, show_meter=True)
    # pass@1 alone would repeat the mean for most rewards.
    if any(estimate.num_values for k, estimate in report.pass_at.items() if k > 1):
        for k, estimate in report.pass_at.items():
            _estimate_row(table, f"pass@{k}", estimate)
    environments = report.environments
    if len(report.tasks) > 1 and report.tasks.keys() - environments.keys():
        for name, estimate in report.tasks.items():
            _estimate_row(table, f"  {name}", estimate, show_meter=True)
    for name, estimate in report.metrics.items():
        _estimate_row(table, f"  {name}", estimate)
    for name, own in environments.items():
        if own["reward"] is None:
            table.add_row(safe_text(name, limit=40), "-", "no rollout was scored")
        else:
            _estimate_row(table, name, own["reward"], show_meter=True)
        for metric, estimate in own["metrics"].items():
            _estimate_row(table, f"  {metric}", estimate)
    return table


def _estimate_row(table: Table, name: str, value: Estimate, *, show_meter: bool = False) -> None:
    # Rewards outside [0, 1] have no scale for a bar.
    in_unit = 0.0 <= value.mean <= 1.0
    table.add_row(
        safe_text(name, limit=40),
        f"{value.mean:.3f}",
        interval(value),
        str(value.num_examples),
        meter(value.mean) if show_meter and in_unit else "",
    )


def evaluation_facts(report: EvalReport) -> Table:
    """Return the counts: rollouts, failures, truncations, tokens, time."""
    usage = report.results.get("usage", {})
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    counted = f"{report.num_rollouts} over {report.num_examples} examples"
    if report.num_resumed:
        counted += f", {report.num_resumed} of them from an earlier start"
    facts.add_row("rollouts", counted)
    if report.num_failed:
        share = report.num_failed / report.num_rollouts
        facts.add_row("failed", f"{report.num_failed} ({share:.0%}, not in the means)")
        messages = report.results.get("failure_messages", {})
        for kind, count in report.results.get("failures", {}).items():
            said = f"{count} x {kind}"
            if kind in messages:
                said += f", the first: {messages[kind]}"
            facts.add_row("", safe_text(said, limit=600))
    # An error that ended rollouts is not shown again for the function that raised it.
    told = set(report.results.get("failure_messages", {}).values())
    for function, raised in report.results.get("scoring_errors", {}).items():
        if raised["first"].partition(": ")[2] not in told:
            said = f"{function} raised in {raised['num']}, the first: {raised['first']}"
            facts.add_row("scoring", safe_text(said, limit=600))
    if report.num_unscored:
        facts.add_row("unscored", f"{report.num_unscored} (not in the means)")
    if report.num_truncated:
        reasons = counts(report.results.get("truncations", {}))
        facts.add_row("truncated", safe_text(f"{report.num_truncated}: {reasons}"))
    if usage:
        facts.add_row(
            "tokens",
            f"{usage['num_prompt_tokens']:,} prompt, {usage['num_completion_tokens']:,} sampled "
            f"({usage['mean_num_completion_tokens']:.1f} a rollout, "
            f"{usage['mean_num_calls']:.1f} calls)",
        )
    facts.add_row("time", duration(report.elapsed_s))
    if report.run_path is not None:
        facts.add_row("run", safe_text(report.run_path))
    return facts
