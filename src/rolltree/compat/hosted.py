"""The names of `prime_sandboxes`, the hosted service's client, as `envs.sandbox_env` has them.

Without the package they are those of this machine's sandboxes, so that an environment that imports
them can be loaded.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from rolltree.compat.sandbox_client import SandboxClient, SandboxRequest


class _AdvancedConfigs(SimpleNamespace):
    """Settings that only the hosted service has: a sandbox on this machine refuses them."""


_HERE = {
    "APIClient": SimpleNamespace,
    "AdvancedConfigs": _AdvancedConfigs,
    "AsyncSandboxClient": SandboxClient,
    "CreateSandboxRequest": SandboxRequest,
    "SandboxClient": SandboxClient,
}


def __getattr__(name: str) -> Any:
    if name not in _HERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "prime_sandboxes.core" if name == "APIClient" else "prime_sandboxes"
    try:
        return getattr(import_module(module), name)
    except ImportError:
        return _HERE[name]
