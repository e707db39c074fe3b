"""What a docstring says of a function and its parameters, in Google's, NumPy's or Sphinx's style.

It reads what the tool schemas of verifiers 0.1.8 are made of: the first text that belongs to no
section, and the descriptions in sections of parameters. Odd forms count as they did there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_PARAMETERS = ("args", "arguments", "params", "parameters")
_SECTIONS = frozenset(
    (
        *_PARAMETERS,
        *(f"{kind} {name}" for kind in ("other", "type") for name in _PARAMETERS),
        *("keyword args", "keyword arguments", "raises", "exceptions", "returns", "yields"),
        *("receives", "examples", "attributes", "functions", "methods", "classes"),
        *("type aliases", "modules", "warns", "warnings"),
    )
)
_NUMPY_SECTIONS = (_SECTIONS - {"args", "arguments", "params"}) | {"deprecated"}
_HEADING = re.compile(r"(\w[\s\w-]*):(\s+\S.*)?\s*$")
_GLUED = re.compile(rf"({'|'.join(_PARAMETERS)}):\s*$", re.IGNORECASE)
_NUMPY_NAMES = re.compile(r"(\*{0,2}[_a-z]\w*(?:,\s\*{0,2}[_a-z]\w*)*)", re.IGNORECASE | re.ASCII)
_FIELD = re.compile(r":(param|parameter|arg|argument|key|keyword)\b")
_OTHER_FIELD = re.compile(
    r":(type|var|ivar|cvar|vartype|returns?|rtype|raises?|except|exception)\b"
)


@dataclass
class Documented:
    """A function's description, None without one, and those of its parameters."""

    texts: list[str] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str | None:
        """The first text."""
        return self.texts[0] if self.texts else None

    def add_text(self, lines: Sequence[str]) -> None:
        """Add lines that belong to no section."""
        if any(lines):
            self.texts.append("\n".join(lines).rstrip("\n"))


def read_docstring(func: Callable[..., Any]) -> Documented:
    """Return what the docstring of `func` says."""
    doc = inspect.getdoc(func)
    if not doc:
        return Documented()
    read = _STYLES[_style_of(doc)]
    return read(doc.rstrip().split("\n"))


def _style_of(doc: str) -> str:
    counts = {
        style: sum(bool(re.search(form, doc, re.MULTILINE)) for form in forms)
        for style, forms in _SIGNS.items()
    }
    best = max(counts, key=lambda style: counts[style])  # the first of equals
    return best if counts[best] else "google"


_SIGNS = {
    "sphinx": (r"^:param\s", r"^:type\s", r"^:return:", r"^:rtype:"),
    "numpy": tuple(rf"^{name}\s*\n\s*-{{3,}}" for name in ("Parameters", "Returns", "Yields")),
    "google": (r"^(Args|Arguments):", r"^(Returns):", r"^(Raises):"),
}


def _is_blank(lines: Sequence[str], at: int) -> bool:
    return 0 <= at < len(lines) and not lines[at].strip()


def _is_indented(lines: Sequence[str], at: int) -> bool:
    return at < len(lines) and lines[at].startswith(" ") and not _is_blank(lines, at)


def _google(lines: list[str]) -> Documented:
    lines = _unglued(lines)
    found, text, at, in_code = Documented(), list[str](), 0, False
    while at < len(lines):
        line = lines[at]
        is_fence = line.lstrip(" ").startswith("```")
        in_code ^= is_fence
        heading = None if in_code or is_fence else _HEADING.match(line)
        if heading is None or not _opens_section(lines, at):
            text.append(line)
            at += 1
            continue
        name, (items, end) = heading[1].lower(), _items(lines, at + 1)
        if name in _SECTIONS or items:
            found.add_text(text)
            text = []
        else:
            text.append(line)
        if name in _PARAMETERS:
            found.parameters.update(_google_parameters(items))
        at = end
    found.add_text(text)
    return found


def _unglued(lines: Sequence[str]) -> list[str]:
    """Return lines with an empty one above each heading of parameters."""
    made: list[str] = []
    for at, line in enumerate(lines):
        follows = lines[at + 1][:1] if at + 1 < len(lines) else ""
        if _GLUED.match(line) and made and made[-1].strip() and follows in (" ", "\t"):
            made.append("")
        made.append(line)
    return made


