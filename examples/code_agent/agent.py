"""A coding agent that knows nothing about rolltree: it writes code, runs it, and reads the error.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "7 times 2" 14

It asks the model for a line of Python, runs the line, and compares what it printed with the test.
After a failure the model sees what happened and has a second try. It prints the last line.

What a model wrote is run here only if it is `print()` of one sum, difference or product of two
digits: anything else is refused. An agent for real code needs a real sandbox.
"""

from __future__ import annotations

import ast
import asyncio
import io
import sys
from functools import partial

import openai

PARTS = (ast.Module, ast.Expr, ast.Call, ast.Name, ast.Load, ast.BinOp, ast.Constant)
OPERATORS = (ast.Add, ast.Sub, ast.Mult)


def run(line: str) -> str:
    """Return what a line prints, or its error."""
    try:
        tree = ast.parse(line)
    except (SyntaxError, ValueError):
        return "syntax error"
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    if (
        len(line) > 12
        or names != ["print"]
        or not all(isinstance(node, PARTS + OPERATORS) for node in ast.walk(tree))
    ):
        return "refused"
    printed = io.StringIO()
    try:
        # A `print` of its own: `redirect_stdout` would change all threads of the process.
        own = {"print": partial(print, file=printed)}
        exec(compile(tree, "line", "exec"), {"__builtins__": own})
    except TypeError:
        return "type error"
    return printed.getvalue().strip()


async def solve(task: str, test: str, client: openai.AsyncOpenAI, num_tries: int = 2) -> str:
    """Return the last line of Python for a task such as "7 times 2", tested with what it prints."""
    messages = [{"role": "user", "content": task}]
    line = ""
    for _ in range(num_tries):
        reply = await client.chat.completions.create(model="default", messages=messages)
        line = reply.choices[0].message.content or ""
        printed = run(line)
        if printed == test:
            break
        messages.append({"role": "assistant", "content": line})
        messages.append({"role": "user", "content": f"{printed}, not {test}: {task}"})
    return line


async def main() -> None:
    """Solve the task on the command line."""
    async with openai.AsyncOpenAI() as client:
        print(await solve(*sys.argv[1:3], client))


if __name__ == "__main__":
    asyncio.run(main())
