"""Checkpoints that are complete or absent: model, optimizer and position of a training run.

    checkpoints/step-000020/  state.json, rng.safetensors, model and optimizer (checkpoint_formats)
    checkpoints/latest        the name of the newest complete one

A checkpoint is written into a temporary directory, synced and renamed; only then does `latest`
point to it, so a kill at any moment, of any rank, leaves the previous one current. Rollouts are
in the run store.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rolltree._helpers.files import remove, sync, write_whole
from rolltree.training.checkpoint_formats import put_in_place, sync_files, write_full, written
from rolltree.training.optim import Optimizer
from rolltree.values.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from rolltree.training.models.ranks import Ranks

FORMAT = 3
_RNG, STATE, LATEST = "rng.safetensors", "state.json", "latest"


@dataclass(frozen=True, slots=True)
class TrainState:
    """The progress of a run: `step` steps are done and the weights are policy `version`.

    Example: `TrainState(step=20, version=20)`. Task order, seeds and learning rate follow from the
    step, so nothing else has a position. `averages`: each role's moving average, if the credit
    has them.
    """

    step: int
    version: int
    averages: Mapping[str, float] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, below one directory that all ranks see. One writer at a time.

    Args:
        root: created when the first checkpoint is saved.
        keep: how many complete checkpoints are kept.
        content: the format to write, "full" or "sharded"; both can be read.
        ranks: the processes that call `save` and `load` together; None for one process.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int = 2,
        *,
        content: str = "full",
        ranks: Ranks | None = None,
    ) -> None:
        self.root, self.keep, self.content = Path(root), keep, content
        if self.root.is_symlink():
            raise TrainingError(
                f"{self.root} is a link, but checkpoints are written and removed there: in "
                "someone else's run it could lead anywhere. Link the whole run directory instead, "
                "or set run.dir to the other disk."
            )
        self.ranks = ranks
        self._verified: Path | None = None  # by `latest`, so that `load` need not do it again

    def latest(self, notify: Callable[[str], None] = lambda message: None) -> Path | None:
        """Return the newest whole checkpoint, or None if none was ever saved.

        Every file is compared with its checksum. If the newest checkpoint is damaged, the one
        before it is returned, and `notify` gets a sentence about it.

        Raises:
            TrainingError: no checkpoint is whole.
        """
        pointer = self.root / LATEST
        # Not `exists`: a link that leads nowhere is damage, and must not start the run from the
        # beginning.
        if not os.path.lexists(pointer):
            return None
        from rolltree.training.checkpoint_reading import newest_whole

        self._verified = newest_whole(pointer, notify)
        return self._verified

    def save(self, model: torch.nn.Module, optimizer: Optimizer, state: TrainState) -> Path:
        """Write a checkpoint, point `latest` at it, and remove those beyond `keep`.

        Rank 0 makes the directory and moves the pointer; in between every rank writes and syncs.
        """
        final = self.root / f"step-{state.step:06d}"
        working = self.root / f".{final.name}.tmp"
        with written(working, f"the checkpoint of step {state.step}"):
            if self._leads:
                self.root.mkdir(parents=True, exist_ok=True)
                # A killed writer may have left a partial directory.
                remove(working)
                working.mkdir()
            # The others write into the directory that rank 0 makes.
            self._meet()
            write = write_full
            if self.content == "sharded":
                from rolltree.training.sharded_checkpoint import write_sharded

                write = write_sharded
            write(working, model, optimizer, self.ranks)
            # Rank 0 lists the files that all of them have written.
            self._meet()
            if self._leads:
                save_file(rng_tensors(), working / _RNG)
                data = {"format": FORMAT, "content": self.content, "state": asdict(state)}
                # Written and synced after all files that it lists, so a directory with
                # `state.json` has all of them.
                data["files"] = sync_files(working)
                data["checksum"] = own_checksum(data)
                text = json.dumps(data, indent=2) + "\n"
                write_whole(working / STATE, text, follow=False)
                sync(working)
                # The pointer moves last, when directory and name are on the disk: "latest" never
                # leads to half a checkpoint. Only then are the older ones dispensable.
                put_in_place(working, final)  # a kill before the pointer may have left that name
                self._point_to(final)
                self._retain(final)
        self._meet()
        return final

    def load(self, path: Path, model: torch.nn.Module, optimizer: Optimizer) -> TrainState:
        """Copy a checkpoint into the module's own tensors, the optimizer and the generators.

        Raises:
            TrainingError: the directory is torn or damaged, or it belongs to a different model.
        """
        from rolltree.inference.models.layouts import open_file
        from rolltree.training import checkpoint_reading as reading

        data = reading.check_complete(path)
        if self._leads and path != self._verified:
            reading.check_content(path)
        try:
            reading.READS[data["content"]](path, model, optimizer, self.ranks)
            drawn = open_file(path / _RNG)
        except ConfigError as error:
            # To the loaders of weights an unreadable file is a wrong setting; here it is damage.
            raise reading.torn(path, str(error).rstrip(".")) from error
        reading.restore_rng({name: drawn.read(name) for name in drawn.names})
        return msgspec.convert(data["state"], TrainState)

    @property
    def _leads(self) -> bool:
        return self.ranks is None or self.ranks.leads

    def _meet(self) -> None:
        if self.ranks is not None:
            self.ranks.barrier()

    def _point_to(self, final: Path) -> None:
        write_whole(self.root / LATEST, final.name + "\n", follow=False)
        sync(self.root)

    def _retain(self, newest: Path) -> None:
        """Remove checkpoints beyond `keep`, later ones, and the leftovers of killed writers."""
        others = sorted(self.root.glob("step-*"), reverse=True)
        older = [path for path in others if path.name < newest.name]
        # Left behind when a damaged checkpoint was passed over: those steps are trained again.
        future = [path for path in others if path.name > newest.name]
        for old in (*future, *older[self.keep - 1 :]):
            # Renamed before it is removed, so a kill leaves no half checkpoint under a name that
            # `latest` tries.
            hidden = old.with_name(f".{old.name}.old")
            remove(hidden)
            old.rename(hidden)
        for left in (*self.root.glob(".step-*.old"), *self.root.glob(".step-*.tmp")):
            remove(left)


def own_checksum(data: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the values in `state.json`, without the checksum itself."""
    rest = {key: value for key, value in data.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of `random`, `numpy.random` and torch on the CPU and every GPU."""
    # All as tensors, since a checkpoint holds no pickle.
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python/words": torch.tensor(words, dtype=torch.int64),
        "python/gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy/keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy/position": torch.tensor([int(position), int(has_gauss)]),
        "numpy/gauss": torch.tensor([float(cached)], dtype=torch.float64),
        "torch/cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states = torch.cuda.get_rng_state_all()
        tensors |= {f"torch/cuda{index}": state for index, state in enumerate(states)}
    return tensors
