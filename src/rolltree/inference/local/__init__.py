"""The embedded engine: batched decoding in this process, with the trainer's own weights.

It needs torch and transformers. It knows nothing about environments and training.
"""

from rolltree.inference.local.client import LocalClient, local_client
from rolltree.inference.local.engine import LocalEngine
from rolltree.inference.local.requests import LocalOutput

__all__ = ["LocalClient", "LocalEngine", "LocalOutput", "local_client"]
