"""A checkpoint against raw DCP: saving and resuming the same state, checksums included.

    python benchmarks/checkpoint.py            the table, figures on the last line
    python benchmarks/checkpoint.py --check    exit 1 when a bar is missed
    python benchmarks/checkpoint.py --json     one JSON object instead of the table

Raw DCP is `torch.distributed.checkpoint.save` and `load` with their own storage (FileSystemWriter,
which syncs its files) of the same tensors: a float32 model of 134 million parameters (SmolLM2's
shape, random weights) and AdamW's two moments, 1.6 GB. Each kind is measured in turn, `--rounds`
times, and a ratio is the median over the rounds of one kind's time by DCP's in the same round, so
what else the machine does meets both. Resuming is `latest()`, which compares every checksum, and
`load()`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import LlamaConfig, LlamaForCausalLM
from verdict import Bar, conclude, make_parser

from rolltree.training import Checkpoints, TrainState, load_train_config
from rolltree.training.checkpoint_formats import quiet, trained_tensors
from rolltree.training.optim import Optimizer

RATIO = 1.2
KINDS = ("full", "sharded")
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def make_state(layers: int) -> tuple[Any, Optimizer]:
    """Return a model and an optimizer that has taken a step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": layers}))
    optimizer = Optimizer(model, load_train_config({}).optim)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step(1e-3)
    for parameter in model.parameters():
        parameter.grad = None
    return model, optimizer


def state_dict(model: Any, optimizer: Optimizer) -> dict[str, Any]:
    """Return the tensors that a checkpoint keeps, as DCP takes them."""
    tensors = {f"model/{name}": value for name, value in trained_tensors(model).items()}
    return tensors | {f"optimizer/{name}": value for name, value in optimizer.tensors().items()}


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def dcp(folder: Path, model: Any, optimizer: Optimizer) -> tuple[float, float]:
    """Save and load with DCP alone."""
    state = state_dict(model, optimizer)
    with quiet():
        saving = timed(
            lambda: dcp_save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        )
        loading = timed(
            lambda: dcp_load(state, storage_reader=FileSystemReader(folder), no_dist=True)
        )
    return saving, loading


def own(folder: Path, kind: str, model: Any, optimizer: Optimizer) -> tuple[float, float]:
    """Save and resume a checkpoint of this kind."""
    state = TrainState(1, 1)
    saving = timed(lambda: Checkpoints(folder, content=kind).save(model, optimizer, state))

    def resume() -> None:
        store = Checkpoints(folder, content=kind)
        path = store.latest()
        assert path is not None
        store.load(path, model, optimizer)

    return saving, timed(resume)


def measure(rounds: int, layers: int, folder: Path | None) -> list[dict[str, Any]]:
    """Return one row per round: seconds of saving and loading of each kind."""
    model, optimizer = make_state(layers)
    rows = []
    for number in range(rounds + 1):  # the first one warms up
        row: dict[str, Any] = {}
        kinds = ["dcp", *KINDS]
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                target = Path(place) / "x"
                found = (
                    dcp(target, model, optimizer)
                    if kind == "dcp"
                    else own(target, kind, model, optimizer)
                )
                row[kind] = dict(zip(("save_s", "load_s"), found, strict=True))
                shutil.rmtree(target)
        if number:
            rows.append(row)
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    return [
        Bar.at_most(
            f"x raw DCP, {what} ({kind})",
            median(row[kind][key] / row["dcp"][key] for row in rows),
            RATIO,
        )
        for kind in KINDS
        for key, what in (("save_s", "saving"), ("load_s", "resuming"))
    ]


def show(rows: list[dict[str, Any]]) -> None:
    print("median seconds      save    load")
    for kind in ("dcp", *KINDS):
        saving, loading = (median(row[kind][key] for row in rows) for key in ("save_s", "load_s"))
        print(f"  {kind:<16} {saving:>6.2f}  {loading:>6.2f}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    options = parser.parse_args()
    rows = measure(options.rounds, options.layers, options.folder)
    return conclude(options, bars(rows), rows, lambda: show(rows))


if __name__ == "__main__":
    sys.exit(main())
