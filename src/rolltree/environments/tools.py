"""The names of `rolltree.tools` under the path they had first."""

from rolltree.tools.describe import (
    Tool,
    ToolArgumentError,
    ToolUnavailable,
    convert_func_to_oai_tool,
    result_text,
)

__all__ = [
    "Tool",
    "ToolArgumentError",
    "ToolUnavailable",
    "convert_func_to_oai_tool",
    "result_text",
]
