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
    side_by_side,
)
from rolltree.environments.tools.tool import (
    Tool,
    ToolUnavailable,
    convert_func_to_oai_tool,
)
from rolltree.environments.tools.toolset import Toolset, raw_tool_calls, unreadable

__all__ = [
    "Tool",
    "ToolUnavailable",
    "ToolProcessError",
    "ToolQuit",
    "ToolTimeLimit",
    "Toolset",
    "answer_of",
    "call_function",
    "convert_func_to_oai_tool",
    "in_process",
    "raw_tool_calls",
    "unreadable",
    "side_by_side",
]
