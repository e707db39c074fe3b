"""Tools: Python functions that a model can call, their schemas, and calling them.

`rolltree.inference` parses the calls that a model writes.
"""

from rolltree.tools.describe import Tool as Tool
from rolltree.tools.describe import ToolArgumentError as ToolArgumentError
from rolltree.tools.describe import ToolUnavailable as ToolUnavailable
from rolltree.tools.describe import convert_func_to_oai_tool as convert_func_to_oai_tool
from rolltree.tools.describe import result_text as result_text
from rolltree.tools.run import ToolProcessError as ToolProcessError
from rolltree.tools.run import ToolQuit as ToolQuit
from rolltree.tools.run import ToolTimeLimit as ToolTimeLimit
from rolltree.tools.run import answer_of as answer_of
from rolltree.tools.run import answer_request as answer_request
from rolltree.tools.run import call_function as call_function
from rolltree.tools.run import in_process as in_process
from rolltree.tools.run import is_plain as is_plain
from rolltree.tools.run import run_all as run_all
from rolltree.tools.run import side_by_side as side_by_side
from rolltree.tools.toolset import RawToolCall as RawToolCall
from rolltree.tools.toolset import Toolset as Toolset
from rolltree.tools.toolset import raw_tool_calls as raw_tool_calls
