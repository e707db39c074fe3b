"""Some rollouts of a step or an evaluation as text, for trackers.

The texts are safe to show: without secrets, and with control characters made visible.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from rolltree._helpers.redact import shown, shown_start
from rolltree.rollouts.conversation import conversation_of
from rolltree.values.types import RolloutResult, State, text_of

_MOST_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Transcript:
    """One rollout: its prompt and completion, and what it earned."""

    step: int
    phase: str
    rollout: str
    agent: str
    prompt: str
    completion: str
    reward: float | None
    advantage: float | None
    error: str

    def row(self) -> list[Any]:
        """Return the values of `COLUMNS`."""
        return [getattr(self, name) for name in COLUMNS]

    def __str__(self) -> str:
        facts = [f"step {self.step}", self.phase, self.rollout, self.agent]
        facts += [] if self.reward is None else [f"reward {self.reward:.4g}"]
        facts += [] if self.advantage is None else [f"advantage {self.advantage:.4g}"]
        parts = [", ".join(fact for fact in facts if fact), self.prompt, self.completion]
        parts += [f"failed: {self.error}"] if self.error else []
        return "\n\n".join(parts)


COLUMNS = tuple(field.name for field in fields(Transcript))


def transcripts(
    results: Iterable[RolloutResult],
    num: int,
    *,
    step: int,
    phase: str,
    advantages: Mapping[tuple[str, int], float] | None = None,
) -> list[Transcript]:
    """Return the first `num` rollouts of `results`; a request without a rollout has an empty one.

    `advantages` are shown; see `CreditReport.first_advantages`.
    """
    # Lazy, so the other rollouts are not turned into text.
    return list(islice(_each(results, step, phase, advantages or {}), num))


def _each(
    results: Iterable[RolloutResult], step: int, phase: str, first: Mapping[tuple[str, int], float]
) -> Iterator[Transcript]:
    for result in results:
        error = "" if result.error is None else f"{result.error.type}: {result.error.message}"
        # A request that failed before it had a rollout still shows its prompt.
        asked = State(prompt=result.request.input.get("prompt"))
        for index, state in enumerate(result.states or (asked,)):
            prompt, completion = conversation_of(state)
            yield Transcript(
                step,
                phase,
                # Names come from data and environments, and may contain control characters.
                shown(result.request.request_id),
                shown(str(state.get("agent") or "")),
                _text(prompt),
                _text(completion),
                state.get("reward"),
                first.get((result.request.request_id, index)),
                _cut(error),
            )


def _text(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return chat messages as text: `role: content`."""
    return _cut("\n".join(map(_line, messages)))


def _line(message: Mapping[str, Any]) -> str:
    parts = [str(message["reasoning_content"])] if message.get("reasoning_content") else []
    parts += [text_of(message)] if message.get("content") else []
    parts += [json.dumps(call, default=str) for call in message.get("tool_calls") or ()]
    return f"{message.get('role', '?')}: " + "\n".join(parts)


def _cut(text: str) -> str:
    return "".join(shown_start(text, _MOST_CHARACTERS))
