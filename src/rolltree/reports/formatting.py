"""Numbers and untrusted text for a terminal.

A model's output is data: control characters are made visible, so that no answer can move the
cursor or recolour the screen.
"""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from rolltree.evaluation import Estimate

_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_VISIBLE |= dict.fromkeys(range(128, 160), 65533)
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), 65533)  # lone surrogates: no terminal takes them
_VISIBLE |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 65533)  # text order


def safe_text(text: str, *, limit: int | None = None, style: str = "") -> Text:
    """Return text without markup and with control characters made visible, cut at `limit`."""
    cut = "" if limit is None or len(text) <= limit else f" … ({len(text) - limit:,} more)"
    shown = text if limit is None else text[:limit]
    return Text(shown.translate(_VISIBLE), style=style) + Text(cut, style="dim")


def say(console: Console, line: str) -> None:
    """Print one line as it is: no markup, no highlighting, no line breaks in the middle."""
    console.print(safe_text(line), highlight=False, soft_wrap=True)


def interval(estimate: Estimate) -> str:
    """Return `[0.490, 0.943]`, or a dash when there is none."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]"


def meter(value: float, width: int = 20) -> str:
    """Return a bar for a value in [0, 1]; values outside fill or empty it, NaN has none."""
    value = 0.0 if math.isnan(value) else value
    eighths = round(max(0.0, min(1.0, value)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def duration(seconds: float) -> str:
    """Return `8.4 s`, `3 min 05 s` or `2 h 10 min`.

    >>> [duration(8.44), duration(185), duration(7800)]
    ['8.4 s', '3 min 05 s', '2 h 10 min']
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counts(found: dict[str, int]) -> str:
    """Return `ServerError 2, BadResponse 1`."""
    return ", ".join(f"{name} {number}" for name, number in found.items())
