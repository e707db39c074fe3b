"""Shows in the terminal what rescoring changed."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table

from rolltree.records import CreditChange, RescoreReport
from rolltree.reports.formatting import Cell, interval, number_text, safe_text, text_table


def rescore_parts(report: RescoreReport, *, num_changes: int = 10) -> list[RenderableType]:
    """Return the printed parts: counts, phases, group advantages, the most changed rollouts."""
    parts: list[RenderableType] = [_phases(report)]
    facts = [f"{report.num_changed:,} of {report.num_rollouts:,} rollouts have another reward."]
    if report.num_failed:
        facts.append(
            f"{report.num_failed:,} could not be scored, so they have no reward; the first: "
            f"{report.failure}"
        )
    if report.num_unplayed:
        facts.append(
            f"{report.num_unplayed:,} had failed before they were scored, so nothing scored them; "
            f"play them again. The first: {report.unplayed}"
        )
    if report.credit is not None:
        facts.append(_credit(report.credit))
    parts += ["", *(safe_text(fact, limit=600) for fact in facts)]
    if num_changes and report.changes:
        parts += ["", _changes(report, num_changes)]
    parts += ["", safe_text(f"run  {report.run}")]
    return parts


def _phases(report: RescoreReport) -> Table:
    heads = ("phase", "rollouts", "changed", "before", "after", "difference", "95 % interval")
    rows = []
    for phase in report.phases:
        found = phase.rewards
        # A phase may have no rewards before or after.
        means = ["-", "-", "-", "-"]
        if found is not None:
            means = [f"{found.before.mean:.3f}", f"{found.after.mean:.3f}"]
            means += [f"{found.difference.mean:+.3f}", interval(found.difference)]
        counts = (f"{phase.num_rollouts:,}", f"{phase.num_changed:,}")
        rows.append((phase.phase, *counts, *means))
    title = safe_text(f"{report.source}, scored by {report.scored_by}")
    return text_table(heads, rows, "lrrrrrl", title=title, limit=40)


def _credit(credit: CreditChange) -> str:
    """Return sentences on how the advantages of the groups change."""
    return (
        f"Advantages ({credit.name}, {credit.num_groups:,} groups): {credit.num_turned:,} of "
        f"{credit.num_rollouts:,} rollouts turn from reinforced to discouraged or back; the mean "
        f"absolute change is {credit.mean_change:.3f}. Groups that teach nothing: "
        f"{credit.num_flat_before:,} before, {credit.num_flat_after:,} after."
    )


def _changes(report: RescoreReport, num: int) -> Table:
    heads = ("rollout", "agent", "before", "after", "advantage before", "after")
    rows: list[tuple[Cell, ...]] = []
    for change in report.changes[:num]:
        name = change.request_id
        # Nearly every rollout has one trajectory; the others are numbered.
        if change.trajectory_index:
            name += f" [{change.trajectory_index}]"
        values = (change.before, change.after, change.advantage_before, change.advantage_after)
        rows.append((name, safe_text(change.agent, limit=20), *map(number_text, values)))
    return text_table(heads, rows, "llrrrr", title="changed most", limit=60)
