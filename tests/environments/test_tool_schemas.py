import enum
import functools
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.environments import Tool, convert_func_to_oai_tool
from rolltree.environments.tools.tool import ToolArgumentError, result_text
from rolltree.values.errors import ConfigError


def parameters(func):
    return convert_func_to_oai_tool(func)["function"]["parameters"]


def search(query: str, limit: int = 10) -> str:
    """Search the library.

    Finds books by their title.

    Args:
        query: What to look for. It may be
            several words.
        limit (int): Most results.

    Returns:
        The titles, one a line.
    """
    return f"{query}:{limit}"


def test_a_whole_schema():
    assert convert_func_to_oai_tool(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the library.\n\nFinds books by their title.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "What to look for. It may be several words.",
                    },
                    "limit": {"type": "integer", "description": "Most results.", "default": 10},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Person(TypedDict):
    name: str


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"enum": ["a", "b"]}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Colour, {"$ref": "#/$defs/Colour"}),
        (Point, {"$ref": "#/$defs/Point"}),
        (Person, {"$ref": "#/$defs/Person"}),
    ],
)
def test_hints_and_their_schemas(hint, schema):
    def tool(value):
        return value

    tool.__annotations__["value"] = hint
    body = parameters(tool)
    assert body["properties"]["value"] == schema
    if "$ref" in schema:
        assert schema["$ref"].rpartition("/")[2] in body["$defs"]


def test_no_hint_takes_anything():
    body = parameters(lambda_named("f", lambda value, other=None: value))
    assert body["properties"] == {"value": {}, "other": {"default": None}}
    assert body["required"] == ["value"]


def lambda_named(name, func):
    func.__name__ = name
    return func


def test_descriptions_from_annotated_win_over_the_docstring():
    def tool(a: Annotated[int, "from the hint"], b: int):
        """Do it.

        Args:
            a: from the text
            b: from the text
        """

    properties = parameters(tool)["properties"]
    assert properties["a"]["description"] == "from the hint"
    assert properties["b"]["description"] == "from the text"


def test_restructured_text_docstrings():
    def tool(a: int, b: str):
        """Do it.

        :param a: the first,
            and more
        :param str b: the second
        :return: nothing
        """

    function = convert_func_to_oai_tool(tool)["function"]
    assert function["description"] == "Do it."
    texts = {name: p["description"] for name, p in function["parameters"]["properties"].items()}
    assert texts == {"a": "the first, and more", "b": "the second"}


def test_colons_in_a_description_do_not_begin_an_argument():
    def tool(a: int, b: int):
        """Do it.

        Args:
            a: one of:
                b: no argument, deeper
            b: the real one
        """

    properties = parameters(tool)["properties"]
    assert properties["a"]["description"] == "one of: b: no argument, deeper"
    assert properties["b"]["description"] == "the real one"


def test_no_docstring():
    assert convert_func_to_oai_tool(lambda_named("f", lambda: 1))["function"]["description"] == ""


def test_defaults_that_json_cannot_hold_are_not_shown():
    def tool(a: float = float("nan"), b: Any = object(), c: list = [1]):  # noqa: B006, B008
        pass

    properties = parameters(tool)["properties"]
    assert "default" not in properties["a"]
    assert "default" not in properties["b"]
    assert properties["c"]["default"] == [1]


def test_methods_partials_and_callable_objects():
    class Box:
        def open(self, key: str) -> str:
            return key

    described = Tool.of(Box().open)
    assert list(described.schema["function"]["parameters"]["properties"]) == ["key"]

    partial = functools.partial(search, limit=3)
    partial.__name__ = "search3"
    assert Tool.of(partial).schema["function"]["name"] == "search3"


def test_hidden_arguments_are_not_shown():
    def tool(query: str, sandbox: object) -> str:
        return query

    described = Tool.of(tool, hidden=["sandbox"])
    assert list(described.schema["function"]["parameters"]["properties"]) == ["query"]


def test_pydantic_models():
    pydantic = pytest.importorskip("pydantic")

    class Book(pydantic.BaseModel):
        title: str
        year: int = 1900

    def tool(book: Book) -> str:
        return f"{book.title} {book.year}"

    tool.__annotations__["book"] = Book
    described = Tool.of(tool)
    schema = described.schema["function"]["parameters"]
    assert "title" in str(schema)
    arguments = described.read_arguments('{"book": {"title": "Emma"}}')
    assert arguments["book"] == Book(title="Emma")
    with pytest.raises(ToolArgumentError, match="year"):
        described.read_arguments({"book": {"title": "Emma", "year": "soon"}})


