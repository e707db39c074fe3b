"""Parsers: turn a model's text into a value that a rubric can score or a world can execute.

Tool calls are parsed by `rolltree.inference`, because their format depends on the model.
"""

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader

if TYPE_CHECKING:
    from rolltree.environments.parsers.actions import ActionParser as ActionParser
    from rolltree.environments.parsers.actions import as_text as as_text
    from rolltree.environments.parsers.actions import by_function as by_function
    from rolltree.environments.parsers.actions import compose_parsers as compose_parsers
    from rolltree.environments.parsers.actions import from_parser as from_parser
    from rolltree.environments.parsers.actions import one_of as one_of
    from rolltree.environments.parsers.actions import tagged as tagged
    from rolltree.environments.parsers.actions import without_thinking as without_thinking
    from rolltree.environments.parsers.parser import MaybeThinkParser as MaybeThinkParser
    from rolltree.environments.parsers.parser import Parser as Parser
    from rolltree.environments.parsers.parser import ThinkParser as ThinkParser
    from rolltree.environments.parsers.parser import extract_boxed_answer as extract_boxed_answer
    from rolltree.environments.parsers.parser import extract_hash_answer as extract_hash_answer
    from rolltree.environments.parsers.xml import XMLParser as XMLParser
    from rolltree.values.types import text_of as text_of

_MODULES = {
    "actions": "ActionParser as_text by_function compose_parsers from_parser one_of tagged "
    "without_thinking",
    "parser": "MaybeThinkParser Parser ThinkParser extract_boxed_answer extract_hash_answer",
    "rolltree.values.types": "text_of",
    "xml": "XMLParser",
}
__getattr__ = loader(__name__, _MODULES)
__all__ = sorted(" ".join(_MODULES.values()).split())
