"""The public test kit: scripted and faulty models and servers, and a byte tokenizer.

No other room imports it. `ScriptedClient` answers in this process, and `ScriptedServer` over real
HTTP on loopback; both report exact token ids and logprobs.
"""

from rolltree.testing.faults import FaultRow, FaultyClient, HttpFault
from rolltree.testing.hostile import HOSTILE
from rolltree.testing.loopback import DirectTransport, LoopbackServer, Reply, Request
from rolltree.testing.script import ScriptedAnswer, scripted_logprobs
from rolltree.testing.scripted_client import ScriptedCall, ScriptedClient
from rolltree.testing.scripted_server import ScriptedServer, ServedRequest
from rolltree.testing.tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer

__all__ = [
    "CHATML_TEMPLATE",
    "HOSTILE",
    "SPECIAL_TOKENS",
    "ByteTokenizer",
    "DirectTransport",
    "FaultRow",
    "FaultyClient",
    "HttpFault",
    "LoopbackServer",
    "Reply",
    "Request",
    "ScriptedAnswer",
    "ScriptedCall",
    "ScriptedClient",
    "ScriptedServer",
    "ServedRequest",
    "scripted_logprobs",
]
