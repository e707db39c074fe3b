"""A TOML file and `key.sub=value` words to plain data.

A value is read as TOML (`1e-5`, `true`, `[1, 2]`, `"text"`), and as a string when it is no TOML.
It knows nothing about which keys there are: the config's own checks do.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolltree.errors import ConfigError


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of a TOML file with the overrides applied, later ones winning.

    Raises:
        ConfigError: the file is missing or no TOML, or an override cannot be applied.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the config {path} cannot be read ({error.strerror}). Check the path; "
            "examples/ holds configs to start from."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} is not TOML: {error}.") from error
    for override in overrides:
        apply_override(data, override)
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in nested data.

    >>> data = {"optim": {"lr": 1.0}}
    >>> apply_override(data, "optim.lr=1e-5"); data
    {'optim': {'lr': 1e-05}}

    Raises:
        ConfigError: there is no `=`, an empty key, or a key inside a value that is no section.
    """
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(
            f"{override!r} is no override; write section.key=value, for example optim.lr=1e-5."
        )
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
    """Return `text` read as a TOML value, or as it is.

    >>> [parse_value(text) for text in ("3", "1e-5", "false", '"3"', "tiny")]
    [3, 1e-05, False, '3', 'tiny']
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text
