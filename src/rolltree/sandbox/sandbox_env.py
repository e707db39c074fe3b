"""`SandboxEnv` and `PythonEnv`: each rollout has a sandbox with a shell or Python.

Do not score inside the sandbox: code that the model wrote can write any file there, including a
reward file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rolltree.environments.lifecycle import cleanup, teardown
from rolltree.environments.tool_env import StatefulToolEnv
from rolltree.sandbox import Limits, PythonSession, RunResult, Sandbox, SandboxBackend, backend_of
from rolltree.values.errors import SandboxError, SandboxUnavailable
from rolltree.values.steps import ToolRequest
from rolltree.values.types import ChatMessage, Messages, State

_FAILURES = {kind.__name__: kind for kind in (SandboxError, SandboxUnavailable)}


class SandboxToolEnv(StatefulToolEnv):
    """A `StatefulToolEnv` whose rollouts fail if the sandbox itself fails, not the code in it."""

    async def answer_call(self, request: ToolRequest, state: State) -> ChatMessage:
        """Run one call; a failure of the sandbox itself fails the rollout.

        Raises:
            SandboxError: the sandbox could not run the code.
        """
        # Exceptions of tools become messages to the model. A broken sandbox is not the model's
        # fault, so its error is raised.
        num_known = len(state.get("tool_errors") or ())
        answer = await super().answer_call(request, state)
        for error in (state.get("tool_errors") or ())[num_known:]:
            if error["type"] in _FAILURES:
                raise _FAILURES[error["type"]](error["message"])
        return answer


class SandboxEnv(SandboxToolEnv):
    """A `ToolEnv` whose rollouts each have a sandbox, from `setup_state` to the end of cleanup.

    `state["sandbox_id"]` names it and `state["sandbox_level"]` says how well it isolates; each step
    has the level's name in `extras["sandbox_level"]`. To read files after a rollout, write a
    `@cleanup` method: with the default priority it runs before the sandbox is deleted. If the
    sandbox itself fails, the rollout fails, and the model is not told.

    Args:
        sandbox: "local", "docker" or a backend.
        limits: resource limits of each run.
        shell: offer the tool `bash`.
        tools: more tools; they run outside the sandbox.
        settings: `ToolEnv`'s.
    """

    def __init__(
        self,
        sandbox: str | SandboxBackend = "local",
        limits: Limits | None = None,
        shell: bool = True,
        tools: Sequence[Callable[..., Any]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tools=tools, **settings)
        self.backend = backend_of(sandbox)
        self.limits = limits or Limits()
        # Not in the state, which is stored and has only the sandbox's id.
        self._sandboxes: dict[str, Sandbox] = {}
        self._inside: set[str] = set()
        if shell:
            self.add_sandbox_tool(self.bash)

    def add_sandbox_tool(self, tool: Callable[..., Any]) -> None:
        """Offer a tool whose argument `sandbox` is the rollout's sandbox, unseen by the model."""
        self.add_tool(tool, args_to_skip=["sandbox"])
        self._inside.add(tool.__name__)

    async def bash(self, command: str, sandbox: Sandbox) -> str:
        """Run a shell command and return its output.

        Files stay between calls; variables, background processes and network access do not exist.

        Args:
            command: The command line.
        """
        result = await sandbox.run(["sh", "-c", command])
        return result.text() or "(no output)"

    def sandbox_of(self, state: State) -> Sandbox:
        """Return the sandbox of a rollout.

        Raises:
            SandboxError: the rollout has no sandbox, or it has been closed.
        """
        sandbox = self._sandboxes.get(state.get("sandbox_id") or "")
        if sandbox is None:
            raise SandboxError(
                "this rollout has no open sandbox: it exists from setup_state to the end of "
                "cleanup. Look at its files in a @cleanup method."
            )
        return sandbox

    async def setup_state(self, state: State) -> State:
        """Make the rollout's sandbox."""
        state = await super().setup_state(state)
        sandbox = await self.backend.create(limits=self.limits)
        self._sandboxes[sandbox.id] = sandbox
        state["sandbox_id"] = sandbox.id
        state["sandbox_level"] = sandbox.level.as_dict()
        return state

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Any
    ) -> None:
        """Append the step, with the isolation level of its tool calls."""
        before = len(state.trajectory)
        await super().add_model_response(state, prompt_messages, response)
        for step in state.trajectory[before:]:
            step["extras"]["sandbox_level"] = state["sandbox_level"]["name"]

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> dict[str, Any]:
        """Fill in the sandbox for the tools that run in it."""
        if tool_name not in self._inside:
            return tool_args
        return {**tool_args, "sandbox": self.sandbox_of(state)}

    @cleanup(priority=-100)
    async def release_sandbox(self, state: State) -> None:
        """Close the rollout's sandbox: end its processes and delete its files."""
        sandbox = self._sandboxes.pop(state.get("sandbox_id") or "", None)
        if sandbox is not None:
            await sandbox.close()

    @teardown
    async def close_sandboxes(self) -> None:
        """Close the sandboxes of rollouts that never reached their cleanup."""
        left = list(self._sandboxes.values())
        self._sandboxes.clear()
        # A sandbox that cannot be closed must not leave the others open.
        ends = await asyncio.gather(*(sandbox.close() for sandbox in left), return_exceptions=True)
        failures = [end for end in ends if isinstance(end, Exception)]
        if failures:
            raise ExceptionGroup(f"{len(failures)} sandboxes could not be closed", failures)


_PER_CALL = """Run Python code as a program and return what it printed.

Nothing is remembered between calls but files. There is no network."""


class PythonEnv(SandboxEnv):
    """A `SandboxEnv` with the tool `python`.

    Args:
        stateful: variables stay between calls, as in a notebook; else each call is a new program.
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
        # Started with the first call: an interpreter takes a while to start, and many rollouts
        # never use it.
        session = self._python_sessions.get(sandbox.id)
        if session is None:
            session = self._python_sessions[sandbox.id] = sandbox.python_session()
        return _session_text(await session.run(code))

    @cleanup(priority=-90)
    async def release_python(self, state: State) -> None:
        """End the rollout's interpreter, before its sandbox is closed."""
        session = self._python_sessions.pop(state.get("sandbox_id") or "", None)
        if session is not None:
            await session.close()


def _session_text(result: RunResult) -> str:
    if result.ended == "exit" and result.exit_code in (0, 1):
        return result.stdout.rstrip("\n") or "(no output)"
    return f"{result.text()}\n[Python was restarted: variables are gone]".lstrip("\n")
