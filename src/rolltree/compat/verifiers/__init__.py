"""The public API of verifiers 0.1.8.post2: its module paths and names, and their behaviour.

Submodules (`envs.tool_env`, `rubrics.rubric`, `utils.data_utils`, `types`, ...) are made from the
table in `rolltree.compat.names` when they are imported, and a name is fetched when it is used. It
does not cover trainers; what behaves differently on purpose is in docs/compat.md.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rolltree.compat.logs import write_to_stderr
from rolltree.compat.names import IMPORTED_MODULES, MODULES, REMOVED, SCRIPTS, SOURCE_OF

__version__ = "0.1.8.post2"
__all__ = [
    *("EnvGroup", "Environment", "JudgeRubric", "MathRubric", "MaybeThinkParser", "MultiTurnEnv"),
    *("Parser", "PythonEnv", "ReasoningGymEnv", "Rubric", "RubricGroup", "SandboxEnv"),
    *("SingleTurnEnv", "StatefulToolEnv", "TextArenaEnv", "ThinkParser", "ToolEnv", "ToolRubric"),
    *("XMLParser", "cleanup", "extract_boxed_answer", "extract_hash_answer", "load_environment"),
    *("load_example_dataset", "print_prompt_completions_sample", "setup_logging", "stop"),
    "teardown",
]


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        raise AttributeError(
            f"verifiers' trainer is not part of rolltree, so there is no {name!r}. Train with "
            "rolltree.train or `rolltree train`; see docs/training.md."
        )
    return _fetched(__name__, name)


def _fetched(module: str, name: str) -> Any:
    """Return a submodule, a public name, or what `module` imports of other packages."""
    path = f"{module}.{name}".removeprefix(f"{__name__}.")
    if path in MODULES or path in SCRIPTS:
        return import_module(SCRIPTS.get(path, f"{__name__}.{path}"))
    if name in SOURCE_OF:
        return getattr(import_module(SOURCE_OF[name]), name)
    if name in IMPORTED_MODULES:
        return import_module(IMPORTED_MODULES[name])
    where = f"verifiers.{path}".removesuffix(f".{name}")
    raise AttributeError(f"module {where!r} of verifiers 0.1.8 has no public name {name!r}")


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the submodules of this package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        prefix, _, name = fullname.partition(f"{__name__}.")
        if prefix or name not in MODULES:
            return None
        is_package = any(known.startswith(f"{name}.") for known in MODULES)
        return ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Mirror(spec.name, MODULES[spec.name.removeprefix(f"{__name__}.")])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are fetched when they are used."""


class _Mirror(ModuleType):
    """A module whose names come from elsewhere."""

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        super().__init__(path, f"Names of verifiers 0.1.8 in `{path}`.")
        self.__all__ = list(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name == "logger":
            return logging.getLogger(self.__name__.removeprefix("rolltree.compat."))
        return _fetched(self.__name__, name)


write_to_stderr("verifiers", os.environ.get("VF_LOG_LEVEL", "INFO"))
if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
