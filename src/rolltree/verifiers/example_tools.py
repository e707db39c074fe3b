"""The example tools of verifiers 0.1.8 (`utils.tools`).

`python` runs the model's code in a sandbox, without a network or the host's files.
"""

from __future__ import annotations

import ast
import operator
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rolltree._helpers.tasks import run_sync
from rolltree.sandbox import Limits, LocalBackend

# A model can write 9**9**9, which would block the event loop.
_MAX_BITS = 2**20
_HOST = "https://api.deepinfra.com/v1/openai"
_MODEL = "Qwen/Qwen2.5-7B-Instruct"


def calculator(expression: str) -> str:
    """Evaluate one line of arithmetic.

    Args:
        expression: Numbers, brackets and + - * / **, without names.

    Returns:
        The result, or what is wrong.
    """
    # The same characters and words as in verifiers: the model reads them.
    if not set(expression) <= set("0123456789+-*/.() "):
        return "Error: Invalid characters in expression"
    try:
        return str(_value(ast.parse(expression.lstrip(" "), "<string>", "eval").body))
    except Exception as error:  # noqa: BLE001  told to the model
        return f"Error: {error}"


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _value(node: ast.AST) -> Any:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: a power of whole numbers could have more than a million bits.
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand))
    if not isinstance(node, ast.BinOp):
        raise TypeError("a number cannot be called")
    left, right = _value(node.left), _value(node.right)
    whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(node.op, ast.Pow) and whole and left.bit_length() * right > _MAX_BITS:
        raise ValueError("the power is too large")
    return _OPERATORS[type(node.op)](left, right)


def python(code: str) -> str:
    """Run Python code as a notebook's cell: its output, and the value of its last expression.

    Args:
        code: The Python code.

    Returns:
        What it printed, or its error, each at most 1,000 characters.

    Raises:
        SandboxUnavailable: this machine cannot isolate code.
    """
    return run_sync(_run(_cell(code)))


def _cell(code: str) -> str:
    """Return code that prints its last expression unless that is None."""
    code = textwrap.dedent(code)
    tree = ast.parse(code, mode="exec")
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return code
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    lines = [ast.unparse(tree), f"_ = {ast.unparse(last.value)}", "if _ is not None: print(_)"]
    return "\n".join(lines)


async def _run(code: str) -> str:
    # verifiers runs the code with the `python` on PATH, so models expect its packages.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    backend = LocalBackend(read_only=packages, env={"PYTHONPATH": os.pathsep.join(packages)})
    sandbox = await backend.create(limits=Limits(wall_s=10.0, cpu_s=20.0, memory_bytes=2 * 2**30))
    try:
        result = await sandbox.run([sandbox.python, "-c", code])
    finally:
        await sandbox.close()
    if result.ended == "wall":
        return "Error: Code execution timed out after 10 seconds"
    ending = "" if result.ended in ("exit", "signal") else result.text()
    # Only the errors if there are any, cut at 1,000 characters, as in verifiers.
    return (result.stderr.strip() or ending or result.stdout.strip())[:1000]


def ask(question: str, url: str) -> str:
    """Ask a model about a web page, on a server whose key is in $DEEPINFRA_API_KEY.

    Args:
        question: What to ask.
        url: The page.

    Returns:
        The model's answer, or what went wrong.
    """
    # The limit of verifiers: a page must fit the model's context.
    page = _page(url)[:50_000]
    if page.startswith("Error:"):
        return "Error: Failed to fetch URL contents."
    try:
        from openai import OpenAI

        client = OpenAI(base_url=_HOST, api_key=os.environ.get("DEEPINFRA_API_KEY"))
        said = f"Answer the question from the page.\n\nQuestion: {question}\n\n{url}:\n\n{page}"
        answer = client.chat.completions.create(
            model=_MODEL, messages=[{"role": "user", "content": said}], max_tokens=4000
        )
        return answer.choices[0].message.content or "Error: No response from model."
    except Exception as error:  # noqa: BLE001  told to the model
        return f"Error: {error}"


def _page(url: str) -> str:
    try:
        import requests
        from markdownify import markdownify

        response = requests.get(url, timeout=30)
        response.raise_for_status()
        return str(markdownify(response.text))
    except Exception as error:  # noqa: BLE001  told to the model
        return f"Error: {error}"


def search_ddg(query: str, num_results: int = 5) -> str:
    """Search the web with DuckDuckGo (the package duckduckgo-search).

    Args:
        query: What to look for.
        num_results: How many results, at most 10.

    Returns:
        A title and a summary of each result.
    """
    try:
        from duckduckgo_search import DDGS

        with DDGS() as searcher:
            found = list(searcher.text(query, max_results=min(num_results, 10)))
        parts = [
            (result["title"], result["body"][:200].rsplit(".", 1)[0] + ".") for result in found
        ]
        return _bullets(f"• {title}\n  {text}" for title, text in parts)
    except Exception as error:  # noqa: BLE001  told to the model
        return f"Error: {error}"


def search(query: str) -> str:
    """Search the web with Brave (the package brave-search, its key in $BRAVE_API_KEY).

    Args:
        query: What to look for.

    Returns:
        Source, title, summary and address of three results.
    """
    try:
        from brave import Brave

        answer: Mapping[str, Any] = Brave().search(q=query, count=10, raw=True)
        found = answer.get("web", {}).get("results", [])
        return _bullets([_brave_result(result) for result in found if "profile" in result][:3])
    except Exception as error:  # noqa: BLE001  told to the model
        return f"Error: {error}"


def _brave_result(result: Mapping[str, Any]) -> str:
    source = f"{result['profile']['name']} ({result['profile']['long_name']})"
    text = f"{result['description'][:300]} ..."
    return f"•  {source}\n   {result['title']}\n   {text}\n   {result['url']}"


def _bullets(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) or "No results found"
