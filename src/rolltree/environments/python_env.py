"""`PythonEnv`: the model has a Python interpreter in a sandbox of its own.

It knows the tool and its sessions. It leaves out isolation (`rolltree.sandbox`).
"""

from __future__ import annotations

from typing import Any

from rolltree.environments.decorators import cleanup
from rolltree.environments.sandbox_env import SandboxEnv
from rolltree.sandbox import PythonSession, RunResult, Sandbox
from rolltree.types import State

_PER_CALL = """Run Python code as a program and return what it printed.

Nothing is remembered between calls but files. There is no network."""


class PythonEnv(SandboxEnv):
    """A `SandboxEnv` with the tool `python`.

    Args:
        stateful: variables stay between calls, as in a notebook; else each call is a program.
        shell: offer `bash` too.
        settings: `SandboxEnv`'s.
    """

    def __init__(self, stateful: bool = True, shell: bool = False, **settings: Any) -> None:
        super().__init__(shell=shell, **settings)
        self.stateful = stateful
        self._python_sessions: dict[str, PythonSession] = {}
        self.add_sandbox_tool(self.python)
        if not stateful:
            self.tool_map["python"].schema["function"]["description"] = _PER_CALL

    async def python(self, code: str, sandbox: Sandbox) -> str:
        """Run Python code and return what it printed and the value of its last line.

        Variables and files stay between calls. There is no network.

        Args:
            code: The code.
        """
        if not self.stateful:
            return (await sandbox.run_python(code)).text() or "(no output)"
        session = self._python_sessions.get(sandbox.id)
        if session is None:
            session = self._python_sessions[sandbox.id] = sandbox.python_session()
        return _told(await session.run(code))

    @cleanup(priority=-90)
    async def release_python(self, state: State) -> None:
        """End the rollout's interpreter; the sandbox goes next."""
        session = self._python_sessions.pop(state.get("sandbox_id") or "", None)
        if session is not None:
            await session.close()


def _told(result: RunResult) -> str:
    if result.ended == "exit" and result.exit_code in (0, 1):
        return result.stdout.rstrip("\n") or "(no output)"
    return f"{result.text()}\n[Python was restarted: variables are gone]".lstrip("\n")
