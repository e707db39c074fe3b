"""What a transcript shows of an agent's program: the calls that are not trained, and its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from rolltree.reports.formatting import duration, safe_text
from rolltree.rollouts.conversation import message_list
from rolltree.rollouts.programs import program_ending, program_of, why_left_out
from rolltree.store import to_plain
from rolltree.tokens import peek
from rolltree.values.types import State


def agent_rows(state: State, limit: int) -> Iterator[tuple[str, Text]]:
    """Yield the name and the text of each row; texts are cut at `limit` characters."""
    for index, step in enumerate(state.get("trajectory") or ()):
        if (why := why_left_out(step)) is not None:
            answer = message_list(peek(step, "completion"), "assistant")
            texts = [str(message.get("content") or "") for message in answer]
            yield "left out", safe_text(f"call {index}: {why}\n{''.join(texts)}", limit=limit)
    if (program := program_of(state)) is not None:
        yield "program", _program(program, limit)


def _program(program: Mapping[str, Any], limit: int) -> Text:
    facts = [program_ending(program)]
    if isinstance(program.get("wall_s"), int | float):
        facts.append(duration(program["wall_s"]))
    if files := program.get("files"):
        facts.append(f"collected {', '.join(map(str, files))}")
    parts = [safe_text("   ".join(facts), limit=limit)]
    error, returned = program.get("error"), program.get("returned")
    if isinstance(error, Mapping):
        parts.append(safe_text(f"{error.get('type')}: {error.get('message')}", limit=limit))
    if returned is not None:
        parts.append(safe_text(f"returned {json.dumps(to_plain(returned))}", limit=limit))
    for name in ("stdout", "stderr"):
        output = str(program.get(name) or "").strip()
        if output:  # its end says most
            cut = "..." if len(output) > limit else ""
            parts.append(safe_text(f"{name}: {cut}{output[-limit:]}", style="dim"))
    return Text("\n").join(parts)
