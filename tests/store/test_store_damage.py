"""Flipped bits at random places of a run's files: nothing changes, or it is said.

`ROLLTREE_FLIPS` is how many places of each file are tried.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from rolltree.store import Run, summarize
from rolltree.values.errors import StoreError

NUM_FLIPS = int(os.environ.get("ROLLTREE_FLIPS", "40"))

MAKER = textwrap.dedent(
    """
    import random, sys
    import numpy as np
    from rolltree.store import Run, StoredRollout, TrainedRollout
    run = Run.create(sys.argv[1], config={"model": "tiny", "train": {"lr": 0.5}})
    draw = random.Random(0)
    for step in range(int(sys.argv[2])):
        run.add_rollouts(
            StoredRollout(
                request_id=f"{step}-{i}",
                phase="eval" if i == 3 else "train",
                train_step=step,
                group_id=f"g{step}",
                env_id="sums",
                reward=draw.random(),
                num_completion_tokens=draw.randrange(99),
                truncated=i == 2,
                metrics={"correct": draw.random()},
                record=draw.randbytes(1500 * i),
                tokens=draw.randbytes(900),
            )
            for i in range(4)
        )
        columns = {
            name: np.array([draw.random() for _ in range(90)], np.float32)
            for name in ("advantage", "weight", "logprob", "entropy")
        }
        calls = np.array([40, 50], np.int32)
        trained = TrainedRollout(request_id=f"{step}-0", step=step, num_sampled=calls, **columns)
        run.add_step(step, {"loss": draw.random()}, [trained])
        run.add_event("note", {"text": "x" * 300}, step=step)
    print("made", flush=True)
    sys.stdin.read()
    """
)


def make(path, steps=12, *, kill=False):
    """Make a run; with `kill` its writer dies by SIGKILL, and the log stays as it is."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(path), str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "made\n"
    if kill:
        os.kill(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=30)
    if not kill:
        Run.open(path).close()  # merges the log
    return path


PARTS = {
    "summary": lambda run: summarize(run).phases,
    "rows": lambda run: list(run.rollouts()),
    "light": lambda run: list(run.rollouts(blobs=False, phase="train")),
    "filtered": lambda run: [row.request_id for row in run.rollouts(truncated=True)],
    "steps": lambda run: run.steps(),
    "trained": lambda run: [
        (row.request_id, row.step, row.logprob.tolist(), row.weight.tolist())
        for row in run.trained()
    ],
    "events": lambda run: run.events(),
    "meta": lambda run: run.meta,
    "num": lambda run: run.num_rollouts(phase="eval"),
    "ids": lambda run: run.finished_ids("train"),
    "sql": lambda run: run.query("SELECT phase, avg(reward) FROM rollouts GROUP BY phase"),
}


def ask(path):
    """What a reader gets, question by question on a connection of its own, or what is said."""
    answers = {}
    for name, question in PARTS.items():
        try:
            with Run.open(path, mode="r") as run:
                answers[name] = question(run)
        except StoreError as error:
            answers[name] = error
    return answers


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {"run.db": make(folder / "closed"), "run.db-wal": make(folder / "killed", kill=True)}


@pytest.mark.parametrize("name", ["run.db", "run.db-wal"])
def test_a_flipped_bit_is_harmless_or_said(tmp_path, runs, name):
    wanted = ask(runs[name])
    assert not any(isinstance(answer, StoreError) for answer in wanted.values())
    draw = random.Random(int(os.environ.get("ROLLTREE_FLIPS_SEED", "1")))
    num_bits = 8 * (runs[name] / name).stat().st_size
    outcomes = {"harmless": 0, "said": 0}
    for trial in range(NUM_FLIPS):
        # Half of them near the beginning, where the header and the schema are.
        bit = draw.randrange(num_bits if trial % 2 else min(num_bits, 8 * 4096 * 4))
        path = tmp_path / "run"
        shutil.copytree(runs[name], path)
        flip(path / name, bit)
        said = False
        for question, answer in ask(path).items():
            if isinstance(answer, StoreError):
                said = True
            else:
                assert answer == wanted[question], (bit, question)
        try:
            Run.open(path).close()
        except StoreError:
            said = True
        else:
            assert ask(path) == wanted or said, bit
        outcomes["said" if said else "harmless"] += 1
        shutil.rmtree(path)
    assert outcomes["said"] > NUM_FLIPS / 4, outcomes
