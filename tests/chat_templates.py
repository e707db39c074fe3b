"""Every chat template that the tests have, with a tokenizer, and some in the manner of strict ones.

The strict templates refuse, in the words of no model, what the templates of real models refuse.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolltree.inference import ChatRenderer
from rolltree.inference.models.made import CHAT_TEMPLATE as MADE
from rolltree.testing import CHATML_TEMPLATE, ByteTokenizer

TESTS = Path(__file__).parent

# One call per message, and `raise_exception` for several (Llama 3.1's and 3.2's manner).
ONE_CALL = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '{"name": ..., "parameters": dictionary}' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m and m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time!') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Arguments are taken apart with `| items` (Qwen 3.5's and Qwen3-Coder's manner).
ITEMS = """\
{%- if tools %}{{- '<|im_start|>system\\n<function=name><parameter=key>' + (tools | tojson) }}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- set body = m.content | trim %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + body + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + body.split('</think>')[-1] }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role in ('user', 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + body + '<|im_end|>\\n' }}
{%- else %}{{- raise_exception('unknown role') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Roles alternate, ids have nine letters, and no answer is empty (Mistral's manner).
ALTERNATING = """\
{%- set ns = namespace(turn=0) %}
{{- '<s>' }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
{%- if m.role != 'tool' and m.role != 'system' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}
{{- raise_exception('roles take turns') }}{%- endif %}
{%- set ns.turn = ns.turn + 1 %}{%- endif %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{- '[SYSTEM]' + m.content + '[/SYSTEM]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']</s>' }}
{%- elif m.content == '' %}{{- raise_exception('an answer has content or calls') }}
{%- else %}{{- m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""

# Two roles that alternate, and no tools (Gemma's manner).
TWO_ROLES = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles take turns') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Channels: only one call, no marks in the content, results name the call before (gpt-oss's manner).
CHANNELS = """\
{%- set ns = namespace(name=none) %}
{%- if tools %}{{- '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{- raise_exception('marks in the content') }}{%- endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{- raise_exception('one call') }}{%- endif %}
{%- if m.content and m.reasoning_content %}{{- raise_exception('text twice') }}{%- endif %}
{%- set ns.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- else %}
{%- set ns.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# Special tokens around fenced JSON, whose arguments are joined as text (DeepSeek V3's manner).
FENCED = """\
{%- set begin = '<\uff5ctool\u2581call\u2581begin\uff5c>' %}
{%- set sep = '<\uff5ctool\u2581sep\uff5c>' %}
{%- set end = '<\uff5ctool\u2581call\u2581end\uff5c>' %}
{{- tools | tojson if tools else '' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<\uff5ctool\u2581output\u2581begin\uff5c>' + m.content }}
{%- elif m.role == 'system' %}{{- m.content }}
{%- else %}{{- '<\uff5cAssistant\uff5c>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- begin + 'function' + sep + call['function']['name'] + '\\n```json\\n' }}
{{- call['function']['arguments'] + '\\n```' + end }}
{%- endfor %}{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c>' }}{%- endif %}"""

# System text comes first, nobody is a developer, and a turn is to be answered (Qwen 3.5's manner).
LEADING = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<tool_call>' }}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('system comes first') }}
{%- elif m.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('unknown role') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if m.tool_calls is defined and m.role == 'assistant' %}
{%- set first = m.tool_calls[0].function %}
{%- for call in m.tool_calls %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{%- if messages[-1].role == 'assistant' %}{{- raise_exception('whose turn is it?') }}{%- endif %}
{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Everything but the text of the usual roles is left out without a word (SmolLM3's manner).
MUTE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tool_call>' + (tools | tojson) }}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') or m.role == 'system' and loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

STRICT = {
    "one call": ONE_CALL,
    "items": ITEMS,
    "alternating": ALTERNATING,
    "two roles": TWO_ROLES,
    "channels": CHANNELS,
    "fenced": FENCED,
    "leading": LEADING,
    "mute": MUTE,
}
_SPECIAL = re.compile(
    "<[|\uff5c][^|\uff5c<>]+[|\uff5c]>|\\[/?[A-Z_]+\\]|</?s>|<(?:bos|(?:start|end)_of_turn)>|<SPECIAL_\\d+>"
)
_ENDS = (
    *("<|eot_id|>", "<|return|>", "<|im_end|>", "</s>", "<end_of_turn>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|END_OF_TURN_TOKEN|>",
    "<SPECIAL_12>",
    "<|end|>",
    "<|endoftext|>",
)


@dataclass(frozen=True)
class Template:
    """A chat template by name."""

    name: str
    source: str

    def renderer(
        self, kind: type[ChatRenderer] = ChatRenderer, *, with_tools: bool = False, **settings: Any
    ) -> ChatRenderer:
        """Return its renderer; `with_tools` writes them first if the template leaves them out."""
        shows = "{{- tools | tojson if tools else '' }}"
        source = shows + self.source if with_tools and "tools" not in self.source else self.source
        special = list(dict.fromkeys([*_SPECIAL.findall(self.source), "<|endoftext|>"]))
        end = next(text for text in _ENDS if text in special)
        return kind(ByteTokenizer(source, special, end), **settings)


def extended(
    renderer: ChatRenderer,
    previous_ids: Any,
    messages: list[dict[str, Any]],
    num_old: int,
    tools: list[dict[str, Any]] | None = None,
) -> Any:
    """Return the whole next prompt; the arguments are those of `ChatRenderer.continuation`."""
    found = renderer.continuation(previous_ids, messages, num_old, tools)
    if found.suffix is None:
        return found.rendered
    return np.concatenate([np.asarray(previous_ids, np.int32), found.suffix])


def all_templates() -> dict[str, Template]:
    """Return the tests' templates by name: the strict ones, rolltree's own, and each room's."""
    kit = runpy.run_path(str(TESTS / "inference" / "inference_templates.py"))
    sources: Mapping[str, str] = {
        **STRICT,
        "made": MADE,
        "chatml": CHATML_TEMPLATE,
        **{path.stem: path.read_text() for path in sorted((TESTS / "samples").glob("*/*.jinja"))},
        **{
            name.lower(): value
            for name, value in kit.items()
            if isinstance(value, str) and "{%- for m in messages" in value
        },
    }
    return {name: Template(name, source) for name, source in sources.items()}
