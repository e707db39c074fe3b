"""`load_environment` finds an environment by its name and makes it.

Loading runs the environment's Python code: load only what you trust.

A name is looked up in this order: the entry point group `rolltree.environments`; an installed
module of that name (dashes become underscores) with a function `load_environment`; the folder
`environments/<name>/` of the working directory with `<name>.py`, `__init__.py`, or a package
`<name>/` or `src/<name>/`; the ready-made environments that come with rolltree. A name with a path
separator or the ending `.py` is a path; if it is not that of an environment, `owner/name` is looked
up as `name`. Code that imports `verifiers` gets the package of `rolltree.verifiers`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rolltree._helpers.tasks import contained
from rolltree.environments.environment import Environment
from rolltree.environments.verifiers_import import imported_real_version, provide
from rolltree.values.errors import (
    ConfigError,
    Escaped,
    RolltreeError,
    UnknownName,
    did_you_mean,
    message_of,
)

GROUP = "rolltree.environments"
FOLDER = "environments"
READY_MADE = Path(__file__).resolve().parents[1] / "_environments"
"""The ready-made environments; in a clone a link to the folder `environments/`."""
Factory = Callable[..., Any]

# Folders of loaded files, added to sys.path for the imports of those files.
_beside: set[str] = set()


def load_environment(
    env_id: str | os.PathLike[str], *, compat: bool = False, **args: Any
) -> Environment:
    """Return the environment named `env_id`, made by its `load_environment(**args)`.

    With `compat`, an environment that imports `verifiers` gets rolltree's package, from now on and
    in the whole process, even if the real package is installed; without `compat`, only if it is
    not.

    Raises:
        UnknownName: there is no such environment; the message names the nearest one.
        ConfigError: the environment does not take one of the arguments, its code raised (the cause
            is that exception), or the returned object is not an environment, or was made with the
            real verifiers package.
    """
    if isinstance(env_id, Environment):
        raise ConfigError(
            f"this is a {type(env_id).__name__} already, so it need not be loaded. Use it as it is."
        )
    if not isinstance(env_id, str | os.PathLike):
        raise ConfigError(f"{env_id!r} is not the name or a path of an environment.")
    name = os.fspath(env_id)
    # Before the environment is imported, since its `import verifiers` is resolved then.
    provide(force=compat)
    try:
        with contained():
            factory = find_environment(name)
            _check_arguments(name, factory, args)
            environment = factory(**args)
    except Exception as error:  # an author's code may raise anything
        raised = error.raised if isinstance(error, Escaped) else error
        if isinstance(raised, SystemExit):
            raise ConfigError(
                f"the environment {name!r} called exit({raised}) while it was loaded, so nothing "
                "was started. Remove the call, or put it under `if __name__ == '__main__':`."
            ) from raised
        version = imported_real_version()
        if version is None or not _comes_from_verifiers(error):
            # These say themselves what to do.
            if isinstance(raised, RolltreeError | ImportError | OSError):
                raise
            raise ConfigError(_failed_to_load(name, raised)) from raised
        raise ConfigError(_of_the_real_package(name, version, f"failed ({error})")) from error
    if not isinstance(environment, Environment):
        version = imported_real_version()
        if version is not None and _is_from_verifiers(environment):
            raise ConfigError(_of_the_real_package(name, version, "was made"))
        raise ConfigError(
            f"load_environment of {name!r} returned a {type(environment).__name__}, not a "
            "rolltree.Environment. Return an instance of one of its subclasses."
        )
    environment.set_loaded_name(
        Path(name).resolve().stem if _is_path(name) and _at(name) else name, args
    )
    environment.loaded_by = factory
    return environment


def _failed_to_load(name: str, error: BaseException) -> str:
    """Return the message for an author's code that raised: what, and at which of its lines."""
    file = environment_file(name)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(READY_MADE.parent)
        and not frame.filename.startswith("<frozen")
    ]
    # The author's own line, not that of a library it called.
    own = [f for f in frames if file and Path(f.filename).is_relative_to(file.parent.resolve())]
    where = "".join(f" at {at.filename}:{at.lineno}" for at in (own or frames)[-1:])
    said = " ".join(message_of(error).split())[:1000]
    return (
        f"the environment {name!r} raised {type(error).__name__}{where} while it was loaded"
        f"{f': {said}' if said else ''} -- so nothing was started. Correct that line, or the "
        "arguments that it was given; rt.load_environment in Python shows the whole traceback."
    )


