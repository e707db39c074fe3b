"""Parsers and tool schemas on a thousand random texts and docstrings, the same on both sides.

Run as a script it prints what one side makes of them.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

HERE = Path(__file__).parent
EITHER, MAYBE = Union[int, str], Optional  # noqa: UP007
PIECES = (
    *("<think>", "</think>", "<a>", "</a>", "<b>", "</b>", "<c>", "</c>", "<answer>", "</answer>"),
    *(" ", "\n", "x", "\\boxed{", "}", "{", "42", "\u00a0", "\x1c", "####", "<", "a>", "7"),
)
GOOGLE = (
    *("Add two.", "", "", "Args:", "    a: first", "    b (int): second one", "        goes on"),
    *("      odd", "    *args: many", "    no colon here", "Returns:", "    int: sum", "Example:"),
    *("    >>> f(1)", "Note: careful", "    indented", "```", "Arguments:", "Parameters:"),
    *("  x: two", "Raises:", "    ValueError: bad", "Text after.", "Keyword Args:", "Examples:"),
    *("    c (list[int], optional): third: with colon", "Some words: more"),
)
NUMPY = (
    *("Sum up.", "", "Parameters", "----------", "a : int", "    the first", "    more"),
    *("b, c : str, optional", "    both", "Returns", "-------", "int", "    the sum", "Notes"),
    *("-----", "free text", "Examples", "--------", ">>> 1", "*args", "  odd", "d"),
)
SPHINX = (
    *("Say.", "", "more text", ":param a: first", ":param int b: second", "    cont"),
    *(":type a: int", ":return: x", ":rtype: int", ":raises ValueError: bad", ":keyword c: k"),
    *(":param list of int c: third", ":unknown x: y", ":parameter e: ee", "tail"),
)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Place:
    """Where."""

    name: str
    tags: list[Literal["p", "q"]] = dataclasses.field(default_factory=list)
    inside: Place | None = None


def hints() -> list[Any]:
    """Return types of arguments, with a default of each."""
    from pydantic import BaseModel, Field

    class Point(BaseModel):
        """A point."""

        x: int
        y: float = 0.0
        near: list[Point] = []

    Point.model_rebuild(_types_namespace={"Point": Point})
    some = Annotated[int, Field(ge=0, le=9, description="some")]
    return [
        *((int, 1), (str, "x"), (float, 1.5), (bool, False), (list[int], [1]), (Any, None)),
        *((int | None, None), (EITHER, 3), (tuple[int, ...], (1,)), (set[str], None)),
        *((Literal["a", 1], "a"), (Color, Color.BLUE), (Point, None), (MAYBE[Point], None)),
        *((Place, None), (Annotated[str, "what to say"], "no"), (some, 4), (list[Place], [])),
        *((list, None), (tuple[int, str], (1, "a")), (bytes, b"x")),
    ]


def main() -> None:
    """Print what this side makes of the texts, one JSON value per line."""
    import verifiers as vf

    rng = random.Random(5)
    parsers = [
        vf.XMLParser(["think", "answer"]),
        vf.XMLParser(["a", ("b", "c")], answer_field="c"),
        vf.XMLParser(["a"], "a", str.upper),
        vf.XMLParser([("a", "b"), "answer"]),
        vf.XMLParser(["a", "b"], answer_field="none"),
        *(vf.ThinkParser(), vf.ThinkParser(vf.extract_boxed_answer)),
        *(vf.MaybeThinkParser(), vf.MaybeThinkParser(vf.extract_boxed_answer)),
        *(vf.Parser(), vf.Parser(str.upper)),
    ]
    for _ in range(1000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(14)))
        said = [message(rng, text) for _ in range(rng.randrange(5))]
        for parser in parsers:
            print(json.dumps([text, type(parser).__name__, read(parser, text, said)]))
        print(json.dumps([vf.extract_boxed_answer(text), vf.extract_hash_answer(text)]))
    for number in range(1500):
        print(json.dumps(schema(rng, (GOOGLE, NUMPY, SPHINX)[number % 3])))


def message(rng: random.Random, text: str) -> dict[str, Any]:
    """Return a message of any role, perhaps without content."""
    content = rng.choice([text, text, "<a>1</a>", "<answer> 2 </answer><answer>3</answer>", None])
    made = {"role": rng.choice(["assistant", "assistant", "user", "tool", "system"])}
    return made if rng.random() < 0.03 else {**made, "content": content}


def read(parser: Any, text: str, said: list[Any]) -> list[Any]:
    """Return all that a parser makes of a text and of a conversation."""
    reward = parser.get_format_reward_func()
    found = [
        tried(lambda: plain(parser.parse(text))),
        tried(lambda: parser.parse_answer(text)),
        tried(lambda: parser.parse_answer(said)),
        tried(lambda: reward(completion=said)),
        tried(lambda: reward(completion=text)),
        tried(lambda: parser.get_assistant_messages(said)),
        tried(lambda: parser.get_tool_messages(said)),
    ]
    if hasattr(parser, "get_fields"):
        found += [
            tried(lambda: plain(parser.parse(text, strip=False))),
            tried(lambda: plain(parser.parse(text, last=True))),
            *(parser.get_fields(), parser.get_format_str()),
            tried(lambda: parser.format(a=text, b=1)),
            tried(lambda: parser.format(think=1, answer=text, x=3)),
        ]
    return found


def plain(value: Any) -> Any:
    """Return a namespace as a dict."""
    return vars(value) if hasattr(value, "__dict__") else value


def tried(act: Callable[[], Any]) -> Any:
    """Return what `act` returns, or the name of its error."""
    try:
        return act()
    except Exception as error:
        return [type(error).__name__]


def schema(rng: random.Random, lines: tuple[str, ...]) -> Any:
    """Return the schema of a function with a random signature and docstring."""
    from verifiers.utils.tool_utils import convert_func_to_oai_tool

    kinds = hints()
    names = rng.sample(["a", "b", "c", "x"], rng.randrange(4))
    chosen = [rng.choice(kinds) for _ in names]
    num_plain = rng.randrange(len(names) + 1)
    parameters = [
        name if index < num_plain else f"{name}=defaults[{index}]"
        for index, name in enumerate(names)
    ]
    scope: dict[str, Any] = {"defaults": [default for _, default in chosen]}
    exec(f"def tool({', '.join(parameters)}): ...", scope)
    tool = scope["tool"]
    tool.__annotations__ = dict(zip(names, (kind for kind, _ in chosen), strict=True))
    doc = "\n".join(rng.choice(lines) for _ in range(rng.randrange(12)))
    tool.__doc__ = doc if rng.random() < 0.7 else "\n    " + doc.replace("\n", "\n    ")
    return [doc, tried(lambda: convert_func_to_oai_tool(tool))]


def test_parsers_and_schemas_read_alike(real_python: Path) -> None:
    own = [sys.executable, str(HERE / "as_verifiers.py"), __file__]
    sides = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            text=True,
        )
        for command in ([str(real_python), __file__], own)
    ]
    real, ours = (side.communicate(timeout=300)[0].splitlines() for side in sides)
    assert len(real) == 1000 * 12 + 1500
    assert [pair for pair in zip(real, ours, strict=True) if pair[0] != pair[1]][:3] == []


if __name__ == "__main__":
    main()
