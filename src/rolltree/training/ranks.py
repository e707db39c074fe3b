"""The processes that train one model together: who they are, and how rank 0 leads them.

torchrun starts them and says so in the environment; without it there is one process and
torch.distributed is never set up. Rank 0 runs everything that a single process would (rollouts,
store, engine, evaluation); the others wait for its commands. It knows process groups and arrays. It
leaves out models (`shard.py`) and what a command does (`follow.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rolltree.errors import ConfigError, TrainingError
from rolltree.training.wire import decode, encode

STOP = "stop"
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_WAIT = timedelta(days=30)
"""How long ranks wait for a command: rollouts may take long, and a dead rank 0 is noticed anyway"""


@dataclass(frozen=True, slots=True)
class Command:
    """What rank 0 wants: a row of `follow.COMMANDS`, or `STOP`, with plain data and arrays."""

    name: str
    data: Mapping[str, Any]


class Ranks:
    """This process among those that train together.

    `rank` is 0 to `size - 1`; `device` is where this one computes; `mesh` is one-dimensional;
    `group` is for what is on the CPU.
    """

    def __init__(self, device_type: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        self.mesh: DeviceMesh = init_device_mesh(device_type, (self.size,))
        self.group = dist.new_group(backend="gloo", timeout=_WAIT)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def tell(self, name: str, data: Mapping[str, Any] | None = None) -> None:
        """Send a command to all other ranks; only rank 0 may.

        Raises:
            TrainingError: another rank is gone.
        """
        content = encode({"name": name, "data": data or {}})
        size = torch.tensor([len(content)])
        with _lost("a rank that trains with this one has ended"):
            dist.broadcast(size, 0, group=self.group)
            dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0, self.group)

    def hear(self) -> Command:
        """Wait for rank 0's next command.

        Raises:
            TrainingError: rank 0 is gone.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with _lost("rank 0 has ended"):
            dist.broadcast(size, 0, group=self.group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, 0, group=self.group)
        message = decode(content.numpy().tobytes())
        return Command(message["name"], message["data"])

    def total(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Return the element-wise sums of every rank's arrays; all ranks call it alike.

        Raises:
            TrainingError: a rank is gone.
        """
        summed = [torch.from_numpy(np.array(array, copy=True)) for array in arrays]
        with _lost("a rank that trains with this one has ended"):
            for tensor in summed:
                dist.all_reduce(tensor, group=self.group)
        return [tensor.numpy() for tensor in summed]

    def barrier(self) -> None:
        """Wait until every rank is here.

        Raises:
            TrainingError: a rank is gone.
        """
        with _lost("a rank that trains with this one has ended"):
            dist.barrier(group=self.group)


@contextmanager
def start_ranks(device: str = "cpu", init_method: str = "env://") -> Iterator[Ranks | None]:
    """Join the ranks that torchrun started, or yield None when this process is alone.

    `init_method` is torch.distributed's: where the ranks find each other. All ranks leave the
    context together, unless one leaves it with an error, of which the others hear when its process
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
            f"model.device is {device!r}, and several ranks train on {' or '.join(_BACKENDS)}. "
            "Change the device, or start one process without torchrun."
        )
    if "RANK" not in os.environ:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and RANK is not set, so this process cannot "
            "tell which of them it is. Start it with torchrun, or unset WORLD_SIZE."
        )
    dist.init_process_group(
        _BACKENDS[kind],
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    ranks = Ranks(kind)
    yield ranks  # after an error nobody is told anything: ending closes the connections
    ranks.barrier()
    dist.destroy_process_group()


@contextmanager
def _lost(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo names the socket, not the reason
        raise TrainingError(
            f"{what}, and the ranks of a run end together. Its own message says why; when that is "
            f"mended, the same command continues from the last checkpoint. ({error})"
        ) from error
