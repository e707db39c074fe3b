"""`ToolRubric`: a rubric with metrics about tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rolltree.environments.parsers import Parser
from rolltree.environments.rubrics.functions import RewardFunc, run_inline
from rolltree.environments.rubrics.rubric import Rubric
from rolltree.environments.tools import raw_tool_calls
from rolltree.values.types import ChatMessage, Messages, State


class ToolRubric(Rubric):
    """A rubric with metrics about tool calls, of weight 0.

    `total_tool_calls`, `failed_tool_calls` (the tool raised), `unreadable_tool_calls` and, for each
    tool, `<name>_calls`.

    Args:
        funcs, weights, parser: as in `Rubric`; the metrics come after these functions.
        tools: the functions, or their names. Calls of other tools count only in the total.
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
        self.add_metric(unreadable_tool_calls)
        for name in self.tool_names:
            self.add_metric(_counter(name))


@run_inline
def total_tool_calls(completion: Messages) -> float:
    """Return the number of tool calls that the model made."""
    return float(len(_called(completion)))


@run_inline
def failed_tool_calls(state: State) -> float:
    """Return the number of calls in which the tool raised."""
    return float(len(state.get("tool_errors") or ()))


@run_inline
def unreadable_tool_calls(completion: Messages) -> float:
    """Return the number of calls that could not be read, and so are in neither of the others."""
    problems = [message.get("parse_problems") or () for message in _messages(completion)]
    return float(sum(map(len, problems)))


def _counter(tool: str) -> RewardFunc:
    @run_inline
    def count(completion: Messages) -> float:
        return float(_called(completion).count(tool))

    count.__name__ = f"{tool}_calls"
    return count


def _called(completion: Messages) -> list[str]:
    return [call.name for message in _messages(completion) for call in raw_tool_calls(message)]


def _messages(completion: Messages) -> list[ChatMessage]:
    return [] if isinstance(completion, str) else completion or []
