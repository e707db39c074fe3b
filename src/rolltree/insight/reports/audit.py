"""Shows an audit: a table of checks, then the findings, then a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from rolltree.reports.formatting import counts, safe_text, text_table

if TYPE_CHECKING:
    from rolltree.records import AuditReport


def audit_table(report: AuditReport) -> Table:
    """Return a row per check: how many things it examined, and how many are wrong."""
    from rolltree.records import CHECKS

    table = text_table(("check", "looked at", "wrong", "what"), (), "lrrl", pad_edge=False)
    for check in report.checks:
        style = "red" if check.num_problems else ""
        told = CHECKS[check.name]
        # A check that skipped something, perhaps only a part, says why.
        if check.skipped is not None:
            told = f"not checked: {check.skipped}" if not check.num_checked else check.skipped
            style = style or "dim"
        table.add_row(
            check.name,
            f"{check.num_checked:,}" if check.num_checked else "-",
            f"{check.num_problems:,}" if check.num_checked or check.num_problems else "-",
            safe_text(told),
            style=style,
        )
    return table


def audit_lines(report: AuditReport, *, limit: int) -> list[str]:
    """Return at most `limit` findings, the facts, and the final sentence."""
    lines = [""] if report.findings else []
    lines += [
        f"{item.where}: {item.check}/{item.cause}: {item.message}"
        for item in report.findings[:limit]
    ]
    num_problems = sum(check.num_problems for check in report.checks)
    # Checks count every problem, but keep only some of them as findings.
    hidden = num_problems - min(limit, len(report.findings))
    if hidden:
        lines.append(f"... and {hidden:,} more (--limit, --json)")
    lines.append("")
    if report.breaks:
        lines.append(f"breaks by cause (no fault): {counts(dict(report.breaks))}")
    if report.recomputed:
        found = report.recomputed
        lines.append(
            f"recomputed {found['num_tokens']:,.0f} tokens of {found['num_rollouts']:.0f} "
            f"rollouts: engine logprobs differ by {found['abs_mean']:.2g} on average, "
            f"{found['abs_max']:.2g} at most"
        )
    amount = (
        f"{report.num_rollouts:,} rollouts, {report.num_sampled_tokens:,} sampled tokens, "
        f"{report.num_steps:,} steps"
    )
    verdict = "nothing is wrong" if report.ok else f"{num_problems:,} things are wrong"
    lines.append(f"{report.run}: {amount}: {verdict}")
    return lines
