"""The process that compares mathematical answers: `python -m rolltree.rubrics.math_worker`.

It reads JSON lines `{"gold": ..., "said": ...}` on stdin and answers `{"equal": true}`, or
`{"error": ...}` for a reference answer that cannot be read, on stdout. It runs as its own process
because comparing expressions that a model wrote can take for ever or all memory; the process that
started it kills it (`math_workers`). It knows math-verify and nothing of rolltree.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

MEMORY_BYTES = 2 * 2**30


def compare(gold: str, said: str) -> bool:
    """Return whether two answers mean the same.

    Raises:
        ValueError: the reference answer is no expression.
    """
    from math_verify import parse, verify

    wanted = parse(_in_math(gold), parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the reference answer {gold!r} is no expression that math-verify reads")
    given = parse(_in_math(said), parsing_timeout=None)
    return bool(given) and bool(verify(wanted, given, timeout_seconds=None))


def _in_math(text: str) -> str:
    r"""Return `text` as LaTeX in `\boxed`, unless it has mathematics delimiters of its own."""
    return text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"


def main() -> None:
    """Answer lines until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    compare("1", "1")  # imports what it takes, before the time limit counts
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply: dict[str, object] = {"equal": compare(asked["gold"], asked["said"])}
        except ValueError as error:
            reply = {"error": str(error)}
        except (RecursionError, MemoryError, ArithmeticError, TypeError):
            reply = {"equal": False, "gave_up": True}  # sympy on an answer that makes no sense
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
