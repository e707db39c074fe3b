"""Tools of requests as the functions that chat templates know, and the way back.

A custom tool, which takes free text, is offered as a function with one argument, `input`. Functions
in a namespace are offered under a name that begins with it. Tools that the API's own servers would
run are left out, and noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from rolltree.gateway.messages import INPUT, input_of, text_at
from rolltree.values.types import ChatMessage, ToolSchema
from rolltree.web.guard import RequestError


@dataclass(slots=True)
class OfferedTools:
    """The functions that a prompt offers, the names of those that stand for custom tools, notes."""

    tools: list[ToolSchema] = field(default_factory=list)
    custom: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def chat_tools(listed: Sequence[Any]) -> OfferedTools:
    """Return the tools of chat completions.

    Raises:
        RequestError: one is not a tool; the error names its place.
    """
    offered = OfferedTools()
    for index, tool in enumerate(listed):
        where = f"tools[{index}]"
        match tool:
            case {"type": "custom", "custom": {}}:
                offered.tools.append(custom_tool(tool["custom"], f"{where}.custom"))
                offered.custom.append(tool["custom"]["name"])
            case {"function": {"name": str()}} if tool.get("type", "function") == "function":
                offered.tools.append(tool)
                offered.notes |= tool_notes(tool["function"])
            case {"type": str(kind)} if kind not in ("function", "custom"):
                offered.notes |= left_out(kind)
            case _:
                raise RequestError(f"{where} is not a tool: {shown(tool)}.", param=where)
    return offered


def chat_call(call: ChatMessage, custom: Sequence[str]) -> ChatMessage:
    """Return a finished call as chat completions have it: a custom tool's has its input."""
    function = call["function"]
    if function["name"] not in custom:
        return call
    text = input_of(function["arguments"])
    return {
        "id": call["id"],
        "type": "custom",
        "custom": {"name": function["name"], "input": text},
    }


TOOL_NOTES = {
    "strict": "schemas of tools are shown, and only a call that tool_choice forces is held to them",
    "defer_loading": "all tools are offered from the start",
    "input_examples": "chat templates have no place for examples of inputs",
    "output_schema": "chat templates have no place for the schema of a result",
}
"""Fields of tools that are taken without effect, and why."""


def tool_notes(tool: Mapping[str, Any]) -> dict[str, str]:
    """Return notes on the fields of a tool that are taken without effect."""
    return {name: why for name, why in TOOL_NOTES.items() if tool.get(name)}


def left_out(kind: str) -> dict[str, str]:
    """Return the note on a tool that neither the agent nor the gateway runs."""
    return {f"tools.{kind}": f"tools of type {kind} are run by nobody here, and not offered"}


def function_tool(tool: Mapping[str, Any]) -> ToolSchema:
    """Return a function in the form of chat completions."""
    return {"type": "function", "function": dict(tool)}


def custom_tool(tool: Mapping[str, Any], where: str) -> ToolSchema:
    """Return the function that stands for a custom tool; a grammar is shown, not enforced.

    Raises:
        RequestError: it has no name, or its format is unknown.
    """
    described = tool.get("description") or ""
    match tool.get("format") or {"type": "text"}:
        case {"type": "text"}:
            pass
        case {"type": "grammar", "grammar": {"definition": str(rules)}} | {
            "type": "grammar",
            "definition": str(rules),
        }:
            described += f"\n\nThe input follows this grammar:\n{rules}"
        case unknown:
            raise RequestError(
                f"{where}.format is {shown(unknown)}; known are text and grammar.",
                param=f"{where}.format",
            )
    function = {"name": text_at(tool.get("name"), f"{where}.name")}
    if described := text_at(described, f"{where}.description").strip():
        function["description"] = described
    text = {"type": "string", "description": "The input of the tool, as plain text."}
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return function_tool({**function, "parameters": schema})


def name_in(namespace: object, name: str, where: str) -> str:
    """Return the name under which a function of a namespace is offered.

    >>> name_in("mcp__files", "read", "tools[0]"), name_in(None, "read", "tools[0]")
    ('mcp__files__read', 'read')
    """
    if namespace in (None, ""):
        return name
    begin = text_at(namespace, f"{where}.namespace")
    return begin + name if begin.endswith("__") else f"{begin}__{name}"
