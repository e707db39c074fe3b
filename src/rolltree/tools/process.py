"""Tools that may hang or crash: one process per call, killed when nobody waits for it any more.

A tool is named to the process by module and qualified name, its arguments go there as JSON, and
what it returns comes back as text. The process inherits the environment: it protects the run from a
tool that hangs, not the machine from the tool (`rolltree.sandbox` does). It knows nothing about
models.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from rolltree.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class ToolProcessError(Exception):
    """A tool in a process raised, or its process died; the message is what the model is told."""


def in_process(func: F) -> F:
    """Mark a tool to be called in a process of its own, which is killed when its time is over.

    It costs the start of a Python process and the import of the tool's module, so it is for tools
    that take seconds.

    Raises:
        ConfigError: another process could not import the function.
    """
    module, name = getattr(func, "__module__", ""), getattr(func, "__qualname__", "")
    if module in ("", "__main__") or "<" in name:
        raise ConfigError(
            f"tool {name!r} cannot be called in another process: it is defined in "
            f"{module or 'no module'}, where that process would not find it. Define it at the top "
            "of a module that can be imported."
        )
    func.__rolltree_process__ = True  # type: ignore[attr-defined]
    return func


async def call_in_process(func: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Return the text of what `func(**arguments)` returns in a process of its own.

    When the waiting task is cancelled, the process and all its children are killed.

    Raises:
        ToolProcessError: the function raised, or the process died.
    """
    order = {
        "path": sys.path,
        "module": func.__module__,
        "name": func.__qualname__,
        "arguments": msgspec.to_builtins(dict(arguments), enc_hook=_builtins),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolltree.tools.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        answer, said = await process.communicate(json.dumps(order).encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it left running
        await process.wait()
    try:
        told = json.loads(answer)
    except ValueError:
        last = said.decode(errors="replace").strip()[-500:]
        raise ToolProcessError(
            f"{func.__name__} ended its process (exit status {process.returncode}). {last}".strip()
        ) from None
    if "error" in told:
        error = ToolProcessError(told["error"])
        error.add_note(told["traceback"])
        raise error
    return str(told["text"])


def _builtins(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{value!r} has no JSON form")
