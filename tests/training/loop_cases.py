"""The whole loop led by rank 0 of two, and a follower that dies: run by `ranks_kit`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from loop_kit import METRICS, make_config, make_model, start
from ranks_kit import fork_world
from training_kit import LetterSource

from rolltree.store import Run
from rolltree.training import Silent, load_train_config
from rolltree.training.models.ranks import STOP
from rolltree.training.rank0 import follow
from rolltree.values.errors import TrainingError

CASES = {
    "plain": {"checkpoint": {"every": 2, "export": True}},
    "lora": {
        "model": {"lora_rank": 4},
        "checkpoint": {"every": 2, "export": True, "format": "sharded"},
    },
    "asynchronous": {"train": {"async_steps": 1}},
}


def config_of(name, folder: Path, run: str, **train):
    sections = {key: dict(value) for key, value in CASES[name].items()}
    adapters = sections.pop("model", {})
    sections["train"] = {**sections.get("train", {}), **train}
    data = make_config(make_model(folder / "model"), folder / f"{name}-{run}", **sections).as_dict()
    data["model"] |= adapters
    return load_train_config(data)


def curve_of(report):
    """Asynchronous steps without a fresh token have no mismatch."""
    return [
        [
            *(step[name] for name in METRICS),
            *tokens,
            step.get("train/sampling/sampling_logp_difference/max", 0.0),
        ]
        for step, tokens in zip(report.metrics, tokens_of(report.run_path), strict=True)
    ]


def tokens_of(path: Path):
    """Return a number for each array that a step stored of its tokens."""
    with Run.open(path, "r") as run:
        for step in range(1, 5):
            rows = list(run.trained(step=step))
            columns = [
                np.nan_to_num(np.concatenate([getattr(row, name) for row in rows]))
                for name in ("advantage", "weight", "logprob", "entropy")
            ]
            yield [float(column @ np.cos(np.arange(len(column)))) for column in columns]


def together(config, ranks):
    """Lead or follow one run; return what it reported."""
    if ranks is None:
        return start(config)
    if not ranks.leads:
        follow(config, ranks)
        return None
    report = start(config, ranks=ranks)
    ranks.send(STOP)
    return report


def runs(ranks, folder):
    """The curve of each case; two ranks stop half-way and are started again."""
    results = {}
    for name in CASES:
        size = str(ranks.size if ranks else 1)
        if ranks is not None and name != "asynchronous":
            together(config_of(name, folder, size, num_steps=3), ranks)
        report = together(config_of(name, folder, size), ranks)
        results[name] = report and curve_of(report)
    return results


def corrupted(ranks, folder):
    """The copy that is sampled from keeps a weight: the probe of all ranks finds it."""
    import rolltree.training.loop as loop

    wanted = loop.renew_copy

    def renew(model, served, ranks):
        weight = served.model.layers[0].mlp.up_proj.weight
        before = weight.clone()
        wanted(model, served, ranks)
        with torch.no_grad():
            weight.copy_(before)

    loop.renew_copy = renew
    try:
        together(config_of("plain", folder, "corrupted"), ranks)
    except TrainingError as error:
        ranks.send(STOP)
        return str(error)
    finally:
        loop.renew_copy = wanted
    return ""


class Dying(Silent):
    """Waits until the follower is dead, after two steps."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def on_step(self, step, metrics):
        if step == 2:
            self.trace.touch()


def loses_a_follower(ranks, folder):
    """Rank 1 is killed during the third step: rank 0 says so and ends."""
    config = config_of("plain", folder, "lost")
    trace = folder / "second-step"

    def body(inner):
        if not inner.leads:
            import rolltree.training.rank0 as room

            step = room.COMMANDS["step"]

            def dies(follower, data):
                if data["step"] == 3:
                    os.kill(os.getpid(), 9)
                step(follower, data)

            room.COMMANDS["step"] = dies
            follow(config, inner)
            return 0
        try:
            start(config, LetterSource(), ranks=inner, reporter=Dying(trace))
        except (TrainingError, RuntimeError) as error:
            (folder / "message").write_text(f"{type(error).__name__}: {error}")
            os._exit(3)
        return 0

    codes = fork_world(2, folder / "lost-world", body, quiet=True)
    again = start(config)
    return {
        "codes": codes,
        "message": (folder / "message").read_text(),
        "second": trace.exists(),
        "steps": len(again.metrics),
    }


WORLDS = [(1, runs), (2, runs), (2, corrupted), (1, loses_a_follower)]
