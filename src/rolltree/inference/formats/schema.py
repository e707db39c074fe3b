"""What a tool's schema says of an argument that a model wrote as bare text.

Formats with tags write strings without quotes, so `42` may be a text or a number: only the schema
knows. Without one, text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rolltree._helpers.untrusted import read_json

_MAX_LITERAL = 100_000
_MAX_NESTING = 8
_INTEGER = re.compile(r"[+-]?\d{1,4000}")
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
_TYPES |= {"list": "array", "tuple": "array", "none": "null", "text": "string", "double": "number"}
_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class Schemas:
    """The parameters of the tools that a call may name."""

    def __init__(self, tools: Sequence[Any] | None = None) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                found = function.get("parameters")
                self._parameters[function["name"]] = found if isinstance(found, Mapping) else {}

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def keys_of(self, name: str) -> list[str]:
        """Return the parameters that the schema of a tool names, in its order."""
        return [key for key in _properties(self._parameters.get(name)) if isinstance(key, str)]

    def complete(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a known tool is given an argument, and every one that it requires."""
        required = self._parameters.get(name, {}).get("required")
        listed = required if isinstance(required, list) else []
        return name in self and bool(arguments) and all(key in arguments for key in listed)

    def value(self, name: str, key: str, text: str, *, otherwise: bool = False) -> Any:
        """Return the value of an argument written as `text`.

        `otherwise` says what is done without a schema: read the text as JSON instead of keeping it.
        """
        root = self._parameters.get(name)
        types = _types_of(_properties(root).get(key), root or {})
        if types:
            return _as_type(text, types)
        return _json_or_text(text) if otherwise else text


def _properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = schema.get("properties") if schema else None
    return found if isinstance(found, Mapping) else {}


def _types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_NESTING:
        return set()
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = {_TYPES.get(each, each) for each in map(str, listed)}
    values = schema.get("enum")
    for value in [*(values if isinstance(values, list) else []), schema.get("const")]:
        # JSON Schema has no const by default, and a null const is not worth an exception.
        if not types and value is not None:
            types.add(_OF_VALUES.get(type(value), ""))
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        for part in parts if isinstance(parts, list) else ():
            types |= _types_of(part, root, depth + 1)
    if isinstance(path := schema.get("$ref"), str) and path.startswith("#/"):
        found: Any = root
        for step in path[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        types |= _types_of(found, root, depth + 1)
    if schema.get("nullable") is True:
        types.add("null")
    if not types and isinstance(schema.get("properties"), Mapping):
        types.add("object")
    return types - {"", "any"}


def _as_type(text: str, types: set[str]) -> Any:
    """Return `text` as one of the types, or as it is if it is none of them."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return None
    if types & {"object", "array"} and bare[:1] in ("{", "["):
        value = _container(bare)
        if isinstance(value, dict) and "object" in types:
            return value
        if isinstance(value, list) and "array" in types:
            return value
    if "string" in types:
        return text
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower() == "true"
    if types & {"integer", "number"}:
        if _INTEGER.fullmatch(bare):
            return int(bare)
        number = _json_or_text(bare)
        if isinstance(number, float):
            if "number" in types:
                return number
            # JSON Schema counts 3.0 as an integer.
            if number.is_integer():
                return int(number)
    # A schema of JSON that is not a string either: what the model wrote is the best that there is.
    return text


def _container(text: str) -> Any:
    """Return the object or list in JSON, or in Python's spelling; None if it is neither."""
    try:
        return read_json(text)
    except ValueError:
        from rolltree.inference.formats.python import literal

        try:
            return literal(text[:_MAX_LITERAL])
        except ValueError:
            return None


def _json_or_text(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return text
