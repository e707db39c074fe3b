"""The uses of request fields, from which protocols make tables; other fields are refused by name.

A field is read by its protocol, is a sampling setting, is passed on to the model's server (which
obeys it or refuses it by name), does not affect the answer, or must have one of the values that
change nothing. Anything else is an error: nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Literal

from rolltree.gateway.serve.requests import is_one_of, sampling_of, unknown_field
from rolltree.values.types import SamplingParams
from rolltree.web.guard import RequestError


@dataclass(frozen=True, slots=True)
class Field:
    """How one field is used.

    `name` is the setting's name in OpenAI's API (or vLLM's); empty: the field's own. `passed`: a
    field with one of `values` is not passed on. `only`: other values are refused, `why` says why.
    """

    use: Literal["read", "sampling", "passed", "no_effect", "only"]
    name: str = ""
    values: tuple[object, ...] = ()
    why: str = ""


READ = Field("read")
NO_EFFECT = Field("no_effect")


def each(names: str, field: Field) -> dict[str, Field]:
    """Return a table in which every name in `names`, separated by spaces, has `field`."""
    return dict.fromkeys(names.split(), field)


def settings(names: str) -> dict[str, Field]:
    """Return a table of sampling settings with OpenAI's names."""
    return each(names, Field("sampling"))


def sampling(name: str) -> Field:
    """Return a field that is the sampling setting `name`."""
    return Field("sampling", name)


def passed(*neutral: object, name: str = "") -> Field:
    """Return a field that is passed on, as `name`, unless it has a neutral value."""
    return Field("passed", name, neutral)


def only(*values: object, why: str) -> Field:
    """Return a field that is accepted with these values only."""
    return Field("only", "", values, why)


def read_fields(
    body: Mapping[str, Any], fields: Mapping[str, Field]
) -> tuple[dict[str, Any], SamplingParams]:
    """Return the fields that the protocol reads itself, and the sampling settings.

    A field that is null counts as missing.

    Raises:
        RequestError: a field is unknown, or has a value that would not be obeyed.
    """
    given: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None:
            raise unknown_field(name, fields)
        is_listed = is_one_of(value, field.values)
        if field.use == "read":
            given[name] = value
        elif field.use == "sampling" or (field.use == "passed" and not is_listed):
            asked[field.name or name] = value
        elif field.use == "only" and not is_listed:
            raise disobeyed(name, value, field.why)
    return given, sampling_of(asked, asked)


def read_part(
    part: object, fields: Mapping[str, Field], where: str
) -> tuple[dict[str, Any], SamplingParams]:
    """Return the result of `read_fields` for an object inside the body; errors say where it is."""
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is {shown(part)}, not an object.", param=where)
    try:
        return read_fields(part, fields)
    except RequestError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise RequestError(f"{where}: {error}", param=param) from error


def disobeyed(name: str, value: object, why: str) -> RequestError:
    """Return the error for a value that would not be obeyed."""
    return RequestError(
        f"{name} = {shown(value)} cannot be obeyed: {why}. Leave it out.", param=name
    )


def model_in(given: Mapping[str, Any]) -> str:
    """Return the name of the requested model; empty if none is named."""
    model = given.get("model", "")
    if not isinstance(model, str):
        raise RequestError("model is not a string.", param="model")
    return model


def tools_in(given: Mapping[str, Any]) -> list[Any]:
    """Return the list of tools, as they came."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise RequestError("tools is not a list.", param="tools")
    return tools
