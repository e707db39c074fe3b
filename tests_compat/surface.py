"""Prints every public name of `import verifiers`, with parameters, fields and bases, as JSON.

`python surface.py` walks the package itself; `python surface.py NAMES.json` looks for the names of
such a walk, so that what one side has more than the other does not count.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path
from types import GenericAlias, ModuleType, UnionType
from typing import Any, cast

_OWN = ("verifiers", "rolltree")
_OURS = re.compile(r"rolltree\.verifiers(\.verifiers)?")


def main() -> None:
    """Print this side's surface."""
    import verifiers

    found: dict[str, Any] = {}
    wanted = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else None
    with contextlib.redirect_stdout(sys.stderr):
        paths = wanted or ["verifiers", *walked(verifiers)]
        for path in paths:
            try:
                module = importlib.import_module(path)
            except ImportError as error:
                found[path] = type(error).__name__
                continue
            named = names_of(module) if wanted is None else wanted[path]
            found[path] = {name: described(module, name, named) for name in named}
    print(json.dumps(found))


def walked(package: ModuleType) -> list[str]:
    """Return the modules of a package, without the trainer."""
    found = pkgutil.walk_packages(package.__path__, "verifiers.")
    return sorted(module.name for module in found if not module.name.startswith("verifiers.rl"))


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module, those that it imports included."""
    names = {*dir(module), *getattr(module, "__all__", ())}
    return sorted(name for name in names if not name.startswith("_"))


def described(module: ModuleType, name: str, named: Any) -> Any:
    """Return what a name is; members are those that `named` has."""
    try:
        value = getattr(module, name)
    except (AttributeError, ImportError):
        return "missing"
    return about(value, (named[name] or {}) if isinstance(named, dict) else {})


def about(value: Any, wanted: Any) -> Any:
    """Return a description of a value: the same of one that does the same."""
    if isinstance(value, ModuleType):
        return "module " + _OURS.sub("verifiers", value.__name__)
    home = getattr(value, "__module__", "")
    is_own = str(home).split(".")[0] in _OWN
    if home in ("typing", "collections.abc") or isinstance(value, (GenericAlias, UnionType)):
        return "alias"
    if isinstance(value, type) and is_own:
        return of_class(value, wanted if isinstance(wanted, dict) else {})
    if callable(value) and is_own:
        return signature(value, wanted)
    if isinstance(value, (str, int, float, tuple, list)):
        return repr(value)
    kind = value if isinstance(value, type) or inspect.isfunction(value) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def of_class(value: type, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the bases, fields and members of a class."""
    asked = wanted.get("members")
    members = [name for name in dir(value) if is_member(value, name)] if asked is None else asked
    fields = {name for base in value.__mro__ for name in vars(base).get("__annotations__", ())}
    return {
        "bases": kept([base.__name__ for base in value.__mro__], wanted.get("bases")),
        "fields": kept(sorted(fields), wanted.get("fields")),
        "required": sorted(getattr(value, "__required_keys__", ())),
        "members": {
            name: member(value, name, None if asked is None else asked[name]) for name in members
        },
    }


def is_member(value: type, name: str) -> bool:
    """Say whether a class has an attribute of its own kind, not of `object` or `dict`."""
    owners = [base for base in value.__mro__ if name in vars(base)]
    public = name == "__init__" or not name.startswith("__")
    return public and bool(owners) and owners[0].__module__.split(".")[0] in _OWN


def member(value: type, name: str, wanted: Any) -> Any:
    """Return the signature of a method, or the value of an attribute."""
    if not hasattr(value, name):
        return "missing"
    found = getattr(value, name)
    return signature(found, wanted) if callable(found) else about(found, wanted)


def signature(value: Any, wanted: Any) -> Any:
    """Return names, kinds and defaults of parameters; our own ones too many must be optional."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "no signature"
    known = wanted.get("parameters") if isinstance(wanted, dict) else None
    parameters = {
        parameter.name: [parameter.kind.name, default(parameter.default)]
        for parameter in found
        if known is None or parameter.name in known or not optional(parameter)
    }
    return {
        "async": inspect.iscoroutinefunction(value),
        "parameters": parameters,
        "order": list(parameters),
    }


def optional(parameter: inspect.Parameter) -> bool:
    """Say whether a caller may leave a parameter out."""
    return parameter.default is not parameter.empty or parameter.kind in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def default(value: Any) -> str:
    """Return a default as text."""
    if value is inspect.Parameter.empty:
        return "none"
    return "function" if callable(value) else repr(value)


def kept(names: list[str], wanted: list[str] | None) -> list[str]:
    """Return the names that are wanted, all of them by default."""
    return names if wanted is None else [name for name in cast(list[str], wanted) if name in names]


if __name__ == "__main__":
    main()
