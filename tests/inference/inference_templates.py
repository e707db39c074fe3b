"""Small chat templates in the manners of real ones, for the tests of this room."""

from __future__ import annotations

from typing import Any

import numpy as np

from rolltree.inference import Prompt, TokenSession
from rolltree.inference.call import Answer, ModelCall
from rolltree.testing import ByteTokenizer
from rolltree.values.types import FinishReason, ModelResponse, SamplingParams

# Role markers, no close: the next role's marker ends a turn (GLM's manner).
ROLE_MARKERS = """\
{{- '<|sys|>' }}
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}
{%- elif m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}
{%- else %}{{- '<|assistant|>' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' + (value | string) + '</arg_value>\n' }}
{%- endfor %}{{- '</tool_call>' }}{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
ROLE_TOKENS = ("<|sys|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")

# Reasoning opened by the prompt and stripped from all earlier turns (DeepSeek R1's manner).
STRIPPING = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""

# The end token differs between the last and an earlier answer (gpt-oss's manner).
TWO_CLOSES = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{{- '<|return|>' if m.role == 'assistant' and loop.last else '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TWO_CLOSES_TOKENS = ("<|im_start|>", "<|im_end|>", "<|return|>")

# Tools are shown before the newest user message only (Mistral's manner).
MOVING_TOOLS = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- else %}{{- m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""
MOVING_TOKENS = ("[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]", "</s>")

# System text of any message is collected at the start (DeepSeek's and Command R's manner).
HOISTING = """\
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}
{%- set ns.system = ns.system + m.content %}
{%- endfor %}
{{- '<|sys|>' + ns.system }}
{%- for m in messages if m.role in ('user', 'assistant') %}
{{- '<|' + m.role + '|>' + m.content }}
{%- if m.role == 'assistant' %}{{- '<|endoftext|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

# A space stands before the end token that closes an answer (Llama 2's manner).
SPACED_CLOSE = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<s>[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{- ' ' + m.content + ' </s>' }}
{%- endif %}
{%- endfor %}"""
SPACED_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")

# A word of its own and the end token close an answer (Apriel's manner).
WORDY_CLOSE = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '\n<|end|>\n' }}
{%- if m.role == 'assistant' %}{{- '</s>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
WORDY_TOKENS = ("<|user|>", "<|assistant|>", "<|end|>", "</s>")

# Results name the id of their call, which the model has written (Mistral v0.3's manner).
TOOL_IDS = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
{{- '[TOOL_RESULTS]' + m.content + ' of ' + m.tool_call_id + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']</s>' }}
{%- else %}{{- m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""
TOOL_ID_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")

# Plain text without special tokens.
PLAIN = """\
{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""

# The position of a message shows in its text, so nothing can be cut out.
COUNTING = """\
{%- for m in messages %}
{{- '<|im_start|>' + (loop.index | string) + m.role + '\n' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Every text stands twice, so no cut is certain.
REPEATING = """\
{%- for m in messages %}{{- '<|im_start|>' + m.content + m.content + '<|im_end|>' }}{%- endfor %}"""

# Content as a list of parts (vision models' manner).
PARTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- for part in m.content %}{{- part['text'] }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Tool arguments as JSON text (DeepSeek V3's manner).
TEXT_ARGUMENTS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

ROLE_MARKER_TOKENIZER = ByteTokenizer(ROLE_MARKERS, ROLE_TOKENS, "<|endoftext|>")
TWO_CLOSES_TOKENIZER = ByteTokenizer(TWO_CLOSES, TWO_CLOSES_TOKENS, "<|return|>")
HOISTING_TOKENIZER = ByteTokenizer(HOISTING, ROLE_TOKENS, "<|endoftext|>")
SPACED_TOKENIZER = ByteTokenizer(SPACED_CLOSE, SPACED_TOKENS, "</s>")
WORDY_TOKENIZER = ByteTokenizer(WORDY_CLOSE, WORDY_TOKENS, "</s>")
TOOL_ID_TOKENIZER = ByteTokenizer(TOOL_IDS, TOOL_ID_TOKENS, "</s>")
MOVING_TOKENIZER = ByteTokenizer(MOVING_TOOLS, MOVING_TOKENS, "</s>")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def complete(
    session: TokenSession,
    prompt: Prompt,
    ids: Any,
    logprobs: Any,
    reason: FinishReason,
    *,
    temperature: float = 1.0,
    versions: Any = 0,
    **fields: Any,
) -> ModelResponse:
    """Return the record of what was sampled after a prompt."""
    answer = Answer(reason, **fields)
    if ids is not None:
        answer.completion_ids = np.asarray(ids)
        whole = [versions] * len(ids) if isinstance(versions, int) else versions
        answer.versions = np.array(whole, np.int32)
    answer.logprobs = None if logprobs is None else np.array(logprobs, np.float32)
    return session.complete(prompt, answer, ModelCall("", SamplingParams(temperature=temperature)))
