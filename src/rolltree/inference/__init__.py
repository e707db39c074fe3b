"""Inference: one client interface, exact prompts from token ids, remote and scripted models.

`ModelClient` is what the rest of rolltree talks to. The room knows the values of `rolltree.types`
and nothing about environments, rewards or training. The embedded torch engine lives in
`rolltree.inference.local` and is not imported here.
"""

from rolltree.inference.chat import ChatRenderer, Continuation
from rolltree.inference.client import ModelClient, as_client, sampling_from_args
from rolltree.inference.completion import REASONING_TAGS, ParsedCompletion
from rolltree.inference.extract import parse_response_messages, parse_response_tokens
from rolltree.inference.openai_client import OpenAIClient
from rolltree.inference.retry import RetryPolicy
from rolltree.inference.session import Prompt, Sampled, TokenSession, next_call_id
from rolltree.inference.template import ChatTemplate, TemplateError
from rolltree.inference.tool_calls import TOOL_PARSERS, ToolCall, ToolCalls
from rolltree.inference.wrapped import WrappedClient

__all__ = [
    "ChatRenderer",
    "ChatTemplate",
    "Continuation",
    "ModelClient",
    "OpenAIClient",
    "ParsedCompletion",
    "Prompt",
    "REASONING_TAGS",
    "RetryPolicy",
    "Sampled",
    "TOOL_PARSERS",
    "TemplateError",
    "TokenSession",
    "ToolCall",
    "ToolCalls",
    "WrappedClient",
    "as_client",
    "next_call_id",
    "parse_response_messages",
    "parse_response_tokens",
    "sampling_from_args",
]
