"""Weights that a trainer broadcasts, received into the served model, in place.

Names and shapes are checked before anything is received, each bucket before it is copied. When a
transfer breaks off, what has been copied stays: the publisher leaves the server paused. It knows a
model and channels. It knows nothing about engines; whoever calls it sees to it that no step runs
meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from rolltree.errors import ConfigError
from rolltree.inference.server.weights import check_fit
from rolltree.inference.transfer.buckets import plan, specs_from_data
from rolltree.inference.transfer.channel import Channel, Invitation, accept, receive


class WeightReceiver:
    """The receiving end of `rolltree.inference.transfer` for one model.

    Calls come one at a time; `close` may come at any time, and ends a transfer.
    """

    world_size = 1

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._channel: Channel | None = None
        self._is_started = False

    def meet(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer that `info` names; an earlier one is forgotten.

        Raises:
            ConfigError: it is no invitation.
            ConnectionFailed: the trainer cannot be reached.
        """
        self.close()
        try:
            invitation = msgspec.convert(info, Invitation)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"init_info is none that `rolltree.inference.WeightTransfer` sends ({error}), and "
                "no other trainer can be received from."
            ) from error
        self._channel = accept(invitation, 1, self._device)

    def start(self) -> None:
        """Begin an update.

        Raises:
            ConfigError: no trainer was met.
        """
        self._met()
        self._is_started = True

    def receive(self, info: Mapping[str, Any]) -> None:
        """Copy what the trainer sends into the model.

        Raises:
            ConfigError: no update was begun, or the weights do not fit the model.
            BadResponse: a bucket's checksum differs.
            ConnectionFailed: the trainer is gone.
        """
        channel = self._met()
        if not self._is_started:
            raise ConfigError("/update_weights came before /start_weight_update.")
        self._is_started = False
        try:
            specs = specs_from_data(info.get("tensors"))
            size = info.get("bucket_bytes")
            if type(size) is not int or size < 1:
                raise ConfigError(f"update_info has bucket_bytes = {size!r}, which is no size.")
            own = self._model.state_dict()
            check_fit(own, {spec.name: spec.shape for spec in specs}, "that were announced")
            with torch.no_grad():
                for tensors in receive(channel, plan(specs, size)):
                    for name, tensor in tensors:
                        own[name].copy_(tensor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the trainer."""
        channel, self._channel = self._channel, None
        self._is_started = False
        if channel is not None:
            channel.close()

    def _met(self) -> Channel:
        if self._channel is None:
            raise ConfigError(
                "no trainer has been met, so there is nobody to receive weights from. Send "
                "/init_weight_transfer_engine first, as `WeightTransfer.open` and `publish` of "
                "rolltree.inference do."
            )
        return self._channel
