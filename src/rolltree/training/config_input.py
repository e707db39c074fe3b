"""Settings as people write them: as text, and with keys and values that are refused."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rolltree._helpers.untrusted import read_toml
from rolltree.training.config import REMOVED, SECTIONS, apply_setting, keys_of
from rolltree.values.errors import ConfigError, did_you_mean

_OTHER_NAMES = Path(__file__).with_name("other_names.toml")
"""Names of settings in other libraries, by the same or the closest setting here."""


@cache
def _known_as() -> dict[str, str]:
    """Return the setting that a name of another library means."""
    sections = tomllib.loads(_OTHER_NAMES.read_text(encoding="utf-8"))
    return {
        name: f"{section}.{key}"
        for section, keys in sections.items()
        for key, names in keys.items()
        for name in names
    }


def meant(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a key that does not exist."""
    # Names of other libraries first: by spelling, `beta` is nearer to `beta2` than to `kl_coef`.
    if place := _known_as().get(name.rpartition(".")[2]):
        section, key = place.split(".")
        ways = sorted({key, f"{section}_{key}"} & set(known))
        way = f" (in Python {' or '.join(f'{each}=...' for each in ways)})" if ways else ""
        return f" Did you mean {place!r}{way}?"
    names = list(known)
    hint = did_you_mean(name, names)
    # A list of all keys would be too long to help.
    if "Did you mean" in hint or len(names) < 40:
        return hint
    return f" The sections are {', '.join(SECTIONS)}; `rolltree docs settings` lists their keys."


def was_removed(place: str) -> str:
    """Return what to know of a setting that no longer exists."""
    return f" It was removed: {REMOVED[place][1]}. Leave it out."


def unknown_keys(places: Sequence[str]) -> str:
    """Return the message for keys and sections that a config has and settings do not."""
    hints = []
    for place in places:
        section, dot, key = place.partition(".")
        if place in REMOVED:
            hint = was_removed(place)
        else:
            hint = meant(key, keys_of(section)) if dot else meant(section, SECTIONS)
        hints.append(f"key {place}.{hint}" if dot else f"section {section!r}.{hint}")
    if len(hints) == 1:
        return f"the config has no {hints[0]}"
    # At once: one after the other, each would cost its writer a start.
    return f"the config has {len(hints)} names that are not known:\n" + "\n".join(
        f"  no {hint}" for hint in hints
    )


def invalid(data: Any, where: str, text: str) -> str:
    """Return the message for a value that msgspec refused at the dotted key `where`."""
    names = where.split(".")
    for name in where.replace("[", ".").replace("]", "").split("."):
        if isinstance(data, list | tuple) and name.isdecimal():
            data = data[int(name)]
        else:
            data = data.get(name) if isinstance(data, Mapping) else None
    allowed = _choices(names) if "enum" in text else []
    remedy = did_you_mean(str(data), allowed) if allowed else " Change it."
    if "Did you mean" in remedy:
        remedy += f" Known: {', '.join(allowed)}."
    return f"{where or 'the config'} is {data!r}: {text[0].lower()}{text[1:]}.{remedy}"


def _choices(names: Sequence[str]) -> list[str]:
    """Return the values that a setting may have, if those are a few names."""
    if len(names) != 2 or names[0] not in SECTIONS:
        return []
    # The annotations are text, because of the `__future__` import.
    hint = get_type_hints(SECTIONS[names[0]]).get(names[1])
    options = (hint, *get_args(hint))
    return sorted({str(v) for o in options if get_origin(o) is Literal for v in get_args(o)})


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one key in nested data; a value that is not TOML is a string.

    A name without dots is found as Python's keywords are.

    >>> data = {"optim": {"lr": 1.0}}
    >>> apply_override(data, "optim.lr=1e-5"); apply_override(data, "num_steps=3"); data
    {'optim': {'lr': 1e-05}, 'train': {'num_steps': 3}}

    Raises:
        ConfigError: there is no `=`, an empty key, or a key inside a value that is not a section.
    """
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(
            f"{override!r} is not an override. Write key=value or section.key=value, such as "
            "optim.lr=1e-5."
        )
    if len(names) == 1:
        apply_setting(data, names[0], parse_value(text.strip()))
        return
    section = data
    for depth, name in enumerate(names[:-1], start=1):
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{override!r} sets a key inside {'.'.join(names[:depth])}, which is a value and "
                "not a section."
            )
    section[names[-1]] = parse_value(text.strip())


def parse_value(text: str) -> Any:
    """Return the TOML value of a text, or the text itself if it is not one.

    >>> parse_value("1e-5"), parse_value("tiny")
    (1e-05, 'tiny')
    """
    try:
        return read_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


def read_config(path: Path) -> dict[str, Any]:
    """Return the data of a TOML file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        # `rolltree train key=value` takes the setting for the file.
        key, is_setting, _ = str(path).partition("=")
        if is_setting:
            raise ConfigError(
                f"{key} is a setting, but a config file must come first: CONFIG.toml {key}=... "
                "examples/ has configs to start from."
            ) from error
        raise ConfigError(
            f"the config {path} cannot be read ({error.strerror}). Check the path; examples/ has "
            "configs to start from."
        ) from error
    except ValueError as error:
        raise ConfigError(f"the config {path} is not TOML: {error}.") from error
