"""The interpreter of `PythonEnv`: what runs in a sandbox, how it is asked, what a model is told.

In a hosted sandbox it is a process that reads requests from one pipe and answers on another.
"""

from __future__ import annotations

import base64
from typing import Any

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
        except Exception as error:
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
    """Return the command that a hosted sandbox starts with: packages, then the worker."""
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


def told(answer: dict[str, Any]) -> str:
    """Return what the model is told of an answer."""
    parts = [(answer.get("stdout") or "").rstrip()]
    errors = (answer.get("stderr") or "").rstrip()
    if errors:
        parts.append(f"stderr:\n{errors}")
    result = answer.get("result")
    if answer.get("status") == "error":
        parts.append((result or "").rstrip())
    elif result is not None:
        parts.append(f"Out[{answer['execution_count']}]: {result}")
    return "\n".join(part for part in parts if part) or "(no output)"
