"""The process behind `rolltree.tools.process`: reads one order, makes one call, answers, ends.

It dies with the process that started it (on Linux). It knows nothing about time limits: it is
killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import reduce
from typing import Any

from rolltree.tools.describe import Tool, result_text

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer the order on standard input; what the tool prints goes to standard error."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = {"text": result_text(_call(json.load(sys.stdin)))}
    except BaseException as error:  # noqa: BLE001  a tool that exits is a tool that fails
        answer = {"error": str(error) or type(error).__name__, "traceback": traceback.format_exc()}
    json.dump(answer, answers)
    answers.close()


def _call(order: dict[str, Any]) -> Any:
    sys.path[:] = order["path"]
    module = importlib.import_module(order["module"])
    func: Any = reduce(getattr, order["name"].split("."), module)
    result = func(**Tool.of(func).read_arguments(order["arguments"]))

    async def settled() -> Any:
        return await result

    return asyncio.run(settled()) if inspect.isawaitable(result) else result


if __name__ == "__main__":
    main()
