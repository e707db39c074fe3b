"""Step dicts as views of the token tree: `RecordedStep` and its `StepTokens`.

T turns repeat T prompts, each with the ids, masks and numbers of its call. A recorded step keeps
only the new part of its prompt, the step before it, and a handle into the token tree. The values of
a step and of its `StepTokens` become lists and dicts when they are first read, and are kept from
then on, so that changing them in place works as in any dict; `peek` reads without keeping.

Code that bypasses Python methods sees markers instead of values: pass it `dict(step)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import product
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rolltree.tokens.buffers import readable_floats
from rolltree.tokens.tree import TokenTree
from rolltree.values.steps import MAX_REWARD
from rolltree.values.types import ChatMessage, FinishReason, FloatArray, Messages, ModelResponse

TOKEN_KEYS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "completion_logprobs",
)


class _Unread:
    def __repr__(self) -> str:
        return "<not read yet>"


_UNREAD: Any = _Unread()


class LazyDict(dict[str, Any]):
    """A dict that builds the values that hold the marker `_UNREAD` when they are read."""

    __slots__ = ()
    _builders: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def peek(self, key: str) -> Any:
        """Return `self[key]` without keeping the built value, for readers that do not change it."""
        value = dict.__getitem__(self, key)
        return self._builders[key](self) if self._is_unread(key, value) else value

    def _is_unread(self, key: str, value: Any) -> bool:
        return value is _UNREAD and key in self._builders

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if self._is_unread(key, value):
            value = self._builders[key](self)
            dict.__setitem__(self, key, value)  # else an edit in place would change a copy
        return value

    def __iter__(self) -> Iterator[str]:  # makes `dict(step)` and `{**step}` call __getitem__
        return dict.__iter__(self)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401 (this is get)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value under `key`, after setting it to `default` if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> Any:
        """Return the pairs of keys and values."""
        # dict's own view would show the markers.
        return self.copy().items()

    def values(self) -> Any:
        """Return the values."""
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict with the same values."""
        return {key: self[key] for key in self}

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def _same(self, key: str, mine: Any, theirs: Any) -> bool:
        return bool(mine == theirs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or self.keys() != other.keys():
            return False
        return all(self._same(key, self.peek(key), peek(other, key)) for key in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def __repr__(self) -> str:
        return repr({key: self.peek(key) for key in self})

    # A single step is pickled as plain data; a `Trajectory` keeps the sharing.
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, ({key: self.peek(key) for key in self},)


# -- the tokens of a step ------------------------------------------------------------------------


def mask_list(weights: FloatArray) -> list[Any]:
    """Return loss weights as ints if all are whole numbers, else as floats."""
    whole = weights.astype(np.int64)
    return whole.tolist() if np.array_equal(whole, weights) else readable_floats(weights)


def _logprob_list(view: StepTokens) -> list[float]:
    logprobs = view.tree.logprobs(view.call)
    return [] if logprobs is None else readable_floats(logprobs)


class StepTokens(LazyDict):
    """The tokens of one call, as a dict of lists that are built when they are first read.

    `completion_logprobs` is empty if the engine returned none. Values that were assigned or edited
    in place override the tree; None counts as in a plain dict: no logprobs, or no mask. Logprobs
    are float32, and `==` compares them as such.
    """

    __slots__ = ("_held", "_seen", "call", "tree")
    _builders: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "prompt_ids": lambda view: view.tree.prompt_ids(view.call).tolist(),
        "prompt_mask": lambda view: mask_list(view.tree.prompt_mask(view.call)),
        "completion_ids": lambda view: view.tree.completion_ids(view.call).tolist(),
        "completion_mask": lambda view: mask_list(view.tree.mask(view.call)),
        "completion_logprobs": _logprob_list,
    }

    def __init__(self, tree: TokenTree, call: int) -> None:
        super().__init__(dict.fromkeys(TOKEN_KEYS, _UNREAD))
        self.tree = tree
        self.call = call
        # An author's own dict, and the values of its keys when it was last read.
        self._held: Mapping[str, Any] | None = None
        self._seen: tuple[Any, ...] = ()

    def peek(self, key: str) -> Any:
        """Return `self[key]` without keeping the built value."""
        self._follow()
        return super().peek(key)

    def __getitem__(self, key: str) -> Any:
        self._follow()
        return super().__getitem__(key)

    @property
    def assigned(self) -> tuple[str, ...]:
        """The keys whose values differ from the record: they were assigned or edited in place."""
        self._follow()
        return tuple(key for key, value in dict.items(self) if self._differs(key, value))

    @property
    def as_recorded(self) -> bool:
        """Whether the tree still has all that training reads, since no token key was changed."""
        return not any(key in TOKEN_KEYS for key in self.assigned)

    def _differs(self, key: str, value: Any) -> bool:
        if self._is_unread(key, value):
            return False
        if key not in self._builders or not isinstance(value, list):
            return True
        return not self._same(key, self._builders[key](self), value)

    def hold(self, tokens: Mapping[str, Any]) -> None:
        """Use the author's own lists as values of this view, if they equal the recorded ones.

        The author's code may still refer to these lists or this dict, and edit them later.
        """
        for key, value in tokens.items():
            if key not in self._builders:
                self[key] = value
            elif isinstance(value, list) and not self._differs(key, value):
                dict.__setitem__(self, key, value)
        if isinstance(tokens, dict):
            self._held, self._seen = tokens, tuple(map(tokens.get, TOKEN_KEYS))

    def _follow(self) -> None:
        """Take over values that were assigned, since the last read, in the dict of `hold`."""
        if self._held is None:
            return
        values = tuple(map(self._held.get, TOKEN_KEYS))
        for key, value, before in zip(TOKEN_KEYS, values, self._seen, strict=True):
            if value is not before:
                dict.__setitem__(self, key, value)
        self._seen = values

    def _same(self, key: str, mine: Any, theirs: Any) -> bool:
        if mine == theirs or key != "completion_logprobs":
            return bool(mine == theirs)
        if not isinstance(theirs, list) or not all(isinstance(x, int | float) for x in theirs):
            return False
        return np.array_equal(np.array(mine, np.float32), np.array(theirs, np.float32))

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "the tokens of a recorded call cannot lose keys; training reads them later. Work on a "
            "copy: dict(step['tokens'])."
        )

    pop = popitem = clear = __delitem__ = _refuse

    # `memo` makes all steps of a trajectory share one copy of the tree.
    def __deepcopy__(self, memo: dict[int, Any]) -> StepTokens:
        copied = StepTokens(deepcopy(self.tree, memo), self.call)
        for key in self.assigned:
            copied[key] = deepcopy(dict.__getitem__(self, key), memo)
        return copied


