"""The protocols that a gateway speaks."""

from __future__ import annotations

from rolltree.gateway.anthropic_messages import MESSAGES
from rolltree.gateway.openai_chat import CHAT, TEXT
from rolltree.gateway.openai_responses import RESPONSES
from rolltree.gateway.protocol import WireProtocol

PROTOCOLS: tuple[WireProtocol, ...] = (CHAT, TEXT, RESPONSES, MESSAGES)
