"""Tool schemas as verifiers 0.1.8 made them: pydantic's JSON schema in OpenAI's strict form.

Titles and descriptions are in the prompt that the model reads, so they are the same to the letter.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

from rolltree.values.errors import ConfigError
from rolltree.values.types import ToolSchema


def convert_func_to_oai_tool(func: Callable[..., Any]) -> ToolSchema:
    """Return the OpenAI schema of a function, with every argument required.

    Raises:
        ConfigError: a hint has no JSON schema, or pydantic is missing.
    """
    description, texts = read_docstring(func)
    return {
        "type": "function",
        "function": {
            "name": func.__name__,
            "description": description,
            "parameters": strict(_schema_of(func, texts)),
        },
    }


# verifiers describes tools with openai-agents, which reads docstrings with griffe and guesses their
# style: the one with most signs, of equals the first, and without any signs Google's.
_STYLE_SIGNS = {
    "sphinx": (r"^:param\s", r"^:type\s", r"^:return:", r"^:rtype:"),
    "numpy": tuple(rf"^{name}\s*\n\s*-{{3,}}" for name in ("Parameters", "Returns", "Yields")),
    "google": (r"^(Args|Arguments):", r"^(Returns):", r"^(Raises):"),
}
_PARAMETERS_HEADING = re.compile(r"(?i)(args|arguments|params|parameters):\s*$")


def read_docstring(func: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a docstring's description of the function and, by name, those of its parameters.

    Raises:
        ConfigError: griffe is missing.
    """
    doc = inspect.getdoc(func)
    if not doc:
        return "", {}
    try:
        from griffe import Docstring, DocstringSectionKind
    except ImportError as error:
        raise ConfigError(
            "verifiers' tools are described from their docstrings, which griffe reads, and it is "
            "missing. Install it with `pip install 'rolltree[compat]'`."
        ) from error
    signs = {
        style: sum(bool(re.search(form, doc, re.M)) for form in forms)
        for style, forms in _STYLE_SIGNS.items()
    }
    style = max(signs, key=lambda name: signs[name]) if any(signs.values()) else "google"
    if style == "google":
        doc = _with_blank_lines(doc)
    griffe_logger = logging.getLogger("griffe")
    level = griffe_logger.level
    griffe_logger.setLevel(logging.ERROR)  # it warns of every parameter without a type
    try:
        # griffe dedents again, except for the first line, unless that is empty.
        sections = Docstring("\n" + doc, lineno=1, parser=style).parse()
    finally:
        griffe_logger.setLevel(level)
    texts = [part.value for part in sections if part.kind is DocstringSectionKind.text]
    parameters = {
        item.name.lstrip("*"): item.description
        for part in sections
        if part.kind is DocstringSectionKind.parameters
        for item in part.value
    }
    return (texts[0] if texts else ""), parameters


def _with_blank_lines(doc: str) -> str:
    """Return a docstring with an empty line above `Args:`: griffe skips a heading without one."""
    lines = doc.splitlines()
    made: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_heading = _PARAMETERS_HEADING.match(line) and following.startswith((" ", "\t"))
        if is_heading and made and made[-1].strip():
            made.append("")
        made.append(line)
    return "\n".join(made)


