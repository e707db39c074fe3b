"""Stores chat histories that share messages: each message once, O(new messages) per history.

Histories are paths in a trie of messages, so a prompt that continues an earlier prompt adds one
node per new message, and one that rewrites history adds nodes from the rewritten message on.
Strings (the completions endpoint) are paths of text pieces in the same way.

A history's reference is an integer (a trie node, -1 for the empty list), `{"t": node}` for a
string, None, or `{"v": value}` for anything that is not a chat history.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

from rolltree.store import dumps

Reference: TypeAlias = Any
_EMPTY = -1
MAX_MESSAGES = 2**27
MAX_CHARACTERS = 2**30
"""Limits of all histories together, unfolded: a thousand times the size of a long rollout."""


class MessageTable:
    """Collects histories. `add` returns a reference that `MessageReader.get` resolves.

    The messages must stay alive and unchanged while the table is filled.
    """

    def __init__(self) -> None:
        # The JSON texts of the distinct messages.
        self._texts: list[str] = []
        self._by_text: dict[str, int] = {}
        self._by_identity: dict[int, int] = {}
        self._nodes: dict[tuple[int, int], int] = {}
        self._pieces: list[tuple[int, str]] = []
        self._strings: dict[str, int] = {"": _EMPTY}

    @property
    def num_messages(self) -> int:
        """The number of distinct messages in the table."""
        return len(self._texts)

    @property
    def num_nodes(self) -> int:
        """The number of trie nodes of all histories together."""
        return len(self._nodes) + len(self._pieces)

    def add(self, history: Any, after: int = _EMPTY) -> Reference:
        """Add a history and return its reference. A string shares the prefix of an earlier one.

        With `after`, the reference of a list, `history` is appended to that list, at the cost of
        its own messages only.
        """
        if isinstance(history, str):
            return {"t": self._add_string(history)}
        if history is None:
            return None
        if not isinstance(history, list):
            return {"v": history}
        node = after
        for message in history:
            edge = (node, self._add_message(message))
            node = self._nodes.setdefault(edge, len(self._nodes))
        return node

    def _add_message(self, message: Any) -> int:
        # By identity first: T prompts of T messages would be T^2 messages to write as JSON. An id
        # is unique only while its object is alive, which the class requires.
        index = self._by_identity.get(id(message))
        if index is None:
            text = dumps(message)
            index = self._by_text.setdefault(text, len(self._texts))
            if index == len(self._texts):
                self._texts.append(text)
            self._by_identity[id(message)] = index
        return index

    def _add_string(self, text: str) -> int:
        if text in self._strings:
            return self._strings[text]
        # The newest first, since a prompt most likely continues the last one.
        known = next((s for s in reversed(self._strings) if text.startswith(s)), "")
        self._pieces.append((self._strings[known], text[len(known) :]))
        self._strings[text] = len(self._pieces) - 1
        return len(self._pieces) - 1

    def to_json(self, since: tuple[int, int, int] = (0, 0, 0)) -> str:
        """Return the table as JSON text for `MessageReader`; only what is new since a `size`."""
        texts, nodes, pieces = since
        added = ",".join(self._texts[texts:])
        edges = ",".join(
            f"[{node},{message}]" for node, message in islice(self._nodes, nodes, None)
        )
        strings = dumps([list(piece) for piece in self._pieces[pieces:]])
        return f'{{"messages":[{added}],"nodes":[{edges}],"pieces":{strings}}}'

    @property
    def size(self) -> tuple[int, int, int]:
        """The current size, for a later `to_json(since=...)`."""
        return len(self._texts), len(self._nodes), len(self._pieces)


class MessageReader:
    """Resolves references to histories in the data of `MessageTable.to_json` (`store.loads`).

    Histories share their message objects, as they did when they were recorded, but not their
    lists. `get` raises ValueError for a table that `MessageTable` cannot have written: one with
    cycles, or with histories of more than `MAX_MESSAGES` together.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._messages: Sequence[Any] = data["messages"]
        self._nodes: Sequence[Sequence[int]] = data["nodes"]
        self._pieces: Sequence[Any] = data["pieces"]
        self._num_messages = self._num_characters = 0

    def get(self, reference: Reference) -> Any:
        """Return the history of a reference."""
        if reference is None:
            return None
        if isinstance(reference, dict):
            return self._string(reference["t"]) if "t" in reference else reference["v"]
        path = []
        while reference != _EMPTY:
            parent, message = self._nodes[reference]
            # A node is written after its parent, so anything else is a forged table, perhaps with
            # a cycle that would never end.
            if not _EMPTY <= parent < reference:
                raise ValueError("a history begins with itself")
            path.append(self._messages[message])
            reference = parent
        # Histories share messages, so a small file could unfold until memory is full. That is why
        # the limit applies to the sum.
        self._num_messages += len(path)
        if self._num_messages > MAX_MESSAGES:
            raise ValueError(f"its histories have more than {MAX_MESSAGES:,} messages")
        return path[::-1]

    def _string(self, node: int) -> str:
        parts = []
        while node != _EMPTY:
            parent, piece = self._pieces[node]
            if not _EMPTY <= parent < node:
                raise ValueError("a text begins with itself")
            parts.append(piece)
            node = parent
        self._num_characters += sum(map(len, parts))
        if self._num_characters > MAX_CHARACTERS:
            raise ValueError(f"its texts have more than {MAX_CHARACTERS:,} characters")
        return "".join(reversed(parts))
