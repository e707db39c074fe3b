"""`import verifiers` without verifiers: an import hook that finds `rolltree.verifiers.verifiers`.

`provide()` is called when an environment is loaded. It gives way to the real package unless it
is forced. `install()` is the same for scripts that import `verifiers` themselves. Modules are
registered under both names, so that each class exists once. Nothing of `rolltree.verifiers` is
loaded before something imports `verifiers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import RLock
from types import ModuleType
from typing import Any

from rolltree import wings
from rolltree.values.errors import ConfigError

_OURS = wings.find("import", "verifiers").module
_THEIRS = "verifiers"
_lock = RLock()


class VerifiersFinder(MetaPathFinder, Loader):
    """Finds `verifiers` and its modules: rolltree's, if there is no real one or `is_forced`."""

    is_forced = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module's spec, or None for the real package and all other modules.

        Raises:
            ModuleNotFoundError: the module belongs to verifiers' trainer.
        """
        package, _, rest = fullname.partition(".")
        if package != _THEIRS:
            return None
        if not rest:
            return None if not self.is_forced and real_verifiers() else self._spec(fullname, True)
        if not is_ours():
            return None
        # Raised here, since `No module named verifiers.rl` would make people reinstall verifiers.
        if rest.partition(".")[0] == "rl":
            raise ModuleNotFoundError(
                f"{fullname} is verifiers' trainer, which is not part of rolltree. Train with "
                "rolltree.train or `rolltree train`; see docs/training.md.",
                name=fullname,
            )
        known = _modules()
        if rest not in known:
            return None
        return self._spec(fullname, any(name.startswith(f"{rest}.") for name in known))

    def _spec(self, fullname: str, is_package: bool) -> ModuleSpec:
        return ModuleSpec(fullname, self, origin="rolltree", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return rolltree's module, which is already imported."""
        path = spec.name.removeprefix(_THEIRS)
        module = import_module(wings.load_wing("import", "SCRIPTS").get(path[1:]) or _OURS + path)
        # The import system writes the spec of the second name into the module.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, and with it its own name."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def provide(*, force: bool = False) -> None:
    """Make `import verifiers` find rolltree's modules, unless the real package is installed.

    With `force`, even then, for the whole process. Calling it again changes nothing.

    Raises:
        ConfigError: `force` is set, and the real package has been imported already.
    """
    with _lock:
        finder = next((each for each in sys.meta_path if isinstance(each, VerifiersFinder)), None)
        if finder is None:
            finder = VerifiersFinder()
            # In front, because a folder `verifiers/` in the working directory would be found first.
            # See design/0020-import-verifiers.md.
            sys.meta_path.insert(0, finder)
        if force:
            # Classes of both packages in one process fail isinstance checks far from the cause.
            if _THEIRS in sys.modules and not is_ours():
                raise ConfigError(
                    "the verifiers package has been imported already, so environments would get "
                    "classes of both. Load the environment in a new process, before anything "
                    "imports verifiers."
                )
            finder.is_forced = True


def install() -> None:
    """Make `import verifiers` and its modules resolve to rolltree's, in this process.

    Raises:
        ConfigError: the real package has been imported already; its classes would mix with these.
    """
    provide(force=True)
    import_module(_THEIRS)


def uninstall() -> None:
    """Undo `install` and `provide`; modules that have imported names keep them."""
    with _lock:
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, VerifiersFinder)]
        if is_ours():
            for path in ("", *(f".{path}" for path in _modules())):
                sys.modules.pop(_THEIRS + path, None)


def _modules() -> list[str]:
    """Return the modules of rolltree's package `verifiers`."""
    return [*wings.load_wing("import", "MODULES"), *wings.load_wing("import", "SCRIPTS")]


def is_ours() -> bool:
    """Return whether `verifiers` has been imported and is rolltree's."""
    module = sys.modules.get(_THEIRS)
    return module is not None and module is sys.modules.get(_OURS)


def real_verifiers() -> str | None:
    """Return where the real package is, or None; a folder without code does not count."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        # One finder at a time, since `importlib.util.find_spec` would call this hook again.
        if find is None or isinstance(finder, VerifiersFinder):
            continue
        spec = find(_THEIRS, None)
        if spec is not None and spec.origin is not None:
            return str(spec.origin)
    return None


def imported_real_version() -> str | None:
    """Return the version of the real package if this process has imported it."""
    module = sys.modules.get(_THEIRS)
    if module is None or is_ours():
        return None
    return str(getattr(module, "__version__", "of an unknown version"))
