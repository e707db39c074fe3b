"""A byte tokenizer with ChatML special tokens, for tests that must not wait for a real one.

Every byte is a token; special tokens get ids from 256 on. It has those parts of a Hugging Face
tokenizer that rolltree uses: `encode`, `decode`, `chat_template`, `eos_token_id`,
`all_special_ids`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SPECIAL_TOKENS: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- 'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with Hermes tool calls. It never rewrites history."""


class ByteTokenizer:
    """Encodes text as UTF-8 bytes; `special_tokens` in the text become single ids.

    >>> ByteTokenizer().encode("hi<|im_end|>")
    [104, 105, 258]
    """

    def __init__(
        self,
        chat_template: str | None = CHATML_TEMPLATE,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        eos_token: str = "<|im_end|>",
    ) -> None:
        self.chat_template = chat_template
        self.special_tokens = tuple(special_tokens)
        self._special_ids = {text: 256 + index for index, text in enumerate(self.special_tokens)}
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.special_tokens)) + ")")
        self.eos_token = eos_token
        self.eos_token_id = self._special_ids[eos_token]
        self.all_special_ids = list(self._special_ids.values())
        self.special_tokens_map = {"eos_token": eos_token}

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return 256 + len(self.special_tokens)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`. `add_special_tokens` has no effect, since none are added."""
        ids: list[int] = []
        for piece in self._pattern.split(text):
            token = self._special_ids.get(piece)
            if token is None:
                ids.extend(piece.encode("utf-8", "surrogatepass"))
            else:
                ids.append(token)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        parts: list[str] = []
        pending = bytearray()
        for token in ids:
            if token < 256:
                pending.append(token)
                continue
            parts.append(pending.decode("utf-8", "replace"))
            pending.clear()
            if not skip_special_tokens:
                parts.append(self.special_tokens[token - 256])
        parts.append(pending.decode("utf-8", "replace"))
        return "".join(parts)
