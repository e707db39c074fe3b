"""Checkpoints of several ranks, read by any number, and kills while they are written.

Run by `ranks_kit`; what is compared across worlds goes through files in its folder.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from dataclasses import replace

import torch
from ranks_kit import fork_world
from safetensors.torch import load_file, save_file
from training_kit import group, tiny_model, tree

from rolltree.training import Checkpoints, Trainer, TrainState, load_train_config
from rolltree.training import checkpoint as checkpoint_room
from rolltree.training import checkpoint_formats as formats_room
from rolltree.training import sharded_checkpoint as sharded_room
from rolltree.training.checkpoint_formats import export_model, trained_tensors
from rolltree.training.models.lora import add_adapter
from rolltree.training.models.shards import whole
from rolltree.training.optim import Optimizer

KINDS = ("tied", "untied", "lora")
CONTENTS = ("full", "sharded")
SETTINGS = {
    "optim": {"lr": 1e-3, "weight_decay": 0.1},
    "train": {"max_mismatch": 1e9, "skip_zero_advantage": False},
}


def made(kind, ranks, fresh=False):
    """A trainer; `fresh` starts from other numbers wherever a checkpoint has them all."""
    seed = 9 * fresh * (kind != "lora")
    model = tiny_model("llama" if kind == "untied" else "qwen3", seed, num_hidden_layers=1)
    sections = dict(SETTINGS)
    if kind == "lora":
        sections["model"] = {"lora_rank": 3}
    config = load_train_config(sections)
    if kind == "lora":
        add_adapter(model, config.model, seed=int(fresh))
    return Trainer(model, config, ranks)


def bare(ranks=None):
    """Model and optimizer alone, which is all that a checkpoint needs and quicker to make."""
    if ranks is not None:
        trainer = made("tied", ranks)
        return trainer.model, trainer.optimizer
    model = tiny_model(num_hidden_layers=1)
    return model, Optimizer(model, load_train_config(SETTINGS).optim)


def data(step):
    calls = [group(num=2, prefix=6, turns=1, seed=10 * step + number) for number in range(3)]
    return [
        tree([replace(call, rollout=call.rollout + 10 * number) for call in part])
        for number, part in enumerate(calls)
    ]


def state_of(trainer):
    tensors = {name: whole(value) for name, value in trained_tensors(trainer.model).items()}
    state = {name: whole(value) for name, value in trainer.optimizer.tensors().items()}
    return {name: value.clone().contiguous() for name, value in (tensors | state).items()}


def saved(ranks, folder):
    """Two steps, a checkpoint in each format, three more steps: what a resumed run is held to."""
    formats_room.MAX_SHARD_SIZE = "20KB"  # in this process only
    for kind in KINDS:
        trainer = made(kind, ranks)
        for step in (1, 2):
            trainer.step(data(step), step)
        for content in CONTENTS:
            root = folder / f"{kind}-{content}"
            store = Checkpoints(root, content=content, ranks=ranks)
            store.save(trainer.model, trainer.optimizer, TrainState(2, 2))
        export_model(trainer.model, None, folder / kind / "model", ranks=ranks)
        after = state_of(trainer)
        for step in (3, 4, 5):
            trainer.step(data(step), step)
        last = state_of(trainer)
        if ranks.leads:
            save_file(after, folder / f"{kind}-saved.safetensors")
            save_file(last, folder / f"{kind}-last.safetensors")
    names = [path.name for path in (folder / "tied-sharded" / "step-000002" / "shards").iterdir()]
    return sorted(names)


def resumed(ranks, folder):
    """Largest differences right after loading, and after three further steps."""
    results = {}
    for kind in KINDS:
        wanted = [load_file(folder / f"{kind}-{when}.safetensors") for when in ("saved", "last")]
        trainer = made(kind, ranks, fresh=True)
        for content in CONTENTS:
            store = Checkpoints(folder / f"{kind}-{content}", ranks=ranks)
            state = store.load(store.latest(), trainer.model, trainer.optimizer)
            loaded = distance(state_of(trainer), wanted[0])
            for step in (3, 4, 5):
                trainer.step(data(step), step)
            later = distance(state_of(trainer), wanted[1], "exp_avg_sq")
            results[f"{kind}-{content}"] = [state.step, loaded, later]
    return results


def distance(found, wanted, but="nothing"):
    assert found.keys() == wanted.keys()
    return max(
        float((found[name] - wanted[name]).abs().max())
        for name in wanted
        if not name.startswith(but)
    )


def counted(function, budget):
    def call(*args, **kwargs):
        budget[0] -= 1
        if budget[0] < 0:
            os.kill(os.getpid(), 9)
        return function(*args, **kwargs)

    return call


def mine_every_call(budget):
    """Let the process die at the call to the file system for which the budget does not reach."""
    import transformers.modeling_utils as transformers_room

    for name in ("mkdir", "rename", "replace", "write_text", "unlink"):
        setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name), budget))
    for place, name in (
        (checkpoint_room, "save_file"),
        (formats_room, "save_file"),
        (sharded_room, "save_file"),
        (transformers_room, "safe_save_file"),
        (os, "fsync"),
        (shutil, "rmtree"),
    ):
        setattr(place, name, counted(getattr(place, name), budget))


def kills(size, victim, content):
    """Save once, then again with rank `victim` killed at its n-th call, for every n."""

    def case(ranks, folder):
        assert ranks is None  # the parent, which forks a world per kill
        return kill_everywhere(size, victim, content, folder)

    case.__name__ = f"kills_{size}_{victim}_{content}"
    return case


def kill_everywhere(size, victim, content, folder):
    torch.manual_seed(0)
    outcomes = []
    root = folder / f"kills-{size}-{victim}-{content}"
    root.mkdir()
    for calls in range(60):

        def body(ranks, calls=calls):
            parts = bare(ranks)
            rank = ranks.rank if ranks else 0
            store = Checkpoints(root / str(calls), keep=1, content=content, ranks=ranks)
            store.save(*parts, TrainState(1, 1))
            if rank == victim:
                mine_every_call([calls])
            store.save(*parts, TrainState(2, 2))

        codes = fork_world(size, root / f"world{calls}", body, quiet=True)
        model, optimizer = bare()
        for parameter in model.parameters():
            parameter.data.zero_()
        store = Checkpoints(root / str(calls), keep=1)
        state = store.load(store.latest(), model, optimizer)
        loaded = distance(dict(model.named_parameters()), dict(bare()[0].named_parameters()))
        store.save(model, optimizer, TrainState(3, 3))
        left = sorted(path.name for path in (root / str(calls)).iterdir())
        outcomes.append([codes, state.step, loaded, left])
        if not any(codes):
            break
    return outcomes


WORLDS = [
    (2, saved),
    (1, resumed),
    (2, resumed),
    (3, resumed),
    (4, resumed),
    (1, kills(1, 0, "full")),
    (1, kills(1, 0, "sharded")),
    (1, kills(2, 0, "full")),
    (1, kills(2, 0, "sharded")),
    (1, kills(2, 1, "sharded")),
]
