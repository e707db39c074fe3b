"""`load_environment`: from a name to an environment.

It runs the Python code that it finds: load only what you trust.

A name is looked up in this order: the entry point group `rolltree.environments`; an installed
module of that name (dashes become underscores) with a function `load_environment`; the folder
`environments/<name>/` of the working directory with `<name>.py`. Anything with a separator or the
ending `.py` is a path.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rolltree.environments.environment import Environment
from rolltree.errors import ConfigError, UnknownName, did_you_mean

GROUP = "rolltree.environments"
FOLDER = "environments"
Factory = Callable[..., Any]


def load_environment(env_id: str | os.PathLike[str], **args: Any) -> Environment:
    """Return the environment named `env_id`, made by its `load_environment(**args)`.

    Raises:
        UnknownName: there is no such environment; the message names the nearest one.
        ConfigError: an argument is not one that the environment takes, or what it returned is no
            environment.
    """
    name = os.fspath(env_id)
    factory = find_environment(name)
    _check_arguments(name, factory, args)
    environment = factory(**args)
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"load_environment of {name!r} returned a {type(environment).__name__}, not a "
            "rolltree.Environment. Return an instance of one of its subclasses."
        )
    environment.name_as(Path(name).stem if _is_path(name) else name, args)
    environment.loaded_by = factory
    return environment


def find_environment(name: str) -> Factory:
    """Return the function `load_environment` of the environment `name`.

    Raises:
        UnknownName: there is none.
    """
    if _is_path(name):
        factory = _from_path(Path(name))
    else:
        factory = _from_entry_point(name) or _from_module(name) or _from_folder(name)
    if factory is None:
        raise UnknownName(
            f"there is no environment {name!r}: no entry point in {GROUP!r}, no installed module "
            f"with load_environment(), no {FOLDER}/{_module_name(name)}/ here."
            f"{did_you_mean(name, known_environments())} Install its package, or pass a path."
        )
    return factory


def known_environments() -> list[str]:
    """Return the names that can be listed: entry points, and folders of the working directory."""
    names = {point.name for point in entry_points(group=GROUP)}
    folder = Path(FOLDER)
    if folder.is_dir():
        names.update(path.name for path in folder.iterdir() if _file_in(path) is not None)
    return sorted(names)


def _check_arguments(name: str, factory: Factory, args: dict[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = [key for key in args if key not in parameters]
        if unknown:
            raise ConfigError(
                f"environment {name!r} takes no argument {unknown[0]!r}; it would be ignored."
                f"{did_you_mean(unknown[0], parameters)}"
            )
    needed = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        and p.name not in args
    ]
    if needed:
        raise ConfigError(
            f"environment {name!r} needs the argument {needed[0]!r}. Pass it to load_environment, "
            "or with -a on the command line."
        )


def _is_path(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or "/" in name


def _module_name(name: str) -> str:
    return name.replace("-", "_")


def _from_entry_point(name: str) -> Factory | None:
    for point in entry_points(group=GROUP):
        if _module_name(point.name) == _module_name(name):
            found = point.load()
            return _factory_of(found) if isinstance(found, ModuleType) else found
    return None


def _from_module(name: str) -> Factory | None:
    module_name = _module_name(name)
    if not module_name.isidentifier() or importlib.util.find_spec(module_name) is None:
        return None
    return _factory_of(importlib.import_module(module_name))


def _from_folder(name: str) -> Factory | None:
    return _from_path(Path(FOLDER) / _module_name(name))


def _from_path(path: Path) -> Factory | None:
    file = path if path.suffix == ".py" and path.is_file() else _file_in(path)
    if file is None:
        return None
    factory = _factory_of(_load_file(file))
    if factory is None:
        raise ConfigError(
            f"{file} has no function load_environment, so there is no environment in it. Add "
            "`def load_environment(...)` that returns one; `rolltree init NAME` writes an example."
        )
    return factory


def _file_in(folder: Path) -> Path | None:
    for candidate in (folder / f"{_module_name(folder.name)}.py", folder / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _load_file(file: Path) -> ModuleType:
    """Run a file as a package of its folder, so that it may import its neighbours relatively."""
    file = file.resolve()
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    name = f"rolltree_environment_{_module_name(stem)}"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _factory_of(module: ModuleType) -> Factory | None:
    factory = getattr(module, "load_environment", None)
    return factory if callable(factory) else None
