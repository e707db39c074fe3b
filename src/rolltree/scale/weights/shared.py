"""The trainer's weights as a safetensors file in memory, which servers on its machine map.

The file is not on any disk: servers open it as `/proc/PID/fd/N`, so it disappears with the
trainer's process, however that ends. It is laid out once; each version is then copied into the same
pages. Servers read it only while the trainer waits for them, so it does not change meanwhile.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rolltree.scale.weights.buckets import TensorSpec, as_torch_dtype
from rolltree.scale.weights.receive import MARK
from rolltree.values.errors import ConfigError

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class SharedWeights:
    """A file in memory; until `reserve` it holds only its mark.

    `mark` is unique to the file: a server that reads the same mark sees this file.

    Raises:
        OSError: the operating system does not support files in memory.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("files in memory need Linux")
        self.mark = secrets.token_hex(16)
        self._file = os.memfd_create("rolltree-weights")
        self._specs: list[TensorSpec] | None = None
        self._views: dict[str, Tensor] = {}
        os.pwrite(self._file, self._header([]), 0)

    @property
    def path(self) -> Path:
        """The file's path for processes on this machine."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def reserve(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Lay out the file for tensors like these, unless that is done.

        Raises:
            OSError: there is not enough memory.
            ConfigError: safetensors does not support a dtype, or the tensors have changed.
        """
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
        if specs == self._specs:
            return
        # Not laid out again, since a server may still map the file.
        if self._specs is not None:
            raise ConfigError("the tensors of the model changed since its weights were published.")
        # The largest elements first: safetensors allows no gaps, and views must be aligned.
        ordered = sorted(specs, key=lambda spec: -as_torch_dtype(spec.dtype).itemsize)
        header = self._header(ordered)
        size = len(header) + sum(spec.num_bytes for spec in ordered)
        # Reserved now, because memory that is missing later would kill the process with SIGBUS.
        os.posix_fallocate(self._file, 0, size)
        os.pwrite(self._file, header, 0)
        memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)
        start = len(header)
        for spec in ordered:
            data = memory[start : start + spec.num_bytes]
            self._views[spec.name] = data.view(as_torch_dtype(spec.dtype)).view(spec.shape)
            start += spec.num_bytes
        self._specs = specs

    @torch.no_grad()
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights into the file; raises as `reserve` does."""
        named = list(tensors)
        self.reserve(named)
        for name, tensor in named:
            self._views[name].copy_(tensor)

    def close(self) -> None:
        """Free the memory, except while servers still map it."""
        self._views.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _header(self, specs: Iterable[TensorSpec]) -> bytes:
        data: dict[str, object] = {"__metadata__": {MARK: self.mark}}
        end = 0
        for spec in specs:
            if spec.dtype not in _DTYPES:
                raise ConfigError(f"{spec.name} is {spec.dtype}, which safetensors cannot hold.")
            start, end = end, end + spec.num_bytes
            place = {"shape": list(spec.shape), "data_offsets": [start, end]}
            data[spec.name] = {"dtype": _DTYPES[spec.dtype], **place}
        text = json.dumps(data).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
