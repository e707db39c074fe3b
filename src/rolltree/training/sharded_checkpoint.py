"""Checkpoints of which every rank writes its own part.

torch.distributed.checkpoint writes them as safetensors. Any number of ranks can read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rolltree._helpers.files import sync
from rolltree.training.checkpoint_formats import quiet, trained_tensors
from rolltree.training.models.ranks import Ranks
from rolltree.training.optim import Optimizer

SHARDS = "shards"


def write_sharded(folder: Path, model: Any, optimizer: Optimizer, ranks: Ranks | None) -> None:
    """Write what this rank holds; a tensor that every rank has is written by one of them."""
    # In a separate folder: DCP's reader takes every safetensors file there (design/0007).
    writer = _ShardWriter(str(folder / SHARDS), save_distributed=True)
    with quiet():
        dcp_save(
            together(model, optimizer),
            storage_writer=writer,
            process_group=None if ranks is None else ranks.group,
            no_dist=ranks is None,
        )


class _ShardWriter(HuggingFaceStorageWriter):
    """DCP's writer of safetensors, without its copy of the whole file in memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file with this rank's parts, and sync it."""
        tensors: dict[str, Tensor] = {}
        parts: dict[str, Any] = {}
        results = []
        for item in plan.items:
            assert item.tensor_data is not None
            name, data = item.index.fqn, planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[name] = data.detach().cpu().contiguous()
            parts[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, tensors[name].nbytes, None))
        # If a model has few or short tensors, a rank may hold nothing.
        if tensors:
            index = plan.storage_data["shard_index"]
            # DCP's own names and header, since DCP's reader reads the file.
            path = Path(self.path) / f"shard-{index:05d}-model-00001-of-00001.safetensors"
            header = {"DCP_SHARDING_INFO": json.dumps(parts), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(tensors, path, metadata=header)
            sync(path)  # by the machine that wrote it
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def together(model: Any, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what a checkpoint keeps, by the names that its files have for it."""
    model_part = {f"model/{name}": tensor for name, tensor in trained_tensors(model).items()}
    return model_part | {f"optimizer/{name}": value for name, value in optimizer.tensors().items()}
