"""Parsers: from what a model wrote to a value that a rubric can judge.

The room knows text and chat messages. It knows nothing about environments or rewards. It leaves
out tool calls, which the inference room parses because their format belongs to the model.
"""

from rolltree.parsers.extract import extract_boxed_answer, extract_hash_answer
from rolltree.parsers.parser import Parser, text_of
from rolltree.parsers.think import MaybeThinkParser, ThinkParser
from rolltree.parsers.xml import XMLParser

__all__ = [
    "MaybeThinkParser",
    "Parser",
    "ThinkParser",
    "XMLParser",
    "extract_boxed_answer",
    "extract_hash_answer",
    "text_of",
]
