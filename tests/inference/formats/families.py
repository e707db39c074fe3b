"""How each family of models spells a call, after its chat template; for the tests of this room."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BAR, SPACE = "\uff5c", "\u2581"


def deepseek(*words: str) -> str:
    return f"<{BAR}{SPACE.join(words)}{BAR}>"


def _body(name: str, arguments: Mapping[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _functions(opened: str, closed: str, line: str = "\n") -> Any:
    def spell(name: str, arguments: Mapping[str, Any]) -> str:
        parts = [
            f"<parameter={key}>{line}{_bare(value)}{line}</parameter>\n"
            for key, value in arguments.items()
        ]
        return f"{opened}\n<function={name}>\n{''.join(parts)}</function>\n{closed}"

    return spell


def _invokes(prefix: str, opened: str, closed: str, typed: bool = False) -> Any:
    def spell(name: str, arguments: Mapping[str, Any]) -> str:
        parts = []
        for key, value in arguments.items():
            kind = f' string="{str(isinstance(value, str)).lower()}"' if typed else ""
            head = f'<{prefix}parameter name="{key}"{kind}>'
            parts.append(f"{head}{_bare(value)}</{prefix}parameter>\n")
        inner = f'<{prefix}invoke name="{name}">\n{"".join(parts)}</{prefix}invoke>'
        return f"{opened}\n{inner}\n{closed}"

    return spell


def _pairs(name: str, arguments: Mapping[str, Any]) -> str:
    parts = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


def _python(opened: str, closed: str) -> Any:
    def spell(name: str, arguments: Mapping[str, Any]) -> str:
        parts = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"{opened}{name}({parts}){closed}"

    return spell


def _gemma(opened: str, closed: str, quote: str) -> Any:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{quote}{given}{quote}"
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{value(each)}" for key, each in given.items()) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        return json.dumps(given)

    def spell(name: str, arguments: Mapping[str, Any]) -> str:
        return f"{opened}call:{name}{value(dict(arguments))}{closed}"

    return spell


def _json(opened: str, closed: str, key: str = "arguments") -> Any:
    return lambda name, arguments: f"{opened}{_body(name, arguments, key)}{closed}"


def _named(opened: str, middle: str, closed: str) -> Any:
    return lambda name, arguments: (
        f"{opened}{name}{middle}{json.dumps(arguments, ensure_ascii=False)}{closed}"
    )


V3_BEGIN = deepseek("tool", "call", "begin")
V3_SEP, V3_END = deepseek("tool", "sep"), deepseek("tool", "call", "end")
FAMILIES: dict[str, tuple[str, Any]] = {
    "Qwen 2.5 and 3, Hermes": ("hermes", _json("<tool_call>\n", "\n</tool_call>")),
    "Llama 3": ("llama3", _json("", "", "parameters")),
    "Llama 3 with a tag": ("llama3", _json("<|python_tag|>", "", "parameters")),
    "Mistral 7B": ("mistral", _json("[TOOL_CALLS][", "]")),
    "Mistral Small 3.2": ("mistral", _named("[TOOL_CALLS]", "[ARGS]", "")),
    "Devstral": ("mistral", _named("[TOOL_CALLS]", "", "")),
    "DeepSeek V3": (
        "deepseek",
        _named(f"{V3_BEGIN}function{V3_SEP}", "\n```json\n", f"\n```{V3_END}"),
    ),
    "DeepSeek V3.1": ("deepseek", _named(V3_BEGIN, V3_SEP, V3_END)),
    "DeepSeek V3.2": (
        "deepseek_dsml",
        _invokes(
            f"{BAR}DSML{BAR}",
            f"<{BAR}DSML{BAR}function_calls>",
            f"</{BAR}DSML{BAR}function_calls>",
            True,
        ),
    ),
    "DeepSeek V4": (
        "deepseek_dsml",
        _invokes(
            f"{BAR}DSML{BAR}", f"<{BAR}DSML{BAR}tool_calls>", f"</{BAR}DSML{BAR}tool_calls>", True
        ),
    ),
    "GLM 4.5": ("glm", _pairs),
    "GLM 4.7": ("glm", lambda name, args: _pairs(name, args).replace("\n<arg", "<arg")),
    "Qwen3-Coder": ("qwen_xml", _functions("<tool_call>", "</tool_call>")),
    "Seed-OSS": ("seed_oss", _functions("<seed:tool_call>", "</seed:tool_call>", "")),
    "MiniMax M2": (
        "minimax_m2",
        _invokes("", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "Step 3": (
        "step3",
        lambda name, arguments: (
            f"<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>"
            + _invokes("steptml:", name, "")(name, arguments).rstrip()
            + f"<{BAR}tool_call_end{BAR}>"
        ),
    ),
    "Kimi K2": (
        "kimi_k2",
        _named(
            "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"
        ),
    ),
    "Gemma 4": ("gemma4", _gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    "FunctionGemma": (
        "functiongemma",
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "Llama 4": ("llama4", _python("[", "]")),
    "LFM2": ("lfm2", _python("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "LFM2 in JSON": ("lfm2", _json("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "Gemma 3": ("gemma3", _python("```tool_code\n", "\n```")),
    "xLAM": ("xlam", _json("[", "]")),
    "OLMo 3": ("olmo3", _python("<function_calls>", "</function_calls>")),
    "Granite 3": ("granite", _json("<|tool_call|>[", "]")),
    "Granite 4": ("hermes", _json("<tool_call>", "</tool_call>")),
    "Phi-4-mini": ("phi4", _json("functools[", "]")),
    "Cohere": (
        "cohere",
        lambda name, arguments: (
            "<|START_ACTION|>["
            + json.dumps({"tool_call_id": "0", "tool_name": name, "parameters": arguments})
            + "]<|END_ACTION|>"
        ),
    ),
    "InternLM": ("internlm", _json("<|action_start|><|plugin|>\n", "<|action_end|>")),
    "Nemotron Nano 2": ("nemotron", _json("<TOOLCALL>[", "]</TOOLCALL>")),
    "Nemotron 3": ("qwen_xml", _functions("<tool_call>", "</tool_call>")),
    "Apertus": (
        "apertus",
        lambda name, args: "<|tools_prefix|>[" + json.dumps({name: args}) + "]<|tools_suffix|>",
    ),
    "GigaChat 3.1": ("gigachat", _json("<|function_call|>", "")),
    "Hunyuan, Jamba": ("tool_calls", _json("<tool_calls>[", "]</tool_calls>")),
    "LongCat": ("longcat", _json("<longcat_tool_call>\n", "\n</longcat_tool_call>")),
    "gpt-oss": (
        "harmony",
        lambda name, arguments: (
            f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
            f"<|message|>{json.dumps(arguments)}<|call|>"
        ),
    ),
}
"""The row that reads a family, and a function from a name and arguments to its text."""
QUOTES_STRINGS = ("gemma4", "functiongemma")


def tool(name: str, **types: Any) -> dict[str, Any]:
    """Return a tool whose parameters have these types, or schemas."""
    properties = {
        key: given if isinstance(given, dict) else {"type": given} for key, given in types.items()
    }
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("write", path="string", text="string"),
    tool("count", n="integer", x="number", yes="boolean", items="array", table="object"),
    tool("now"),
]
VALUES = {
    "plain": {"path": "a.txt", "text": "hello"},
    "looks like a number": {"path": "42", "text": "1.50"},
    "looks like a word of JSON": {"path": "true", "text": "null"},
    "looks like JSON": {"path": '{"a":1}', "text": "[1, 2]"},
    "empty": {"path": "", "text": " "},
    "lines": {"path": "a", "text": "def f():\n    return 1\n\n\n    # end"},
    "quotes": {"path": "it's", "text": 'say "no", or \\n'},
    "markup": {"path": "<b>x</b>", "text": "a < b && c > d {e} [f] (g)"},
    "other scripts": {"path": "你好", "text": "🎉 é"},
    "a fence": {"path": "x", "text": "```json\n{}\n```"},
}
TYPED = {"n": 42, "x": 1.5, "yes": True, "items": ["a", 1], "table": {"k": {"m": 2}}}
_AB = {"path": "a", "text": "b"}


def spell(family: str, name: str, **arguments: Any) -> str:
    return str(FAMILIES[family][1](name, arguments))


_DSML = f"{BAR}DSML{BAR}"
SECTIONS = {
    "DeepSeek V3": (deepseek("tool", "calls", "begin"), deepseek("tool", "calls", "end")),
    "DeepSeek V3.1": (deepseek("tool", "calls", "begin"), deepseek("tool", "calls", "end")),
    "Step 3": (f"<{BAR}tool_calls_begin{BAR}>\n", f"\n<{BAR}tool_calls_end{BAR}>"),
    "Kimi K2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
}
"""Marks around all calls of an answer."""
SEAMS = {
    "Llama 3": ("", "; "),
    "Llama 3 with a tag": ("}<|python_tag|>", "}; "),
    "Mistral 7B": ("][TOOL_CALLS][", ", "),
    **dict.fromkeys(["Mistral Small 3.2", "Devstral", "DeepSeek V3.1", "Kimi K2"], ("", "")),
    "Llama 4": ("][", ", "),
    "xLAM": ("][", ", "),
    "LFM2": ("]<|tool_call_end|><|tool_call_start|>[", ", "),
    "LFM2 in JSON": ("]<|tool_call_end|><|tool_call_start|>[", ", "),
    "OLMo 3": ("</function_calls><function_calls>", "\n"),
    "Gemma 3": ("\n``````tool_code\n", "\n"),
    "Granite 3": ("]<|tool_call|>[", ", "),
    "Phi-4-mini": ("]functools[", ", "),
    "Cohere": ("]<|END_ACTION|><|START_ACTION|>[", ", "),
    "Nemotron Nano 2": ("]</TOOLCALL><TOOLCALL>[", ", "),
    "Apertus": ("]<|tools_suffix|><|tools_prefix|>[", ", "),
    "Hunyuan, Jamba": ("]</tool_calls><tool_calls>[", ", "),
    "MiniMax M2": ("\n</minimax:tool_call><minimax:tool_call>\n", "\n"),
    "DeepSeek V3.2": (f"\n</{_DSML}function_calls><{_DSML}function_calls>\n", "\n"),
    "DeepSeek V4": (f"\n</{_DSML}tool_calls><{_DSML}tool_calls>\n", "\n"),
}
"""What a template leaves out between two calls, and what stands there; else a line break."""


def answer(family: str, *spelled: str) -> str:
    """Return the answer with these calls, as the family's template puts them together."""
    seam, between = SEAMS.get(family, ("", "\n"))
    text = "".join(spelled).replace(seam, between) if seam else between.join(spelled)
    opened, closed = SECTIONS.get(family, ("", ""))
    return opened + text + closed


def texts(family: str) -> dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Return answers of a family by kind, each with its calls."""
    write, now = spell(family, "write", **_AB), spell(family, "now")
    made = {
        kind: (answer(family, spell(family, "write", **values)), [("write", values)])
        for kind, values in VALUES.items()
    }
    made["other types"] = (answer(family, spell(family, "count", **TYPED)), [("count", TYPED)])
    made["no arguments"] = (answer(family, now), [("now", {})])
    made["text before"] = ("Let me look.\n" + answer(family, write), [("write", _AB)])
    made["text after"] = (answer(family, now) + "\nDone.", [("now", {})])
    made["two calls"] = (answer(family, write, now), [("write", _AB), ("now", {})])
    return made
