"""`XMLParser`: named fields between tags, as in `<answer>42</answer>`.

Not a strict XML parser: models write `a < b` inside a field, and that must not break it. Tags have
no attributes. If tags of one name are nested, a field ends at the first closing tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rolltree._helpers.untrusted import between
from rolltree.environments.parsers.parser import Parser, identity
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import Messages, text_of


class XMLParser(Parser):
    """Read and write text with tagged fields.

    Args:
        fields: tag names. A tuple names alternatives for one field, and the first is canonical:
            `["think", ("code", "answer")]`.
        answer_field: the field that `parse_answer` returns.
        extract_fn: applied to the answer's text.

    Example:
        >>> parser = XMLParser(["think", "answer"])
        >>> parser.parse("<think>2 + 2</think> <answer> 4 </answer>").answer
        '4'

    Raises:
        ConfigError: there is no field, or one is named twice.
    """

    def __init__(
        self,
        fields: Sequence[str | Sequence[str]],
        answer_field: str = "answer",
        extract_fn: Callable[[str], Any] = identity,
    ) -> None:
        super().__init__(extract_fn)
        self._fields: list[tuple[str, ...]] = [
            (field,) if isinstance(field, str) else tuple(field) for field in fields
        ]
        names = [name for field in self._fields for name in field]
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"XMLParser fields are {list(fields)!r}; without names there is nothing to find. "
                "Pass tag names, such as ['think', 'answer']."
            )
        if len(set(names)) != len(names):
            raise ConfigError(
                f"an XMLParser field is named twice in {names}; it would be unclear which one a "
                "tag belongs to. Name each field once."
            )
        self.answer_field = answer_field
        self._tags = {name: (f"<{name}>", f"</{name}>") for name in names}

    def parse(self, text: str, strip: bool = True, last: bool = False) -> SimpleNamespace:
        """Return a namespace with one attribute per tag name: its text, or None when missing.

        The first occurrence of a tag counts, with `last` the last one.
        """
        # Every name is an attribute, so that a rubric can ask for a field that the model left out.
        found = SimpleNamespace()
        for name, tags in self._tags.items():
            matches = between(text, *tags)
            # Lazily, because a model may write a tag a million times and the first is enough.
            value = next(matches, None)
            if last and value is not None:
                value = [value, *matches][-1]
            setattr(found, name, value.strip() if strip and value is not None else value)
        return found

    def parse_answer(self, completion: Messages) -> Any:
        """Return the answer field of the latest assistant message that has one, else None.

        Of several occurrences in that message, the last counts.

        Raises:
            ConfigError: `answer_field` is not a field of this parser.
        """
        texts = (
            [completion]
            if isinstance(completion, str)
            else [text_of(message) for message in self.get_assistant_messages(completion)]
        )
        for text in reversed(texts):
            found = self.parse(text, last=True)
            for name in self._alternatives(self.answer_field):
                value = getattr(found, name)
                if value is not None:
                    return self.extract_fn(value)
        return None

    def get_fields(self) -> list[str]:
        """Return the canonical field names, in order."""
        return [field[0] for field in self._fields]

    def get_format_str(self) -> str:
        """Return a template of the format, to put into a system prompt."""
        return "\n".join(
            f"<{'|'.join(names)}>\n...\n</{'|'.join(names)}>" for names in self._fields
        )

    def format(self, **values: Any) -> str:
        """Return text with the given fields in the parser's order.

        Raises:
            ConfigError: a field is missing, given twice or unknown.
        """
        unknown = [name for name in values if name not in self._tags]
        if unknown:
            hint = did_you_mean(unknown[0], self._tags)
            raise ConfigError(f"this parser has no field {unknown[0]!r}.{hint}")
        parts = []
        for names in self._fields:
            given = [name for name in names if name in values]
            if len(given) != 1:
                what = "no value" if not given else f"several values ({', '.join(given)})"
                raise ConfigError(
                    f"field {names[0]!r} has {what}; the formatted text would not parse back. "
                    "Give each field exactly one."
                )
            parts.append(f"<{given[0]}>\n{values[given[0]]}\n</{given[0]}>")
        return "\n".join(parts)

    def score_format(self, text: str) -> float:
        """Return the format score of one message, in [0, 1].

        0.4 times the share of fields present, plus 0.2 each if every present field has no white
        space around its text (except one line break on either side), if the message begins with a
        field's tag, and if it ends with one. Without any field: 0.
        """
        bare, raw = self.parse(text), self.parse(text, strip=False)
        present = [names for names in self._fields if any(getattr(bare, n) for n in names)]
        if not present:
            return 0.0
        filled = [name for names in present for name in names if getattr(bare, name) is not None]
        tidy = all(_single_spaced(getattr(raw, name), getattr(bare, name)) for name in filled)
        body = text.strip()
        starts = any(body.startswith(f"<{name}>") for name in self._tags)
        ends = any(body.endswith(f"</{name}>") for name in self._tags)
        # The share of fields, not of names: alternatives of one field count once.
        share = len(present) / len(self._fields)
        return 0.4 * share + 0.2 * tidy + 0.2 * starts + 0.2 * ends

    def _alternatives(self, field: str) -> tuple[str, ...]:
        for names in self._fields:
            if field in names:
                return names
        raise ConfigError(
            f"answer_field {field!r} is not a field of this parser, so no answer would be found."
            f"{did_you_mean(field, self._tags)}"
        )


def _single_spaced(raw: str, bare: str) -> bool:
    return raw in (bare, f"\n{bare}\n")
