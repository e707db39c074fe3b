"""A method for vLLM's workers that replaces all weights, also those of a tied output layer.

On a CPU vLLM packs the output layer's weights into a form of its own. Where they are tied to the
embedding, its `reload_weights` renews the embedding and leaves that packed copy as it was: answers
then come from half an update. It knows vLLM's worker. It leaves out where weights come from.

    python -m vllm.entrypoints.openai.api_server \
        --worker-extension-cls rolltree.inference.vllm.worker.WeightReload ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class WeightReload:
    """Mixed into vLLM's worker class by `worker_extension_cls`."""

    def reload_all_weights(
        self,
        weights_path: str | None = None,
        weights_iterator: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Replace the weights from a folder, or by tensors named as in a checkpoint."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        worker: Any = self
        worker.reload_weights(weights_path=weights_path, weights_iterator=weights_iterator)
        for module in worker.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
