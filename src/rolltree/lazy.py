"""Names of a package that are loaded on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "safetensors", "matplotlib", "peft"), "rolltree[train]"
    ),
    **dict.fromkeys(("starlette", "uvicorn"), "rolltree[torch,serve]"),
    "pyarrow": "rolltree[data]",
    **dict.fromkeys(("datasets", "gymnasium"), "rolltree[envs]"),
}
"""Package to the extra that installs it."""


def loader(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    `modules` maps each submodule to the names that it defines, separated by spaces.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{module_of[name]}")
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs the package {error.name}, which is not installed. Install "
                f"rolltree with its extra: pip install '{extra}'.",
                name=error.name,
            ) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load
