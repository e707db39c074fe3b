"""Extends vLLM's workers to load new weights completely, and to receive transfers.

On a CPU vLLM packs the output layer's weights into a format of its own. If they are tied to the
embedding, its `reload_weights` renews the embedding but not the packed copy, so answers mix old and
new weights. Importing the module also registers the weight-transfer backend "rolltree"
(`receive.py`).

    python -m vllm.entrypoints.openai.api_server \
        --worker-extension-cls rolltree.scale.vllm.worker.WeightReload \
        --weight-transfer-config '{"backend": "rolltree"}' ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class WeightReload:
    """Mixed into vLLM's worker class by `worker_extension_cls`."""

    def reload_all_weights(
        self,
        weights_path: str | None = None,
        weights_iterator: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Replace the weights from a folder or a file, or by tensors named as in a checkpoint."""
        worker: Any = self
        # vLLM's own loader accepts only folders.
        if weights_path is not None and Path(weights_path).is_file():
            weights_iterator, weights_path = _tensors_in(weights_path), None
        worker.reload_weights(weights_path=weights_path, weights_iterator=weights_iterator)
        renew_output_layer(worker.model_runner.get_model())

    def weights_mark(self, weights_path: str) -> str | None:
        """Return the mark by which a trainer recognizes its file."""
        from rolltree.scale.weights.receive import weights_mark

        return weights_mark(Path(weights_path))

    def abandon_weight_update(self) -> None:
        """Abandon an update whose trainer is gone."""
        worker: Any = self
        worker._weight_update_active = False


def _tensors_in(path: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
            yield name, file.get_tensor(name)


def renew_output_layer(model: Any) -> None:
    """Repack the output layer's weights if vLLM keeps a packed copy of them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    # Without this, answers keep using the old head, as the probe after each publish found
    # (design/0022).
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _register() -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        # vLLM is missing, or too old for transfers; reloading still works.
        return
    name = "rolltree.scale.vllm.receive"
    WeightTransferEngineFactory.register_engine("rolltree", name, "TransferEngine")


_register()
