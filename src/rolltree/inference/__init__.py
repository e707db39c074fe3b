"""Inference: one client interface, exact prompts from token ids, remote and embedded models.

The rest of rolltree calls models through `ModelClient`. Names are loaded on first use (PEP 562).
The embedded torch engine is in `rolltree.inference.local`, vLLM in this process in
`rolltree.scale.vllm`, the server in `rolltree.gateway.serve`; none is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.wings import exports

if TYPE_CHECKING:
    from rolltree.inference.chat import ChatRenderer as ChatRenderer
    from rolltree.inference.chat import Continuation as Continuation
    from rolltree.inference.client import ModelClient as ModelClient
    from rolltree.inference.client import as_client as as_client
    from rolltree.inference.client import sampling_from_args as sampling_from_args
    from rolltree.inference.formats.calls import TOOL_PARSERS as TOOL_PARSERS
    from rolltree.inference.formats.reader import ParsedCompletion as ParsedCompletion
    from rolltree.inference.formats.reader import ToolCall as ToolCall
    from rolltree.inference.formats.reader import ToolCalls as ToolCalls
    from rolltree.inference.formats.rows import REASONING_FORMATS as REASONING_FORMATS
    from rolltree.inference.formats.rows import REASONING_TAGS as REASONING_TAGS
    from rolltree.inference.formats.rows import TOOL_FORMATS as TOOL_FORMATS
    from rolltree.inference.formats.rows import ReasoningFormat as ReasoningFormat
    from rolltree.inference.formats.rows import ToolFormat as ToolFormat
    from rolltree.inference.openai_client import OpenAIClient as OpenAIClient
    from rolltree.inference.openai_sdk import OpenAISDKClient as OpenAISDKClient
    from rolltree.inference.parse import parse_response_messages as parse_response_messages
    from rolltree.inference.parse import parse_response_tokens as parse_response_tokens
    from rolltree.inference.reachable import served_version as served_version
    from rolltree.inference.retry import RetryPolicy as RetryPolicy
    from rolltree.inference.session import Prompt as Prompt
    from rolltree.inference.session import TokenSession as TokenSession
    from rolltree.inference.template import ChatTemplate as ChatTemplate
    from rolltree.inference.template import TemplateError as TemplateError
    from rolltree.scale.pool import EndpointPool as EndpointPool
    from rolltree.scale.weights.publish import publish_adapter as publish_adapter
    from rolltree.scale.weights.publish import publish_weights as publish_weights
    from rolltree.scale.weights.transfer import WeightTransfer as WeightTransfer

_MODULES: dict[str, str] = {
    **exports(__name__),
    "chat": "ChatRenderer Continuation",
    "client": "ModelClient as_client sampling_from_args",
    "formats.calls": "TOOL_PARSERS",
    "formats.reader": "ParsedCompletion ToolCall ToolCalls",
    "formats.rows": ("REASONING_FORMATS REASONING_TAGS TOOL_FORMATS ReasoningFormat ToolFormat"),
    "parse": "parse_response_messages parse_response_tokens",
    "openai_client": "OpenAIClient",
    "openai_sdk": "OpenAISDKClient",
    "reachable": "served_version",
    "retry": "RetryPolicy",
    "session": "Prompt TokenSession",
    "template": "ChatTemplate TemplateError",
}
__all__ = sorted(" ".join(_MODULES.values()).split())
__getattr__ = loader(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
