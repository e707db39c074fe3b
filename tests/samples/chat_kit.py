"""Chat templates, a byte tokenizer and a scripted model, to record real-looking conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATES = Path(__file__).parent / "templates"
Message = dict[str, Any]


def template(name: str) -> Callable[..., str]:
    """Return a template as `render(messages, tools=..., add_generation_prompt=...)`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string((TEMPLATES / f"{name}.jinja").read_text())
    return lambda messages, **options: compiled.render(messages=messages, **options)


class ByteTokenizer:
    """Bytes, special tokens, and `merges`: words that the tokenizer writes as one id.

    A model may sample the bytes of a merged word; encoding its text again gives the one id.
    """

    SPECIALS = (
        "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
        "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>",
    )  # fmt: skip

    def __init__(self, *merges: str) -> None:
        self.words = [*self.SPECIALS, *merges]
        self._split = re.compile("(" + "|".join(map(re.escape, self.words)) + ")")

    def encode(self, text: str, *, merged: bool = True) -> list[int]:
        known = self.words if merged else self.words[: len(self.SPECIALS)]
        ids: list[int] = []
        for piece in self._split.split(text):
            ids.extend([256 + known.index(piece)] if piece in known else piece.encode())
        return ids

    def decode(self, ids: list[int]) -> str:
        raw = b"".join(self.words[i - 256].encode() if i > 255 else bytes([i]) for i in ids)
        return raw.decode(errors="replace")


class Recorder:
    """Plays a conversation: renders, encodes, takes the scripted text as sampled, records steps."""

    def __init__(
        self, name: str, *, tokenizer: ByteTokenizer | None = None, **options: Any
    ) -> None:
        self.render = template(name)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.options = options
        self.messages: list[Message] = []
        self.steps: list[Any] = []
        self.turn = -1

    def say(self, role: str, content: str) -> None:
        """Append a message that the model did not write; a user message begins a turn."""
        self.turn += role == "user"
        self.messages.append({"role": role, "content": content})

    def sample(
        self, text: str, end: str, *, message: Message | None = None, merged: bool = True
    ) -> None:
        """Record one call in which the model samples `text` and `end`; put it into the history.

        `message` is what the history gets instead of the sampled text.
        """
        prompt = self.render(self.messages, add_generation_prompt=True, **self.options)
        self.steps.append(
            {
                "tokens": {
                    "prompt_ids": self.tokenizer.encode(prompt),
                    "completion_ids": self.tokenizer.encode(text + end, merged=merged),
                },
                "extras": {"agent": "a", "turn": self.turn},
            }
        )
        self.messages.append(message or {"role": "assistant", "content": text})
