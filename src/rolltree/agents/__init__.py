"""Agents: models with a context, a parser and tools. One `act()` is one turn."""

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
    "SummaryCompaction",
    "ToolAgent",
    "TruncatedThinking",
]
