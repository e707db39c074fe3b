"""The reward curve of a run, in the terminal and as a PNG.

The PNG needs matplotlib (`pip install 'rolltree[train]'`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from rolltree._helpers.files import whole_file
from rolltree._helpers.redact import shown
from rolltree.reports.formatting import only_shows
from rolltree.store import Run
from rolltree.store.metric_names import number_of
from rolltree.values.errors import import_extra

if TYPE_CHECKING:
    from rolltree.evaluation import Estimate

CURVE_FILE = "reward_curve.png"

_AXIS_WIDTH = 9
# A wider plot has more columns than most runs have steps, and an eye can follow.
_LEAST_WIDTH, _MOST_WIDTH = 10, 160
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a Braille character, by row and column (Unicode block U+2800)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean training reward per step, and held-out estimates at some steps."""

    title: str
    steps: Sequence[int]
    rewards: Sequence[float]
    held_out: Sequence[tuple[int, Estimate]] = ()


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Return the mean of each value and up to `width - 1` values before it."""
    return [
        sum(values[max(0, end - width) : end]) / min(width, end)
        for end in range(1, len(values) + 1)
    ]


@dataclass(frozen=True, slots=True)
class CurveView:
    """A curve as wide as the terminal, for rich."""

    curve: Curve

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the curve."""
        width = max(_LEAST_WIDTH, min(_MOST_WIDTH, options.max_width - _AXIS_WIDTH))
        # Rendered long after `training_report` has made its parts, so it is guarded here.
        with only_shows("the reward curve"):
            yield Text(terminal_curve(self.curve, width=width), no_wrap=True)


def terminal_curve(curve: Curve, *, width: int = 64, height: int = 12) -> str:
    """Return the curve as text: Braille dots, 2 x 4 to a character, and `o` for held-out means.

    `width` and `height` are those of the plot area in characters, without the axes.
    """
    means = [estimate.mean for _, estimate in curve.held_out]
    values = [*curve.rewards, *means]
    steps = [*curve.steps, *(step for step, _ in curve.held_out)]
    if not values:
        return f"{shown(curve.title)}: no steps yet"
    low, high = min(0.0, *values), max(values)
    # Rewards in [0, 1] are drawn on that scale, so that curves of several runs can be compared by
    # eye.
    high = 1.0 if 0.5 < high <= 1.0 else high if high > low else low + 1.0
    first, last = min(steps), max(steps)

    def place(step: float, value: float) -> tuple[int, int]:
        x = (step - first) / max(1, last - first) * (2 * width - 1)
        return round(x), round((high - value) / (high - low) * (4 * height - 1))

    cells = [[0] * width for _ in range(height)]
    points = [place(*point) for point in zip(curve.steps, curve.rewards, strict=True)]
    # A single step is drawn as a line to itself.
    for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for at in range(length + 1):
            x, y = round(x0 + (x1 - x0) * at / length), round(y0 + (y1 - y0) * at / length)
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    rows = [[chr(0x2800 + cell) if cell else " " for cell in row] for row in cells]
    for step, estimate in curve.held_out:
        x, y = place(step, estimate.mean)
        rows[y // 4][x // 2] = "o"
    ticks = {0: high, height // 2: high - (high - low) * (height // 2) / height, height - 1: low}
    lines = [shown(curve.title) + ("   (o: held out)" if curve.held_out else "")]
    for number, row in enumerate(rows):
        label = f"{ticks[number]:7.2f}" if number in ticks else " " * 7
        lines.append(f"{label} ┤{''.join(row)}".rstrip())
    lines.append(" " * 8 + "└" + "─" * width)
    lines.append(" " * 9 + f"{first}" + f"step {last}".rjust(width - len(str(first))))
    return "\n".join(lines)


def save_curve(curve: Curve, path: str | Path) -> Path:
    """Draw the curve, its running mean and the held-out intervals into a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    # Not pyplot, which would look for a display and keep every figure.
    drawing = import_extra("matplotlib.figure", "the curve as a PNG", "rolltree[train]")
    figure = drawing.Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curve.steps, curve.rewards, color="0.75", linewidth=1, label="training, each step")
    axes.plot(curve.steps, smooth(curve.rewards), color="C0", linewidth=2, label="mean of 5 steps")
    for number, (step, estimate) in enumerate(curve.held_out):
        # A single example gives no interval, and matplotlib needs numbers.
        low = estimate.mean if estimate.low is None else estimate.low
        high = estimate.mean if estimate.high is None else estimate.high
        axes.errorbar(
            [step],
            [estimate.mean],
            yerr=[[estimate.mean - low], [high - estimate.mean]],
            fmt="o",
            color="C3",
            capsize=4,
            label="held out, with interval" if number == 0 else None,
        )
    # A dollar sign in an environment's name does not begin a formula.
    axes.set_title(shown(curve.title), parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    target = Path(path)
    with whole_file(target, follow=False) as part:
        # Without matplotlib's version in it, the same curve gives the same file.
        figure.savefig(part, format=target.suffix[1:] or "png", metadata={"Software": None})
    return target


def reward_curve(run: Run) -> Curve | None:
    """Return the mean training reward of every step and the held-out means; None without steps."""
    found = ((row.step, number_of(row.metrics.get("reward/mean"))) for row in run.steps())
    points = [(step, reward) for step, reward in found if reward is not None]
    if not points:
        return None
    from rolltree.evaluation import stored_report

    held_out = [
        (done.step, stored_report(run, done.phase, outcomes=False).reward)
        for done in run.evaluations()
    ]
    return Curve(
        title=f"mean reward, {', '.join(sorted({part.env_id for part in run.totals()}))}",
        steps=[step for step, _ in points],
        rewards=[reward for _, reward in points],
        held_out=[(step, found) for step, found in held_out if found is not None],
    )


def save_reward_curve(run: Run) -> Path | None:
    """Draw the reward curve into the run directory; None if the run has no steps.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    curve = reward_curve(run)
    return None if curve is None else save_curve(curve, run.path / CURVE_FILE)
