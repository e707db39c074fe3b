"""Tools: Python functions that a model can call, their schemas, and calling them.

The room knows signatures, threads and time limits. It knows nothing about models, agents or
environments, and leaves out how a model spells a call (`rolltree.inference`).
"""

from rolltree.tools.describe import (
    Tool,
    ToolArgumentError,
    ToolUnavailable,
    convert_func_to_oai_tool,
    result_text,
)
from rolltree.tools.process import ToolProcessError, in_process
from rolltree.tools.run import (
    ToolQuit,
    ToolTimeLimit,
    answer_request,
    call_function,
    is_plain,
    run_all,
)

__all__ = [
    "Tool",
    "ToolArgumentError",
    "ToolUnavailable",
    "ToolProcessError",
    "ToolQuit",
    "ToolTimeLimit",
    "answer_request",
    "call_function",
    "convert_func_to_oai_tool",
    "in_process",
    "is_plain",
    "result_text",
    "run_all",
]
