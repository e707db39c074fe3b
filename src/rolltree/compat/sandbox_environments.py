"""`SandboxEnv` and `PythonEnv` of verifiers 0.1.8."""

from __future__ import annotations

from typing import TypedDict

from rolltree import environments as rooms

SandboxEnv = rooms.SandboxEnv
PythonEnv = rooms.PythonEnv


class PythonWorkerState(TypedDict):
    """What `state["python_env"]` says of a rollout's interpreter."""

    ready: bool
    execution_count: int
