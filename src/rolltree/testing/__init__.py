"""The public test kit: scripted and faulty models, a tokenizer, and the environments' contract.

It may import any room and is imported by none. `ScriptedClient` answers in this process,
`ScriptedServer` over real HTTP on loopback; both report exact token ids and logprobs.
"""

from rolltree.testing.env_check import CheckReport, check_environment
from rolltree.testing.faults import FaultRow, FaultyClient, HttpFault
from rolltree.testing.findings import CHECKS, Finding
from rolltree.testing.loopback import LoopbackServer, Reply, Request
from rolltree.testing.script import ScriptedAnswer, scripted_logprobs
from rolltree.testing.scripted_client import ScriptedCall, ScriptedClient
from rolltree.testing.scripted_server import ScriptedServer, ServedRequest
from rolltree.testing.tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer

__all__ = [
    "CHATML_TEMPLATE",
    "CHECKS",
    "SPECIAL_TOKENS",
    "ByteTokenizer",
    "CheckReport",
    "FaultRow",
    "FaultyClient",
    "Finding",
    "HttpFault",
    "LoopbackServer",
    "Reply",
    "Request",
    "ScriptedAnswer",
    "ScriptedCall",
    "ScriptedClient",
    "ScriptedServer",
    "ServedRequest",
    "check_environment",
    "scripted_logprobs",
]
