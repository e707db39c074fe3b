"""What rescoring changed, for a terminal."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from rolltree.records import CreditChange, RescoreReport
from rolltree.reports.formatting import interval, safe_text


def rescore_parts(report: RescoreReport, *, num_changes: int = 10) -> list[RenderableType]:
    """Return what is printed: counts, phases, group advantages, the rollouts that changed most."""
    parts: list[RenderableType] = [_phases(report)]
    facts = [f"{report.num_changed:,} of {report.num_rollouts:,} rollouts have another reward."]
    if report.num_failed:
        facts.append(
            f"{report.num_failed:,} could not be scored, so they have no reward; the first: "
            f"{report.failure}"
        )
    if report.credit is not None:
        facts.append(_credit(report.credit))
    parts += ["", *(safe_text(fact, limit=600) for fact in facts)]
    if num_changes and report.changes:
        parts += ["", _changes(report, num_changes)]
    parts += ["", safe_text(f"run  {report.run}")]
    return parts


def _phases(report: RescoreReport) -> Table:
    title = safe_text(f"{report.source}, scored by {report.scored_by}")
    table = Table(title=title, title_justify="left", box=None)
    heads = ("phase", "rollouts", "changed", "before", "after", "difference", "95 % interval")
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if 0 < at < 6 else "left")
    for phase in report.phases:
        found = phase.rewards
        means = ["-", "-", "-", "-"]
        if found is not None:
            means = [f"{found.before.mean:.3f}", f"{found.after.mean:.3f}"]
            means += [f"{found.difference.mean:+.3f}", interval(found.difference)]
        counts = (f"{phase.num_rollouts:,}", f"{phase.num_changed:,}")
        table.add_row(safe_text(phase.phase, limit=40), *counts, *means)
    return table


def _credit(credit: CreditChange) -> str:
    """Return what becomes of the groups, in sentences."""
    return (
        f"Advantages ({credit.name}, {credit.num_groups:,} groups): {credit.num_turned:,} of "
        f"{credit.num_rollouts:,} rollouts turn from reinforced to discouraged or back; the mean "
        f"absolute change is {credit.mean_change:.3f}. Groups that teach nothing: "
        f"{credit.num_flat_before:,} before, {credit.num_flat_after:,} after."
    )


def _changes(report: RescoreReport, num: int) -> Table:
    table = Table(title="changed most", title_justify="left", box=None)
    heads = ("rollout", "agent", "before", "after", "advantage before", "after")
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at > 1 else "left")
    for change in report.changes[:num]:
        name = change.request_id
        if change.trajectory_index:
            name += f" [{change.trajectory_index}]"
        values = (change.before, change.after, change.advantage_before, change.advantage_after)
        texts = ["-" if value is None else f"{value:.3f}" for value in values]
        table.add_row(safe_text(name, limit=60), safe_text(change.agent, limit=20), *texts)
    return table
