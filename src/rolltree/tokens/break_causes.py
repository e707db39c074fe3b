"""Explains why a prompt does not extend an earlier call: position, surroundings and a cause.

Causes are derived from ids alone if those suffice; with a decoder, which the caller passes, equal
text with different ids is detected, too, and with the messages what ids cannot tell. A prompt that
extends no earlier call begins a new sample.

The first rule that holds gives the cause:

1. `agent_handoff`: this agent has no earlier call in the rollout.
2. `sampled_again`: the prompt is that of the earlier call.
3. `another_conversation` (messages only): no earlier answer is in the prompt, and the system
   message is another one, or the only exchange before began with another question; or it begins
   with another question while a call that asked for tools waits for them, as a sub-agent does.
4. `retokenized` (decoder only): after the divergence both sides decode to the same text.
5. `system_or_tools_changed`: the prompt diverges before the first sampled token, and all sampled
   tokens survive after the change.
6. `reasoning_stripped`: the prompt diverges within 32 tokens of the start of a sampled completion,
   whose beginning is gone and whose end survives; and with the messages, all that was said does.
7. `compaction`: sampled completions are gone and the prompt became shorter, or the history after
   them survives.
8. `history_rewritten`: everything else, including a rollback to an earlier point.

In 2 and 3 nothing was changed, so these are not breaks (`Break.is_break`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rolltree.tokens.arena import ROOT, Place
from rolltree.tokens.breaks import Break, BreakCause, Decoder, Dialogue, system_and_rest
from rolltree.tokens.tree import TokenTree
from rolltree.values.types import IntArray, text_of

# In tokens: how much a report shows on each side, and how far the rules below look.
NEIGHBOURHOOD_TOKENS = 16
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 64
_FRONT_TOKENS = 32
_GLUE_TOKENS = 16
_CLEAR_TOKENS = 16  # that many equal ones are the same text
# Ends of the marks that begin or end reasoning in common templates.
_MARKERS = ("think>", "reasoning>", "thought>", "analysis", "[/THINK]")


@dataclass(frozen=True)
class _Divergence:
    """Both sides of a break from the first differing token on, and where completions are."""

    position: int
    context: IntArray
    previous: IntArray
    current: IntArray
    sampled: tuple[tuple[int, int], ...]
    first_prompt_len: int
    decode: Decoder | None
    was: Dialogue
    now: Dialogue
    is_delegated: Callable[[], bool]

    @cached_property
    def surviving(self) -> int:
        """The number of last ids of the previous path that occur in the new prompt."""
        return surviving_tail(self.previous, self.current)[0]

    @cached_property
    def end(self) -> int:
        """The length of the previous path."""
        return self.position + len(self.previous)


def surviving_tail(old: IntArray, new: IntArray) -> tuple[int, int]:
    """Return the longest suffix of `old` that occurs in `new`: its length and start in `new`."""
    hits = np.empty(0, dtype=np.int64)
    # Long endings first, since they occur in few places.
    for needed in (4, 2, 1):
        if needed <= len(old) and needed <= len(new):
            hits = np.flatnonzero(new[needed - 1 :] == old[-1]) + needed - 1
            for back in range(1, needed):
                hits = hits[new[hits - back] == old[-1 - back]]
            if len(hits):
                break
    best, start = 0, 0
    # Only the first ones: a common ending, such as an end token, occurs in thousands of places.
    for hit in hits[:64].tolist():
        count = min(hit + 1, len(old))
        agree = old[len(old) - count :][::-1] == new[hit + 1 - count : hit + 1][::-1]
        length = count if agree.all() else int(agree.argmin())
        if length > best:
            best, start = length, hit + 1 - length
    return best, start


def _sampled_again(d: _Divergence) -> bool:
    return not len(d.current) and d.position == d.sampled[-1][0]


def _another_conversation(d: _Divergence) -> bool:
    if not d.was or not d.now:
        return False
    (head_was, rest_was), (head_now, rest_now) = map(system_and_rest, (d.was, d.now))
    answers = [_turn(each) for each in rest_was if each.get("role") == "assistant"]
    if any(_turn(each) in answers for each in rest_now):
        return False
    if head_was != head_now:
        # The system message of one agent may grow, by a summary for instance.
        texts = head_was, head_now
        return not (all(texts) and (texts[0].startswith(texts[1]) or texts[1].startswith(texts[0])))
    first_was, first_now = rest_was[:1], rest_now[:1]
    if list(map(_turn, first_was)) == list(map(_turn, first_now)):
        return False
    # A single exchange leaves nothing to compact. Otherwise it may be a summary of what was said.
    is_new = not any(each.get("role") == "assistant" for each in rest_now)
    return len(d.sampled) == 1 or (is_new and d.is_delegated())


def _turn(message: Mapping[str, Any]) -> tuple[Any, str, tuple[tuple[Any, Any], ...]]:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    called = tuple((each.get("name"), str(each.get("arguments"))) for each in functions)
    return message.get("role"), _visible_text(message), called


def _visible_text(message: Mapping[str, Any]) -> str:
    """Return what a message says after its reasoning."""
    text = text_of(message)
    ends = [at + len(mark) for mark in _MARKERS if (at := text.rfind(mark)) >= 0]
    return " ".join(text[max(ends, default=0) :].split())


def _loses_text(d: _Divergence) -> bool:
    """Whether an answer was sent back without what it said beside its reasoning and its calls."""
    pairs = zip(d.was, d.now, strict=False)
    return any(
        _visible_text(before) not in " ".join(text_of(after).split())
        for before, after in pairs
        if before.get("role") == after.get("role") == "assistant"
    )


def _retokenized(d: _Divergence) -> bool:
    if d.decode is None or not len(d.previous) or not len(d.current):
        return False
    # A token may be part of a character, so the tokens before it are decoded with it, and a partial
    # character at the end of the window is dropped.
    context = d.context.tolist()
    texts = [
        d.decode(context + side[:_WINDOW_TOKENS].tolist()).rstrip("\ufffd")
        for side in (d.previous, d.current)
    ]
    shorter = min(map(len, texts))
    # Equal beyond the context, which is the same on both sides.
    return texts[0][:shorter] == texts[1][:shorter] and shorter > len(d.decode(context))


def _system_changed(d: _Divergence) -> bool:
    return d.position < d.first_prompt_len and d.end - d.surviving <= d.first_prompt_len


def _reasoning_stripped(d: _Divergence) -> bool:
    if _loses_text(d):
        return False
    for start, end in d.sampled:
        if not start - _GLUE_TOKENS <= d.position < end or d.position - start > _FRONT_TOKENS:
            continue
        completion = d.previous[max(0, start - d.position) : end - d.position]
        window = d.current[: len(completion) + _WINDOW_TOKENS]
        kept, inserted = surviving_tail(completion, window)
        # Also without the last id, since a template may end an answer with a different one.
        if kept < _CLEAR_TOKENS:
            kept, inserted = max((kept, inserted), surviving_tail(completion[:-1], window))
        removed = completion[: len(completion) - kept]
        # If more was inserted than was kept, it is a rewrite.
        if not len(removed) or inserted >= max(kept, 1):
            continue
        # At least two ids, because one may match by chance.
        if d.decode is None:
            return kept >= 2
        text = d.decode(removed.tolist())
        return bool(text.strip()) and (kept >= 2 or any(marker in text for marker in _MARKERS))
    return False


def _compaction(d: _Divergence) -> bool:
    if not len(d.current):
        return False
    kept = d.end - d.surviving + 1  # an end token may match that of a different message
    lost = sum(start >= d.position and end <= kept for start, end in d.sampled)
    shorter = len(d.current) < len(d.previous)
    early = d.position < d.first_prompt_len
    return bool(lost >= 2 and shorter) or bool(lost and early and (shorter or d.surviving > 1))


_RULES: tuple[tuple[BreakCause, Callable[[_Divergence], bool]], ...] = (
    (BreakCause.SAMPLED_AGAIN, _sampled_again),
    (BreakCause.ANOTHER_CONVERSATION, _another_conversation),
    (BreakCause.RETOKENIZED, _retokenized),
    (BreakCause.SYSTEM_CHANGED, _system_changed),
    (BreakCause.REASONING_STRIPPED, _reasoning_stripped),
    (BreakCause.COMPACTION, _compaction),
)


def explain_break(
    tree: TokenTree,
    call: int,
    previous: int,
    *,
    history: Sequence[int] = (),
    first_prompt_len: int = 0,
    handoff: bool = False,
    decode: Decoder | None = None,
    was: Dialogue = (),
    now: Dialogue = (),
    is_delegated: Callable[[], bool] = lambda: False,
) -> Break:
    """Compare the prompt of `call` with the path of `previous`; return where and why they differ.

    Args:
        history: calls whose sampled tokens are on the path of `previous`, in order, including
            `previous`.
        first_prompt_len: prompt length of the agent's first call, before anything was sampled.
        handoff: `previous` is a different agent's call, and this agent had none before.
        decode: ids to text, for `retokenized` and the two texts.
        was: the messages of the path of `previous`, with its answer.
        now: the messages of the prompt of `call`.
        is_delegated: whether another conversation waits for what its tools do meanwhile.
    """
    calls, arena = tree.calls, tree.arena
    old_end, new_end = calls.end(previous), calls.prompt_end(call)
    # The tree knows where the paths part, so no ids are compared again.
    position = arena.depth(arena.common(old_end, new_end))
    old_len, new_len = tree.path_len(previous), tree.prompt_len(call)
    before = _window(tree, new_end, new_len, max(0, position - NEIGHBOURHOOD_TOKENS), position)
    divergence = _Divergence(
        position=position,
        context=before[-_CONTEXT_TOKENS:],
        previous=_window(tree, old_end, old_len, position, old_len),
        current=_window(tree, new_end, new_len, position, new_len),
        sampled=tuple((tree.prompt_len(c), tree.path_len(c)) for c in history or (previous,)),
        first_prompt_len=first_prompt_len,
        decode=decode,
        was=was,
        now=now,
        is_delegated=is_delegated,
    )
    cause = BreakCause.AGENT_HANDOFF
    if not handoff:
        cause = next(
            (cause for cause, holds in _RULES if holds(divergence)), BreakCause.HISTORY_REWRITTEN
        )
    was_ids, now_ids = (
        np.concatenate([before, side[:NEIGHBOURHOOD_TOKENS]])
        for side in (divergence.previous, divergence.current)
    )
    return Break(
        rollout=0,
        call=call,
        previous=None if handoff else previous,
        agent=tree.agent(call),
        position=position,
        cause=cause,
        previous_ids=was_ids,
        current_ids=now_ids,
        previous_text=None if decode is None else decode(was_ids.tolist()),
        current_text=None if decode is None else decode(now_ids.tolist()),
    )


def _window(tree: TokenTree, end: Place, length: int, low: int, high: int) -> IntArray:
    """Return ids `low` to `high` of the path of `length` tokens to `end`."""
    arena = tree.arena
    return arena.path(arena.up(end, length - high), high - low) if high > low else arena.path(ROOT)