def _schema_of(func: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return pydantic's schema of a model with the function's parameters as fields."""
    try:
        from pydantic import Field, create_model
        from pydantic.errors import PydanticUserError
        from pydantic.fields import FieldInfo
    except ImportError as error:
        raise ConfigError(
            "verifiers' tools are described by pydantic, which is missing. Install it with "
            "`pip install 'rolltree[compat]'`."
        ) from error
    hints = get_type_hints(func, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(func).parameters.items():
        # verifiers refuses `**kwargs`; here the object is left open further down.
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name.startswith("_"):
            raise ConfigError(
                f"the tool {func.__name__!r} has an argument {name!r}; names of arguments that a "
                "model gives do not begin with an underscore. Rename it."
            )
        kind = _known_to_pydantic(hints.get(name, Any))
        text = texts.get(name)
        if get_origin(kind) is Annotated:
            said = next((item for item in get_args(kind)[1:] if isinstance(item, str)), None)
            # The docstring overrides the annotation, and an empty text counts as missing, as in
            # openai-agents.
            text = (text if text is not None else said) or None
        if parameter.kind is parameter.VAR_POSITIONAL:
            fields[name] = (_several(kind), Field(default_factory=list, description=text))
        elif isinstance(parameter.default, FieldInfo):
            fields[name] = (kind, _described(parameter.default, text or None))
        elif parameter.default is parameter.empty:
            fields[name] = (_described(kind, text), ...)
        else:
            fields[name] = (_described(kind, text), parameter.default)
    try:
        # The model's name ends up as the title of the schema, which the prompt shows.
        schema: dict[str, Any] = create_model(f"{func.__name__}_args", **fields).model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(
            f"the arguments of the tool {func.__name__!r} have no JSON schema: {error}"
        ) from error
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()):
        schema["additionalProperties"] = True
    return schema


def _known_to_pydantic(kind: Any) -> Any:
    """Return a hint with `typing`'s typed dicts replaced by those of `typing_extensions`.

    Before Python 3.12, pydantic accepts only these.
    """
    if sys.version_info >= (3, 12) or not is_typeddict(kind):
        return kind
    from typing_extensions import TypedDict, is_typeddict as is_known  # noqa: I001

    if is_known(kind) and type(kind).__module__ == "typing_extensions":
        return kind
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        name: _known_to_pydantic(hint if name in kind.__required_keys__ else NotRequired[hint])
        for name, hint in hints.items()
    }
    made = TypedDict(kind.__name__, fields)
    made.__doc__ = kind.__doc__
    return made


def _several(kind: Any) -> Any:
    """Return the type of what `*args: kind` collects."""
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    parts = get_args(plain)
    if get_origin(plain) is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return list[parts[0]]  # type: ignore[valid-type]
    return list[kind]


def _described(kind: Any, text: str | None) -> Any:
    """Return a type or a field with a description, unless there is none to add."""
    from pydantic import Field
    from pydantic.fields import FieldInfo

    if text is None:
        return kind
    if isinstance(kind, FieldInfo):
        return FieldInfo.merge_field_infos(kind, description=text)
    return Annotated[kind, Field(description=text)]


def strict(schema: Any, root: Any = None) -> dict[str, Any]:
    """Return a JSON schema in OpenAI's strict form; `schema` is changed.

    Objects are closed, unless they say that they are open, and require all their properties; null
    defaults are left out, and a reference with a description is replaced by its target.
    """
    root = schema if root is None else root
    for name in ("$defs", "definitions"):
        for part in (schema.get(name) or {}).values():
            strict(part, root)
    properties = schema.get("properties")
    if schema.get("type") is None and isinstance(properties, dict):
        schema["type"] = "object"
    kinds = schema.get("type")
    is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    if is_object:
        schema.setdefault("additionalProperties", False)
    if isinstance(properties, dict):
        # Every property, even with a default: strict mode requires it, and verifiers sends it.
        schema["required"] = list(properties)
        for part in properties.values():
            strict(part, root)
    if isinstance(schema.get("items"), dict):
        strict(schema["items"], root)
    if "oneOf" in schema:
        # Strict mode does not have oneOf.
        schema["anyOf"] = [*schema.get("anyOf", ()), *schema.pop("oneOf")]
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        strict(part, root)
    if len(schema.get("allOf", ())) == 1:
        schema.update(schema.pop("allOf")[0])
    # As in openai-agents, which treats null as no default.
    if schema.get("default", ...) is None:
        del schema["default"]
    # A reference with a description next to it is not allowed, so it is replaced by its target.
    if "$ref" in schema and len(schema) > 1:
        target = root
        for step in schema.pop("$ref").removeprefix("#/").split("/"):
            target = target[step]
        own = dict(schema)
        schema.update({**target, **own})
        strict(schema, root)
    return dict(schema) if schema is root else schema
