"""Tools: Python functions that a model can call, described and checked by their type hints.

JSON schemas come from msgspec, or from pydantic if a hint is one of its models.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from rolltree._helpers.untrusted import read_json, shorten, well_formed
from rolltree.values.errors import ConfigError, RolltreeError, message_of
from rolltree.values.types import ErrorKind, ToolSchema


class ToolArgumentError(ValueError):
    """The model's arguments do not match the tool; the model is shown the message."""


class ToolUnavailable(RolltreeError):
    """A tool cannot be called at all: its server or sandbox is gone. This fails the rollout.

    Other errors of a tool are answers to the model, but this one is not the model's fault.
    """

    kind: ErrorKind = "machine"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, its OpenAI schema and the struct that checks its arguments."""

    func: Callable[..., Any]
    name: str
    schema: ToolSchema
    arguments_type: type[msgspec.Struct]
    takes_all: bool
    is_async: bool

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """Call the function."""
        return self.func(*args, **arguments)

    @classmethod
    def of(cls, func: Callable[..., Any], *, hidden: Sequence[str] = ()) -> Tool:
        """Describe `func`: name, docstring, and per argument its type, description and default.

        Arguments in `hidden` are not shown to the model. Hints may be types that JSON can hold:
        `str`, `int`, `float`, `bool`, `None`, `Literal`, `Optional` and other unions, `list`,
        `dict`, enums, dataclasses, typed dicts, pydantic models, and `Annotated[type, "text"]`.

        Raises:
            ConfigError: the function has no usable name or has a positional argument, or a hint
                has no JSON form.
        """
        name = getattr(func, "__name__", "")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_-]{0,63}", name):
            raise ConfigError(
                f"a tool is named {name!r}; models call tools by names of at most 64 letters, "
                "digits and underscores. Define it with `def` and such a name."
            )
        parameters = _parameters(func, name, hidden)
        hints = _hints(func, name)
        summary, texts = _read_docstring(inspect.getdoc(func) or "")
        types = [hints.get(p.name, Any) for p in parameters]
        properties, definitions = _property_schemas(name, parameters, types)
        for parameter, kind in zip(parameters, types, strict=True):
            text = _annotation_text(kind) or texts.get(parameter.name)
            if text:
                properties[parameter.name]["description"] = text
            if parameter.default is not parameter.empty and _is_json(parameter.default):
                properties[parameter.name]["default"] = parameter.default
        takes_all = any(
            p.kind is p.VAR_KEYWORD for p in inspect.signature(func).parameters.values()
        )
        body: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": [p.name for p in parameters if p.default is p.empty],
            "additionalProperties": takes_all,
        }
        if definitions:
            body["$defs"] = definitions
        return cls(
            func=func,
            name=name,
            schema={
                "type": "function",
                "function": {"name": name, "description": summary, "parameters": body},
            },
            arguments_type=_arguments_type(name, parameters, types, strict=not takes_all),
            takes_all=takes_all,
            is_async=inspect.iscoroutinefunction(func)
            or inspect.iscoroutinefunction(getattr(func, "__call__", None)),  # noqa: B004
        )

    @classmethod
    def of_schema(cls, schema: ToolSchema, func: Callable[..., Any]) -> Tool:
        """Return a tool with an OpenAI schema; the asynchronous `func` gets the model's arguments.

        Only the presence of required arguments is checked, if their names are valid in Python.

        Raises:
            ConfigError: the schema has no function with a name.
        """
        function = schema.get("function") or {}
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"a tool schema has no function name: {schema!r}. Pass OpenAI's form, "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}.'
            )
        required = (function.get("parameters") or {}).get("required") or ()
        plain = [key for key in required if key.isidentifier() and not key.startswith("__")]
        return cls(
            func=func,
            name=name,
            schema=schema,
            arguments_type=msgspec.defstruct("arguments", [(k, Any) for k in plain], kw_only=True),
            takes_all=True,
            is_async=True,
        )

    def read_arguments(self, arguments: str | Mapping[str, Any] | None) -> dict[str, Any]:
        """Return checked and converted arguments from what the model wrote.

        Raises:
            ToolArgumentError: the text is not a JSON object, or does not match the signature.
        """
        given: Any = {} if arguments is None else arguments
        try:
            if isinstance(given, str):
                given = read_json(given) if given.strip() else {}
        except ValueError as error:
            raise ToolArgumentError(
                f"the arguments of {self.name} are not valid JSON: {error}"
            ) from error
        if not isinstance(given, Mapping):
            raise ToolArgumentError(f"the arguments of {self.name} must be a JSON object")
        try:
            checked = msgspec.convert(
                given, self.arguments_type, strict=False, dec_hook=_decode_pydantic
            )
        except Exception as error:
            # A type's own validation may raise anything.
            # The message goes into the prompt, and may quote everything that the model wrote.
            what = shorten(message_of(error), 500)
            raise ToolArgumentError(f"wrong arguments for {self.name}: {what}") from error
        fields = self.arguments_type.__struct_fields__
        known = {
            name: value for name in fields if (value := getattr(checked, name)) is not msgspec.UNSET
        }
        if self.takes_all:
            known.update({name: value for name, value in given.items() if name not in fields})
        return known


def convert_func_to_oai_tool(func: Callable[..., Any]) -> ToolSchema:
    """Return the OpenAI schema of a function."""
    return Tool.of(func).schema


MAX_RESULT_CHARS = 1_000_000
"""The longest text of a tool message: a tool may return more than any prompt or disk holds."""


def text_for_model(text: str) -> str:
    """Return a text as a model is shown it: at most a million characters, no lone surrogates."""
    return str(well_formed(shorten(text, MAX_RESULT_CHARS)))


def result_text(value: Any) -> str:
    """Return a tool's result as the text of a tool message: a string as it is, else JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _parameters(
    func: Callable[..., Any], name: str, hidden: Sequence[str]
) -> list[inspect.Parameter]:
    parameters = []
    for parameter in inspect.signature(func).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"tool {name!r} has the positional argument {parameter.name!r}; a model passes "
                "arguments by name. Remove the `/` or the `*` from its signature."
            )
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in hidden:
            parameters.append(parameter)
    return parameters


