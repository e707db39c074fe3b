"""Inference: one client interface, exact prompts from token ids, remote and scripted models.

`ModelClient` is what the rest of rolltree talks to. The room knows the values of `rolltree.types`
and nothing about environments, rewards or training. The embedded torch engine lives in
`rolltree.inference.local` and is not imported here.
"""

from rolltree.inference.chat import ChatRenderer, Continuation
from rolltree.inference.client import ModelClient, as_client, sampling_from_args
from rolltree.inference.completion import REASONING_TAGS, ParsedCompletion
from rolltree.inference.session import Prompt, Sampled, TokenSession, next_call_id
from rolltree.inference.template import ChatTemplate, TemplateError
from rolltree.inference.tool_calls import TOOL_PARSERS, ToolCall, ToolCalls

__all__ = [
    "REASONING_TAGS",
    "TOOL_PARSERS",
    "ChatRenderer",
    "ChatTemplate",
    "Continuation",
    "ModelClient",
    "ParsedCompletion",
    "Prompt",
    "Sampled",
    "TemplateError",
    "ToolCall",
    "TokenSession",
    "ToolCalls",
    "as_client",
    "next_call_id",
    "sampling_from_args",
]
