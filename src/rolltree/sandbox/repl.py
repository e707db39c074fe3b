"""The Python process of a session, inside the sandbox: run as `python -c SOURCE`.

It reads one JSON line per piece of code from standard input, runs it in one namespace, prints the
value of a last expression as an interactive interpreter would, and writes a mark when done. It
imports the standard library only; the code it runs may replace any of it.
"""

import ast
import json
import linecache
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    # Code that reads standard input must find it empty, and not take the next request.
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # A copy, since the code may close its own.
    output = os.dup(1)
    os.dup2(1, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[0] = os.getcwd()
    sys.argv = [""]
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, line in enumerate(requests, start=1):
        request = json.loads(line)
        failed = run(request["code"], f"<cell {number}>", namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, ValueError, OSError):
                continue
        os.write(output, f"\x1e{request['nonce']}:{int(failed)}\n".encode())


def run(code: str, name: str, namespace: dict[str, Any]) -> bool:
    """Run one piece of code; return whether it raised."""
    # So that tracebacks show lines of a program that has no file.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # noqa: BLE001  whatever it is, the model is told
        # Without the frame of this function, which the model did not write.
        own = error.__traceback__.tb_next if error.__traceback__ else None
        if isinstance(error, SyntaxError) and error.filename == name:
            own = None
        print("".join(traceback.format_exception(type(error), error, own)), end="")
        return True
    return False


if __name__ == "__main__":
    main()
