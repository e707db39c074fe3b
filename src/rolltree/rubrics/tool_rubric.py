"""`ToolRubric`: how often tools were called, and how often in vain.

It knows tool calls in messages and `state["tool_errors"]`. It knows nothing about tools themselves.
It leaves out whether a call was useful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rolltree.parsers import Parser
from rolltree.rubrics.functions import RewardFunc, cheap
from rolltree.rubrics.rubric import Rubric
from rolltree.types import Messages, State


class ToolRubric(Rubric):
    """A rubric with metrics about tool calls, of weight 0.

    `total_tool_calls`, `failed_tool_calls` (the tool raised) and, for each tool, `<name>_calls`.

    Args:
        funcs, weights, parser: as in `Rubric`; the metrics come after these functions.
        tools: the functions, or their names. Calls of other names count in the total only.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | str] | None = None,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        super().__init__(funcs, weights, parser)
        self.tool_names = [
            tool if isinstance(tool, str) else str(getattr(tool, "__name__", tool))
            for tool in tools or ()
        ]
        self.add_metric(total_tool_calls)
        self.add_metric(failed_tool_calls)
        for name in self.tool_names:
            self.add_metric(_counter(name))


@cheap
def total_tool_calls(completion: Messages) -> float:
    """Return how many tool calls the model wrote."""
    return float(len(_called(completion)))


@cheap
def failed_tool_calls(state: State) -> float:
    """Return how many calls ended in an exception of the tool."""
    return float(len(state.get("tool_errors") or ()))


def _counter(tool: str) -> RewardFunc:
    @cheap
    def count(completion: Messages) -> float:
        return float(_called(completion).count(tool))

    count.__name__ = f"{tool}_calls"
    return count


def _called(completion: Messages) -> list[str]:
    if isinstance(completion, str):
        return []
    return [
        str((call.get("function") or {}).get("name") or "")
        for message in completion or ()
        if message.get("role") == "assistant"
        for call in message.get("tool_calls") or ()
    ]
