"""A worker extension whose reload leaves one layer as it was, on any CPU.

vLLM's own `reload_weights` leaves a tied output layer as it was, but only if the CPU's kernels
have weights packed in a form of their own (AVX-512, not AVX2).
"""

from pathlib import Path

from safetensors.torch import load_file

from rolltree.scale.vllm.worker import WeightReload


class StaleReload(WeightReload):
    """`WeightReload`, and a reload that keeps layer 15 as it was when it was first called."""

    def reload_all_but_one_layer(self, weights_path):
        weights = load_file(Path(weights_path) / "model.safetensors")
        layer = {name: tensor for name, tensor in weights.items() if ".layers.15." in name}
        self._kept = getattr(self, "_kept", layer)
        self.reload_all_weights(weights_iterator={**weights, **self._kept}.items())
