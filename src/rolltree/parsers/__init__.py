"""Parsers: turn a model's text into a value that a rubric can score or a world can execute.

Tool calls are parsed by `rolltree.inference`, because their format depends on the model.
"""

from rolltree.parsers.actions import (
    ActionParser,
    as_text,
    by_function,
    compose_parsers,
    from_parser,
    one_of,
    tagged,
    without_thinking,
)
from rolltree.parsers.parser import (
    MaybeThinkParser,
    Parser,
    ThinkParser,
    extract_boxed_answer,
    extract_hash_answer,
    text_of,
)
from rolltree.parsers.xml import XMLParser

__all__ = [
    "ActionParser",
    "MaybeThinkParser",
    "Parser",
    "ThinkParser",
    "XMLParser",
    "as_text",
    "by_function",
    "compose_parsers",
    "extract_boxed_answer",
    "extract_hash_answer",
    "from_parser",
    "one_of",
    "tagged",
    "text_of",
    "without_thinking",
]
