"""What reads text of models and servers costs O(length): a million characters in CPU seconds.

One call runs in the event loop beside all other rollouts, so a quadratic reader stops them all.
"""

import contextlib
import importlib.util
import json
import time
from pathlib import Path

import pytest

from odd_kit import calling
from rolltree._helpers.redact import redact_text
from rolltree._helpers.untrusted import read_json, visible, well_formed
from rolltree.agents.tool_calls import ReActCalls
from rolltree.agents.worlds.gym import plain_ansi
from rolltree.environments.parsers import (
    MaybeThinkParser,
    XMLParser,
    extract_boxed_answer,
    extract_hash_answer,
    one_of,
    tagged,
    without_thinking,
)
from rolltree.environments.tools import Tool
from rolltree.inference import TOOL_PARSERS
from rolltree.inference.formats.reader import CompletionParser, cut_at_stop
from rolltree.inference.formats.rows import REASONING_TAGS
from rolltree.reports.formatting import safe_text
from rolltree.values.types import FinishReason

MILLION = 10**6
BOUND_S = 5.0
"""CPU seconds for a million characters; the slowest takes a tenth of it."""


def add(a: int, b: list[int]) -> int:
    """Add."""
    return a


def packaged(name):
    file = Path(__file__).parents[1] / "environments" / name / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"linear_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def similarity(text):
    functions = packaged("reverse_text").load_environment(5, 5).rubric.get_reward_funcs()
    return functions[0](parser=XMLParser(["a"], "a"), completion=f"<a>{text}</a>", answer="x" * 40)


def shown(text):
    return safe_text(text, limit=600)


said = {"role": "assistant"}
READERS = {
    **{name: lambda text, read=read: read(text) for name, read in TOOL_PARSERS.items()},
    **{
        f"reasoning {name}": lambda text, name=name: CompletionParser(reasoning=name).parse(
            text, FinishReason.STOP
        )
        for name in REASONING_TAGS
    },
    "stop": lambda text: cut_at_stop(text, ["\nObservation:", "</answer>"]),
    "xml": lambda text: XMLParser(["think", "answer"]).parse(text, last=True),
    "xml format": XMLParser(["think", "answer"]).score_format,
    "think": MaybeThinkParser().parse,
    "think format": MaybeThinkParser().score_format,
    "boxed": extract_boxed_answer,
    "hash": extract_hash_answer,
    "one_of": one_of(["left", "right", "up up"]),
    "tagged": tagged("answer"),
    "without_thinking": without_thinking(),
    "react": lambda text: ReActCalls().read({**said, "content": text}),
    "react final": lambda text: ReActCalls().final({**said, "content": text}),
    "arguments": Tool.of(add).read_arguments,
    "json": read_json,
    "redaction": redact_text,
    "visible": visible,
    "well formed": well_formed,
    "shown": shown,
    "ansi": plain_ansi,
    "gsm8k": packaged("gsm8k").number,
    "gsm8k boxed": packaged("gsm8k").boxed,
    "tic_tac_toe": packaged("tic_tac_toe").cell,
    "reverse_text": similarity,
}

EVIL = [
    *(
        "<answer>",
        "<think><answer>",
        "<answer></think>",
        "<function=a><parameter=b",
        "<parameter=b>",
    ),
    *(
        "<arg_key>a</arg_key>",
        "<arg_key>a</arg_key> <arg_value>",
        "<arg_key>",
        "<tool_call>",
        "<tool_call>f",
    ),
    *("<|channel|>a to=b ", "<|start|>assistant to=", "<|channel|>", "<|message|>", "to= "),
    *("<|channel|>commentary to=functions.add<|message|>{}<|end|>", "<|start|><|channel|>to=a"),
    *(
        "Action: a ",
        "Action:\n",
        "Action: a\n",
        "Action Input:",
        " ",
        "\t",
        "a ",
        "\n",
        "\\boxed{",
        "{",
    ),
    *("[", '{"a":', "[1,", '"', "\\", '"\\', "\\u", '{"name":"a"};', "[TOOL_CALLS]a[ARGS]{}"),
    *(
        '<tool_call>{"name":"a"}</tool_call>',
        "<tool_call>x</tool_call>",
        "1",
        "1.",
        "-",
        "9e9",
        "e",
    ),
    *(
        "sk-",
        "bearer ",
        "://a:",
        "://a:b",
        "?key=a",
        "a=b&",
        "A",
        "Aa",
        "\x1b[41m",
        "\x1b[0m",
        "\x1b[",
    ),
    *("####", "</think>", "<think>", "left", "right ", "é", "\ud800", "\u202e", "\x00", "```json"),
]
"""Texts that are repeated; the first ones took regular expressions quadratic or cubic time."""


def cpu_s(read, text):
    start = time.process_time()
    with contextlib.suppress(ValueError):
        read(text)
    return time.process_time() - start


def of_length(head, piece, length):
    return (head + piece * (length // max(1, len(piece)) + 1))[:length]


@pytest.mark.parametrize("name", READERS)
def test_a_million_characters_cost_ten_times_a_hundred_thousand(name):
    read = READERS[name]
    heads = ["", "<tool_call>", "<|channel|>a to=b<|message|>"]
    cpu_s(read, "a")  # caches
    costs = []
    for piece in EVIL:
        for head in heads if piece in EVIL[:16] else heads[:1]:
            # A quadratic reader shows long before it takes hours.
            small = cpu_s(read, of_length(head, piece, 10_000))
            assert small < 0.25, f"{small:.2f} s for 10,000 characters of {piece!r}"
            small = cpu_s(read, of_length(head, piece, MILLION // 10))
            assert small < BOUND_S, f"{small:.2f} s for 100,000 characters of {piece!r}"
            costs.append((small, head, piece))
    for small, head, piece in sorted(costs)[-2:]:
        large = cpu_s(read, of_length(head, piece, MILLION))
        if large > 40 * max(small, 0.005):  # a busy machine costs CPU time, too: once more
            small = max(small, cpu_s(read, of_length(head, piece, MILLION // 10)))
            large = min(large, cpu_s(read, of_length(head, piece, MILLION)))
        assert large < BOUND_S, f"{large:.2f} s for a million characters of {piece!r}"
        assert large < 40 * max(small, 0.005), f"{small:.3f} s became {large:.3f} s with {piece!r}"


@pytest.mark.parametrize("style", TOOL_PARSERS)
def test_a_million_characters_of_calls_are_read(style):
    text = calling(style, ("add", json.dumps({"text": "a" * MILLION})))
    start = time.process_time()
    found = TOOL_PARSERS[style](text)
    assert time.process_time() - start < BOUND_S
    assert len(found.calls) == (style != "none")
