"""`find_openings`: why the samples of a rollout began, each compared with an earlier call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from rolltree.samples.resolve import Group, ResolvedRollout, ResolvedStep
from rolltree.tokens import Break, Decoder, Place, TokenTree, explain_break
from rolltree.tokens.breaks import system_text

# With so many samples of one rollout, older ones are not looked at for what a prompt changed.
_MOST_COMPARED = 32


def _nearest(
    tree: TokenTree, call: ResolvedStep, latest_first: Iterable[ResolvedStep]
) -> ResolvedStep:
    """Return the call whose path has the longest common part with a call's prompt."""
    arena, prompt_end = tree.arena, tree.calls.prompt_end(call.handle)
    # No path can share more, so the search ends there.
    most = tree.known_prompt_len(call.handle)
    nearest, longest = call, -1
    for each in islice(latest_first, _MOST_COMPARED):
        shared = arena.depth(arena.common(tree.calls.end(each.handle), prompt_end))
        if shared > longest:
            nearest, longest = each, shared
        if shared >= most:
            break
    return nearest


@dataclass(slots=True)
class _Conversation:
    """An agent's calls with one system message, as far as they have come."""

    first: ResolvedStep
    # The latest call of a group, by the group's first call; in the order of the latest calls.
    latest: dict[int, ResolvedStep] = field(default_factory=dict)


def _latest_first(conversations: Sequence[_Conversation]) -> Iterable[ResolvedStep]:
    if len(conversations) == 1:
        return reversed(conversations[0].latest.values())
    calls = [call for each in conversations for call in each.latest.values()]
    return sorted(calls, key=lambda call: -call.index)


def _is_delegated(
    rollout: ResolvedRollout, groups: Sequence[Group], call: ResolvedStep, previous: ResolvedStep
) -> bool:
    """Whether `call` is made while a conversation waits for tools, which may be sub-agents.

    That of `previous` counts only if it goes on later: else `call` may be what it was compacted to.
    """
    for group in groups:
        before = [each for each in group if each.index < call.index]
        if not before or (previous in group and group[-1].index < call.index):
            continue
        answered = rollout.messages(before[-1].index, with_answer=True)
        if answered and answered[-1].get("tool_calls"):
            return True
    return False


def find_openings(
    rollout: ResolvedRollout, groups: Sequence[Group], decode: Decoder | None
) -> list[Break]:
    """Return why groups of `by_prefix` began, in call order.

    The first group of a rollout (or turn) needs no reason. The reason of another comes from a
    comparison with a call of the same agent: the one with the same prompt; else, of those with the
    same system message, or else of all, the one with the longest common path, and the latest of
    several.
    """
    place = {call.index: (group, at) for group in groups for at, call in enumerate(group)}
    ordered = sorted((call for group in groups for call in group), key=lambda call: call.index)
    tree = rollout.tree
    # By agent, then by system message; and by a group's first call and agent, since agents may
    # share a group.
    agents: dict[str, dict[str, _Conversation]] = {}
    homes: dict[tuple[int, str], _Conversation] = {}
    asked: dict[tuple[str, Place], ResolvedStep] = {}
    breaks: list[Break] = []
    before: ResolvedStep | None = None
    for call in ordered:
        group, at = place[call.index]
        home = group[0].index, call.agent
        now = rollout.messages(call.index) if at == 0 else []
        kin = homes.get(home)
        if kin is None:
            head = system_text(now or rollout.messages(home[0]))
            own = agents.setdefault(call.agent, {})
            kin = homes[home] = own.setdefault(head, _Conversation(call))
        same_prompt = call.agent, tree.calls.prompt_end(call.handle)
        if at == 0 and before is not None:
            # With calls of its own conversation, else of its agent, else with the one before it.
            near = [kin] if kin.latest else [each for each in own.values() if each.latest]
            previous = asked.get(same_prompt) or (
                _nearest(tree, call, _latest_first(near)) if near else before
            )
            earlier, until = place[previous.index]
            why = explain_break(
                tree,
                call.handle,
                previous.handle,
                history=[member.handle for member in earlier[: until + 1]],
                first_prompt_len=tree.prompt_len(near[0].first.handle) if near else 0,
                handoff=not near,
                decode=decode,
                was=rollout.messages(previous.index, with_answer=True),
                now=now,
                is_delegated=partial(_is_delegated, rollout, groups, call, previous),
            )
            breaks.append(why.of(rollout.index, call.index, previous.index, call.agent))
        kin.latest.pop(home[0], None)
        kin.latest[home[0]] = call
        before = asked[same_prompt] = call
    return breaks