def _opens_section(lines: Sequence[str], at: int) -> bool:
    near, far = _is_indented(lines, at + 1), _is_indented(lines, at + 2)
    if not (near or far) or (far and _is_blank(lines, at + 1)):
        return False
    return at == 0 or _is_blank(lines, at - 1)


def _items(lines: Sequence[str], at: int) -> tuple[list[list[str]], int]:
    """Return the items of an indented block, and where what follows it begins."""
    while _is_blank(lines, at):
        at += 1
    indent = len(lines[at]) - len(lines[at].lstrip())
    if not indent:
        return [], at
    items: list[list[str]] = []
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            items[-1].append("")
        elif items and line.startswith(" " * 2 * indent):
            items[-1].append(line[2 * indent :])
        elif items and line.startswith(" " * (indent + 1)):
            items[-1].append(line.lstrip())
        elif line.startswith(" " * indent):
            items.append([line[indent:]])
        else:
            break
        at += 1
    return items, at


def _google_parameters(items: Sequence[list[str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for first, *more in items:
        name, colon, text = first.partition(":")
        if not colon:
            continue
        if "(" in name and name.endswith(")"):
            name = name.partition("(")[0].strip()
        found[name.lstrip("*")] = "\n".join([text.lstrip(), *more]).rstrip("\n")
    return found


def _is_underline(lines: Sequence[str], at: int) -> bool:
    return at < len(lines) and "-" in lines[at] and not lines[at].replace("-", "").strip()


def _numpy(lines: list[str]) -> Documented:
    found, text, at, in_code, in_note = Documented(), list[str](), 0, False, False
    while at < len(lines):
        line = lines[at]
        is_fence = line.lstrip(" ").startswith("```")
        in_code ^= is_fence
        is_plain = in_code or is_fence or not line.strip() or at == len(lines) - 1
        if is_plain or not _is_underline(lines, at + 1):
            text.append(line if line.strip() else "")
            at += 1
            continue
        if not in_note:
            found.add_text(text)
        text, name = [], line.lower()
        in_note = name not in _NUMPY_SECTIONS
        at += 2
        if not in_note:
            end = at
            while end < len(lines) and not (end > at and _starts_numpy_section(lines, end)):
                end += 1
            if name == "parameters":
                found.parameters.update(_numpy_parameters(lines[at:end]))
            at = end
    if not in_note:
        found.add_text(text)
    return found


def _starts_numpy_section(lines: Sequence[str], at: int) -> bool:
    return bool(lines[at].strip()) and lines[at][0] != " " and _is_underline(lines, at + 1)


def _numpy_parameters(lines: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith(" "):
            match = _NUMPY_NAMES.match(line)
            names = [name.lstrip("*") for name in match[1].split(", ")] if match else []
            found.update(dict.fromkeys(names, ""))
            continue
        added = line[4:] if line.startswith("    ") else line.lstrip()
        for name in names:
            found[name] += f"\n{added}"
    return {name: text.removeprefix("\n").rstrip() for name, text in found.items()}


def _sphinx(lines: list[str]) -> Documented:
    found, text, at = Documented(), list[str](), 0
    while at < len(lines):
        line = lines[at]
        at += 1
        is_parameter = _FIELD.match(line)
        if not is_parameter and not _OTHER_FIELD.match(line):
            text.append(line)
            continue
        start = at - 1
        while at < len(lines) and not lines[at].startswith(":"):
            at += 1
        _, *rest = inspect.cleandoc("\n".join([line, *lines[start + 1 : at]])).split(":", 2)
        if is_parameter and len(rest) == 2 and " " in rest[0]:
            found.parameters.setdefault(rest[0].split(" ")[-1].lstrip("*"), rest[1].strip())
    while text and not text[0].strip():
        del text[0]
    found.texts.append("\n".join(text).rstrip())
    return found


_STYLES: dict[str, Callable[[list[str]], Documented]] = {
    "google": _google,
    "numpy": _numpy,
    "sphinx": _sphinx,
}
