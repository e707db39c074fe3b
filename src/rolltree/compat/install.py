"""`import verifiers` without verifiers: an import hook that gives `rolltree.compat.verifiers`.

`provide()` is called when an environment is loaded. It steps aside for the real package unless it
is told not to. `install()` is the same for scripts that import `verifiers` themselves. The modules
are registered under both names, so a class is one class.
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

from rolltree.compat.names import MODULES, SCRIPTS
from rolltree.errors import ConfigError

_OURS = "rolltree.compat.verifiers"
_THEIRS = "verifiers"
_lock = RLock()


class VerifiersFinder(MetaPathFinder, Loader):
    """Finds `verifiers` and its modules: rolltree's, if there is no real one or `is_forced`."""

    is_forced = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module comes from, or None for the real package and all other modules.

        Raises:
            ModuleNotFoundError: it is one of verifiers' trainer.
        """
        package, _, rest = fullname.partition(".")
        if package != _THEIRS:
            return None
        if not rest:
            return None if not self.is_forced and real_verifiers() else self._spec(fullname, True)
        if not is_ours():
            return None
        # Named here, since `No module named verifiers.rl` would send people to reinstall.
        if rest.partition(".")[0] == "rl":
            raise ModuleNotFoundError(
                f"{fullname} is verifiers' trainer, which is not part of rolltree. Train with "
                "rolltree.train or `rolltree train`; see docs/training.md.",
                name=fullname,
            )
        known = [*MODULES, *SCRIPTS]
        if rest not in known:
            return None
        return self._spec(fullname, any(name.startswith(f"{rest}.") for name in known))

    def _spec(self, fullname: str, is_package: bool) -> ModuleSpec:
        return ModuleSpec(fullname, self, origin="rolltree", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return rolltree's module; importing is done."""
        path = spec.name.removeprefix(_THEIRS)
        module = import_module(SCRIPTS.get(path[1:]) or _OURS + path)
        # The import system writes the spec of the second name into the module.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it keeps the name it was made with."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state


def provide(*, force: bool = False) -> None:
    """Let `import verifiers` give rolltree's from now on, where the real package is not installed.

    With `force` also when it is, in this whole process. Calling it again costs nothing.

    Raises:
        ConfigError: with `force`: the real package has been imported already.
    """
    with _lock:
        finder = next((each for each in sys.meta_path if isinstance(each, VerifiersFinder)), None)
        if finder is None:
            finder = VerifiersFinder()
            # In front, because a folder `verifiers/` in the working directory would be found first.
            # See design/0020-import-verifiers.md.
            sys.meta_path.insert(0, finder)
        if force:
            # Classes of both in one process fail isinstance far from the cause.
            if _THEIRS in sys.modules and not is_ours():
                raise ConfigError(
                    "the verifiers package has been imported already, so environments would get "
                    "classes of both. Load the environment in a new process, before anything "
                    "imports verifiers."
                )
            finder.is_forced = True


def install() -> None:
    """Let `import verifiers` and its modules resolve to rolltree's, in this process.

    Raises:
        ConfigError: the real package has been imported already; its classes would mix with these.
    """
    provide(force=True)
    import_module(_THEIRS)


def uninstall() -> None:
    """Take back what `install` and `provide` did; modules that have imported names keep them."""
    with _lock:
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, VerifiersFinder)]
        if is_ours():
            for path in ("", *(f".{path}" for path in (*MODULES, *SCRIPTS))):
                sys.modules.pop(_THEIRS + path, None)


def is_ours() -> bool:
    """Return whether `verifiers` has been imported and is rolltree's."""
    module = sys.modules.get(_THEIRS)
    return module is not None and module is sys.modules.get(_OURS)


def real_verifiers() -> str | None:
    """Return where the real package is, or None. A folder of that name without code is not it."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        # Asked finder by finder, as `importlib.util.find_spec` would come back to this hook.
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
