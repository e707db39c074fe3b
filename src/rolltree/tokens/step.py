"""`RecordedStep`: one model call as spec 1's step dict, whose parts are built when they are read.

T turns restate T prompts, each with the ids, masks and numbers of its call. A recorded step keeps
what is new in its prompt, the step before it, and a handle into the token tree; `prompt`,
`completion`, `tokens` and `extras` become lists and dicts when somebody reads them, and stay from
then on, so that changing them in place works as with any dict. `peek` reads without keeping.

Knows the step's keys and the tree's accessors. Leaves out which step continues which: see
`trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from rolltree.tokens.tree import TokenTree
from rolltree.tokens.view import StepTokens
from rolltree.types import ChatMessage, Messages, ModelResponse


class _Unread:
    def __repr__(self) -> str:
        return "<not read yet>"


_UNREAD: Any = _Unread()


class RecordedStep(dict[str, Any]):
    """A `TrajectoryStep` that a client's `ModelResponse` was recorded as.

    `head` is the step that this one's prompt continues, or None; `added` is what the prompt has
    beyond it. The dict below holds a marker for what was not read yet: readers that bypass Python
    methods fail on it, hand those `dict(step)`.
    """

    __slots__ = (
        "_added",
        "_answer",
        "_call_id",
        "_finish_reason",
        "_temperature",
        "call",
        "head",
        "tree",
    )

    def __init__(
        self,
        tree: TokenTree,
        call: int,
        response: ModelResponse,
        head: RecordedStep | None,
        added: Messages,
        completion: Messages,
    ) -> None:
        super().__init__(
            prompt=_UNREAD,
            completion=_UNREAD,
            response=response.raw,
            tokens=_UNREAD,
            reward=None,
            advantage=None,
            extras=_UNREAD,
        )
        self.tree = tree
        self.call = call
        self.head = head
        self._added = _packed(added)
        self._answer = _packed(completion)
        self._call_id = response.call_id
        self._finish_reason = response.finish_reason
        self._temperature = response.temperature

    @property
    def has_own_tokens(self) -> bool:
        """Whether nobody has read or assigned `tokens`: they are what the tree says."""
        return dict.__getitem__(self, "tokens") is _UNREAD

    def recorded_conversation(self) -> Messages:
        """Return prompt and completion as they were recorded; a list is a new one."""
        return self._build_prompt() + _unpacked(self._answer)  # type: ignore[operator]

    def words_after(self, step: object) -> Messages | None:
        """Return what this prompt adds to the conversation of `step`; None when that is not known.

        It is known where the prompt continues `step` and neither was changed since.
        """
        if step is not self.head or self.head is None or self.head.is_changed():
            return None
        return None if self.is_changed() else _unpacked(self._added)

    def is_changed(self) -> bool:
        """Whether prompt or completion are no longer as they were recorded."""
        prompt, completion = dict.get(self, "prompt"), dict.get(self, "completion")
        return not (
            (prompt is _UNREAD or prompt == self._build_prompt())
            and (completion is _UNREAD or completion == _unpacked(self._answer))
        )

    def _build_prompt(self) -> Messages:
        parts: list[Messages] = []
        step: RecordedStep | None = self
        while step is not None:
            parts.append(_unpacked(step._added))
            step = step.head
            if step is not None:
                parts.append(_unpacked(step._answer))
        if isinstance(parts[0], str):
            return "".join(reversed(parts))  # type: ignore[arg-type]
        return [message for part in reversed(parts) for message in part]  # type: ignore[misc]

    def _build_extras(self) -> dict[str, Any]:
        tree, call = self.tree, self.call
        extras: dict[str, Any] = {
            "agent": tree.agent(call),
            "turn": tree.turn(call),
            "call_id": self._call_id,
            "finish_reason": self._finish_reason.value,
            "temperature": self._temperature,
            "num_prompt_tokens": tree.prompt_len(call),
            "num_completion_tokens": tree.num_sampled(call),
        }
        versions = tree.versions(call)
        if len(versions):
            extras["policy_version_min"] = int(versions.min())
            extras["policy_version_max"] = int(versions.max())
        return extras

    def peek(self, key: str) -> Any:
        """Return `self[key]` without keeping what was built for it: for readers that only look."""
        value = dict.__getitem__(self, key)
        return _BUILDERS[key](self) if value is _UNREAD else value

    # -- as a dict -----------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if value is _UNREAD:
            value = _BUILDERS[key](self)
            dict.__setitem__(self, key, value)
        return value

    def __iter__(self) -> Iterator[str]:  # `dict(step)` and `{**step}` then ask __getitem__
        return dict.__iter__(self)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401 (this is get)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, after setting it to `default` when it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        """Remove `key` and return its value (or `default` when given)."""
        if key not in self:
            return dict.pop(self, key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the last key and return it with its value."""
        key = next(reversed(self), None)
        return dict.popitem(self) if key is None else (key, self.pop(key))

    def items(self) -> Any:
        """Return the pairs of keys and values."""
        return self.copy().items()

    def values(self) -> Any:
        """Return the values."""
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict with the same values."""
        return {key: self[key] for key in self}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(peek(self, k) == peek(other, k) for k in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def __repr__(self) -> str:
        return repr({key: self.peek(key) for key in self})

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return a plain dict; its tokens lie in the copy of the tree that `memo` knows."""
        copied: dict[str, Any] = {}
        memo[id(self)] = copied
        copied.update({key: deepcopy(self.peek(key), memo) for key in self})
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, ({key: self.peek(key) for key in self},)


_BUILDERS: dict[str, Callable[[RecordedStep], Any]] = {
    "prompt": RecordedStep._build_prompt,
    "completion": lambda step: _unpacked(step._answer),
    "tokens": lambda step: StepTokens(step.tree, step.call),
    "extras": RecordedStep._build_extras,
}


def peek(step: Mapping[str, Any], key: str) -> Any:
    """Return `step.get(key)`; a recorded step keeps nothing of what is built for it."""
    if isinstance(step, RecordedStep):
        return step.peek(key) if key in step else None
    return step.get(key)


def _packed(messages: Messages) -> str | ChatMessage | tuple[ChatMessage, ...]:
    """Return messages in little memory: the one message itself, or a tuple."""
    if isinstance(messages, str):
        return messages
    return messages[0] if len(messages) == 1 else tuple(messages)


def _unpacked(packed: str | ChatMessage | tuple[ChatMessage, ...]) -> Messages:
    """Return what `_packed` was given; a list is a new one."""
    if isinstance(packed, str):
        return packed
    return list(packed) if isinstance(packed, tuple) else [packed]
