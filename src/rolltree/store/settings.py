"""A run's settings: redacted, shown in `config.json`, and compared when a run continues."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolltree._helpers.files import read_regular, write_whole
from rolltree._helpers.redact import environment_secrets, known_secrets, redact, secrets_in
from rolltree._helpers.untrusted import MAX_DEPTH, check_depth
from rolltree.store.codec import to_plain
from rolltree.values.errors import ConfigError

_MISSING = object()


def stored_settings(
    config: Mapping[str, Any], secrets: Sequence[str]
) -> tuple[Any, tuple[str, ...]]:
    """Return settings as a run stores them, as plain data without secrets, and the secrets.

    Raises:
        ConfigError: they are nested too deeply to come back equal.
    """
    try:
        known = (*secrets, *secrets_in(config))
        plain = to_plain(redact(dict(config), known_secrets((*known, *environment_secrets()))))
        check_depth(plain)
    except (RecursionError, ValueError):
        raise ConfigError(
            f"the settings are nested deeper than {MAX_DEPTH} levels and cannot be stored, so the "
            "run could not be continued. Put such data into a file, and its path into the settings."
        ) from None
    return plain, known


def config_text(config: Mapping[str, Any]) -> str:
    """Return the text of `config.json`."""
    # A foreign run may hold what its codec could not express.
    return json.dumps(to_plain(config), indent=2) + "\n"


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Replace `config.json` atomically, if its content would change."""
    text = config_text(config)
    with contextlib.suppress(OSError):
        if read_regular(path, len(text.encode())) == text.encode():
            return
    write_whole(path, text, follow=False)


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored config with the keys that it lacks, since they are newer than the run.

    >>> with_defaults({"a": {"b": 1}}, {"a": {"b": 0, "c": 2}, "d": {}})
    {'a': {'b': 1, 'c': 2}, 'd': {}}
    """
    full = dict(config)
    for key, default in defaults.items():
        value = full.setdefault(key, to_plain(default))
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            full[key] = with_defaults(value, default)
    return full


def without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a config without these keys of its sections.

    >>> without({"a": {"b": 1, "c": 2}}, ["a.b"])
    {'a': {'c': 2}}
    """
    full = dict(config)
    for section, values in config.items():
        if isinstance(values, Mapping):
            full[section] = {k: v for k, v in values.items() if f"{section}.{k}" not in names}
    return full


def config_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], may_change: Sequence[str] = ()
) -> list[str]:
    """Return a text for each dotted key in which two configs differ, except those of `may_change`.

    >>> config_differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 4}, may_change=["c"])
    ['a.b was 1 and is now 3']
    """
    before, after = flat_config(old), flat_config(new)
    differences = []
    for key in sorted(before.keys() | after.keys()):
        # A parent stands for all of its keys: `may_change=["train"]` allows `train.num_steps`.
        allowed = any(key == name or key.startswith(name + ".") for name in may_change)
        was, now = before.get(key, _MISSING), after.get(key, _MISSING)
        if not allowed and was != now:
            differences.append(f"{key} was {_show(was)} and is now {_show(now)}")
    return differences


def _show(value: object) -> str:
    return "not set" if value is _MISSING else repr(value)


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a config by their dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flat_config(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
