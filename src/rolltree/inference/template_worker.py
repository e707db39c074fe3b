"""The worker process of `ChatTemplate`: Jinja with the extensions that chat templates rely on.

It imports nothing from rolltree, so the process is small and starts fast. Jinja's sandbox limits a
template to the values it is given; the process limits its time and memory.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 8_000_000
"""The longest text that one rendering may produce."""
MAX_TEMPLATES = 64


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks assistant text for trainers; outputs it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_request(request: dict[str, Any]) -> dict[str, Any]:
    """Render the template named `request["template"]` with `request["values"]`.

    Returns `{"text": ...}`, or a `problem` with its `message`: "unknown" (send it again with its
    `source`), "syntax" (with the `line`), "refused", "broken" or "large".
    """
    name = request["template"]
    try:
        if "source" in request:
            # A process that gets many templates must not grow; sources are sent again.
            if len(_templates) >= MAX_TEMPLATES:
                _templates.clear()
            _templates[name] = _compile(request["source"])
        if name not in _templates:
            return {"problem": "unknown", "message": "the worker does not have this template yet"}
        text = _templates[name].render(**request["values"])
    except jinja2.TemplateSyntaxError as error:
        return {"problem": "syntax", "message": str(error.message), "line": error.lineno}
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        return {"problem": "refused", "message": str(error)}
    except (RecursionError, ArithmeticError) as error:
        return {"problem": "broken", "message": f"{type(error).__name__}: {error}"}
    if len(text) > MAX_CHARACTERS:
        return {"problem": "large", "message": f"it produced more than {MAX_CHARACTERS} characters"}
    return {"text": text}


_templates: dict[str, jinja2.Template] = {}


def _compile(source: str) -> jinja2.Template:
    # The settings, globals and filter are those of transformers, for which templates are written.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, loopcontrols],
    )
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    # Jinja's own filter escapes HTML characters.
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
