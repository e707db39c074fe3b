"""Runs of every kind killed at random by every signal, and compared with one that nobody killed.

    python tests/training/kills_kit.py FOLDER 50      one JSON object; 50 kills of each kind

A kind of run is killed and continued until it ends; that is a life. Lives follow each other until
the number of kills is reached. Everything is compared bit for bit: rollouts with tokens, logprobs
and versions, metrics of steps and evaluations, and the last checkpoint. Which rollouts make a step
of an asynchronous run depends on the clock, so such a run is compared with one that never stops and
trains the same rollouts from the same ledger.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = ("evaluation", "synchronous", "asynchronous")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
CODES = {
    "SIGKILL": {-signal.SIGKILL},
    "SIGTERM": {75, -signal.SIGTERM},  # saved, or stopped before there was anything to save
    "SIGINT": {130},
}
NUM_STEPS = 6
OF_THE_CLOCK = re.compile(r"time/|memory/|async/|.*/tokens_per_s$|rollout/reused_share$")
OF_THE_PROCESS = "rng.safetensors"  # Python's generator starts at random in every process
MOST_EVENTS = {"evaluation": 8, "synchronous": 16, "asynchronous": 16}


class Killer:
    """A reporter that signals its process some seconds after the n-th thing that it hears of."""

    def __init__(self, num_events: int, delay_s: float, kind: str) -> None:
        self.num_events, self.delay_s, self.kind = num_events, delay_s, getattr(signal, kind)

    def tick(self, *args: Any) -> None:
        self.num_events -= 1
        if self.num_events == 0:
            threading.Timer(self.delay_s, os.kill, (os.getpid(), self.kind)).start()

    on_start = on_rollouts = on_step = on_eval_progress = on_eval = on_notice = on_end = tick


def train(model: Path, folder: Path, killer: Killer, **section: int) -> None:
    from loop_kit import make_config
    from training_kit import LetterSource

    import rolltree as rt

    config = make_config(
        model,
        folder,
        engine={"batch_invariant": True},
        train={"num_steps": NUM_STEPS, **section},
        checkpoint={"every": 3},
        eval={"before": True, "after": True, "every": 2},
    )
    rt.train(config, environment=LetterSource(), reporter=killer)  # type: ignore[arg-type]


def measure(model: Path, folder: Path, killer: Killer) -> None:
    from training_kit import LetterSource

    import rolltree as rt

    async def main() -> None:
        loaded, tokenizer = rt.load_model(str(model))
        client = rt.local_client(
            loaded, tokenizer, max_batch=3, max_context=128, batch_invariant=True
        )
        with rt.Run.open_or_create(folder, config={"model": "tiny"}, kind="eval") as run:
            report = await rt.evaluate_async(
                LetterSource(),
                client,
                rollouts_per_example=8,
                sampling={"max_tokens": 4},
                max_concurrent=4,
                run=run,
                on_progress=killer.tick,
            )
            found = {"phase": "eval", "metrics": report.as_dict()}
            if not run.events("evaluation"):
                run.add_event("evaluation", found, step=0)
        await client.aclose()

    asyncio.run(main())


PLAYS: dict[str, Callable[[Path, Path, Killer], None]] = {
    "evaluation": measure,
    "synchronous": train,
    "asynchronous": lambda *args: train(*args, async_steps=1),
}


def attempt(
    kind: str, model: Path, folder: Path, num_events: int = 0, delay_s: float = 0.0,
    signal_name: str = "SIGKILL",
) -> int:  # fmt: skip
    """Play a run in a child that gets a signal after `num_events` (0: none); return its code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            from rolltree.values.errors import Stopped

            try:
                PLAYS[kind](model, folder, Killer(num_events, delay_s, signal_name))
                code = 0
            except Stopped:
                code = 75
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def held(folder: Path, *, trained_only: bool = False) -> dict[str, Any]:
    """Return what a run holds, by name; floats and bytes as they are, without times."""
    from rolltree.rollouts.decode import decode_results
    from rolltree.store import Run

    found: dict[str, Any] = {}
    with Run.open(folder, "r") as run:
        ledger = {g for e in run.events("batch") for g in (*e.data["groups"], *e.data["dropped"])}
        for result in decode_results(run.rollouts()):
            request = result.request
            if trained_only and request.phase == "train" and request.group_id not in ledger:
                continue
            calls = [step["response"] for state in result.states for step in state["trajectory"]]
            found[f"rollout {request.request_id}"] = [
                [state["reward"] for state in result.states],
                [
                    [each.tolist() for each in (c.completion_ids, c.logprobs, c.versions)]
                    for c in calls
                ],
            ]
        for row in run.steps():
            for name, value in row.metrics.items():
                if not OF_THE_CLOCK.match(name):
                    found[f"step {row.step} {name}"] = value
        for each in run.trained():
            found[f"trained {each.step} {each.request_id}"] = [
                getattr(each, name).tobytes()
                for name in ("advantage", "weight", "logprob", "entropy")
            ]
        events = run.events("evaluation")
        found["evaluations"] = sorted(event.data["phase"] for event in events)
        for event in events:
            found[f"evaluation {event.data['phase']}"] = event.data["metrics"]["reward"]
        found["batches"] = [(event.step, event.data) for event in run.events("batch")]
    for name, content in last_checkpoint(folder):
        found[f"checkpoint {name}"] = content
    return found


