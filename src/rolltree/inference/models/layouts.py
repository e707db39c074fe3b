"""Opens the weights of a folder in any of Hugging Face's four layouts, and reads them lazily.

    model.safetensors      one file              model.safetensors.index.json   several
    pytorch_model.bin/.pt  one pickled file      pytorch_model.bin.index.json   several

safetensors are read tensor by tensor or in parts. Pickled files go through torch's restricted
unpickler (`weights_only=True`), which builds only tensors and containers.
"""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rolltree.values.errors import ConfigError

Spans: TypeAlias = tuple[slice, ...]


class Weights:
    """The named tensors of a folder: `names`, `shape(name)` and `read(name)`.

    Args:
        files: the file of each tensor, according to the folder or its index.
        opened: a reader for each file.
    """

    def __init__(self, files: Mapping[str, Path], opened: Mapping[Path, Any]) -> None:
        self._files, self._opened = files, opened

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._opened[self._files[name]].shape(name))

    def read(self, name: str, spans: Spans | None = None) -> Tensor:
        """Return a tensor, or the part of it that `spans` selects, one slice per dimension."""
        found: Tensor = self._opened[self._files[name]].read(name, spans)
        return found


class _Safe:
    """A safetensors file; only the requested tensors or parts are read."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, "pt")
        self.names = frozenset(self._file.keys())  # type: ignore[no-untyped-call]

    def shape(self, name: str) -> Iterable[int]:
        shape: Iterable[int] = self._file.get_slice(name).get_shape()
        return shape

    def read(self, name: str, spans: Spans | None) -> Tensor:
        if not spans:
            tensor: Tensor = self._file.get_tensor(name)
            return tensor
        part: Tensor = self._file.get_slice(name)[spans]
        return part


class _Pickled:
    """A file of `torch.save`, memory-mapped if its format allows it."""

    def __init__(self, path: Path) -> None:
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # The warning is about pickles that are refused anyway.
            warnings.simplefilter("ignore", UserWarning)
            # `weights_only`: torch's restricted unpickler runs no code from the file.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(content, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
        ):
            raise ValueError("it is not a state dict, a mapping from names to tensors")
        self._tensors: Mapping[str, Tensor] = content
        self.names = frozenset(content)

    def shape(self, name: str) -> Iterable[int]:
        return self._tensors[name].shape

    def read(self, name: str, spans: Spans | None) -> Tensor:
        return self._tensors[name][spans] if spans else self._tensors[name]


# The file that marks each layout, in order of preference, and the reader of its weight files.
_LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": _Safe,
    "model.safetensors.index.json": _Safe,
    "pytorch_model.bin": _Pickled,
    "pytorch_model.pt": _Pickled,
    "pytorch_model.bin.index.json": _Pickled,
}


def weights_layout(folder: Path) -> str | None:
    """Return the name of the file that marks a folder's layout, or None if it has no weights."""
    return next((name for name in _LAYOUTS if (folder / name).is_file()), None)


def open_weights(folder: Path) -> Weights:
    """Open the weights of a folder, and check that all files exist and match the index.

    Raises:
        ConfigError: there are none, or a file is missing or incomplete, is not a state dict, could
            run code, or disagrees with the index; the message names the file.
    """
    layout = weights_layout(folder)
    if layout is None:
        raise ConfigError(
            f"the folder {folder} has no weights: none of {', '.join(_LAYOUTS)}. Point at the "
            "folder of a saved model."
        )
    reader, marker = _LAYOUTS[layout], folder / layout
    if not layout.endswith(".index.json"):
        whole = _open(marker, reader)
        return Weights(dict.fromkeys(whole.names, marker), {marker: whole})
    files = _read_index(marker)
    opened = {path: _open(path, reader) for path in sorted(set(files.values()))}
    for path, content in opened.items():
        promised = {name for name, owner in files.items() if owner == path}
        # Shards of two models can have the same file names; without this check, tensors of the
        # wrong model would be loaded silently.
        different = sorted(promised ^ content.names)
        if different:
            what = "misses" if different[0] in promised else "also holds"
            raise ConfigError(
                f"the shard {path} {what} {different[0]!r}, contrary to its index {marker.name}, "
                "so they belong to different models. Save or download the model again."
            )
    return Weights(files, opened)


def open_file(path: Path) -> Weights:
    """Open one safetensors file.

    Raises:
        ConfigError: it is missing or incomplete.
    """
    content = _open(path, _Safe)
    return Weights(dict.fromkeys(content.names, path), {path: content})


def _read_index(path: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the index {path} cannot be read ({type(error).__name__}: {error}). It must be JSON "
            "with a weight_map from names to files. Save or download the model again."
        ) from error
    # An untrusted index must not lead out of its folder.
    outside = [file for file in files.values() if Path(file).name != file]
    if outside or not files:
        what = f"names {outside[0]!r}, which is not a file of its folder" if outside else "is empty"
        raise ConfigError(f"the index {path} {what}. Save or download the model again.")
    return {name: path.parent / file for name, file in files.items()}


def _open(path: Path, reader: Callable[[Path], Any]) -> Any:
    if not path.is_file():
        raise ConfigError(
            f"the file {path} is missing, so its tensors would be random. Copy it from where the "
            "other files came from."
        )
    try:
        return reader(path)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than tensors, or is incomplete; reading it could run code, so it "
            f"is refused. Save the model again with safetensors. ({str(error).splitlines()[0]})"
        ) from error
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. It is incomplete or has a different format; copy it "
            "again from its source."
        ) from error
