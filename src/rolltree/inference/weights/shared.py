"""The trainer's weights as a safetensors file in memory, which servers on its machine map.

The file has no name on any disk: servers open it as `/proc/PID/fd/N`, so it is gone with the
trainer's process, however that ends. It is laid out once; each version is then copied into the same
pages. Servers read it only while the trainer waits for them, so it never changes under a reader.
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

from rolltree.errors import ConfigError
from rolltree.inference.weights.buckets import TensorSpec, as_torch_dtype
from rolltree.inference.weights.receive import MARK

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
    """A file in memory; until `reserve` it holds nothing but its mark.

    `mark` is what a server that sees this very file reads there, and no other file has.

    Raises:
        OSError: this system has no such files.
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
        """Where processes of this machine find it."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def reserve(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Lay out the file for tensors like these, if it is not.

        Raises:
            OSError: the memory does not exist.
            ConfigError: safetensors has no such dtype.
        """
        specs = [TensorSpec.of(name, tensor) for name, tensor in tensors]
        if specs == self._specs:
            return
        # A file of other weights may still be mapped by a server, so it is left as it is.
        if self._specs is not None:
            raise ConfigError("the tensors of the model changed since its weights were published.")
        # The largest elements first: safetensors leaves no gaps, and views must be aligned.
        ordered = sorted(specs, key=lambda spec: -as_torch_dtype(spec.dtype).itemsize)
        header = self._header(ordered)
        size = len(header) + sum(spec.num_bytes for spec in ordered)
        # Reserved now: a page that is missing later would end the process with SIGBUS.
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
        """Copy weights into the file; raises as `reserve`."""
        named = list(tensors)
        self.reserve(named)
        for name, tensor in named:
            self._views[name].copy_(tensor)

    def close(self) -> None:
        """Let go of the memory; servers that still map it keep it."""
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
