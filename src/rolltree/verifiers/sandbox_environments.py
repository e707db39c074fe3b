"""`SandboxEnv` and `PythonEnv` of verifiers 0.1.8.

If the client of the hosted sandboxes (`prime-sandboxes`) is installed, they use it, as in
verifiers; otherwise sandboxes are on this machine. `ROLLTREE_SANDBOX` (hosted, docker, local)
overrides that.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import logging
import os
from typing import Any

from rolltree.values.errors import ConfigError
from rolltree.values.types import Messages, State
from rolltree.verifiers.environments import cleanup, teardown
from rolltree.verifiers.sandbox_client import (
    CHOICE,
    DEFAULT_IMAGE,
    DEFAULT_START,
    CommandTimeout,
    SandboxClient,
    SandboxRequest,
    hosted_is_wanted,
)
from rolltree.verifiers.tool_environments import StatefulToolEnv

try:
    import tenacity
except ImportError as _missing:
    raise ConfigError(
        "verifiers' sandbox environments retry with tenacity, which is missing. Install it with "
        "`pip install 'rolltree[compat]'`."
    ) from _missing

_FOLDER = "/tmp"
WORKER = f"{_FOLDER}/python_worker.py"
REQUESTS = f"{_FOLDER}/python_env_cmd"
ANSWERS = f"{_FOLDER}/python_env_res"
READY = f"{_FOLDER}/python_env_ready"

SOURCE = '''
import ast, base64, contextlib, io, json, traceback

_names = {"__name__": "__main__"}
_count = 0


def _answer(code):
    """Run base64 code in one namespace; return output, errors and the last value as JSON."""
    global _count
    _count += 1
    out, err = io.StringIO(), io.StringIO()
    made = {"status": "ok", "result": None, "execution_count": _count}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            body = ast.parse(base64.b64decode(code).decode()).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), "<cell>", "exec"), _names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), _names)
                made["result"] = None if value is None else repr(value)
        except Exception as error:  # the model's code may raise anything
            own = error.__traceback__.tb_next
            text = traceback.format_exception(type(error), error, own)
            made.update(status="error", result="".join(text))
    return json.dumps({**made, "stdout": out.getvalue(), "stderr": err.getvalue()})
'''
_SERVE = f"""
import os

for _path in ({REQUESTS!r}, {ANSWERS!r}):
    if os.path.exists(_path):
        os.remove(_path)
    os.mkfifo(_path)
open({READY!r}, "w").close()
while True:
    with open({REQUESTS!r}) as _pipe:
        _asked = _pipe.read()
    if _asked:
        _said = _answer(_asked)
        with open({ANSWERS!r}, "w") as _pipe:
            _pipe.write(_said)
