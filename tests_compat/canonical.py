"""Any value as comparable JSON: objects as their fields, floats rounded, addresses out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FOLDER = re.compile(r"(?<![\w.:/])/[\w.-]+/[\w./-]+")  # an absolute path, no part of a URL


def canonical(value: Any, depth: int = 12) -> Any:
    """Return `value` as plain JSON."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return str(value) if math.isnan(value) or math.isinf(value) else round(value, 9)
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): canonical(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(canonical(item, depth - 1) for item in value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "model_dump"):
        dumped = value.model_dump(exclude_none=True)
        return {"class": type(value).__name__, **canonical(dumped, depth - 1)}
    if hasattr(value, "tolist"):
        return canonical(value.tolist(), depth - 1)
    return f"<{type(value).__name__}>"


def plain(text: str) -> str:
    """Return a message without addresses and folders."""
    return _FOLDER.sub("PATH", _ADDRESS.sub("", text))


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error's classes, up to the first that Python or a package both sides have owns."""
    names = [
        kind.__name__
        for kind in type(error).__mro__
        if kind.__module__.split(".")[0] not in ("rolltree", "verifiers", "tests_compat")
    ]
    return {"error": names[0], "text": plain(str(error))}