def positional(a, /): ...
def starred(*a): ...
def unresolved(a: "Nowhere"): ...  # noqa: F821
def no_json(a: functools.partial): ...


@pytest.mark.parametrize(
    ("func", "match"),
    [
        (positional, "positional argument"),
        (starred, "positional argument"),
        (unresolved, "Nowhere"),
        (no_json, "no JSON schema"),
        (lambda x: x, "<lambda>"),
    ],
)
def test_functions_that_are_no_tools(func, match):
    with pytest.raises(ConfigError, match=match):
        Tool.of(func)


# Arguments


def test_arguments_are_checked_and_converted():
    def tool(point: Point, colour: Colour, tags: list[str], ratio: float = 0.5):
        pass

    read = Tool.of(tool).read_arguments
    assert read('{"point": {"x": 1}, "colour": "red", "tags": ["a"]}') == {
        "point": Point(1, 0),
        "colour": Colour.RED,
        "tags": ["a"],
    }
    assert read({"point": {"x": "2"}, "colour": "blue", "tags": [], "ratio": 1}) == {
        "point": Point(2, 0),
        "colour": Colour.BLUE,
        "tags": [],
        "ratio": 1.0,
    }


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ('{"query": "a"', "not valid JSON"),
        ("[1]", "JSON object"),
        ('"a"', "JSON object"),
        ("[]", "JSON object"),
        ("false", "JSON object"),
        ("null", "JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ("9" * 10_000, "not valid JSON"),
        ("{}", "query"),
        ('{"query": 3}', "query"),
        ('{"query": "a", "limit": "many"}', "limit"),
        ('{"query": "a", "limt": 3}', "limt"),
    ],
)
def test_what_a_model_gets_wrong(arguments, match):
    with pytest.raises(ToolArgumentError, match=match):
        Tool.of(search).read_arguments(arguments)


@pytest.mark.parametrize("arguments", ["", "  ", None, "{}", {}])
def test_a_tool_without_arguments(arguments):
    def now():
        pass

    assert Tool.of(now).read_arguments(arguments) == {}


def test_keyword_arguments_pass_through():
    def tool(a: int, **rest):
        pass

    described = Tool.of(tool)
    assert described.schema["function"]["parameters"]["additionalProperties"] is True
    assert described.read_arguments('{"a": 1, "b": "x"}') == {"a": 1, "b": "x"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.text())
def test_any_json_value_arrives_as_it_was_sent(value, text):
    import json

    def tool(value: Any, text: str):
        pass

    sent = {"value": value, "text": text}
    assert Tool.of(tool).read_arguments(json.dumps(sent)) == sent


@given(st.text())
def test_no_text_can_crash_the_reader(text):
    try:
        read = Tool.of(search).read_arguments(text)
    except ToolArgumentError:
        return
    assert set(read) <= {"query", "limit"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (3, "3"),
        ({"a": ["é"]}, '{"a": ["é"]}'),
        (Point(1, 2), '{"x": 1, "y": 2}'),
        (Colour.RED, '"red"'),
    ],
)
def test_results_become_text(value, text):
    assert result_text(value) == text


def test_results_without_a_json_form():
    value = object()
    assert result_text(value) == str(value)


async def _given(**arguments):
    return arguments


@pytest.mark.parametrize("required", [[], ["class", "from"], ["self", "a-b"], ["__x", "x y", "q"]])
def test_a_schema_from_elsewhere_is_taken_as_it_is(required):
    schema = {
        "type": "function",
        "function": {"name": "t", "parameters": {"type": "object", "required": required}},
    }
    tool = Tool.of_schema(schema, _given)
    assert tool.schema is schema
    said = dict.fromkeys([*required, "more"], 1)
    assert tool.read_arguments(json.dumps(said)) == said
    if required:
        with pytest.raises(ToolArgumentError, match="missing required field"):
            tool.read_arguments("{}")
    for nameless in ({}, {"function": {"name": ""}}, {"function": {"name": 3}}):
        with pytest.raises(ConfigError, match="no function name"):
            Tool.of_schema(nameless, _given)
