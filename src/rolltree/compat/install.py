"""`install()`: `import verifiers` gives `rolltree.compat.verifiers`.

It registers the modules themselves, so a class is one class under both names.
"""

from __future__ import annotations

import sys
from importlib import import_module

from rolltree.compat.names import MODULES
from rolltree.errors import ConfigError

_OURS = "rolltree.compat.verifiers"
_THEIRS = "verifiers"


def install() -> None:
    """Let `import verifiers` and its submodules resolve to this package, in this process.

    Raises:
        ConfigError: the real package has been imported already; its classes would mix with these.
    """
    known = sys.modules.get(_THEIRS)
    package = import_module(_OURS)
    if known is not None and known is not package:
        raise ConfigError(
            "the verifiers package has been imported already, so environments would get classes of "
            "both. Call rolltree.compat.install() before anything imports verifiers."
        )
    sys.modules[_THEIRS] = package
    for path in MODULES:
        sys.modules[f"{_THEIRS}.{path}"] = import_module(f"{_OURS}.{path}")


def uninstall() -> None:
    """Take back what `install` did; modules that have imported names keep them."""
    package = sys.modules.get(_OURS)
    if package is not None and sys.modules.get(_THEIRS) is package:
        for path in ("", *(f".{path}" for path in MODULES)):
            sys.modules.pop(_THEIRS + path, None)
