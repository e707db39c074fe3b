"""The token tree: every model call of a rollout as a path of ids in one radix tree.

`TokenTree` stores calls, `Trajectory` is the list of steps that an environment sees, and
`StepTokens` is the dict view of a call. The package needs only numpy.
"""

from typing import TYPE_CHECKING

from rolltree._helpers.lazy import loader
from rolltree.tokens.arena import ROOT, CallTable, Place, TokenArena
from rolltree.tokens.breaks import Break, BreakCause, Decoder
from rolltree.tokens.buffers import checked_logprobs, readable_floats
from rolltree.tokens.routing import (
    ROUTED_EXPERTS,
    checked_routing,
    recorded_routing,
    routing_streams,
)
from rolltree.tokens.step import (
    KeptResponse,
    RecordedStep,
    StepTokens,
    assigned_value,
    is_plain_step,
    mask_list,
    num_call_tokens,
    peek,
)
from rolltree.tokens.streams import PlacedStream, TokenStream
from rolltree.tokens.trajectory import Trajectory, check_ids, check_steps, insert_step, record_call
from rolltree.tokens.tree import TokenTree

if TYPE_CHECKING:
    from rolltree.tokens.break_causes import explain_break as explain_break

__getattr__ = loader(__name__, {"break_causes": "explain_break"})

__all__ = [
    "Break",
    "BreakCause",
    "CallTable",
    "Decoder",
    "KeptResponse",
    "PlacedStream",
    "Place",
    "ROOT",
    "ROUTED_EXPERTS",
    "RecordedStep",
    "StepTokens",
    "TokenArena",
    "TokenStream",
    "TokenTree",
    "Trajectory",
    "check_ids",
    "check_steps",
    "checked_logprobs",
    "checked_routing",
    "explain_break",
    "insert_step",
    "mask_list",
    "num_call_tokens",
    "peek",
    "readable_floats",
    "record_call",
    "recorded_routing",
    "routing_streams",
    "assigned_value",
    "is_plain_step",
]