# -- the step ------------------------------------------------------------------------------------


_NO_INFO: Mapping[str, Any] = {}


class KeptResponse(NamedTuple):
    """The values of its `ModelResponse` that a step keeps, copies, pickles and stores.

    The tree has the rest: ids, logprobs, versions, routed experts. A new field of a call has to be
    added in two places, in `ModelResponse` and here; the store writes all fields of this class
    (`rolltree.rollouts.record_steps`), and a test fails if a field is lost on the way.
    """

    message: ChatMessage
    text: str
    finish_reason: FinishReason
    temperature: float
    call_id: int
    extends: int | None
    wait_s: float
    id: str
    model: str | None
    sent_s: float
    time_s: float
    info: Mapping[str, Any]

    @classmethod
    def of(cls, response: ModelResponse) -> KeptResponse:
        """Return the part of a response that a step keeps."""
        # Most calls have no `info`; a million of them share one empty dict.
        return cls._make((*_kept_of(response), response.info or _NO_INFO))


_kept_of = attrgetter(*(name for name in KeptResponse._fields if name != "info"))


class RecordedStep(LazyDict):
    """The `TrajectoryStep` of a client's `ModelResponse`.

    `head` is the step that this one's prompt continues, or None; `added` is the part of the prompt
    after it. Of the response, the step keeps what the tree does not have.
    """

    __slots__ = ("_added", "_answer", "_kept", "call", "head", "tree")
    _builders: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "prompt": lambda step: step._build_prompt(),
        "completion": lambda step: _unpacked(step._answer),
        "response": lambda step: step._build_response(),
        "tokens": lambda step: StepTokens(step.tree, step.call),
        "extras": lambda step: step.recorded_extras(),
    }

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
            # A marker instead of None, because an author may assign None.
            prompt=_UNREAD,
            completion=_UNREAD,
            # A wrapped client's own object is kept, since it cannot be built again.
            response=_UNREAD if response.raw is None else response.raw,
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
        self._kept = KeptResponse.of(response)

    @property
    def has_own_tokens(self) -> bool:
        """Whether `tokens` was neither read nor assigned, so that the tree holds its values."""
        return dict.get(self, "tokens") is _UNREAD

    @property
    def response_record(self) -> Any:
        """The response without its arrays, which the tree has; or the value that was assigned."""
        value = dict.get(self, "response")
        return self._response() if value is _UNREAD else value

    def recorded_conversation(self) -> Messages:
        """Return the prompt and completion as they were recorded; a list is a new object."""
        return self._build_prompt() + _unpacked(self._answer)  # type: ignore[operator]

    def new_messages(self, step: object) -> Messages | None:
        """Return what this prompt adds to the conversation of `step`; None if that is not known.

        It is known if the prompt continues `step` and neither was changed since.
        """
        # By identity: an equal step of another conversation proves nothing about this prompt.
        if step is not self.head or self.head is None or self.head.is_changed():
            return None
        return None if self.is_changed() else _unpacked(self._added)

    def is_changed(self) -> bool:
        """Whether prompt or completion differ from the record."""
        prompt, completion = dict.get(self, "prompt"), dict.get(self, "completion")
        return not (
            (prompt is _UNREAD or prompt == self._build_prompt())
            and (completion is _UNREAD or completion == _unpacked(self._answer))
        )

    def _build_prompt(self) -> Messages:
        parts: list[Messages] = []
        step: RecordedStep | None = self
        # A loop instead of recursion, because a rollout of many turns is a long chain.
        while step is not None:
            parts.append(_unpacked(step._added))
            step = step.head
            if step is not None:
                parts.append(_unpacked(step._answer))
        if isinstance(parts[0], str):
            return "".join(reversed(parts))  # type: ignore[arg-type]
        return [message for part in reversed(parts) for message in part]  # type: ignore[misc]

    def _response(self, **arrays: Any) -> ModelResponse:
        tree, call = self.tree, self.call
        return ModelResponse(
            **self._kept._asdict(),
            num_prompt_tokens=tree.prompt_len(call),
            num_completion_tokens=tree.num_sampled(call),
            **arrays,
        )

    def _build_response(self) -> ModelResponse:
        tree, call = self.tree, self.call
        # With its place, so that logprobs and prompt come from the tree.
        return self._response(
            completion_ids=tree.completion_ids(call),
            versions=tree.versions(call),
            place=(tree, call),
        )

    def recorded_extras(self) -> dict[str, Any]:
        """Return the extras as they were recorded, in a new dict."""
        tree, call = self.tree, self.call
        kept = self._kept
        extras: dict[str, Any] = {
            "agent": tree.agent(call),
            "turn": tree.turn(call),
            "call_id": kept.call_id,
            "finish_reason": kept.finish_reason.value,
            "temperature": kept.temperature,
            "num_prompt_tokens": tree.prompt_len(call),
            "num_completion_tokens": tree.num_sampled(call),
        }
        versions = tree.value_range("version", call)
        if versions is not None:
            extras["policy_version_min"], extras["policy_version_max"] = map(int, versions)
        if "sampling" in kept.info:
            extras["sampling"] = kept.info["sampling"]
        return extras

    def pop(self, key: str, *default: Any) -> Any:
        """Remove `key` and return its value; if it is missing, `default` if given."""
        if key not in self:
            return dict.pop(self, key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Remove the last key and return it with its value."""
        key = next(reversed(self), None)
        return dict.popitem(self) if key is None else (key, self.pop(key))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """Return a plain dict; its tokens are in the copy of the tree that `memo` has."""
        copied: dict[str, Any] = {}
        # Noted first, for a step that refers to itself.
        memo[id(self)] = copied
        copied.update({key: deepcopy(self.peek(key), memo) for key in self})
        return copied

    # -- in a copied or pickled trajectory ---------------------------------------------------

    def to_parts(self, places: Mapping[int, int]) -> tuple[Any, ...]:
        """Return the arguments of `from_parts`; `places` has the indices of steps by `id`."""
        place = None if self.head is None else places.get(id(self.head))
        # Without its head, as in a slice, the step needs the whole prompt.
        added = self._build_prompt() if place is None else _unpacked(self._added)
        kept = {key: value for key, value in dict.items(self) if not self._is_unread(key, value)}
        tokens = kept.pop("tokens", None)
        if isinstance(tokens, StepTokens) and tokens.tree is self.tree:
            kept["tokens"] = (tokens.call, {name: tokens[name] for name in tokens.assigned})
        elif "tokens" in self and not self.has_own_tokens:
            kept["tokens"] = tokens
        # Removed keys stay removed.
        gone = [key for key in self._builders if key not in self]
        return self.call, self._response(), place, added, _unpacked(self._answer), kept, gone

    @staticmethod
    def from_parts(tree: TokenTree, parts: tuple[Any, ...], steps: list[Any]) -> RecordedStep:
        """Return the step that `to_parts` took apart; `steps` are the earlier ones."""
        call, response, place, added, completion, kept, gone = parts
        head = None if place is None else steps[place]
        step = RecordedStep(tree, call, response, head, added, completion)
        if isinstance(kept.get("tokens"), tuple):
            kept["tokens"], assigned = StepTokens(tree, kept["tokens"][0]), kept["tokens"][1]
            kept["tokens"].update(assigned)
        dict.update(step, kept)
        for key in gone:
            dict.pop(step, key)
        return step


def peek(step: Mapping[str, Any], key: str) -> Any:
    """Return `step.get(key)`; a recorded step does not keep the value that it builds."""
    if isinstance(step, LazyDict):
        return step.peek(key) if key in step else None
    return step.get(key)


def assigned_value(step: Mapping[str, Any], key: str) -> Any:
    """Return `step.get(key)`; None as well for what a recorded step builds itself."""
    value = dict.get(step, key) if isinstance(step, LazyDict) else step.get(key)
    return None if value is _UNREAD else value


def is_plain_step(step: Any) -> bool:
    """Whether a step is a dict that surely holds what its keys take, as nearly all steps do."""
    # Exact types, since a class of an environment's author may raise when it is read.
    if type(step) not in _STEPS:
        return False
    get = dict.get
    reward, advantage = get(step, "reward"), get(step, "advantage")
    return (
        (type(get(step, "prompt")), type(get(step, "completion"))) in _MESSAGES
        and "reward" in step
        and (get(step, "extras") is _UNREAD or not odd_extras(get(step, "extras")))
        and (reward is None or (type(reward) is float and abs(reward) <= MAX_REWARD))
        and (advantage is None or (type(advantage) is float and abs(advantage) <= MAX_REWARD))
    )


_STEPS = (RecordedStep, dict)
# Of prompt and completion; a text beside what was not read needs a longer look.
_MESSAGES = frozenset([(str, str), *product((list, _Unread), repeat=2)])
_OF_EXTRAS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("agent", "finish_reason"), (str, type(None))),
    "temperature": (int, float, type(None)),
}


def odd_extras(extras: Any) -> list[str]:
    """Return the keys of a step's extras whose values nobody can store; all of anything else."""
    if type(extras) is not dict:
        return list(_OF_EXTRAS)
    return [key for key, kinds in _OF_EXTRAS.items() if type(extras.get(key)) not in kinds]


def num_call_tokens(step: Mapping[str, Any]) -> int:
    """Return the number of prompt and sampled tokens of a step's call, as far as it is known."""
    tokens = peek(step, "tokens")
    if isinstance(tokens, StepTokens) and tokens.as_recorded:
        return tokens.tree.path_len(tokens.call)
    try:
        return len(tokens["prompt_ids"]) + len(tokens["completion_ids"])
    except (TypeError, KeyError):  # the server returned no ids, or an environment wrote others
        extras = peek(step, "extras") or {}
        counts = (extras.get(key) for key in ("num_prompt_tokens", "num_completion_tokens"))
        return sum(count for count in counts if isinstance(count, int))


def _packed(messages: Messages) -> str | ChatMessage | tuple[ChatMessage, ...]:
    """Return messages in a compact form: a single message itself, else a tuple."""
    if isinstance(messages, str):
        return messages
    return messages[0] if len(messages) == 1 else tuple(messages)


def _unpacked(packed: str | ChatMessage | tuple[ChatMessage, ...]) -> Messages:
    """Return the messages that `_packed` got; a list is a new object."""
    if isinstance(packed, str):
        return packed
    return list(packed) if isinstance(packed, tuple) else [packed]
