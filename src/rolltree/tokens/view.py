"""`step["tokens"]`: the five lists of spec 1, built from the token tree when somebody reads them.

`StepTokens` is a dict with the five keys. It stores a tree and a call handle; every read builds
fresh lists, so changing a returned list changes nothing: assign the key instead. What was assigned
stays with this view and wins over the tree.

Knows the tree's accessors. Leaves out reading the messages: see `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from rolltree.tokens.buffers import readable_floats
from rolltree.tokens.tree import TokenTree
from rolltree.types import FloatArray

TOKEN_KEYS = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "completion_logprobs",
)


def mask_list(weights: FloatArray) -> list[Any]:
    """Return loss weights as ints where all are whole numbers, else as floats."""
    whole = weights.astype(np.int64)
    return whole.tolist() if np.array_equal(whole, weights) else readable_floats(weights)


def _logprob_list(tree: TokenTree, call: int) -> list[float]:
    logprobs = tree.logprobs(call)
    return [] if logprobs is None else readable_floats(logprobs)


_READERS: dict[str, Callable[[TokenTree, int], list[Any]]] = {
    "prompt_ids": lambda tree, call: tree.prompt_ids(call).tolist(),
    "prompt_mask": lambda tree, call: mask_list(tree.prompt_mask(call)),
    "completion_ids": lambda tree, call: tree.completion_ids(call).tolist(),
    "completion_mask": lambda tree, call: mask_list(tree.mask(call)),
    "completion_logprobs": _logprob_list,
}


def _same(key: str, mine: Any, theirs: Any) -> bool:
    if mine == theirs or key != "completion_logprobs":
        return bool(mine == theirs)
    if not isinstance(theirs, list) or not all(isinstance(x, int | float) for x in theirs):
        return False
    return np.array_equal(np.array(mine, np.float32), np.array(theirs, np.float32))


class StepTokens(dict[str, Any]):
    """The tokens of one call, as a dict of lists that exist only while they are looked at.

    `completion_logprobs` is empty when the engine gave none. Reads, `==`, iteration, `json.dumps`,
    `copy` and `dict(...)` see lists. The plain dict below it holds None for what was not assigned,
    which is what readers that bypass Python methods would see: hand those `dict(view)`. Logprobs
    are float32, so `==` compares them as such.
    """

    __slots__ = ("call", "tree")

    def __init__(self, tree: TokenTree, call: int) -> None:
        super().__init__(dict.fromkeys(TOKEN_KEYS))
        self.tree = tree
        self.call = call

    @property
    def assigned(self) -> tuple[str, ...]:
        """The keys that were assigned after the call was recorded."""
        return tuple(
            key for key, value in dict.items(self) if value is not None or key not in _READERS
        )

    @property
    def as_recorded(self) -> bool:
        """Whether the tree still says all that training reads: no token key was assigned."""
        return not any(key in TOKEN_KEYS for key in self.assigned)

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if value is None and key in _READERS:
            return _READERS[key](self.tree, self.call)
        return value

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the list under `key`, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401 (this is get)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the list under `key`, after setting it to `default` when it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> Any:
        """Return the pairs of keys and lists."""
        return self.copy().items()

    def values(self) -> Any:
        """Return the lists."""
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict of lists."""
        return {key: self[key] for key in self}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or self.keys() != other.keys():
            return False
        return all(_same(key, self[key], other[key]) for key in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "the tokens of a recorded call cannot lose keys; training reads them later. Work on a "
            "copy: dict(step['tokens'])."
        )

    pop = popitem = clear = __delitem__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepTokens:
        copied = StepTokens(deepcopy(self.tree, memo), self.call)
        for key in self.assigned:
            copied[key] = deepcopy(dict.__getitem__(self, key), memo)
        return copied
