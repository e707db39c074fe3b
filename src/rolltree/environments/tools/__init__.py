"""Tools: Python functions that a model can call, their schemas, and calling them.

`rolltree.inference` parses the calls that a model writes.
"""

from rolltree.environments.tools.run import (
    ToolProcessError,
    ToolQuit,
    ToolTimeLimit,
    answer_of,
    call_function,
    in_process,
    is_plain,
    run_all,
    side_by_side,
)
from rolltree.environments.tools.tool import (
    Tool,
    ToolArgumentError,
    ToolUnavailable,
    convert_func_to_oai_tool,
    result_text,
)
from rolltree.environments.tools.toolset import Toolset, raw_tool_calls, unreadable

__all__ = [
    "Tool",
    "ToolArgumentError",
    "ToolUnavailable",
    "ToolProcessError",
    "ToolQuit",
    "ToolTimeLimit",
    "Toolset",
    "answer_of",
    "call_function",
    "convert_func_to_oai_tool",
    "in_process",
    "is_plain",
    "raw_tool_calls",
    "unreadable",
    "result_text",
    "run_all",
    "side_by_side",
]
