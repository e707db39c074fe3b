"""Sandbox: running code that nobody trusts, behind one interface.

The room knows processes, files and the kernel. It knows nothing about models, environments or
rewards. It leaves out virtual machines and remote sandboxes; a class with `create` can be one.
"""

from rolltree.sandbox.backends import backend_of, known_backends
from rolltree.sandbox.docker import DockerBackend
from rolltree.sandbox.interface import PythonSession, Sandbox, SandboxBackend
from rolltree.sandbox.local import LocalBackend
from rolltree.sandbox.values import Ended, Limits, RunResult, SandboxLevel

__all__ = [
    "DockerBackend",
    "Ended",
    "Limits",
    "LocalBackend",
    "PythonSession",
    "RunResult",
    "Sandbox",
    "SandboxBackend",
    "SandboxLevel",
    "backend_of",
    "known_backends",
]
