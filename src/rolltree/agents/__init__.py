"""Agents: a model with a context, a parser and tools. One `act()` is one turn.

The room knows the client interface, messages, parsers and tools. It knows nothing about worlds or
protocols: somebody tells an agent what it observes and does what it decided.
"""

from rolltree.agents.agent import Agent
from rolltree.agents.context import (
    ContextStrategy,
    FullDialog,
    SlidingWindow,
    SummaryCompaction,
    TruncatedThinking,
)
from rolltree.agents.tool_agent import ReActAgent, ToolAgent
from rolltree.agents.tool_calls import (
    NativeCalls,
    ParsedCalls,
    ReActCalls,
    ToolCallFormat,
)

__all__ = [
    "Agent",
    "ContextStrategy",
    "FullDialog",
    "NativeCalls",
    "ReActAgent",
    "ReActCalls",
    "SlidingWindow",
    "ToolCallFormat",
    "ParsedCalls",
    "SummaryCompaction",
    "ToolAgent",
    "TruncatedThinking",
]
