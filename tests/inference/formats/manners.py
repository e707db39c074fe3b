"""A chat template in the manner of each family, built from how `families` spells its calls.

They have the marks of the vendors' templates in the same places, and no more: arguments are texts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from families import BAR, FAMILIES, deepseek

from rolltree.inference import ChatRenderer
from rolltree.testing import ByteTokenizer

_SPECIAL = re.compile(
    rf"<[|{BAR}][^|{BAR}<>\s]+[|{BAR}]>|\[/?[A-Z_]+\]|</?s>|<(?:bos|(?:start|end)_of_turn)>"
    r"|<\|?(?:turn|tool_call|tool_response)\|?>|<(?:start|end)_function_(?:call|response)>|<escape>"
    r"|\]~b\]|\[e~\[|<seed:(?:bos|eos)>|<SPECIAL_\d+>|</?think>|<longcat_(?:user|assistant|s)>"
)


@dataclass(frozen=True)
class Manner:
    """How a family's template writes messages.

    Args:
        family: the key in `FAMILIES`.
        user: what opens a user's message; likewise `assistant`, and `system` (default: as a user).
        close: what closes every message.
        result: what stands around a tool's result.
        wrap: what stands around the calls of a message; `between` them.
        of_call: what closes a message with calls, if not `close`.
        opened: what a prompt has after `assistant`.
        thinks: whether a message's reasoning is shown ("keeps") or dropped ("strips").
        one_call: whether several calls in one message are refused.
    """

    family: str
    user: str
    assistant: str
    close: str
    result: tuple[str, str]
    wrap: tuple[str, str] = ("", "")
    between: str = ""
    system: str = ""
    start: str = ""
    of_call: str | None = None
    opened: str = ""
    thinks: str = ""
    one_call: bool = False

    @property
    def row(self) -> str:
        """The format of calls."""
        return FAMILIES[self.family][0]

    @property
    def call_close(self) -> str:
        """What closes a message with calls."""
        return self.close if self.of_call is None else self.of_call

    def spelled(self, name: str, arguments: dict[str, str]) -> str:
        """Return the text of an answer with one call."""
        call = FAMILIES[self.family][1](name, arguments).removeprefix(self.assistant)
        return f"{self.wrap[0]}{call}{self.wrap[1]}"

    @property
    def source(self) -> str:
        """The template."""
        head, key, sep, tail = self._parts()
        shown = "'<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n'"
        lines = [
            _write(self.start),
            "{%- for m in messages %}",
            "{%- if m.role == 'assistant' %}" + _write(self.assistant),
            "{%- if m.reasoning_content %}{{- " + shown + " }}{%- endif %}"
            if self.thinks == "keeps"
            else "",
            "{{- m.content }}{%- if m.tool_calls is defined %}",
            "{%- if m.tool_calls | length > 1 %}{{- raise_exception('one call') }}{%- endif %}"
            if self.one_call
            else "",
            _write(self.wrap[0]) + "{%- for call in m.tool_calls %}",
            head + "{%- for key, value in call.function.arguments.items() %}",
            key + "{%- if not loop.last %}" + _write(sep) + "{%- endif %}{%- endfor %}",
            tail + "{%- if not loop.last %}" + _write(self.between) + "{%- endif %}{%- endfor %}",
            _write(self.wrap[1]) + _write(self.call_close),
            "{%- else %}" + _write(self.close) + "{%- endif %}",
            "{%- elif m.role == 'tool' %}{{- " + _quoted(self.result[0]) + " + m.content + ",
            _quoted(self.result[1]) + " }}",
            "{%- else %}{{- (" + _quoted(self.system or self.user) + " if m.role == 'system' else ",
            _quoted(self.user) + ") + m.content }}",
            "{%- if loop.first and tools %}{{- tools | tojson }}{%- endif %}" + _write(self.close),
            "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}",
            _write(self.assistant + self.opened) + "{%- endif %}",
            # What shows the format in the vendors' templates, where the calls alone do not.
            "{# " + _HINTS.get(self.family, "") + " #}",
        ]
        return "".join(lines)

    def _parts(self) -> tuple[str, str, str, str]:
        """Return a call as Jinja: its head, one argument, what is between two, and its tail."""
        spell = FAMILIES[self.family][1]
        one = spell("Name", {"Key": "Value"}).removeprefix(self.assistant)
        two = spell("Name", {"Key": "Value", "Next": "Last"}).removeprefix(self.assistant)
        head, _, rest = one.partition("Key")
        middle, _, tail = rest.partition("Value")
        # What stands before a key and after a value belongs to the argument.
        joint = two.partition("Value")[2].partition("Next")[0]
        named = _write(head).replace("Name", "' + call.function.name + '")
        argument = "{{- key + " + _quoted(middle) + " + value }}"
        return named, argument, joint, _write(tail).replace("Name", "' + call.function.name + '")

    def renderer(self, **settings: object) -> ChatRenderer:
        """Return the renderer of the template, with its marks as tokens."""
        marks = [*_SPECIAL.findall(self.source), "<|endoftext|>"]
        special = sorted(set(marks), key=len, reverse=True)
        end = next((mark for mark in _SPECIAL.findall(self.close)), "<|endoftext|>")
        return ChatRenderer(ByteTokenizer(self.source, special, end), **settings)  # type: ignore[arg-type]


def _quoted(text: str) -> str:
    return "'" + json.dumps(text, ensure_ascii=False)[1:-1].replace("'", "\\'") + "'"


def _write(text: str) -> str:
    return "{{- " + _quoted(text) + " }}" if text else ""


_HINTS = {
    "Llama 3": '"parameters": dictionary',
    "Llama 4": "[func_name1(",
    "gpt-oss": "<|channel|>",
}
_CHATML = ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n")
_CHATML_RESULT = ("<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n")
_CHATML_SYSTEM = "<|im_start|>system\n"


def _header(role: str, mark: str = "{}_header_id") -> str:
    start, end = (mark.format(word) for word in ("start", "end"))
    return f"<|{start}|>{role}<|{end}|>\n\n"


_HEADER_4 = "header_{}"
_USER, _ASSISTANT = deepseek("User"), deepseek("Assistant")
_EOS = deepseek("end", "of", "sentence")
_CALLS = (deepseek("tool", "calls", "begin"), deepseek("tool", "calls", "end"))
_OUTPUT = (deepseek("tool", "output", "begin"), deepseek("tool", "output", "end"))
_DSML = ("\n\n<function_results>\n<result>", "</result>\n</function_results>\n\n")
_TURN = ("<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n")
_GLM = ("<|user|>\n", "<|assistant|>", "")
_GLM_RESULT = ("<|observation|>\n<tool_response>\n", "\n</tool_response>")


def _chatml(family: str, **settings: object) -> Manner:
    given = {"result": _CHATML_RESULT, "between": "\n", "system": _CHATML_SYSTEM, **settings}
    return Manner(family, *_CHATML, **given)  # type: ignore[arg-type]


def _deepseek(family: str, **settings: object) -> Manner:
    """User text has no close of its own."""
    start = deepseek("begin", "of", "sentence")
    return Manner(family, _USER, _ASSISTANT, _EOS, start=start, **settings)  # type: ignore[arg-type]


_HERMES = "Qwen 2.5 and 3, Hermes"
_TOOL_ROLE = ("<|im_start|>tool\n", "<|im_end|>\n")
_OPEN_THINK = {"opened": "<think>\n", "thinks": "keeps"}
MANNERS: dict[str, Manner] = {
    "Qwen 2.5": _chatml(_HERMES),
    "Qwen 3": _chatml(_HERMES, thinks="keeps"),
    "QwQ": _chatml(_HERMES, opened="<think>\n", thinks="strips"),
    "Hermes 3": _chatml(_HERMES, result=("<|im_start|>tool\n<tool_response>\n", "<|im_end|>\n")),
    "MiMo": _chatml(_HERMES, system="<|im_start|>system\n\n"),
    "Qwen3-Coder": _chatml("Qwen3-Coder"),
    "Qwen 3.5": _chatml("Qwen3-Coder", **_OPEN_THINK),
    "Step 3.5": _chatml("Qwen3-Coder", result=("<|im_start|>tool_response\n", "<|im_end|>\n")),
    "Nemotron 3": _chatml("Nemotron 3", **_OPEN_THINK),
    "Llama 3.1": Manner(
        "Llama 3",
        _header("user"),
        _header("assistant"),
        "<|eot_id|>",
        (_header("ipython"), "<|eot_id|>"),
        system=_header("system"),
        start="<|begin_of_text|>",
        one_call=True,
    ),
    "Llama 4": Manner(
        "Llama 4",
        _header("user", _HEADER_4),
        _header("assistant", _HEADER_4),
        "<|eot|>",
        (_header("ipython", _HEADER_4), "<|eot|>"),
        one_call=True,
    ),
    "Mistral 7B": Manner(
        "Mistral 7B",
        "[INST] ",
        "",
        "</s>",
        ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        one_call=True,
        start="<s>",
    ),
    "Mistral Small 3.2": Manner(
        "Mistral Small 3.2",
        "[INST]",
        "",
        "</s>",
        ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        start="<s>",
    ),
    "Devstral": Manner(
        "Devstral", "[INST]", "", "</s>", ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"), start="<s>"
    ),
    "DeepSeek V3": _deepseek("DeepSeek V3", wrap=_CALLS, between="\n", result=_OUTPUT),
    "DeepSeek R1": _deepseek(
        "DeepSeek V3",
        wrap=_CALLS,
        between="\n",
        result=_OUTPUT,
        opened="<think>\n",
        thinks="strips",
    ),
    "DeepSeek V3.1": _deepseek("DeepSeek V3.1", wrap=_CALLS, result=_OUTPUT),
    "DeepSeek V3.2": _deepseek("DeepSeek V3.2", result=_DSML, between="\n"),
    "DeepSeek V4": _deepseek("DeepSeek V4", result=_DSML, between="\n"),
    "GLM 4.5": Manner("GLM 4.5", *_GLM, _GLM_RESULT, between="\n", start="[gMASK]<sop>"),
    "GLM 4.7": Manner(
        "GLM 4.7", "<|user|>", *_GLM[1:], _GLM_RESULT, start="[gMASK]<sop>", system="<|system|>"
    ),
    "Seed-OSS": Manner(
        "Seed-OSS",
        "<seed:bos>user\n",
        "<seed:bos>assistant\n",
        "<seed:eos>",
        ("<seed:bos>tool\n", "<seed:eos>"),
        between="\n",
    ),
    "MiniMax M2": Manner(
        "MiniMax M2",
        "]~b]user\n",
        "]~b]ai\n",
        "[e~[\n",
        ("]~b]tool\n<response>", "</response>[e~[\n"),
        between="\n",
        **_OPEN_THINK,  # type: ignore[arg-type]
    ),
    "Step 3": Manner(
        "Step 3",
        "<|BOT|>user\n",
        "<|BOT|>assistant\n",
        "<|EOT|>",
        ("<|BOT|>tool\n", "<|EOT|>"),
        (f"<{BAR}tool_calls_begin{BAR}>", f"<{BAR}tool_calls_end{BAR}>"),
    ),
    "Kimi K2": Manner(
        "Kimi K2",
        "<|im_user|>user<|im_middle|>",
        "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
        ("<|im_system|>tool<|im_middle|>", "<|im_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "Gemma 4": Manner(
        "Gemma 4",
        "<|turn>user\n",
        "<|turn>model\n",
        "<turn|>\n",
        ("<|tool_response>", "<tool_response|>"),
        start="<bos>",
        of_call="",
    ),
    "FunctionGemma": Manner(
        "FunctionGemma",
        *_TURN,
        ("<start_function_response>", "<end_function_response>"),
        start="<bos>",
        of_call="",
    ),
    "LFM2": _chatml("LFM2", result=_TOOL_ROLE),
    "OLMo 3": _chatml("OLMo 3", result=("<|im_start|>environment\n", "<|im_end|>\n")),
    "InternLM": _chatml("InternLM", result=("<|im_start|>environment\n", "<|im_end|>\n")),
    "Granite 3": Manner(
        "Granite 3",
        "<|start_of_role|>user<|end_of_role|>",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>\n",
        ("<|start_of_role|>tool_response<|end_of_role|>", "<|end_of_text|>\n"),
        one_call=True,
    ),
    "Granite 4": Manner(
        "Granite 4",
        "<|start_of_role|>user<|end_of_role|>",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>\n",
        ("<|start_of_role|>tool<|end_of_role|>", "<|end_of_text|>\n"),
        between="\n",
    ),
    "Phi-4-mini": Manner(
        "Phi-4-mini", "<|user|>", "<|assistant|>", "<|end|>", ("<|tool|>", "<|end|>"), one_call=True
    ),
    "Cohere": Manner(
        "Cohere",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        ("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>"),
        one_call=True,
    ),
    "Nemotron Nano 2": Manner(
        "Nemotron Nano 2",
        "<SPECIAL_11>User\n",
        "<SPECIAL_11>Assistant\n",
        "\n<SPECIAL_12>\n",
        ("<SPECIAL_11>User\n<TOOL_RESPONSE>", "</TOOL_RESPONSE>\n"),
        one_call=True,
    ),
    "Apertus": Manner(
        "Apertus",
        "<|user_start|>",
        "<|assistant_start|>",
        "<|assistant_end|>",
        ("[", "]<|assistant_end|>"),
        one_call=True,
    ),
    "Hunyuan": Manner(
        "Hunyuan, Jamba",
        "<|bos|>",
        "<|extra_0|>",
        "<|eos|>",
        ("<|bos|><tool_response>", "</tool_response>"),
        one_call=True,
    ),
    "Jamba": Manner(
        "Hunyuan, Jamba",
        "<|bom|><|user|> ",
        "<|bom|><|assistant|> ",
        "<|eom|>",
        ("<|bom|><|tool|> ", "<|eom|>"),
        one_call=True,
    ),
    "LongCat": Manner(
        "LongCat",
        "<longcat_user>",
        "<longcat_assistant>",
        "<longcat_s>",
        ("<longcat_user><longcat_tool_response>\n", "\n</longcat_tool_response>"),
    ),
    "GigaChat 3.1": Manner(
        "GigaChat 3.1",
        "user<|role_sep|>\n",
        "assistant<|role_sep|>\n",
        "<|message_sep|>\n\n",
        ("function result<|role_sep|>\n", "<|message_sep|>\n\n"),
        one_call=True,
    ),
    "gpt-oss": Manner(
        "gpt-oss",
        "<|start|>user<|message|>",
        "<|start|>assistant",
        "<|end|>",
        ("<|start|>functions.write to=assistant<|channel|>commentary<|message|>", "<|end|>"),
        of_call="",
        one_call=True,
    ),
}
"""Models by name."""