def find_environment(name: str) -> Factory:
    """Return the function `load_environment` of the environment `name`.

    Raises:
        UnknownName: the environment does not exist.
        ConfigError: its file has no function `load_environment`, or cannot be imported.
    """
    if _is_path(name) and _at(name):
        factory = _from_path(Path(name))
        if factory is not None:
            return factory
    elif not _is_path(name) or _is_owned(name):
        short = name.rpartition("/")[2]
        factory = _from_entry_point(short) or _from_module(short) or _from_folder(short)
        if factory is not None:
            return factory
        raise UnknownName(
            f"there is no environment {name!r}: no entry point in {GROUP!r}, no installed module "
            f"{_module_name(short)} with load_environment(), no {FOLDER}/{_module_name(short)}/ "
            f"here, and no ready-made one.{did_you_mean(short, known_environments())} Install its "
            "package (`rolltree env install PATH`), or pass a path."
        )
    raise UnknownName(
        f"there is no environment at {name}: it needs load_environment() in a file of that name, "
        "or in a folder with NAME.py or __init__.py. Check the path."
    )


def load_object(where: str) -> Any:
    """Return the object that `module:name` or `path/to/file.py:name` names. This runs its module.

    Raises:
        ConfigError: `where` has a different form, or there is no such file.
        UnknownName: there is no such module, or it has no object of that name.
    """
    source, colon, name = where.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise ConfigError(
            f"{where!r} does not say where the object is. Write module:name, as in "
            "my_rewards:rubric, or path/to/file.py:name."
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise ConfigError(f"there is no file {source}, which {where!r} names. Check the path.")
        module = _load_file(Path(source))
    else:
        try:
            with _syntax_checked():
                module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            raise UnknownName(
                f"there is no module {error.name!r}, which {where!r} names. Install its package, "
                "or name its file: path/to/file.py:name."
            ) from error
    if not hasattr(module, name):
        raise UnknownName(f"{source} has no {name!r}.{did_you_mean(name, dir(module))}")
    return getattr(module, name)


def environment_file(name: str) -> Path | None:
    """Return the file of an environment's module or top-level package, without importing it."""
    if _is_path(name) and _at(name):
        path = Path(name)
        return path if path.is_file() else _file_in(path)
    short = name.rpartition("/")[2]
    modules = [p.module for p in entry_points(group=GROUP) if _same_name(p.name, short)]
    for module in (*modules, _module_name(short)):
        spec = _installed(module.partition(".")[0])
        if spec is not None and spec.has_location and spec.origin is not None:
            return Path(spec.origin)
    return next(filter(None, map(_file_in, _folders(short))), None)


def known_environments() -> list[str]:
    """Return the names that can be listed: entry points, folders here, and ready-made ones."""
    names = {point.name for point in entry_points(group=GROUP)}
    for folder in filter(Path.is_dir, (Path(FOLDER), READY_MADE)):
        names.update(path.name for path in folder.iterdir() if _file_in(path) is not None)
    return sorted(names)


def _check_arguments(name: str, factory: Factory, args: dict[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        unknown = [key for key in args if key not in parameters]
        if unknown:
            raise ConfigError(
                f"environment {name!r} takes no argument {unknown[0]!r}, so it was not loaded."
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


def _of_the_real_package(name: str, version: str, what: str) -> str:
    return (
        f"environment {name!r} imports verifiers, and {what} with the installed package "
        f"(verifiers {version}), whose environments rolltree does not run. Use rolltree's package "
        "instead, in a new process: --compat, env.compat=true in a training config, or "
        "load_environment(..., compat=True)."
    )


def _comes_from_verifiers(error: Exception) -> bool:
    """Whether the real package raised an error, or lacks the name that was imported from it."""
    folder = str(getattr(sys.modules.get("verifiers"), "__file__", "")).rpartition(os.sep)[0]
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    missing = isinstance(error, ImportError | AttributeError) and "verifiers" in str(error)
    return missing or bool(folder and any(file.startswith(folder + os.sep) for file in files))


def _is_from_verifiers(value: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "verifiers" for kind in type(value).__mro__)


def _is_path(name: str) -> bool:
    return name.endswith(".py") or os.sep in name or "/" in name or name in (".", "..")


def _at(name: str) -> bool:
    """Whether a path exists; `owner/name` counts only if it is an environment's folder."""
    return _file_in(Path(name)) is not None if _is_owned(name) else Path(name).exists()


def _is_owned(name: str) -> bool:
    """Whether a name has the form `owner/name`."""
    if name.endswith(".py"):
        return False
    owner, _, short = name.partition("/")
    return bool(owner and short) and "/" not in short and not name.startswith((".", "~"))


def _module_name(name: str) -> str:
    return name.replace("-", "_")


def _same_name(one: str, other: str) -> bool:
    return _module_name(one) == _module_name(other)


def _from_entry_point(name: str) -> Factory | None:
    for point in entry_points(group=GROUP):
        if _same_name(point.name, name):
            with _syntax_checked():
                found = point.load()
            return _factory_of(found) if isinstance(found, ModuleType) else found
    return None


def _from_module(name: str) -> Factory | None:
    module_name = _module_name(name)
    if _installed(module_name) is None:
        return None
    with _syntax_checked():
        return _factory_of(importlib.import_module(module_name))


def _installed(module_name: str) -> ModuleSpec | None:
    """Return the spec of a module that can be imported, unless it is only next to a loaded file."""
    spec = importlib.util.find_spec(module_name) if module_name.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    return None if str(folder) in _beside else spec


def _folders(name: str) -> tuple[Path, Path]:
    """Return the folders of this name: in the working directory, and among the ready-made ones."""
    return Path(FOLDER) / _module_name(name), READY_MADE / _module_name(name)


def _from_folder(name: str) -> Factory | None:
    return next(filter(None, map(_from_path, _folders(name))), None)


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
    name = _module_name(folder.resolve().name)
    for file in (f"{name}.py", "__init__.py", f"{name}/__init__.py", f"src/{name}/__init__.py"):
        if (folder / file).is_file():
            return folder / file
    return None


def _load_file(file: Path) -> ModuleType:
    """Import a file as a package of its folder, so that it can use relative imports.

    Modules next to it can also be imported by name, unless an installed one has that name.
    """
    file = file.resolve()
    is_package = file.name == "__init__.py"
    stem = file.parent.name if is_package else file.stem
    beside = str(file.parent.parent if is_package else file.parent)
    if beside not in sys.path:
        # At the end: a module next to an environment must not hide an installed package.
        sys.path.append(beside)
        # Remembered, because a module next to it would otherwise count as installed.
        _beside.add(beside)
    name = f"rolltree_environment_{_module_name(stem)}"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} cannot be imported as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _syntax_checked():
            spec.loader.exec_module(module)
    # A module that failed halfway must not be found by the next import.
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _syntax_checked() -> Iterator[None]:
    """Raise a `ConfigError` for code that is not Python, which is not a bug of rolltree."""
    try:
        yield
    except SyntaxError as error:
        line = f": {error.text.strip()[:200]}" if error.text and error.text.strip() else ""
        raise ConfigError(
            f"{error.filename}:{error.lineno}: {error.msg}{line} -- so the file cannot be loaded. "
            "Correct that line."
        ) from error


def _factory_of(module: ModuleType) -> Factory | None:
    factory = getattr(module, "load_environment", None)
    return factory if callable(factory) else None
