"""Calls that rolltree and vLLM's parsers read right, per family of models.

    python benchmarks/formats.py            the table, figures on the last line
    python benchmarks/formats.py --check    exit 1 when rolltree misses a text, or vLLM reads more
    python benchmarks/formats.py --json     one JSON object instead of the table

The texts are those of the tests (`tests/inference/formats/families.py`): calls as the chat template
of each family spells them, with values that are easily misread. A text is right if the calls have
the names, the order and the typed arguments that the model wrote; content is not compared. vLLM's
parsers read the whole text, with a tokenizer in which the marks of the format are special tokens.
In an environment without vLLM (`make test-vllm` makes one with it) only rolltree is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/inference/formats"))

from families import FAMILIES, TOOLS, texts
from verdict import Bar, conclude, make_parser

from rolltree.inference import TOOL_PARSERS
from rolltree.inference.formats.rows import TOOL_FORMATS

Calls = list[tuple[str, dict[str, Any]]]
VLLM = {
    "hermes": "hermes",
    "llama3": "llama3_json",
    "llama4": "llama4_pythonic",
    "mistral": "mistral",
    "DeepSeek V3": "deepseek_v3",
    "DeepSeek V3.1": "deepseek_v31",
    "DeepSeek V3.2": "deepseek_v32",
    "DeepSeek V4": "deepseek_v4",
    "GLM 4.5": "glm45",
    "GLM 4.7": "glm47",
    "qwen_xml": "qwen3_coder",
    "seed_oss": "seed_oss",
    "minimax_m2": "minimax_m2",
    "step3": "step3",
    "kimi_k2": "kimi_k2",
    "gemma4": "gemma4",
    "functiongemma": "functiongemma",
    "lfm2": "lfm2",
    "xlam": "xlam",
    "olmo3": "olmo3",
    "granite": "granite",
    "Granite 4": "granite4",
    "phi4": "phi4_mini_json",
    "internlm": "internlm",
    "apertus": "apertus",
    "tool_calls": "hunyuan_a13b",
    "longcat": "longcat",
}
"""vLLM's name of a parser by family or row; without one vLLM has none, or none
that reads text: gpt-oss and Cohere are read from ids."""


def by_rolltree(family: str) -> Callable[[str], Calls]:
    read = TOOL_PARSERS[FAMILIES[family][0]]
    return lambda text: [(c.name, json.loads(c.arguments)) for c in read(text, TOOLS).calls]


def by_vllm(family: str) -> Callable[[str], Calls] | None:
    """Return vLLM's reader of a family; None if vLLM has none."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    from rolltree.inference.models import resolve_model

    row = FAMILIES[family][0]
    name = VLLM.get(family, VLLM.get(row))
    if name is None:
        return None
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    marks = [*TOOL_FORMATS[row].marks, *(["[ARGS]"] if family == "Mistral Small 3.2" else [])]
    tokenizer.add_tokens(marks, special_tokens=True)
    messages = [{"role": "user", "content": "Hello"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=TOOLS)
    make = ToolParserManager.get_tool_parser(name)

    def read(text: str) -> Calls:
        found = make(tokenizer, request.tools).extract_tool_calls(text, request=request)
        listed = [call.function for call in found.tool_calls]
        return [(call.name, json.loads(call.arguments or "{}")) for call in listed]

    return read


def right(family: str, read: Callable[[str], Calls]) -> dict[str, str]:
    """Return the kinds of text that were read wrong, each with what was read."""
    faults = {}
    for kind, (text, calls) in texts(family).items():
        try:
            made: object = read(text)
        except Exception as error:  # noqa: BLE001 - a parser that raises has not read the text
            made = f"{type(error).__name__}: {error}"
        if made != calls:
            faults[kind] = str(made)
    return faults


def main() -> int:
    options = make_parser(__doc__).parse_args()
    try:
        import vllm

        version = f"vLLM {vllm.__version__}"
    except ImportError:
        version = ""
    rows: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        other = by_vllm(family) if version else None
        rows[family] = {
            "texts": len(texts(family)),
            "rolltree": right(family, by_rolltree(family)),
            "vllm": right(family, other) if other else None,
        }

    def show() -> None:
        print(f"{'family':24} {'texts':>5} {'rolltree':>8} {version or 'no vLLM here':>12}")
        for family, row in rows.items():
            total, faults = row["texts"], row["vllm"]
            theirs = "-" if faults is None else total - len(faults)
            print(f"{family:24} {total:5} {total - len(row['rolltree']):8} {theirs:>12}")

    compared = [row for row in rows.values() if row["vllm"] is not None]
    wrong = sum(len(row["rolltree"]) for row in rows.values())
    behind = sum(len(row["rolltree"]) > len(row["vllm"]) for row in compared)
    total = sum(row["texts"] for row in compared)
    theirs = total - sum(len(row["vllm"]) for row in compared)
    return conclude(
        options,
        [
            Bar.at_most("texts that rolltree misreads", wrong, 0),
            Bar.at_most("families in which vLLM reads more", behind, 0),
        ],
        {"vllm": version, "families": rows},
        show,
        also=[f"{theirs} of {total} by {version}"] if version else [],
    )


if __name__ == "__main__":
    sys.exit(main())
