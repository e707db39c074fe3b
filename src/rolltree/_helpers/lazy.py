"""Names of a package that are loaded on first use (PEP 562), and what is said if that fails."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from rolltree.wings import absence

EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "safetensors", "matplotlib", "peft"), "rolltree[train]"
    ),
    **dict.fromkeys(("starlette", "uvicorn"), "rolltree[torch,serve]"),
    "pyarrow": "rolltree[data]",
    **dict.fromkeys(("datasets", "gymnasium"), "rolltree[envs]"),
}
"""Package to the extra that installs it."""


def import_problem(
    what: str, module: str, error: ImportError, extra: str, instead: str = ""
) -> str:
    """Return what to do about a module that `what` needs and that cannot be imported.

    A package that is installed fails too, if it expects other releases of the packages beside it.
    """
    top = module.partition(".")[0]
    try:
        installed = find_spec(top) is not None
    except ValueError:  # a module without a spec
        installed = True
    if not installed:
        name = top.replace("_", "-")
        return (
            f"{what} needs the package {name}, which is not installed. Install it: "
            f"pip install '{extra}'{instead}."
        )
    from importlib import metadata

    name = metadata.packages_distributions().get(top, [top])[0]
    try:
        version = f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        version = name
    return (
        f"{what} needs the package {name}, and {version} is installed, but cannot be imported "
        f"({error}). It expects other releases of the packages beside it. Install releases that "
        f"fit: pip install --upgrade {name} '{extra}'{instead}."
    )


def loader(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    `modules` maps each submodule, or a room in full, to the names that it defines, separated by
    spaces.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            where = module_of[name]
            full = where if where.startswith("rolltree.") else f"{package}.{where}"
            module = importlib.import_module(full)
        except ImportError as error:
            needed = error.name or ""
            extra = EXTRAS.get(needed.partition(".")[0])
            text = (
                absence(error)
                if extra is None
                else import_problem(f"{package}.{name}", needed, error, extra)
            )
            if text is None:
                raise
            raise type(error)(text, name=error.name) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