def _hints(func: Callable[..., Any], name: str) -> dict[str, Any]:
    target = func if inspect.isroutine(func) else getattr(func, "func", type(func).__call__)
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(
            f"a type hint of tool {name!r} cannot be resolved ({error}); its schema would be "
            "empty. Import the type at module level, outside `if TYPE_CHECKING`."
        ) from error


def _property_schemas(
    name: str, parameters: Sequence[inspect.Parameter], types: Sequence[Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    properties: dict[str, dict[str, Any]] = {}
    definitions: dict[str, Any] = {}
    for parameter, kind in zip(parameters, types, strict=True):
        try:
            (schema,), components = msgspec.json.schema_components(
                [kind], schema_hook=_pydantic_schema, ref_template="#/$defs/{name}"
            )
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"argument {parameter.name!r} of tool {name!r} has the type hint {kind!r}, which "
                f"has no JSON schema: {error}. Use types that JSON can hold."
            ) from error
        properties[parameter.name] = dict(schema)
        definitions.update(components)
    return properties, definitions


def _arguments_type(
    name: str, parameters: Sequence[inspect.Parameter], types: Sequence[Any], *, strict: bool
) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for parameter, kind in zip(parameters, types, strict=True):
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            # Unset instead of the default, so that the function's own default applies, even if JSON
            # cannot hold it.
            fields.append((parameter.name, kind | msgspec.UnsetType, msgspec.UNSET))
    return msgspec.defstruct(
        f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=strict
    )


def _pydantic_schema(kind: type) -> dict[str, Any]:
    if hasattr(kind, "model_json_schema"):
        schema: dict[str, Any] = kind.model_json_schema()
        return schema
    raise NotImplementedError(f"{kind!r} is unknown to JSON")


def _decode_pydantic(kind: type, value: Any) -> Any:
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    raise NotImplementedError(f"{kind!r} is unknown to JSON")


def _annotation_text(kind: Any) -> str | None:
    if get_origin(kind) is Annotated:
        return next((item for item in get_args(kind)[1:] if isinstance(item, str)), None)
    return None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


_SECTION = re.compile(r"^(\w[\w ]*):\s*$")
_GOOGLE = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_REST = re.compile(r"^:param\s+(?:[\w\[\], |.]+\s+)?(\w+):\s*(.*)$")


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the description of each argument.

    Knows Google's `Args:` section and reStructuredText's `:param name:`.
    """
    summary: list[str] = []
    texts: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in doc.splitlines():
        heading = _SECTION.match(line)
        rest = _REST.match(line.strip())
        if rest:
            section, current, indent = "rest", rest[1], 0
            texts[current] = rest[2].strip()
        elif heading and heading[1] in _HEADINGS:
            section, current = heading[1], ""
        elif section in ("Args", "Arguments", "Parameters"):
            depth = len(line) - len(line.lstrip())
            entry = _GOOGLE.match(line)
            if entry and (not current or depth <= indent):
                current, indent = entry[1], depth
                texts[current] = entry[2].strip()
            elif current and line.strip():
                texts[current] = f"{texts[current]} {line.strip()}".strip()
        elif section == "rest":
            if line.startswith(":"):
                current = ""
            elif current and line.strip():
                texts[current] = f"{texts[current]} {line.strip()}".strip()
        elif not section:
            summary.append(line)
    return "\n".join(summary).strip(), texts


_HEADINGS = frozenset(
    {"Args", "Arguments", "Parameters", "Returns", "Return", "Raises", "Yields"}
    | {"Example", "Examples", "Note", "Notes"}
)
