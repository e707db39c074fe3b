"""Numbers and untrusted text for a terminal.

Text of models and environments is data: `redact.shown` makes control characters visible, so that no
answer, title or error can move the cursor, recolour the screen or hide text.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rolltree._helpers.redact import shown, shown_start
from rolltree._helpers.untrusted import visible

if TYPE_CHECKING:
    from rolltree.evaluation import Estimate


_LOGGER = logging.getLogger("rolltree.reports")


# Cached, so that each problem is logged once and not at every step.
@functools.cache
def _warn(message: str) -> None:
    _LOGGER.warning("%s", shown(message))


@contextmanager
def only_shows(what: str) -> Iterator[None]:
    """Turn an error in the block into a warning, since showing a result must not affect it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  a plotting library raises what it likes
        _warn(f"{what} cannot be shown ({type(error).__name__}: {error}); nothing else is affected")


class SafeConsole(Console):
    """A console for text of models and environments, which cannot control the terminal.

    Strings are never markup, and the output has only rich's own control characters. If the reader
    is gone (`| head`), the console falls silent. With `only_shows`, for output that only shows a
    stored result, it also falls silent if it cannot write at all, and `has_failed` is true.
    """

    def __init__(self, *, only_shows: bool = False, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)
        if self.width < 1:  # COLUMNS=0, as some programs set it; nothing would fit
            self.width = shutil.get_terminal_size().columns
        self._only_shows = only_shows
        self.has_failed = False

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print, as `rich.console.Console` does."""
        try:
            super().print(*objects, **settings)
        except OSError as error:
            if not self._only_shows:
                raise
            self.quiet = self.has_failed = True
            _warn(f"nothing more is printed ({error}); nothing else is affected")

    def on_broken_pipe(self) -> None:
        """Fall silent; rich ends the program here."""
        self.quiet = True

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render, with control characters in texts made visible."""
        for segment in super().render(renderable, options):
            # Control segments, such as a live display's cursor, come only from rich itself.
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def safe_text(text: str, *, limit: int | None = None, style: str = "") -> Text:
    """Return text without markup, secrets and control characters, cut at `limit`."""
    kept, more = (shown(text), "") if limit is None else shown_start(text, limit)
    return Text(kept, style=style) + Text(more, style="dim")


Cell: TypeAlias = str | Text


def text_table(
    heads: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    align: str,
    *,
    limit: int | None = None,
    **options: Any,
) -> Table:
    """Return a table; `align` has `l` or `r` per column, `limit` cuts the cells.

    Heads and cells that are text are made safe; `options` are rich's.
    """
    table = Table(**{"box": None, "title_justify": "left"} | options)
    for head, letter in zip(heads, align, strict=True):
        table.add_column(_as_text(head), justify="right" if letter == "r" else "left")
    for row in rows:
        table.add_row(*(_as_text(cell, limit) for cell in row))
    return table


def _as_text(cell: Cell, limit: int | None = None) -> Text:
    return safe_text(cell, limit=limit) if isinstance(cell, str) else cell


def number_text(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else f"{value:{form}}"


def say(console: Console, line: str) -> None:
    """Print one line as it is: no markup, no highlighting, no line breaks in the middle."""
    console.print(safe_text(line), highlight=False, soft_wrap=True)


def interval(estimate: Estimate) -> str:
    """Return an interval as `[0.490, 0.943]`, or a dash if there is none."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]"


def meter(value: float, width: int = 20) -> str:
    """Return a bar for a value; it is empty for 0 and below and for NaN, and full from 1 on."""
    # NaN must not raise.
    value = 0.0 if math.isnan(value) else value
    # Unicode has blocks of one to seven eighths.
    eighths = round(max(0.0, min(1.0, value)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def duration(seconds: float) -> str:
    """Return a duration as `8.4 s`, `3 min 05 s` or `2 h 10 min`.

    >>> [duration(8.44), duration(185), duration(7800)]
    ['8.4 s', '3 min 05 s', '2 h 10 min']
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counts(numbers: dict[str, int]) -> str:
    """Return counts as `ServerError 2, BadResponse 1`."""
    return ", ".join(f"{name} {number}" for name, number in numbers.items())
