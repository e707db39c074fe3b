"""How the fields of requests are read; `rolltree.gateway.field_table` has them all.

A field is read by its protocol, is a sampling setting, is passed on to the model's server (which
obeys it or refuses it by name), is taken as it is, or must have one of the values that change
nothing. Anything else is an error. Nothing is dropped but what a session says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Literal, NamedTuple, TypeAlias

from rolltree.inference.client import sampling_from_args
from rolltree.values.errors import ConfigError, did_you_mean
from rolltree.values.types import SamplingParams
from rolltree.web.guard import RequestError

_MAX_CHOICES = 256
# Limited because every token is compared with all entries, in the thread that decodes all requests.
_MAX_ENTRIES = {"stop": 4096, "stop_token_ids": 1024}
_MAX_STOP_CHARACTERS = 4096
_SETTING = re.compile(r"sampling argument (\w+)")


Effect: TypeAlias = Literal["changes", "hint", "no effect"]
"""What a field does: it changes the answer, is a wish, or has no effect on what is sampled."""
Use: TypeAlias = Literal["read", "sampling", "passed", "taken", "only"]


@dataclass(frozen=True, slots=True)
class Field:
    """How one field is used.

    `name` is the setting's name in OpenAI's API (or vLLM's); empty: the field's own. `values` ask
    for what is done without the field: one of them is not passed on, and not noted; with the use
    "only", others are refused. `why` says why.
    """

    use: Use
    name: str = ""
    values: tuple[object, ...] = ()
    why: str = ""
    effect: Effect = "changes"

    @property
    def is_noted(self) -> bool:
        """Whether a value that asks for something is noted here; the model's server may obey it."""
        return self.effect == "hint" and self.use != "passed"


READ = Field("read")
NO_EFFECT = Field("taken", effect="no effect")


class FieldsRead(NamedTuple):
    """What `read_fields` returns: the protocol's own fields, sampling settings, and notes."""

    given: dict[str, Any]
    sampling: SamplingParams
    notes: dict[str, str]


def each(names: str, field: Field) -> dict[str, Field]:
    """Return a table in which every name in `names`, separated by spaces, has `field`."""
    return dict.fromkeys(names.split(), field)


def passed(*neutral: object, name: str = "") -> Field:
    """Return a field that is passed on, as `name`, unless it has a neutral value."""
    return Field("passed", name, neutral)


def only(*values: object, why: str) -> Field:
    """Return a field that is accepted with these values only."""
    return Field("only", "", values, why)


def read_fields(body: Mapping[str, Any], fields: Mapping[str, Field]) -> FieldsRead:
    """Return the fields that the protocol reads itself, the sampling settings, and notes on hints.

    A field that is null counts as missing.

    Raises:
        RequestError: a field is unknown, or has a value that would not be obeyed.
    """
    given: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    names: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None:
            raise unknown_field(name, fields)
        limit = _MAX_ENTRIES.get(field.name or name)
        if limit is not None and isinstance(value, Sized) and len(value) > limit:
            raise RequestError(
                f"{name} has {len(value):,} entries or characters, and every token is compared "
                f"with them; at most {limit:,} are allowed.",
                param=name,
            )
        is_listed = is_one_of(value, field.values)
        if field.use == "read":
            given[name] = value
        elif field.use == "sampling" or (field.use == "passed" and not is_listed):
            asked[field.name or name] = value
            names[field.name or name] = name
        elif field.use == "only" and not is_listed:
            raise disobeyed(name, value, field.why.removeprefix("refused: "))
        if field.is_noted and not is_listed:
            # Not what an object has: it may be a key for somebody's server.
            what = shown(value) if isinstance(value, str | int | float) else "something"
            notes[name] = f"{what} was asked for; {field.why}"
    return FieldsRead(given, _sampling_of(asked, names), notes)


def _sampling_of(asked: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """Return the sampling settings of checked fields; `names` has those of the protocol.

    Raises:
        RequestError: a value cannot be used.
    """
    try:
        sampling = sampling_from_args(dict(asked))
    except ConfigError as error:
        message = str(error)
        setting = _SETTING.match(message)
        name = names.get(setting[1]) if setting else None
        if setting and name:
            message = f"{name}{message[setting.end() :]}"
        raise RequestError(message, param=name) from error
    if sum(map(len, sampling.stop)) > _MAX_STOP_CHARACTERS:
        raise RequestError(
            f"the stop strings have more than {_MAX_STOP_CHARACTERS:,} characters in all, and "
            "every token is compared with them. Shorten them.",
            param="stop",
        )
    return sampling


def read_part(part: object, fields: Mapping[str, Field], where: str) -> FieldsRead:
    """Return the result of `read_fields` for an object inside the body; errors say where it is."""
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is {shown(part)}, not an object.", param=where)
    try:
        found = read_fields(part, fields)
    except RequestError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise RequestError(f"{where}: {error}", param=param) from error
    return found._replace(notes={f"{where}.{name}": why for name, why in found.notes.items()})


def checked_names(names: object) -> tuple[str, ...]:
    """Return the names of the fields that a session drops.

    Raises:
        ConfigError: they are not a list of names.
    """
    listed = names if isinstance(names, list | tuple) else [None]
    if not all(isinstance(name, str) and all(name.split(".")) for name in listed):
        raise ConfigError(
            f"drop_fields is {shown(names)}, not a list of names of fields, so nothing would be "
            'dropped. Write ["moderation", "reasoning.context"].'
        )
    return tuple(listed)


def without_fields(
    body: Mapping[str, Any], names: Iterable[str]
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Return a body without the fields that a session drops, and notes on those that it had.

    A name in a nested object has dots; in a list, it is that of every entry.

    >>> without_fields({"a": [{"b": 1, "c": 2}], "d": 3}, ["a.b", "e"])
    ({'a': [{'c': 2}], 'd': 3}, {'a.b': 'the session drops it'})
    """
    notes: dict[str, str] = {}
    for name in names:
        less: Any = _without(body, name.split("."))
        if less != body:
            body, notes[name] = less, "the session drops it"
    return body, notes


def _without(value: Any, path: list[str]) -> Any:
    if isinstance(value, list):
        return [_without(each, path) for each in value]
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    rest = {name: part for name, part in value.items() if name != path[0]}
    return {**value, path[0]: _without(value[path[0]], path[1:])} if path[1:] else rest


def unknown_field(name: str, known: Collection[str]) -> RequestError:
    """Return the error for a field that the server does not know."""
    return RequestError(
        f"the field {shown(name)} is unknown here and would be ignored."
        + did_you_mean(name, known),
        param=name[:100],
    )


def is_one_of(value: object, values: Iterable[object]) -> bool:
    """Return whether a field has one of the values; unlike in Python, `True` is not the number 1.

    >>> is_one_of(1.0, (1,)), is_one_of(True, (1,))
    (True, False)
    """
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def disobeyed(name: str, value: object, why: str) -> RequestError:
    """Return the error for a value that would not be obeyed."""
    return RequestError(
        f"{name} = {shown(value)} cannot be obeyed: {why}. Leave it out, or let the session drop "
        "it (drop_fields).",
        param=name,
    )


def model_in(given: Mapping[str, Any]) -> str:
    """Return the name of the requested model; empty if none is named."""
    model = given.get("model", "")
    if not isinstance(model, str):
        raise RequestError("model is not a string.", param="model")
    return model


def tools_in(given: Mapping[str, Any], where: str = "tools") -> list[Any]:
    """Return the list of tools, as they came."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise RequestError(f"{where} is not a list.", param=where)
    return tools


def flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the value of a boolean field; `default` if it is not given, or null.

    Raises:
        RequestError: it is not a boolean.
    """
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} = {shown(value)} is neither true nor false.", param=name)
    return value


def num_choices(given: Mapping[str, Any]) -> int:
    """Return `n`, the number of completions per prompt."""
    n = given.get("n", 1)
    # True is an int in Python.
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MAX_CHOICES:
        raise RequestError(f"n = {shown(n)} is not a number from 1 to {_MAX_CHOICES}.", param="n")
    return n


def notes_on_form(given: Mapping[str, Any]) -> dict[str, str]:
    """Return a note on `stream_options` without `stream`."""
    if given.get("stream_options") and not flag(given, "stream"):
        return {"stream_options": "the answer is not streamed, so they ask for nothing"}
    return {}


def includes_usage(given: Mapping[str, Any]) -> bool:
    """Return whether `stream_options` request the usage at the end of the stream.

    Raises:
        RequestError: they request anything else.
    """
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise RequestError(
            f"stream_options = {shown(options)} has something other than include_usage, which "
            "would be ignored.",
            param="stream_options",
        )
    return flag(options, "include_usage")
