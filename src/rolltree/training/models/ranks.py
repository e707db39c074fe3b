"""The processes that train one model together, and the model sharded over them.

torchrun or a `[cluster]` starts them; otherwise there is one process and torch.distributed is never
set up. Rank 0 runs everything that a single process would (rollouts, store, engine, evaluation) and
sends the others commands as msgpack, never pickle. The model is sharded with FSDP2 (`fully_shard`,
Zhao et al. 2023, arXiv:2304.11277); gradients are summed, not averaged, because losses carry global
normalizers. There is no tensor or pipeline parallelism.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rolltree.samples import SampleStream
from rolltree.training.forward import LogprobModel
from rolltree.values.errors import ConfigError, RankLost
from rolltree.values.types import Sample

STOP = "stop"
# Commands, samples and sums over records are on the CPU on every device.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_WAIT = timedelta(days=30)
"""How long ranks wait for a command: rollouts may take long, and a dead rank 0 is noticed anyway"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of rank 0: a row of `rank0.COMMANDS`, or `STOP`, with plain data and arrays."""

    name: str
    data: Mapping[str, Any]


class Ranks:
    """This process as one of those that train together.

    `rank` is 0 to `size - 1`; `device` is where this process computes; `mesh` is one-dimensional;
    `group` is for tensors on the CPU.
    """

    def __init__(self, device_type: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        self.mesh: DeviceMesh = init_device_mesh(device_type, (self.size,))
        # A separate group: the default one's timeout would end ranks that wait for rollouts.
        self.group = dist.new_group(backend="gloo", timeout=_WAIT)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def send(self, name: str, data: Mapping[str, Any] | None = None) -> None:
        """Send a command to all other ranks; only rank 0 may call it.

        Raises:
            RankLost: another rank is gone.
        """
        content = encode({"name": name, "data": data or {}})
        # The others need the size first, to make room.
        size = torch.tensor([len(content)])
        with _lost("a rank that trains with this one has ended"):
            dist.broadcast(size, 0, group=self.group)
            # Not `bytes`: torch warns about read-only buffers.
            dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0, self.group)

    def receive(self) -> Command:
        """Wait for rank 0's next command.

        Raises:
            RankLost: rank 0 is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with _lost("rank 0 has ended"):
            dist.broadcast(size, 0, group=self.group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, 0, group=self.group)
        message = decode(content.numpy().tobytes())
        return Command(message["name"], message["data"])

    def total(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return the element-wise sums of every rank's arrays; every rank has to call it.

        Raises:
            RankLost: a rank is gone.
        """
        # Copies, since the reduction writes into them.
        summed = [torch.from_numpy(np.array(array, copy=True)) for array in arrays]
        with _lost("a rank that trains with this one has ended"):
            for tensor in summed:
                dist.all_reduce(tensor, group=self.group)
        return [tensor.numpy() for tensor in summed]

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            RankLost: a rank is gone.
        """
        with _lost("a rank that trains with this one has ended"):
            dist.barrier(group=self.group)


def is_rank0() -> bool:
    """Return whether this process is alone, or rank 0 of those that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def start_ranks(device: str = "cpu", init_method: str = "env://") -> Iterator[Ranks | None]:
    """Join the ranks that were started together, or yield None when this process is alone.

    `init_method` is torch.distributed's: where the ranks find each other. All ranks leave the
    context together, unless one leaves it with an error, which the others notice when its process
    ends.

    Raises:
        ConfigError: the device has no backend for several ranks, or torchrun's RANK is missing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    kind = torch.device(device).type
    if kind not in _BACKENDS:
        raise ConfigError(
            f"model.device is {device!r}, but several ranks train on {' or '.join(_BACKENDS)}. "
            "Change the device, or start one process without torchrun."
        )
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"several ranks need torch 2.13 or later, and this is torch {torch.__version__}: with "
            "older ones they wait for each other forever if a rank has no gradient of a weight. "
            "Update torch, or start one process without torchrun."
        )
    if "RANK" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but RANK is not set, so this process does "
            "not know its rank. Start it with torchrun, or unset WORLD_SIZE."
        )
    dist.init_process_group(
        _BACKENDS[kind],
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    ranks = Ranks(kind)
    yield ranks  # after an error, the others notice the closed connections
    ranks.barrier()
    dist.destroy_process_group()


@contextmanager
def _lost(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo names the socket, not the reason
        raise RankLost(
            f"{what}, and the ranks of a run end together. See that rank's own error message; once "
            f"it is fixed, the same command continues from the last checkpoint. ({error})"
        ) from error


_ARRAY = 1


def encode(value: Any) -> bytes:
    """Serialize plain data, which may contain numpy arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_to_extension)


