"""Writes a training run in a process of its own, as it is told on its standard input.

`step` stores the next step with its rollouts, `done` ends as planned, `fail` with an error. Each
line is said again when it is done.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import planted_kit
from rolltree.store import Run


def main(folder, num_steps):
    draw = random.Random(0)
    config = {"model": {"name": "none"}, "train": {"num_steps": num_steps}}
    with Run.create(folder, kind="train", config=config) as run:
        print("ready", flush=True)
        for step, line in enumerate(sys.stdin, 1):
            if line.strip() == "fail":
                raise ValueError("the disk is full")
            if line.strip() == "done":
                break
            planted_kit.add_step(run, draw, step)
            print(line.strip(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
