"""Parsers: turn a model's text into a value that a rubric can score or a world can execute.

Tool calls are parsed by `rolltree.inference`, because their format depends on the model.
"""

from rolltree.parsers.actions import ActionParser as ActionParser
from rolltree.parsers.actions import as_text as as_text
from rolltree.parsers.actions import by_function as by_function
from rolltree.parsers.actions import compose_parsers as compose_parsers
from rolltree.parsers.actions import from_parser as from_parser
from rolltree.parsers.actions import one_of as one_of
from rolltree.parsers.actions import tagged as tagged
from rolltree.parsers.actions import without_thinking as without_thinking
from rolltree.parsers.parser import MaybeThinkParser as MaybeThinkParser
from rolltree.parsers.parser import Parser as Parser
from rolltree.parsers.parser import ThinkParser as ThinkParser
from rolltree.parsers.parser import extract_boxed_answer as extract_boxed_answer
from rolltree.parsers.parser import extract_hash_answer as extract_hash_answer
from rolltree.parsers.parser import text_of as text_of
from rolltree.parsers.xml import XMLParser as XMLParser
