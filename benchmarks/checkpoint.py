"""A checkpoint against raw DCP: saving and resuming the same state, checksums included.

    python benchmarks/checkpoint.py            the table, figures on the last line
    python benchmarks/checkpoint.py --check    exit 1 when a bar is missed
    python benchmarks/checkpoint.py --json     one JSON object instead of the table

Raw DCP is `torch.distributed.checkpoint.save` and `load` with their own storage (FileSystemWriter,
which syncs its files) of the same tensors: a float32 model of 134 million parameters (SmolLM2's
shape, random weights) and AdamW's two moments, 1.6 GB. Each kind is measured in turn, `--rounds`
times, and a ratio is the median over the rounds of one kind by DCP in the same round. Resuming is
`latest()`, which compares every checksum, and `load()`.

The bars hold bytes on the disk and CPU seconds, of all threads. Wall seconds are only shown: most
are spent in waiting for a disk, which others may use.
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

BYTES_RATIO = 1.01
CPU_RATIO = 1.2
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


Seconds = tuple[float, float]
"""Wall and CPU."""


def timed(action: Callable[[], Any]) -> Seconds:
    """Return the seconds that an action takes."""
    began, worked = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - worked


def dcp(folder: Path, model: Any, optimizer: Optimizer) -> tuple[Seconds, Seconds]:
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


def own(folder: Path, kind: str, model: Any, optimizer: Optimizer) -> tuple[Seconds, Seconds]:
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
    """Return one row per round: seconds of saving and loading, and bytes, of each kind."""
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
                (save_s, save_cpu_s), (load_s, load_cpu_s) = found
                row[kind] = {
                    "save_s": save_s,
                    "save_cpu_s": save_cpu_s,
                    "load_s": load_s,
                    "load_cpu_s": load_cpu_s,
                    "num_bytes": sum(f.stat().st_size for f in target.rglob("*") if f.is_file()),
                }
                shutil.rmtree(target)
        if number:
            rows.append(row)
    return rows


def bars(rows: list[dict[str, Any]]) -> list[Bar]:
    held = (
        ("save_cpu_s", "CPU of saving", CPU_RATIO),
        ("load_cpu_s", "CPU of resuming", CPU_RATIO),
        ("num_bytes", "bytes", BYTES_RATIO),
    )
    return [
        Bar.at_most(
            f"x raw DCP, {what} ({kind})",
            median(row[kind][key] / row["dcp"][key] for row in rows),
            bound,
        )
        for kind in KINDS
        for key, what, bound in held
    ]


def show(rows: list[dict[str, Any]]) -> None:
    print("medians: wall s      save    load   CPU s  save    load      MB")
    for kind in ("dcp", *KINDS):
        names = ("save_s", "load_s", "save_cpu_s", "load_cpu_s", "num_bytes")
        wall, loading, cpu, load_cpu, size = (median(r[kind][n] for r in rows) for n in names)
        print(
            f"  {kind:<16} {wall:>6.2f}  {loading:>6.2f}        {cpu:>5.2f}  {load_cpu:>6.2f}"
            f"  {size / 1e6:>6.0f}"
        )


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
