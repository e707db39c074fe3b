"""Finds the earlier call that a prompt continues: the messages of a rollout as a trie.

A path from the root is a message history; the node of a call's answer holds that call. A lookup
walks down the trie, so the longest earlier call is found whatever the number of calls, agents or
branches. A message is compared with a shallow copy taken when it was first seen, so a message with
a replaced field is a different one; edits inside a field go unnoticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from rolltree._helpers.untrusted import read_json
from rolltree.values.types import ChatMessage, ToolSchema

_Defaults: TypeAlias = Mapping[str, Mapping[str, Any]]
"""For each function that a prompt offers, the arguments that have a default, and its value."""


class _Node:
    __slots__ = ("call", "children", "defaults", "message", "snapshot")

    def __init__(
        self, message: ChatMessage | None, defaults: _Defaults, call: int | None = None
    ) -> None:
        self.message, self.defaults = message, defaults
        self.snapshot = None if message is None else dict(message)
        self.children: list[_Node] = []
        self.call = call

    def find(self, message: ChatMessage) -> list[_Node]:
        """Return the children that equal `message`: the same object first, then the latest."""
        children = self.children
        if len(children) == 1 and children[0].snapshot == message:  # by far the most frequent
            return children
        equal = [
            child for child in reversed(children) if _equal(child.snapshot, message, self.defaults)
        ]
        if len(equal) > 1:
            # Agents usually send back the very message that they got.
            equal.sort(key=lambda child: (child.message is not message, child.snapshot != message))
        return equal


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier call, whose prompt and answer are the first `num_old` messages of a history."""

    call: int
    num_old: int


class MessageIndex:
    """The calls of one rollout (their call ids), found by message history.

    Histories are kept apart by `key` (such as the model's name) and by tools, since both change
    what a prompt looks like from its first token on.
    """

    def __init__(self) -> None:
        self._roots: list[tuple[object, list[ToolSchema], _Node]] = []
        self._walked: tuple[Sequence[ChatMessage] | None, int, _Node | None]
        self._walked = (None, 0, None)  # the last history looked up, and how far it was known

    def find(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] | None = None,
        key: object = None,
    ) -> Match | None:
        """Return the longest call that `messages` continue, or None."""
        nodes = [self._root(tools, key)]  # several if calls gave equal answers
        match = None
        depth = 0
        for message in messages:
            if len(nodes) == 1:
                found = nodes[0].find(message)
            else:
                found = [child for node in nodes for child in node.find(message)]
            if not found:
                break
            nodes = found
            depth += 1
            for node in nodes:
                if node.call is not None:
                    # `find` puts the most likely node first.
                    match = Match(node.call, depth)
                    break
        self._walked = (messages, depth, nodes[0])
        return match

    def add(
        self,
        messages: Sequence[ChatMessage],
        answer: ChatMessage,
        call: int,
        tools: Sequence[ToolSchema] | None = None,
        key: object = None,
    ) -> None:
        """Note that `call` answered `messages` with `answer`."""
        # A prompt is looked up before it is answered: this continues where that walk ended, so a
        # turn costs only its new messages.
        walked, depth, node = self._walked
        if walked is not messages or node is None:
            depth, node = 0, self._root(tools, key)
        for message in itertools.islice(messages, depth, None):
            found = node.find(message)
            if found:
                node = found[0]
            else:
                node.children.append(_Node(message, node.defaults))
                node = node.children[-1]
        node.children.append(_Node(answer, node.defaults, call))

    def _root(self, tools: Sequence[ToolSchema] | None, key: object) -> _Node:
        wanted = list(tools or ())
        for known_key, known_tools, root in self._roots:
            if known_key == key and known_tools == wanted:
                return root
        root = _Node(None, _defaults_of(wanted))
        self._roots.append((key, wanted, root))
        return root


def _equal(known: ChatMessage | None, message: ChatMessage, defaults: _Defaults) -> bool:
    if known is None or known == message:
        return known is not None
    if known.get("role") != "assistant" or message.get("role") != "assistant":
        return False
    # Agents may send answers back without reasoning, ids or white space, or with the defaults of
    # arguments filled in, but what the model decided is the same.
    if _content(known) != _content(message):
        return False
    return _calls(known, defaults) == _calls(message, defaults)


def _content(message: ChatMessage) -> Any:
    """Return the content; the space around it, which many agents strip, does not count."""
    content = message.get("content") or ""
    return content.strip() if isinstance(content, str) else content


def _calls(message: ChatMessage, defaults: _Defaults) -> list[tuple[Any, Any]]:
    """Return each tool call's name, and the arguments that differ from their defaults."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = _field(call, "function") or {}
        arguments = _field(function, "arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):
                # Some servers send an empty string for empty arguments, while agents write `{}`.
                arguments = read_json(arguments or "{}")
        name = _field(function, "name")
        if isinstance(arguments, dict) and (known := defaults.get(name)):
            arguments = {
                key: value
                for key, value in arguments.items()
                if not (key in known and value == known[key] and type(value) is type(known[key]))
            }
        calls.append((name, arguments))
    return calls


def _defaults_of(tools: Sequence[ToolSchema]) -> _Defaults:
    """Return the defaults in the schemas of tools, which may have any shape."""
    defaults: dict[str, dict[str, Any]] = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": {**schemas}}}}:
                defaults[name] = {
                    str(key): schema["default"]
                    for key, schema in schemas.items()
                    if isinstance(schema, Mapping) and "default" in schema
                }
    return defaults


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
