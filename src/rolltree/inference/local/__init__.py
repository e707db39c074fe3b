"""The embedded engine: batched decoding in this process, with the trainer's own weights.

It needs torch and transformers.
"""

from rolltree.inference.local.client import LocalClient, local_client
from rolltree.inference.local.engine import LocalEngine

__all__ = ["LocalClient", "LocalEngine", "local_client"]
