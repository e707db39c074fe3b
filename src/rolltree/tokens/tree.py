"""The token tree of a rollout: every model call is a path of ids in one radix tree.

`TokenTree` adds calls to the radix tree of `arena.py`: where each prompt and completion ends, and
the per-token streams. Calls get the handles 0, 1, 2, ... in order of insertion and are never
removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rolltree._helpers.html_view import html_table
from rolltree.tokens.arena import NO_TURN, ROOT, CallTable, Place, TokenArena
from rolltree.tokens.buffers import (
    MIN_LOGPROB,
    as_ids,
    check_labels,
    check_new_ids,
    checked_logprobs,
    same_ids,
)
from rolltree.tokens.serialize import load, save
from rolltree.tokens.streams import (
    ExtraStreams,
    PlacedStream,
    SampledStream,
    TokenStream,
)
from rolltree.values.errors import TokenError
from rolltree.values.types import FloatArray, IntArray

# A wrong `parent` differs near its end, since calls share their beginnings (design/0001).
_BOUNDARY_TOKENS = 64


class TokenTree:
    """All model calls of one rollout (or, merged, of a group) over shared token ids.

    `arena` holds the ids, `calls` one row per call, and `sampled` the streams with one number per
    sampled token (`logprob`, `temperature`, `version`, `weight`) or per prompt token
    (`prompt_mask`); `extra` holds named streams of any shape.

    Example:
        >>> tree = TokenTree()
        >>> first = tree.insert([5, 6], [7], logprobs=[-0.5])
        >>> second = tree.insert([5, 6, 7, 8], [9], logprobs=[-0.25], parent=first)
        >>> tree.prompt_ids(second).tolist(), tree.num_tokens
        ([5, 6, 7, 8], 5)
    """

    def __init__(self) -> None:
        self.arena = TokenArena()
        self.calls = CallTable()
        self.sampled: dict[str, SampledStream] = {
            "logprob": SampledStream(np.float32, MIN_LOGPROB, 0.0, optional=True),
            "temperature": SampledStream(np.float32),
            "version": SampledStream(np.int32),
            "weight": SampledStream(np.float32),
            "prompt_mask": SampledStream(np.float32),
        }
        self.extra = ExtraStreams()
        self.agents: list[str] = []

    def trim(self) -> None:
        """Free memory that is reserved for further calls; calls can still be inserted."""
        self.arena.trim()
        for stream in self.sampled.values():
            stream.buffer.trim()

    # -- insertion ---------------------------------------------------------------------------

    def insert(
        self,
        prompt_ids: ArrayLike,
        completion_ids: ArrayLike,
        *,
        logprobs: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        versions: ArrayLike = 0,
        mask: ArrayLike | None = None,
        prompt_mask: ArrayLike | None = None,
        agent: str = "",
        turn: int | None = None,
        parent: int | None = None,
        verify: bool = False,
        streams: Mapping[str, Any] | None = None,
    ) -> int:
        """Add one model call; return its handle. A call that is refused changes nothing.

        Args:
            prompt_ids: int `[_P]`, the whole prompt. int32 arrays are scanned at memcmp speed.
            completion_ids: int `[_C]`, the sampled ids, with the end token if it was sampled.
            logprobs: float `[_C]` of the distribution sampled from; None if unknown.
            temperature, versions, mask: one number, or one per sampled token. `mask` is the loss
                weight (default 1).
            prompt_mask: one number per prompt token; recorded, never trained.
            agent, turn: labels for turn samples and break reports.
            parent: the call whose prompt and completion this prompt extends, id for id; an int32
                array then costs O(new tokens). Its length and last 64 ids are checked; with
                `verify`, all ids.
            streams: name to `TokenStream`, `PlacedStream` or an array `[_C, ...]`.

        Raises:
            TokenError: the data contradicts itself, or `parent` is not a prefix.
        """
        prompt = as_ids(prompt_ids, "prompt_ids")
        # Only new ids need checks: matched ones were checked when they were added.
        if parent is None:
            known, place = self.arena.match(prompt)
        else:
            known, place = self._check_parent(parent, prompt, verify)
        return self._add(
            place,
            prompt[known:],
            len(prompt),
            as_ids(completion_ids, "completion_ids"),
            logprobs=logprobs,
            temperature=temperature,
            versions=versions,
            mask=mask,
            prompt_mask=prompt_mask,
            agent=agent,
            turn=turn,
            parent=-1 if parent is None else parent,
            streams=streams,
        )

    def insert_suffix(
        self,
        parent: int,
        suffix_ids: ArrayLike,
        completion_ids: ArrayLike,
        *,
        logprobs: ArrayLike | None = None,
        temperature: ArrayLike = 1.0,
        versions: ArrayLike = 0,
        mask: ArrayLike | None = None,
        agent: str = "",
        turn: int | None = None,
        streams: Mapping[str, Any] | None = None,
    ) -> int:
        """Add a call whose prompt is `parent`'s prompt and completion plus `suffix_ids`.

        O(new tokens): nothing before the suffix is read. Otherwise like `insert`.
        """
        self._check_call(parent)
        suffix = as_ids(suffix_ids, "suffix_ids")
        return self._add(
            self.calls.end(parent),
            suffix,
            self.path_len(parent) + len(suffix),
            as_ids(completion_ids, "completion_ids"),
            logprobs=logprobs,
            temperature=temperature,
            versions=versions,
            mask=mask,
            prompt_mask=None,
            agent=agent,
            turn=turn,
            parent=parent,
            streams=streams,
        )

    def _add(
        self,
        place: Place,
        new_prompt: IntArray,
        prompt_len: int,
        completion: IntArray,
        *,
        logprobs: ArrayLike | None,
        temperature: ArrayLike,
        versions: ArrayLike,
        mask: ArrayLike | None,
        prompt_mask: ArrayLike | None,
        agent: str,
        turn: int | None,
        parent: int,
        streams: Mapping[str, Any] | None,
    ) -> int:
        check_new_ids(new_prompt, "prompt_ids")
        check_new_ids(completion, "completion_ids")
        count = len(completion)
        sampled = self.sampled
        # Everything is checked before the arena grows, since nothing can be removed from it.
        weight = 1.0 if mask is None else sampled["weight"].check(mask, count, "mask")
        values: dict[str, float | NDArray[Any] | None] = {
            "logprob": None if logprobs is None else checked_logprobs(logprobs, count, weight),
            "temperature": sampled["temperature"].check(temperature, count, "temperature"),
            "version": sampled["version"].check(versions, count, "versions"),
            "weight": weight,
            "prompt_mask": 0.0
            if prompt_mask is None
            else sampled["prompt_mask"].check(prompt_mask, prompt_len, "prompt_mask"),
        }
        extra = self.extra.check_all(streams, prompt_len, count)
        check_labels(agent, turn)
        prompt_end = self.arena.extend(new_prompt, place)
        return self.record(
            prompt_end,
            self.arena.extend(completion, prompt_end),
            prompt_len,
            count,
            parent=parent,
            agent=agent,
            turn=turn,
            values=values,
            extra=extra,
        )

    def record(
        self,
        prompt_end: Place,
        end: Place,
        prompt_len: int,
        num_sampled: int,
        *,
        parent: int,
        agent: str,
        turn: int | None,
        values: Mapping[str, float | NDArray[Any] | None],
        extra: Mapping[str, TokenStream | PlacedStream],
    ) -> int:
        """Add the row of a call whose tokens are already in the arena and whose data was checked.

        For `rolltree.tokens` itself; other code calls `insert`.
        """
        handle = len(self.calls)
        self.calls.append(
            prompt_end,
            end,
            prompt_len=prompt_len,
            num_sampled=num_sampled,
            parent=parent,
            agent=self._agent_index(agent),
            turn=NO_TURN if turn is None else turn,
            num_tokens=self.arena.num_tokens,
            num_runs=self.arena.num_runs,
        )
        # Every stream gets an entry for every call, so that a handle is an index into each.
        for name, stream in self.sampled.items():
            stream.add(values[name])
        for name, checked in extra.items():
            self.extra.add(handle, name, checked)
        return handle

    def merge(self, other: TokenTree) -> int:
        """Add all calls of `other`; return the handle of its call 0 in this tree.

        Common prefixes are shared, and `other` does not change. O(unique tokens of `other`).

        Raises:
            TokenError: a named stream has a different kind, dtype or item shape in `other`.
        """
        # Checked before the first token is added.
        for name in other.extra.names():
            self.extra.check_kind(name, other.extra.kind(name))
        mapped = self.arena.absorb(other.arena)
        first = len(self.calls)

        def moved(token: int) -> Place:
            return self.arena.place(int(mapped[token])) if token >= 0 else ROOT

        for call in range(len(other.calls)):
            # Handles shift by the number of calls that are already here.
            parent = other.calls.parent[call]
            self.record(
                moved(other.calls.prompt_token[call]),
                moved(other.calls.end_token[call]),
                other.prompt_len(call),
                other.num_sampled(call),
                parent=parent + first if parent >= 0 else -1,
                agent=other.agent(call),
                turn=other.turn(call),
                values=other.values(call),
                extra=other.streams(call),
            )
        return first

    def copy_call(self, other: TokenTree, call: int) -> int:
        """Add one call of another tree; return its handle in this one."""
        prompt_len, count = other.prompt_len(call), other.num_sampled(call)
        checked = {
            name: self.extra.check(name, stream, prompt_len, count)
            for name, stream in other.streams(call).items()
        }
        prompt_end = self.arena.extend(other.prompt_ids(call))
        return self.record(
            prompt_end,
            self.arena.extend(other.completion_ids(call), prompt_end),
            prompt_len,
            count,
            # The call that it extends in the other tree may be missing here.
            parent=-1,
            agent=other.agent(call),
            turn=other.turn(call),
            values=other.values(call),
            extra=checked,
        )

    def label(
        self,
        call: int,
        *,
        agent: str = "",
        turn: int | None = None,
        streams: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the agent and turn of a call that was inserted without them, and add its streams.

        Raises:
            TokenError: a label or a stream does not fit the call; nothing is changed then.
        """
        self._check_call(call)
        checked = self.extra.check_all(streams, self.prompt_len(call), self.num_sampled(call))
        for name in checked:
            if self.extra.get(name, call) is not None:
                raise TokenError(
                    f"call {call} has a stream {name!r} already, and a tree is append-only. Use "
                    "another name."
                )
        # The last check: from here on nothing raises.
        check_labels(agent, turn)
        for name, value in checked.items():
            self.extra.add(call, name, value)
        self.calls.agent[call] = self._agent_index(agent)
        self.calls.turn[call] = NO_TURN if turn is None else turn

    def _agent_index(self, agent: str) -> int:
        if agent not in self.agents:
            self.agents.append(agent)
        return self.agents.index(agent)

    def _check_call(self, call: int) -> None:
        if not (isinstance(call, int | np.integer) and 0 <= call < len(self.calls)):
            raise TokenError(
                f"call {call!r} is not in this tree of {len(self.calls)} calls; a handle "
                "counts only in its own tree. To extend another rollout, insert the full prompt."
            )

    def _check_parent(self, parent: int, prompt: IntArray, verify: bool) -> tuple[int, Place]:
        self._check_call(parent)
        known, place = self.path_len(parent), self.calls.end(parent)
        # Comparing all ids would make the cost of T turns O(T^2).
        count = known if verify else min(known, _BOUNDARY_TOKENS)
        if known > len(prompt) or not same_ids(
            self.arena.path(place, count), prompt[known - count : known]
        ):
            raise TokenError(
                f"the prompt ({len(prompt)} ids) does not extend call {parent} ({known} ids); "
                "trusting `parent` would record tokens the engine never saw. Pass parent=None to "
                "have the prompt matched by id."
            )
        return known, place

    # -- bytes -------------------------------------------------------------------------------

    def to_bytes(self, since: int | None = None) -> bytes:
        """Return the tree as compact bytes, or only what calls `since`, `since + 1`, ... added.

        Pieces can be concatenated: `to_bytes()` after 3 calls plus `to_bytes(since=3)` is the whole
        tree. A call that is labelled after its piece was saved has its old label in the piece.
        """
        return save(self, 0 if since is None else since)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the tree of one piece, or of several that were concatenated in order.

        Raises:
            TokenError: the bytes are missing, truncated, of another format, contradict themselves,
                or hold a call that `insert` would refuse.
        """
        tree = cls()
        load(tree, data)
        return tree

    # Pickled in the checked format, without the unused space of the buffers.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    # -- reading -----------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """Return the calls as a table for a notebook, with the parent and sizes of each."""
        rows = [
            (
                *(call, self.agent(call), self.turn(call), self.parent(call)),
                *(self.prompt_len(call), self.num_sampled(call)),
            )
            for call in range(self.num_calls)
        ]
        heads = ("call", "agent", "turn", "parent", "prompt tokens", "sampled tokens")
        title = f"token tree: {self.num_calls} calls, {self.num_tokens:,} tokens stored"
        return html_table(title, heads, rows)

    @property
    def num_calls(self) -> int:
        """Number of calls inserted."""
        return len(self.calls)

    @property
    def num_tokens(self) -> int:
        """The number of unique tokens in the tree."""
        return self.arena.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, with their unused space."""
        columns = len(fields(CallTable)) * 4 * len(self.calls)
        sampled = sum(stream.nbytes for stream in self.sampled.values())
        return self.arena.nbytes + columns + sampled + self.extra.nbytes

    def prompt_len(self, call: int) -> int:
        """Return the number of prompt tokens."""
        return self.calls.prompt_len[call]

    def known_prompt_len(self, call: int) -> int:
        """Return a bound of how much of a prompt's beginning the calls inserted before it hold.

        It is exact unless trees were merged: their tokens arrive before the first of their calls.
        """
        calls, arena, end = self.calls, self.arena, self.calls.prompt_end(call)
        runs, tokens = (calls.num_runs[call - 1], calls.num_tokens[call - 1]) if call else (0, 0)
        while end.run >= runs:
            end = Place(arena.run_parent[end.run], arena.run_parent_run[end.run])
        # Only the arena's last run grows, so what is new in an old one is its end.
        return arena.depth(end) - max(0, end.token - tokens + 1)

    def num_sampled(self, call: int) -> int:
        """Return the number of sampled tokens."""
        return self.calls.num_sampled[call]

    def path_len(self, call: int) -> int:
        """Return the number of prompt and sampled tokens together."""
        return self.calls.prompt_len[call] + self.calls.num_sampled[call]

    def prompt_ids(self, call: int) -> IntArray:
        """Return a copy of the prompt, int32 `[_P]`."""
        return self.arena.path(self.calls.prompt_end(call), self.calls.prompt_len[call])

    def completion_ids(self, call: int) -> IntArray:
        """Return a copy of the sampled ids, int32 `[_C]`."""
        return self.arena.path(self.calls.end(call), self.calls.num_sampled[call])

    def path_ids(self, call: int) -> IntArray:
        """Return a copy of prompt and completion, int32 `[_P + _C]`."""
        return self.arena.path(self.calls.end(call), self.path_len(call))

    def path_view(self, call: int) -> IntArray:
        """Return prompt and completion, int32 `[_P + _C]`, read-only; no copy if in one run."""
        return self.arena.path_view(self.calls.end(call), self.path_len(call))

    def prompt_view(self, call: int) -> IntArray:
        """Return the prompt, int32 `[_P]`, read-only; no copy if it is in one run."""
        return self.arena.path_view(self.calls.prompt_end(call), self.calls.prompt_len[call])

    def _values(self, name: str, call: int, count: int) -> NDArray[Any]:
        values = self.sampled[name].get(call, count)
        assert values is not None, "only logprobs can be missing"
        return values.copy()

    def logprobs(self, call: int) -> FloatArray | None:
        """Return the behaviour logprobs, float32 `[_C]`, or None if the engine returned none."""
        values = self.sampled["logprob"].get(call, self.num_sampled(call))
        return None if values is None else values.copy()

    def temperature(self, call: int) -> FloatArray:
        """Return the sampling temperature of each sampled token, float32 `[_C]`."""
        return self._values("temperature", call, self.num_sampled(call))

    def versions(self, call: int) -> IntArray:
        """Return the policy version that sampled each token, int32 `[_C]`."""
        return self._values("version", call, self.num_sampled(call))

    def mask(self, call: int) -> FloatArray:
        """Return the loss weight of each sampled token, float32 `[_C]`."""
        return self._values("weight", call, self.num_sampled(call))

    def prompt_mask(self, call: int) -> FloatArray:
        """Return the recorded mask of each prompt token, float32 `[_P]`, usually zeros."""
        return self._values("prompt_mask", call, self.prompt_len(call))

    def value_range(self, name: str, call: int) -> tuple[Any, Any] | None:
        """Return the smallest and the largest value of a call in the stream `sampled[name]`.

        None if it has no values. A constant, such as the one temperature of most calls, is not
        expanded to an array.
        """
        # Only `prompt_mask` has a value per prompt token.
        size = self.prompt_len(call) if name == "prompt_mask" else self.num_sampled(call)
        return self.sampled[name].value_range(call, size)

    def agent(self, call: int) -> str:
        """Return the agent label."""
        return self.agents[self.calls.agent[call]]

    def turn(self, call: int) -> int | None:
        """Return the turn label, or None."""
        turn = self.calls.turn[call]
        return None if turn == NO_TURN else turn

    def parent(self, call: int) -> int | None:
        """Return the call that was passed as `parent` on insertion, or None."""
        parent = self.calls.parent[call]
        return None if parent < 0 else parent

    def values(self, call: int) -> dict[str, Any]:
        """Return a call's per-token values as they are stored: a number, an array or None."""
        prompt, sampled = self.prompt_len(call), self.num_sampled(call)
        return {
            name: stream.raw(call, prompt if name == "prompt_mask" else sampled)
            for name, stream in self.sampled.items()
        }

    def streams(self, call: int) -> dict[str, TokenStream | PlacedStream]:
        """Return the named extra streams of a call."""
        pairs = ((name, self.extra.get(name, call)) for name in self.extra.names())
        return {name: stream for name, stream in pairs if stream is not None}

    def stream(self, name: str, call: int) -> TokenStream | PlacedStream | None:
        """Return a named extra stream of a call, or None."""
        return self.extra.get(name, call)

    def find(self, ids: ArrayLike) -> int:
        """Return how many of `ids`, from the first on, form a path from the root of this tree."""
        return self.arena.match(as_ids(ids, "ids"), ROOT)[0]
