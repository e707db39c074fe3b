"""The settings in an environment's folder: evaluation defaults and a training config.

The defaults are in its pyproject.toml (`[tool.rolltree.eval]` or `[tool.verifiers.eval]`), the
config is `train.toml`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolltree._helpers.untrusted import read_toml
from rolltree.environments.code_hashes import TRAIN_CONFIG
from rolltree.environments.registry import environment_file, find_environment
from rolltree.values.errors import ConfigError

_KEYS = ("num_examples", "rollouts_per_example")
_TABLES = ("rolltree", "verifiers")
"""`[tool.rolltree.eval]` overrides `[tool.verifiers.eval]`."""


def eval_defaults(name: str) -> dict[str, int]:
    """Return the `num_examples` and `rollouts_per_example` of an environment's own pyproject.toml.

    The file is in the environment's folder or package, or next to its module if the project's
    name is the environment's. Keys that it does not set are left out.

    Raises:
        ConfigError: a value is not a whole number, or a table is something else.
    """
    file = environment_file(name)
    project = _project_of(file) if file is not None else None
    found: dict[str, int] = {}
    for table in _TABLES:
        where = f"the pyproject.toml of environment {name!r}"
        section = _table(project or {}, where, "tool", table, "eval")
        for key in _KEYS:
            if key in section and key not in found:
                found[key] = _whole(section[key], f"[tool.{table}.eval] {key}", name)
    return found


def train_config_file(name: str) -> Path | None:
    """Return the training config that comes with an environment; None if it has none.

    It is in the environment's own folder: next to `<folder>/<folder>.py`, or in its package.

    Raises:
        UnknownName: there is no such environment.
    """
    file = environment_file(name)
    if file is None:
        # Its error says where it looked. An entry point of a module without a file has no folder.
        find_environment(name)
        return None
    folder = file.parent
    if file.name != "__init__.py" and _plain(file.stem) != _plain(folder.name):
        return None
    found = folder / TRAIN_CONFIG
    return found if found.is_file() else None


def own_max_tokens(name: str) -> tuple[int, Path] | None:
    """Return the `sampling.max_tokens` of an environment's training config, and the config.

    Raises:
        ConfigError: the config is not TOML, or has a wrong value there.
        UnknownName: there is no such environment.
    """
    file = train_config_file(name)
    if file is None:
        return None
    try:
        config = read_toml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}). Correct it, or pass -t.") from error
    found = _table(config, str(file), "sampling").get("max_tokens")
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(
            f"sampling.max_tokens in {file} is {found!r}, not a whole number above 0. Correct it "
            "there, or pass -t."
        )
    return found, file


def _project_of(file: Path) -> dict[str, Any] | None:
    folder, stem = file.parent, file.stem
    if file.name == "__init__.py":
        stem = folder.name
        if (folder / "pyproject.toml").is_file():
            return _read(folder / "pyproject.toml")
        folder = folder.parent
    for beside in (folder, *([folder.parent] if folder.name == "src" else [])):
        project = _read(beside / "pyproject.toml")
        declared = str(_table(project, str(beside / "pyproject.toml"), "project").get("name", ""))
        if project and (_plain(declared) == _plain(stem) or _plain(beside.name) == _plain(stem)):
            return project
    return None


def _plain(name: str) -> str:
    return name.replace("-", "_").replace(".", "_").lower()


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _table(data: dict[str, Any], where: str, *names: str) -> dict[str, Any]:
    """Return a table in a table of `data`, an empty one if it is missing."""
    for number, name in enumerate(names, start=1):
        data = data.get(name, {})
        if not isinstance(data, dict):
            raise ConfigError(
                f"{'.'.join(names[:number])} in {where} is {data!r}, not a table. Correct it there."
            )
    return data


def _whole(value: Any, key: str, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"{key} in the pyproject.toml of environment {name!r} is {value!r}, not a whole "
            "number. Correct it there, or pass -n and -r."
        )
    return value
