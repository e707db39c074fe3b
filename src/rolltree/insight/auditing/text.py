"""Compares text with ids: sampled ids must decode to the answer, and prompts to their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltree.records.tokenizer import RunTokenizer
from rolltree.tokens import peek
from rolltree.values.types import FinishReason, ModelResponse

if TYPE_CHECKING:
    from rolltree.insight.auditing.rollout import Call, RolloutAudit

_REMEMBERED = 4096
_CUT = 160


class TextCheck:
    """Compares the decoded ids of calls with their messages."""

    def __init__(self, tokenizer: RunTokenizer) -> None:
        self.tokenizer = tokenizer
        self.folder, self.end_ids = tokenizer.folder, tokenizer.end_ids
        # The calls of a group repeat prompts, and decoding them takes most of the time.
        self._prompt_text = lru_cache(_REMEMBERED)(self._decoded)

    def _decoded(self, ids: bytes) -> str:
        """Return the text of the bytes of an int32 array, without spaces."""
        return _squeezed(self.tokenizer.decode(np.frombuffer(ids, np.int32).tolist()))

    def check(self, audit: RolloutAudit, stop: Sequence[str]) -> None:
        """Compare every call of a rollout with its messages."""
        for call in audit.calls:
            if "completion_ids" in call.tokens.assigned:
                continue
            audit.ledger.count("text")
            self._answer(audit, call, stop)
            self._prompt(audit, call)

    def _answer(self, audit: RolloutAudit, call: Call, stop: Sequence[str]) -> None:
        message = peek(call.step, "completion")
        if isinstance(message, list):
            message = message[0] if len(message) == 1 else {}
        content = message.get("content") if isinstance(message, Mapping) else message
        response = call.response_record
        text = response.text if isinstance(response, ModelResponse) else content
        if not isinstance(text, str):
            return
        ids = call.tokens.tree.completion_ids(call.handle)
        has_ended = len(ids) > 0 and int(ids[-1]) in self.end_ids
        while len(ids) and int(ids[-1]) in self.end_ids:
            ids = ids[:-1]
        sampled = _squeezed(self.tokenizer.decode(ids.tolist()))
        answer = _squeezed(text)
        # Engines cut the sampled stop sequence, and what follows it, off the text. An agent may
        # have given one of its own, which nothing else ends like this.
        is_own = not has_ended and call.extras.get("finish_reason") == FinishReason.STOP
        cut = (bool(stop) or is_own) and sampled.startswith(answer)
        if sampled != answer and not cut and answer != self._without_special(ids):
            audit.find(
                *("text", "answer_differs"),
                f"call {call.index} sampled ids that read {_short(sampled)}, but its answer says "
                f"{_short(answer)}",
            )
            return
        if isinstance(message, Mapping):
            for part in (message.get("reasoning_content"), content):
                if isinstance(part, str) and _squeezed(part) not in answer:
                    audit.find(
                        *("text", "message_differs"),
                        f"the message of call {call.index} says {_short(_squeezed(part))}, which "
                        f"is not in the sampled text {_short(answer)}",
                    )

    def _without_special(self, ids: Any) -> str:
        return _squeezed(self.tokenizer.decode(ids.tolist(), special=False))

    def _prompt(self, audit: RolloutAudit, call: Call) -> None:
        shown = self._prompt_text(call.tokens.tree.prompt_ids(call.handle).tobytes())
        prompt = peek(call.step, "prompt")
        # Templates may drop or rewrite the assistant's messages, but not the others.
        parts = (
            [prompt]
            if isinstance(prompt, str)
            else [
                text
                for message in prompt or ()
                if isinstance(message, Mapping)
                and message.get("role") in ("system", "user", "tool")
                for text in _texts(message.get("content"))
            ]
        )
        at = 0
        for part in parts:
            wanted = _squeezed(part)
            if wanted not in shown:
                wanted = _squeezed(self.tokenizer.as_read(part))
            found = shown.find(wanted, at)
            # Templates move system messages to the front, so an earlier place counts, too.
            if found < 0 and wanted not in shown:
                audit.find(
                    *("text", "prompt_differs"),
                    f"the prompt of call {call.index} has the message {_short(wanted)}, but the "
                    "ids that the engine got do not contain it",
                )
                return
            at = max(at, found + len(wanted)) if found >= 0 else at


def _squeezed(text: str) -> str:
    """Return a text without whitespace and U+FFFD, which decoders put for torn characters."""
    return "".join(text.split()).replace("\ufffd", "")


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, Mapping) and "text" in part]


def _short(text: str) -> str:
    return repr(text if len(text) <= _CUT else text[: _CUT - 3] + "...")
