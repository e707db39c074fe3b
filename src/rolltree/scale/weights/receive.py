"""Puts new weights into a served model, from folders of safetensors or sent by a trainer.

Names and shapes are checked before anything is changed, each received bucket before it is copied.
If a transfer breaks off, the tensors copied so far stay, and the publisher leaves the server
paused. LoRA adapters are not supported. torch is imported only when weights arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rolltree._helpers.files import read_regular
from rolltree._helpers.untrusted import shorten
from rolltree.values.errors import ConfigError

if TYPE_CHECKING:
    from rolltree.scale.weights.channel import Channel

INDEX = "model.safetensors.index.json"
MARK = "rolltree"
"""The key in a file's metadata by which a trainer recognizes its own file."""
_MAX_INDEX_BYTES = 64 * 2**20


class WeightReceiver:
    """The receiving end of `rolltree.scale.weights` for one model.

    Calls must not overlap, except that `close` may be called at any time and ends a transfer.
    """

    world_size = 1

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._channel: Channel | None = None
        self._is_started = False

    def meet(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer that `info` names, and disconnect from an earlier one.

        Raises:
            ConfigError: `info` is not an invitation.
            ConnectionFailed: the trainer cannot be reached.
        """
        self.close()
        from rolltree.scale.weights.channel import Invitation, accept

        try:
            invitation = msgspec.convert(info, Invitation)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"init_info is not what `rolltree.inference.WeightTransfer` sends ({error}); other "
                "trainers are not supported."
            ) from error
        self._channel = accept(invitation, 1, self._device)

    def start(self) -> None:
        """Start an update.

        Raises:
            ConfigError: no trainer has connected.
        """
        self._met()
        self._is_started = True

    def receive(self, info: Mapping[str, Any]) -> None:
        """Copy what the trainer sends into the model.

        Raises:
            ConfigError: no update was started, or the weights do not fit the model.
            BadResponse: a bucket's checksum differs.
            ConnectionFailed: the trainer is gone.
        """
        import torch

        from rolltree.scale.weights.buckets import fill_buckets, specs_from_data
        from rolltree.scale.weights.channel import receive

        channel = self._met()
        if not self._is_started:
            raise ConfigError("/update_weights came before /start_weight_update.")
        self._is_started = False
        try:
            specs = specs_from_data(info.get("tensors"))
            size = info.get("bucket_bytes")
            # A bool is an int, too.
            if type(size) is not int or size < 1:
                raise ConfigError(f"update_info has bucket_bytes = {size!r}; it must be >= 1.")
            own = self._model.state_dict()
            # Checked completely before the first byte is copied, which changes the model.
            check_fit(own, {spec.name: spec.shape for spec in specs}, "that were announced")
            with torch.no_grad():
                for tensors in receive(channel, fill_buckets(specs, size)):
                    for name, tensor in tensors:
                        own[name].copy_(tensor)
        except BaseException:  # the channel is out of sync now
            self.close()
            raise

    def close(self) -> None:
        """Disconnect from the trainer."""
        channel, self._channel = self._channel, None
        self._is_started = False
        if channel is not None:
            channel.close()

    def _met(self) -> Channel:
        if self._channel is None:
            raise ConfigError(
                "no trainer has connected, so no weights can be received. Send "
                "/init_weight_transfer_engine first, as `WeightTransfer.open` and `publish` of "
                "rolltree.inference do."
            )
        return self._channel


def weights_mark(path: Path) -> str | None:
    """Return the mark by which a trainer recognizes its file; None if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        # A named pipe would block.
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            mark: str | None = (file.metadata() or {}).get(MARK)
            return mark
    except (SafetensorError, OSError, ValueError):
        return None


def load_weights(model: Any, folder: Path) -> None:
    """Copy every tensor in a folder or a file into `model`'s tensor of the same name.

    Parameters that share their memory with a loaded parameter (tied embeddings) may be missing.

    Raises:
        ConfigError: the folder has no safetensors, or their names or shapes are not the model's;
            the model is unchanged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    own = model.state_dict()
    found: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in safetensors_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    found[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise _unfit(f"in {folder}", f"{path.name} cannot be read ({error})") from error
    check_fit(own, shapes, f"in {folder}")
    with torch.no_grad():
        for path in sorted(set(found.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    own[name].copy_(file.get_tensor(name))


def check_fit(own: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Check that weights have the names and shapes of the state dict `own`.

    Parameters that share their memory with a given parameter may be missing.

    Raises:
        ConfigError: they do not; the message names the tensors.
    """
    for name, shape in shapes.items():
        if name in own and shape != tuple(own[name].shape):
            raise _unfit(where, f"{name} has shape {shape}", tuple(own[name].shape))
    if unknown := sorted(shapes.keys() - own.keys()):
        raise _unfit(where, f"{_some(unknown)} are not parameters of the model")
    # By address, because a tied tensor has two names but comes once.
    loaded = {own[name].data_ptr() for name in shapes}
    missing = sorted(name for name in own.keys() - shapes if own[name].data_ptr() not in loaded)
    if missing:
        raise _unfit(where, f"{_some(missing)} are missing")


def safetensors_files(folder: Path) -> list[Path]:
    """Return a folder's weight files: those in its index, else all; a file is returned itself.

    Raises:
        ConfigError: there are none, the index cannot be read, or one is not a regular file, so
            that reading it might never end.
    """
    index = folder / INDEX
    try:
        # For example the file in memory of a trainer on this machine.
        if folder.is_file():
            return [folder]
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if index.is_file():
            files = sorted({folder / name for name in _read_index(index)})
    except (OSError, ValueError, RecursionError) as error:
        raise _unfit(
            f"in {shorten(str(folder), 200)}", f"they cannot be found ({error})"
        ) from error
    for path in files:
        # A named pipe would block the reader forever.
        if not path.is_file():
            raise _unfit(f"in {folder}", f"{path.name} is missing or is not a regular file")
    if not files:
        raise ConfigError(
            f"{folder} holds no *.safetensors, so there are no weights to load; the model is "
            "unchanged. Save it with save_pretrained, on a disk that the server can read."
        )
    return files


def _read_index(path: Path) -> Iterable[str]:
    # A publisher can name any folder, so its index must not fill the memory.
    content = read_regular(path, _MAX_INDEX_BYTES, follow=True)
    return msgspec.json.decode(content, type=_Index).weight_map.values()


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _unfit(where: str, what: str, expected: object = None) -> ConfigError:
    wanted = "" if expected is None else f", not {expected}"
    return ConfigError(
        f"the weights {where} do not fit the served model: {what}{wanted}. The model is "
        "unchanged. Publish weights of the same architecture."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
