"""What a model may write: every byte of it, for tests of whatever reads it."""

import asyncio
import itertools
import json

from hypothesis import strategies as st

from rolltree.inference.formats.reader import CompletionParser
from rolltree.values.types import FinishReason, ModelResponse, SamplingParams

BAR, SPACE = "\uff5c", "\u2581"
MARKS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(f"<{BAR}tool{SPACE}call{SPACE}begin{BAR}>", f"<{BAR}tool{SPACE}sep{BAR}>"),
    *(f"<{BAR}tool{SPACE}call{SPACE}end{BAR}>", f"<{BAR}tool{SPACE}calls{SPACE}begin{BAR}>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "</function>"),
    *("<parameter=", "</parameter>", "<|channel|>", "<|message|>", "<|start|>", "assistant"),
    *("<|call|>", "<|end|>", "<|return|>", "to=functions.add", "analysis", "commentary", "to="),
    *("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "####", "Final Answer:"),
    *("\nAction:", "\nAction Input:", "Action: add", "<guess>", "</guess>", "<reversed_text>"),
    *('{"name": "add", "arguments": ', '{"name": "add", "parameters": {"a": ', '"\\ud800"'),
    *("{", "}", "[", "]", '"', "\\", ",", ":", ";", ">", "\n", " ", "\t", "\r", "```json", "```"),
    *("\x00", "\x1b[2J", "\u202e", "\U000e0041", "\ud800", "\udfff\ud800", "\ufeff", "²", "٣"),
    *("1e999", "-Infinity", "NaN", "9" * 5000, "-" + "9" * 400, "1.5", "0x10", "1_000", "½", "İ"),
    *("[" * 2000, '{"a":' * 2000, "[" * 150 + "]" * 150, "{" * 90, "\\frac{" * 50, "(" * 500),
]
"""Pieces of every format that the library reads, and what has broken readers."""

any_text = st.text(st.characters(exclude_categories=()), max_size=30)
any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | any_text
    | st.sampled_from(MARKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
tool_names = st.sampled_from(["add", "echo", "price", "python", "", "add\x00", "\ud800"])


def _call_in(style, name, arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return {
        "hermes": f"<tool_call>{body}</tool_call>",
        "llama3": json.dumps({"name": name, "parameters": arguments}),
        "mistral": f"[TOOL_CALLS][{body}]",
        "react": f"Action: {name}\nAction Input: {json.dumps(arguments)}",
        "harmony": f"<|channel|>commentary to=functions.{name}<|message|>{json.dumps(arguments)}",
        "qwen_xml": f"<tool_call><function={name}>"
        + "".join(
            f"<parameter={key}>\n{json.dumps(value)}\n</parameter>"
            for key, value in arguments.items()
        )
        + "</function></tool_call>",
    }[style]


arguments = st.dictionaries(
    st.sampled_from(["a", "b", "text", "item", "code", "task", "self", "\ud800"]),
    any_json,
    max_size=3,
)
calls = st.builds(
    _call_in,
    st.sampled_from(["hermes", "llama3", "mistral", "react", "harmony", "qwen_xml"]),
    tool_names,
    arguments,
)
answers = (
    any_text
    | st.lists(st.sampled_from(MARKS) | any_text, max_size=8).map("".join)
    | calls
    | st.tuples(calls, st.sampled_from(MARKS)).map("".join)
    | any_text.map(lambda text: f"<answer>{text}</answer>")
    | st.sampled_from(MARKS).map(lambda text: f"<think>x</think>\\boxed{{{text}}}")
)
"""Any text of any model."""

NASTY = [
    "[" * 2000,
    "<tool_call>" + "[" * 2000,
    '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 2000,
    '<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1e999, "b": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 4000 + ', "b": 1}}</tool_call>',
    '<tool_call>{"name": "square", "arguments": {"a": ' + "9" * 4000 + "}}</tool_call>",
    '<tool_call>{"name": "find", "arguments": {"a": ' + "9" * 4000 + "}}</tool_call>",
    '<tool_call>{"name": "echo", "arguments": {"text": "\\u0000\\u001b[2J"}}</tool_call>',
    '<tool_call>{"name": "repeat", "arguments": {"text": "ab", "a": 2000000}}</tool_call>',
    "Action: add\nAction Input: " + "[" * 2000,
    "\ud800",
    "<answer>\ud800</answer>",
    "\x00",
    "9" * 5000,
    "1e999",
    "\\boxed{" + "9" * 1990 + "}",
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{" + "\\frac{" * 300 + "}",
    "\\boxed{\ud800}",
    "\u202e\U000e0041\x1b]0;title\x07[red]bold[/]",
    "",
]


class TextModel:
    """A client that answers with the given texts, each read as a model's server would."""

    model = "text"
    version = 0

    def __init__(self, *texts, style="hermes"):
        self.texts, self.parser = texts, CompletionParser(tool_parser=style)
        self._ids = itertools.count()

    def session(self):
        return TextModel(*self.texts, style=self.parser.tool_parser)

    async def chat(self, messages, *, tools=None, sampling=None, model=None, message_type="chat"):
        await asyncio.sleep(0)
        text = self.texts[min(next(self._ids), len(self.texts) - 1)]
        parsed = self.parser.parse(text, FinishReason.STOP, tools)
        return ModelResponse(
            message=parsed.message,
            text=text,
            finish_reason=parsed.finish_reason,
            prompt_ids=None,
            completion_ids=None,
            logprobs=None,
            versions=None,
            temperature=(sampling or SamplingParams()).temperature,
        )

    async def generate(self, request):
        raise NotImplementedError

    async def aclose(self):
        pass
