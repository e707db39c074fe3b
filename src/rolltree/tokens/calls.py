"""One row per model call: where its prompt and completion end in the arena, and its labels.

Columns of machine integers, so a call costs tens of bytes and a slice of calls is a slice of every
column. Knows nothing about streams or text.
"""

from __future__ import annotations

from array import array

from rolltree.tokens.arena import Place

NO_TURN = -1


class CallTable:
    """One row per call, as columns of machine integers.

    `prompt_token`/`end_token` are arena indices of the last prompt and the last token (-1: none),
    `parent` the call whose path this prompt was known to extend (-1: none), `num_tokens` and
    `num_runs` the sizes of the arena after the call: they make saving incremental.
    """

    COLUMNS = (
        "prompt_token",
        "prompt_run",
        "end_token",
        "end_run",
        "prompt_len",
        "num_sampled",
        "parent",
        "agent",
        "turn",
        "num_tokens",
        "num_runs",
    )
    __slots__ = COLUMNS

    def __init__(self) -> None:
        self.prompt_token = array("i")
        self.prompt_run = array("i")
        self.end_token = array("i")
        self.end_run = array("i")
        self.prompt_len = array("i")
        self.num_sampled = array("i")
        self.parent = array("i")
        self.agent = array("i")
        self.turn = array("i")
        self.num_tokens = array("i")
        self.num_runs = array("i")

    def __len__(self) -> int:
        return len(self.end_token)

    def end(self, call: int) -> Place:
        """Return the place of a call's last token."""
        return Place(self.end_token[call], self.end_run[call])

    def prompt_end(self, call: int) -> Place:
        """Return the place of a call's last prompt token."""
        return Place(self.prompt_token[call], self.prompt_run[call])
