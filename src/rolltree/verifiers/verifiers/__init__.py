"""The public API of verifiers 0.1.8.post2: its module paths and names, and their behaviour.

Submodules (`envs.tool_env`, `rubrics.rubric`, `utils.data_utils`, `types`, ...) are made from the
table in `rolltree.verifiers.names`. A name is fetched when it is used, so importing this imports
neither torch nor the openai package. docs/compat.md lists what behaves differently on purpose.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rolltree.verifiers.helpers import write_to_stderr
from rolltree.verifiers.names import (
    IMPORTED_MODULES,
    MODULES,
    REMOVED,
    SCRIPTS,
    SOURCE_OF,
    STAND_INS,
)

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *MODULES["types"]})  # as there, with the names of `types`


def _fetched(module: str, name: str) -> Any:
    """Return a submodule, a public name, or a name that `module` imports from another package."""
    path = f"{module}.{name}".removeprefix(f"{__name__}.")
    if path in MODULES or path in SCRIPTS:
        return import_module(SCRIPTS.get(path, f"{__name__}.{path}"))
    if name in STAND_INS and find_spec("prime_sandboxes") is None:
        stand_in_module, stand_in = STAND_INS[name]
        return getattr(import_module(stand_in_module), stand_in)
    if name in SOURCE_OF:
        return getattr(import_module(SOURCE_OF[name]), name)
    if name in IMPORTED_MODULES:
        return import_module(IMPORTED_MODULES[name])
    where = f"verifiers.{path}".removesuffix(f".{name}")
    raise AttributeError(f"module {where!r} of verifiers 0.1.8 has no public name {name!r}")


class _Mirror(ModuleType):
    """A module whose names come from elsewhere."""

    def __init__(self, path: str) -> None:
        name = f"{__name__}.{path}"
        super().__init__(name, f"Names of verifiers 0.1.8 in `{name}`.")
        self.__spec__ = ModuleSpec(name, None, is_package=not MODULES[path])
        self.__all__ = list(MODULES[path])
        if not MODULES[path]:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name == "logger":
            return logging.getLogger(self.__name__.removeprefix("rolltree.verifiers."))
        return _fetched(self.__name__, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


write_to_stderr("verifiers", os.environ.get("VF_LOG_LEVEL", "INFO"))
# An empty module costs a microsecond, so all of them are made now: the import system finds what is
# in `sys.modules` without a finder of ours.
for _path in MODULES:
    sys.modules.setdefault(f"{__name__}.{_path}", _Mirror(_path))
