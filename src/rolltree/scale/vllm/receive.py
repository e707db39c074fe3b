"""A weight-transfer backend for vLLM's workers: it receives the weights that a trainer broadcasts.

`worker.py` registers it with vLLM under the name "rolltree". Each bucket is verified before it is
loaded, and it is an error if a model does not get all of its weights. Draft models are not
supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rolltree.scale.vllm.worker import renew_output_layer
from rolltree.scale.weights.buckets import fill_buckets, specs_from_data
from rolltree.scale.weights.channel import Channel, Invitation, accept, receive


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The content of `/update_weights`: the tensors that are sent, and their buckets."""

    tensors: list[Any]
    bucket_bytes: int


class TransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives whole models, named as in a checkpoint."""

    init_info_cls = Invitation
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._channel: Channel | None = None
        # Names of the model's parameters while an update is open.
        self._expected: set[str] | None = None

    def init_transfer_engine(self, init_info: Invitation) -> None:
        """Connect to the trainer, and disconnect from an earlier one."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._channel = accept(init_info, 1 + worker, self.device)

    def start_weight_update(self) -> None:
        """Prepare the model to load layer by layer."""
        self._close_update()
        self._expected = {
            # vLLM wraps layers that can have adapters; checkpoints have the names without wrappers.
            name.replace(".base_layer.", ".")
            for name, _ in self.model.named_parameters()
        }
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what the trainer sends, bucket by bucket.

        Raises:
            RuntimeError: no trainer has connected, or some of the model's weights are missing.
            BadResponse: a bucket's checksum differs.
            ConnectionFailed: the trainer is gone.
        """
        if self._channel is None:
            raise RuntimeError(
                "No trainer has connected, so no weights can be received. Send "
                "/init_weight_transfer_engine first, as rolltree's WeightTransfer.open does."
            )
        loaded: set[str] = set()
        reported = True
        try:
            specs = specs_from_data(update_info.tensors)
            for tensors in receive(self._channel, fill_buckets(specs, update_info.bucket_bytes)):
                names = self.model.load_weights(iter(tensors))
                reported = reported and names is not None
                loaded |= names or set()
            missing = sorted((self._expected or set()) - loaded)
            # Not checked for quantised models, which have parameters that are in no checkpoint,
            # nor for loaders that do not report the loaded names.
            if missing and reported and self.model_config.quantization is None:
                raise RuntimeError(
                    f"{len(missing)} of the model's parameters were not sent, {missing[0]} among "
                    "them, so answers would come from half an update. Send the whole model."
                )
        except BaseException:  # half an update must not stay
            self.shutdown()
            self._close_update()
            raise

    def finish_weight_update(self) -> None:
        """Finish loading, and repack the output layer."""
        self._close_update()
        renew_output_layer(self.model)

    def shutdown(self) -> None:
        """Disconnect from the trainer."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _close_update(self) -> None:
        """End layerwise loading, including layers that got only a part of their weights."""
        # vLLM counts the weights that each layer got. If loading stayed open, they would count for
        # the next update, and a layer would be loaded from a part of it (design/0012).
        if self._expected is not None:
            self._expected = None
            finalize_layerwise_reload(self.model, self.model_config)