def last_checkpoint(folder: Path) -> Iterator[tuple[str, str]]:
    pointer = folder / "checkpoints" / "latest"
    if pointer.is_file():
        for file in sorted((pointer.parent / pointer.read_text().strip()).iterdir()):
            if file.name == OF_THE_PROCESS:
                continue
            content = file.read_bytes()
            if file.name == "state.json":  # its list of files has the generators' checksum
                content = json.dumps(json.loads(content)["state"]).encode()
            yield f"{file.parent.name}/{file.name}", hashlib.sha256(content).hexdigest()


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    names = sorted(left.keys() | right.keys())
    return [name for name in names if left.get(name, "-") != right.get(name, "-")]


def faults_of_the_ledger(folder: Path) -> list[str]:
    """Return what an asynchronous run lost or counted twice."""
    from rolltree.store import Run

    with Run.open(folder, "r") as run:
        rows = list(run.rollouts(phase="train", blobs=False))
        entries = run.events("batch")
        steps = [row.step for row in run.steps()]
    faults = []
    if not steps == [entry.step for entry in entries] == list(range(1, NUM_STEPS + 1)):
        faults.append("a step is missing, or was taken twice")
    groups = Counter(g for e in entries for g in (*e.data["groups"], *e.data["dropped"]))
    if set(groups.values()) != {1}:
        faults.append("a group was trained twice")
    members = Counter(row.group_id for row in rows)
    if any(members[group] != 3 for group in groups):
        faults.append("a rollout of a trained group was lost")
    of = {group: entry.step for entry in entries for group in entry.data["groups"]}
    if any(row.max_version >= of[row.group_id] for row in rows if row.group_id in of):
        faults.append("a step trained on its own future")
    return faults


def replayed(model: Path, folder: Path) -> dict[str, Any]:
    """Return what a run that never stops makes of the rollouts and the ledger of another."""
    from rolltree.store import Run

    again = folder.with_name(f"{folder.name}-again")
    with Run.open(folder, "r") as run, Run.create(again, config=run.config, kind="train") as copy:
        copy.add_rollouts(run.rollouts(phase="train"))
        for event in run.events("batch"):
            copy.add_event("batch", event.data, step=event.step)
    assert attempt("asynchronous", model, again) == 0
    return held(again, trained_only=True)


def killed(kind: str, signal_name: str, model: Path, root: Path, num_kills: int) -> dict[str, Any]:
    """Kill runs of a kind `num_kills` times and return what came of it."""
    rng = random.Random(f"{kind} {signal_name}")
    whole = None
    if kind != "asynchronous":
        if not (root / kind).exists():
            assert attempt(kind, model, root / kind) == 0
        whole = held(root / kind)
    found: dict[str, Any] = {"kills": 0, "lives": 0, "compared": 0, "differ": [], "wrong": []}
    while found["kills"] < num_kills and found["lives"] < 10 + num_kills:
        folder = root / f"{kind}-{signal_name}-{found['lives']}"
        found["lives"] += 1
        code = None
        while code != 0:
            last = found["kills"] >= num_kills
            num_events = 0 if last else rng.randint(1, MOST_EVENTS[kind])
            code = attempt(kind, model, folder, num_events, rng.uniform(0, 0.02), signal_name)
            if code in CODES[signal_name]:
                found["kills"] += 1
            elif code != 0:
                found["wrong"].append(f"exit status {code}")
                break
        asynchronous = kind == "asynchronous"
        mine = held(folder, trained_only=asynchronous)
        if asynchronous:
            found["wrong"] += faults_of_the_ledger(folder)
        other = replayed(model, folder) if whole is None else whole
        found["compared"] += len(mine)
        found["differ"] += [f"{folder.name}: {name}" for name in differences(mine, other)]
    return found


def kill_all(root: Path, num_kills: int) -> dict[str, Any]:
    """Return what `killed` found of every kind and signal, from a process that may fork."""
    done = subprocess.run(
        [sys.executable, __file__, str(root), str(num_kills)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(root: Path, num_kills: int) -> dict[str, Any]:
    from loop_kit import make_model

    model = make_model(root / "model")
    return {
        f"{kind} {name}": killed(kind, name, model, root, num_kills)
        for kind in KINDS
        for name in SIGNALS
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)  # a process without threads may fork
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