"""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def start_command() -> str:
    """Return the start command of a hosted sandbox: install packages, then start the worker."""
    return (
        f"bash -lc 'rm -f {REQUESTS} {ANSWERS} {READY}; pip install -q numpy sympy scipy; "
        f"echo {_encoded(SOURCE + _SERVE)} | base64 -d > {WORKER}; "
        f"python -u {WORKER} & tail -f /dev/null'"
    )


def wait_command() -> str:
    """Return the command that waits until the worker listens."""
    return (
        f"for i in $(seq 1 200); do [ -f {READY} ] && exit 0; sleep 0.05; done; "
        "echo 'python worker failed to start' >&2; exit 1"
    )


def request_command(code: str) -> str:
    """Return the command that sends code to the worker and prints its answer."""
    return f"printf %s {_encoded(code)} > {REQUESTS}; cat {ANSWERS}"


def answer_text(answer: dict[str, Any]) -> str:
    """Return the text that the model reads."""
    parts = [(answer.get("stdout") or "").rstrip()]
    errors = (answer.get("stderr") or "").rstrip()
    if errors:
        parts.append(f"stderr:\n{errors}")
    result = answer.get("result")
    if answer.get("status") == "error":
        parts.append((result or "").rstrip())
    elif result is not None:
        # As a notebook shows it: these lines are what the model reads in verifiers.
        parts.append(f"Out[{answer['execution_count']}]: {result}")
    return "\n".join(part for part in parts if part) or "(no output)"


try:
    from typing_extensions import TypedDict  # the only one pydantic accepts before Python 3.12
except ImportError:
    from typing import TypedDict


class SandboxEnv(StatefulToolEnv):
    """A `StatefulToolEnv` whose rollouts each have a sandbox with a shell.

    `state["sandbox_id"]` names it. Override `post_rollout` to look at it before it is deleted.

    Args:
        kwargs: `StatefulToolEnv`'s, and `sandbox_client`: an object that makes the sandboxes, with
            the methods of `SandboxClient`.

    Raises:
        ConfigError: a sandbox with these settings cannot be made here; the message says what to
            use.
    """

    def __init__(
        self,
        sandbox_name: str = "sandbox-env",
        docker_image: str = DEFAULT_IMAGE,
        start_command: str = DEFAULT_START,
        cpu_cores: int = 1,
        memory_gb: int = 2,
        disk_size_gb: int = 5,
        gpu_count: int = 0,
        timeout_minutes: int = 60,
        timeout_per_command_seconds: int = 30,
        environment_vars: dict[str, str] | None = None,
        team_id: str | None = None,
        advanced_configs: Any = None,
        max_retries: int = 5,
        base_delay: float = 0.5,
        backoff_factor: float = 2.0,
        max_backoff_seconds: float = 30.0,
        jitter: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        # Not a parameter, because it is not in the public signature of 0.1.8.
        sandbox_client = kwargs.pop("sandbox_client", None)
        # Before the base class, whose `__post_init__` registers the teardown that reads it.
        self.active_sandboxes: set[str] = set()
        StatefulToolEnv.__init__(self, **kwargs)
        self.timeout_per_command_seconds = timeout_per_command_seconds
        fields = {
            "name": sandbox_name,
            "docker_image": docker_image,
            "start_command": start_command,
            "cpu_cores": cpu_cores,
            "memory_gb": memory_gb,
            "disk_size_gb": disk_size_gb,
            "gpu_count": gpu_count,
            "timeout_minutes": timeout_minutes,
            "environment_vars": environment_vars,
            "team_id": team_id,
            "advanced_configs": advanced_configs,
        }
        self.sandbox_request: Any
        self.sandbox_client: Any
        self._is_hosted = sandbox_client is None and hosted_is_wanted()
        if self._is_hosted:
            self.sandbox_client, self.sandbox_request = _hosted(fields)
        else:
            self.sandbox_request = SandboxRequest(**fields)
            self.sandbox_client = sandbox_client or SandboxClient(
                os.environ.get(CHOICE) or "auto", timeout_per_command_seconds
            )
            if isinstance(self.sandbox_client, SandboxClient):
                self.sandbox_client.check(self.sandbox_request)
        self.with_retry = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(max(max_retries, 1)),
            wait=tenacity.wait_exponential(base_delay, max_backoff_seconds, backoff_factor)
            + tenacity.wait_random(0, jitter),
            retry=tenacity.retry_if_not_exception_type(ConfigError),
            before_sleep=tenacity.before_sleep_log(self.logger, logging.ERROR),
            reraise=True,
        ).wraps
        self.add_tool(self.bash, args_to_skip=["sandbox_id"])

    async def bash(self, command: str, sandbox_id: str) -> str:
        """Execute `command` inside persistent sandbox container."""
        await self.sandbox_client.wait_for_creation(sandbox_id)
        try:
            result = await asyncio.wait_for(
                self.sandbox_client.execute_command(sandbox_id, command),
                # A local sandbox ends the command itself at its limit; giving up outside would
                # leave it running.
                timeout=None if not self._is_hosted else self.timeout_per_command_seconds,
            )
        except (TimeoutError, CommandTimeout):
            self.logger.warning("a command timed out in sandbox %s", sandbox_id)
            # These words reach the model and are the same as in verifiers.
            return f"Error: Command timed out after {self.timeout_per_command_seconds}s"
        said = result.stdout.strip()
        errors = (result.stderr or "").strip()
        if errors:
            said = f"{said}\nstderr:\n{errors}" if said else f"stderr:\n{errors}"
        return said or "(no output)"

    async def post_rollout(self, state: State) -> None:
        """Override to read from the sandbox of a finished rollout and write into the state."""

    @cleanup
    async def destroy_sandbox(self, state: State) -> None:
        """Call `post_rollout`, then delete the rollout's sandbox."""
        try:
            # `post_rollout` may compute scores in the sandbox, so it comes before the deletion, and
            # a failure in it must not leave the sandbox behind.
            await self.post_rollout(state)
        finally:
            await self._delete(state.get("sandbox_id"))

    async def _delete(self, sandbox_id: str | None) -> None:
        if sandbox_id is None:
            return
        try:
            await self.with_retry(self.sandbox_client.delete)(sandbox_id)
            self.active_sandboxes.discard(sandbox_id)
        except Exception as error:  # noqa: BLE001  the rollout counts without it
            self.logger.warning("Failed to delete sandbox %s: %s", sandbox_id, error)

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Make the rollout's sandbox."""
        made = await self.with_retry(self.sandbox_client.create)(self.sandbox_request)
        self.active_sandboxes.add(made.id)
        state["sandbox_id"] = made.id
        return await super().setup_state(state, **kwargs)

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: Messages,
        state: State,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill in the sandbox for `bash`."""
        if tool_name == "bash":
            return {**tool_args, "sandbox_id": state["sandbox_id"]}
        return tool_args

    async def bulk_delete_sandboxes(self, global_ids: list[str]) -> None:
        """Delete several sandboxes."""
        try:
            await self.with_retry(self.sandbox_client.bulk_delete)(global_ids)
            self.logger.debug(f"Bulk deleted sandboxes: {global_ids}")
            self.active_sandboxes.difference_update(global_ids)
        except Exception as error:  # noqa: BLE001  nothing depends on it
            self.logger.error(f"Failed to bulk delete sandboxes {global_ids}: {error}")

    @teardown
    async def teardown_sandboxes(self) -> None:
        """Delete the sandboxes of rollouts that never reached their cleanup."""
        # Cleared first: a second teardown at exit must not delete the same ones again.
        left = list(self.active_sandboxes)
        self.active_sandboxes.clear()
        if not left:
            return
        if not self._is_hosted:
            await self.bulk_delete_sandboxes(left)
            return
        from prime_sandboxes import SandboxClient as Client
        from prime_sandboxes.core import APIClient

        client = Client(APIClient())  # the asynchronous one belongs to a loop that may be gone
        for start in range(0, len(left), 100):
            client.bulk_delete(sandbox_ids=left[start : start + 100])


def _hosted(fields: dict[str, Any]) -> tuple[Any, Any]:
    if importlib.util.find_spec("prime_sandboxes") is None:
        raise ConfigError(
            f"{CHOICE} is 'hosted', which needs the `prime-sandboxes` package. Install it, or set "
            f"{CHOICE} to docker or local."
        )
    # Through the public module, because environments' tests replace the classes there.
    names = importlib.import_module("rolltree.verifiers.verifiers.envs.sandbox_env")
    return names.AsyncSandboxClient(), names.CreateSandboxRequest(**fields)


class PythonWorkerState(TypedDict):  # noqa: D101  (the model would be told a docstring)
    ready: bool
    execution_count: int


class PythonEnv(SandboxEnv):
    """A `SandboxEnv` whose tool `python` keeps its variables."""

    def __init__(self, **kwargs: Any) -> None:
        settings = {"sandbox_name": "python-env", "docker_image": DEFAULT_IMAGE, **kwargs}
        # Hosted sandboxes, and those of an author's client, keep a process that reads code from a
        # pipe; in sandboxes on this machine, no process runs all the time.
        client = settings.get("sandbox_client")
        is_others = hosted_is_wanted() if client is None else not isinstance(client, SandboxClient)
        if is_others:
            settings.setdefault("start_command", start_command())
        self._sessions: dict[str, Any] = {}
        SandboxEnv.__init__(self, **settings)
        self.add_tool(self.python, args_to_skip=["sandbox_id", "python_state"])
        # The model gets `python` alone; `bash` stays for the environment's own use.
        self.remove_tool(self.bash)

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Make the rollout's sandbox; its interpreter starts with the first code."""
        state = await super().setup_state(state, **kwargs)
        state["python_env"] = {"ready": False, "execution_count": 0}
        return state

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: Messages,
        state: State,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill in the sandbox and the interpreter for `python`."""
        if tool_name != "python":
            return dict(tool_args)
        return {
            **tool_args,
            "python_state": state["python_env"],
            "sandbox_id": state["sandbox_id"],
        }

    async def python(self, code: str, sandbox_id: str, python_state: PythonWorkerState) -> str:
        """Execute `code` inside persistent Python REPL."""
        # A hosted service or an author's client can only run commands.
        if not isinstance(self.sandbox_client, SandboxClient):
            if not python_state["ready"]:
                await self.bash(wait_command(), sandbox_id=sandbox_id)
            said = await self.bash(request_command(code), sandbox_id=sandbox_id)
        else:
            said = await self._in_session(code, sandbox_id)
        python_state["ready"] = True
        answer = json.loads(said)
        python_state["execution_count"] = answer["execution_count"]
        return answer_text(answer)

    async def _in_session(self, code: str, sandbox_id: str) -> str:
        """Run code in the sandbox's own interpreter and return the worker's answer."""
        session = self._sessions.get(sandbox_id)
        if session is None:
            session = self._sessions[sandbox_id] = self.sandbox_client.sandbox(
                sandbox_id
            ).python_session()
            await session.run(SOURCE)
        result = await session.run(f"print(_answer({_encoded(code)!r}))")
        # The interpreter survived: its answer is the last line of what it printed.
        if result.ended == "exit" and result.exit_code in (0, None):
            return str(result.stdout)
        del self._sessions[sandbox_id]  # the next code starts a new one
        await session.close()
        raise RuntimeError(f"{result.text()}\n[Python was restarted: variables are gone]".strip())

    @cleanup
    async def cleanup_python_env(self, state: State) -> None:
        """Forget the rollout's interpreter; it ends with the sandbox."""
        state.pop("python_env", None)
        self._sessions.pop(state.get("sandbox_id") or "", None)