def decode(data: bytes) -> Any:
    """Return the data that `encode` serialized; tuples become lists, arrays are read-only."""
    return msgspec.msgpack.Decoder(ext_hook=_from_extension).decode(data)


def samples_to_data(samples: Sequence[Sample]) -> list[Sample]:
    """Return samples for `encode`, with only the part of `info` that training reads."""
    calls = dict.fromkeys(("left_out", "changed_sampling", "misspelled"), ())
    read: dict[str, Any] = {"streams": {}, "rollouts": (), **calls}
    return [
        replace(s, info={name: s.info.get(name, empty) for name, empty in read.items()})
        for s in samples
    ]


def samples_from_data(data: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Return the samples that `samples_to_data` described, after `decode`."""
    samples = msgspec.convert(data, list[Sample], dec_hook=lambda kind, array: array)
    return [
        replace(
            s, info={**s.info, "streams": {k: _stream(**v) for k, v in s.info["streams"].items()}}
        )
        for s in samples
    ]


def _stream(positions: Any, values: Any) -> SampleStream:
    return SampleStream(positions, tuple(values) if isinstance(values, list) else values)


def _to_extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        # No pickle: dtype, shape and bytes are all that an array needs.
        head = (array.dtype.str, value.shape, array.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(head))
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to other ranks")


def _from_extension(code: int, data: memoryview) -> Any:
    dtype, shape, content = msgspec.msgpack.decode(data)
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape)


_METHOD = "rolltree_logprobs"


def shard(logprobs: LogprobModel, ranks: Ranks) -> None:
    """Shard the module of `logprobs` in place, and let `logprobs` compute with it.

    Each decoder layer is gathered on its own; everything else, tied embeddings and output head
    included, is one more group. Master weights stay as they are (float32); with a different
    `compute_dtype` they are gathered in it, and gradients are summed in float32. Weights without a
    gradient on a rank (experts without a token, most of a recurrent layer in a filler of one token)
    count as zero there: ranks must sum the same tensors, or they wait for each other.
    """
    model, dtype = logprobs.model, logprobs.compute_dtype
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Inner modules first: the root takes what no layer has taken (design/0007).
    for module in (*_own_layers(model), model):
        fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Both, for a plain sum: a factor of 1 alone fails on gloo (design/0007).
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
            module.set_reduce_scatter_unused_params(True, recurse=False)
    # The trainer never calls `forward`, and FSDP gathers weights only for methods that it knows
    # (design/0007).
    setattr(model, _METHOD, logprobs.compute)
    register_fsdp_forward_method(model, _METHOD)
    logprobs.run = getattr(model, _METHOD)
    logprobs.device = ranks.device


def _own_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost decoder layers that share no parameter with the rest of the model.

    An FSDP group owns its parameters: a parameter in two groups would become two parameters, and a
    sharded one cannot be sharded again.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())

    # Counts a parameter once per module that holds it, so a shared one has a larger count in the
    # whole model than in either of its modules.
    def uses(module: torch.nn.Module) -> Counter[int]:
        return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    everywhere = uses(model)

    def stands_alone(child: torch.nn.Module) -> bool:
        # Every use of its parameters is inside it.
        return type(child).__name__ in names and uses(child).items() <= everywhere.items()

    from rolltree.training.models.recompute import outermost

    return outermost(model, stands_alone)
