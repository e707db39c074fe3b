"""Which calls broke the exact prefix, found from the groups that interleaving made.

A group that does not start with the first call of its rollout (or turn) was opened by a break. The
cause is told against the same agent's latest call. Leaves out the rules (`rolltree.tokens.breaks`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rolltree.samples.grouping import Group
from rolltree.samples.rollout import Call, Rollout
from rolltree.tokens import Break, Decoder, explain_break


def find_breaks(rollout: Rollout, groups: Sequence[Group], decode: Decoder | None) -> list[Break]:
    """Return the breaks among calls that interleaving put into these groups, in call order."""
    place = {call.step: (group, index) for group in groups for index, call in enumerate(group)}
    ordered = sorted((call for group in groups for call in group), key=lambda call: call.step)
    tree = rollout.tree
    latest: dict[str, Call] = {}
    first_len: dict[str, int] = {}
    found: list[Break] = []
    before: Call | None = None
    for call in ordered:
        previous = latest.get(call.agent, before)
        if place[call.step][1] == 0 and previous is not None:
            group, index = place[previous.step]
            why = explain_break(
                tree,
                call.handle,
                previous.handle,
                history=[member.handle for member in group[: index + 1]],
                first_prompt_len=first_len.get(call.agent, 0),
                handoff=call.agent not in latest,
                decode=decode,
            )
            found.append(why.of(rollout.index, call.step, previous.step, call.agent))
        latest[call.agent] = before = call
        first_len.setdefault(call.agent, tree.prompt_len(call.handle))
    return found
