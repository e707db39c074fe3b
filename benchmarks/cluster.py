"""What a run on several processes costs: rollouts per second, and where each bottleneck sits.

    python benchmarks/cluster.py            # 100 to 4,000 rollouts in flight, 1 to 4 workers
    python benchmarks/cluster.py --full     # up to 100,000 rollouts in flight and 64 workers
    python benchmarks/cluster.py --check    # exit 1 when a bar is missed
    python benchmarks/cluster.py --json     # one JSON object instead of the tables

The head is this process: the real broker, its HTTP server and a real run directory. Workers are
processes of their own with the worker's own loop; only the engine is scripted: each of its answers
takes a random time, so that the rollouts in flight offer more than this machine can play. A rollout
is one model call with 64 sampled ids. Seconds of CPU are those of the processes, so waiting costs
nothing; rates are of the middle 80 % of the results.

The parts are also measured alone, one core each: what the head does per rollout, and what a step
adds (samples, weights).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from verdict import Bar, conclude, make_parser

import rolltree as rt
from rolltree.rollouts import RolloutEngine
from rolltree.rollouts.requests import example_request, group_member
from rolltree.rollouts.wire import (
    request_encoder,
    request_from_bytes,
    result_from_rows,
    result_to_rows,
)
from rolltree.scale.cluster.broker import Broker, Head
from rolltree.scale.cluster.messages import EngineState, FleetState, Served
from rolltree.scale.cluster.remote import RemoteRollouts
from rolltree.scale.cluster.worker import Engines, HeadClient, Worker
from rolltree.scale.weights.shared import SharedWeights
from rolltree.store import Run
from rolltree.testing import ScriptedClient
from rolltree.values.types import RolloutRequest, SamplingParams

OFFERED = 4000
"""Rollouts per second that the engines would answer, if nothing else took time."""
SAID = "The answer to that question is a number, and it is forty-two .."
ENGINE = EngineState(url="http://scripted/v1", is_ready=True, version=0, epoch=0)
FLEET = FleetState(version=0, labels=("0",), engines=(ENGINE,))
HEAD_MS, WRITER_PER_S, GROWTH = 0.2, 2000.0, 1.5


class Slow(ScriptedClient):
    """Answers after a random time; the mean is `mean_s`."""

    def __init__(self, mean_s: float) -> None:
        super().__init__(lambda messages: SAID)
        self._mean_s, self._random = mean_s, random.Random(0)

    async def respond(self, call: Any, memory: Any) -> Any:
        # Long-tailed, as lengths of answers are.
        self.delay_s = self._mean_s * self._random.lognormvariate(-0.125, 0.5)
        answer = await super().respond(call, memory)
        self.calls.clear()
        return answer


def environment() -> Any:
    def right(completion: Any) -> float:
        return float("forty-two" in completion[-1]["content"])

    rows = [{"question": f"What is the answer, number {n}?"} for n in range(64)]
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([right]), env_id="scripted")


def requests(num: int) -> Iterator[RolloutRequest]:
    """Yield requests in groups of 8, as a step plans them."""
    sampling = SamplingParams(max_tokens=64)
    for group in range(-(-num // 8)):
        prompt = [{"role": "user", "content": f"What is the answer, number {group % 64}?"}]
        request = example_request(
            "scripted",
            {"prompt": prompt, "answer": "", "task": "default", "example_id": group % 64},
            group_id=f"{group:07d}",
            seed=group,
            sampling=sampling,
            phase="train",
            train_step=1,
        )
        yield from (group_member(request, n) for n in range(min(8, num - 8 * group)))


# -- a worker's process ----------------------------------------------------------------------------


class ScriptedWorker(Worker):
    """A worker whose engine is a script."""

    async def work(self, mean_s: float) -> None:
        self._engines = Engines(self._head, await self._when_ready(FleetState, "/fleet"))
        source = environment()
        self._rollouts = RolloutEngine(source, Slow(mean_s), max_concurrent=self._slots)
        await self._work(None)  # type: ignore[arg-type]  # there is no pool to follow

    def _follow(self, pool: Any) -> None:
        pass


async def play(url: str, number: int, slots: int, mean_s: float) -> None:
    token = os.environ["ROLLTREE_CLUSTER_TOKEN"]
    link: Any = SimpleNamespace(
        name=f"worker-{number}", headers={"Authorization": f"Bearer {token}"}
    )
    beats: Any = SimpleNamespace(
        answer={"head": url}, say=lambda *words: None, advance=lambda: None, hurry=lambda: None
    )
    config: Any = SimpleNamespace(cluster=SimpleNamespace(slots_per_worker=slots))
    async with HeadClient(link, beats) as head:
        await ScriptedWorker(link, config, beats, head).work(mean_s)


# -- the head --------------------------------------------------------------------------------------


def cpu_s(pid: int | str = "self") -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(num_in_flight: int, num_workers: int, num: int) -> dict[str, Any]:
    """Play `num` rollouts and return the rate and the CPU time of head and workers."""
    folder, token = Path(tempfile.mkdtemp()), secrets.token_hex(16)
    broker = Broker("127.0.0.1", token)
    broker.start()
    slots = -(-num_in_flight // num_workers)
    words = ["--url", broker.url, "--slots", str(slots)]
    words += ["--mean-s", str(num_in_flight / OFFERED)]
    workers = [
        # It only begins them, which takes a millisecond.
        subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, __file__, "--worker", str(number), *words],
            env={**os.environ, "ROLLTREE_CLUSTER_TOKEN": token, "OMP_NUM_THREADS": "1"},
        )
        for number in range(num_workers)
    ]
    done: list[tuple[float, int, float, float]] = []
    try:
        with Run.create(folder / "run", kind="train", config={}) as run:
            served = Served(model="scripted", end_ids=(0,), vocab_size=256)
            broker.attach(Head(run, "scripted", served, lambda: FLEET, lambda url: None))
            rollouts = RemoteRollouts(
                environment(), Slow(0), broker, run, max_concurrent=num_in_flight
            )
            count = 0
            async for batch in rollouts.run_stored(requests(num), run):
                count += len(batch)
                if not done or time.perf_counter() - done[-1][0] > 0.1 or count == num:
                    spent = sum(cpu_s(worker.pid) for worker in workers)
                    done.append((time.perf_counter(), count, cpu_s(), spent))
            stored = run.num_rollouts(phase="train")
            broker.close()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        shutil.rmtree(folder)
    assert stored == num, f"{stored} of {num} rollouts were stored"
    first = next(row for row in done if row[1] >= num * 0.1)
    last = next(row for row in done if row[1] >= num * 0.9)
    passed = last[1] - first[1]
    wall_s = last[0] - first[0]
    head_s, workers_s = last[2] - first[2], last[3] - first[3]
    return {
        "in_flight": num_in_flight,
        "workers": num_workers,
        "rollouts": num,
        "per_s": passed / wall_s,
        "head_ms": 1e3 * head_s / passed,
        "worker_ms": 1e3 * workers_s / passed,
        "head_busy": head_s / wall_s,
        "worker_busy": workers_s / wall_s / num_workers,
    }


# -- the parts alone -------------------------------------------------------------------------------


def per_item(work: Callable[[], object], num: int, repeats: int = 5) -> float:
    """Return the fastest CPU time per item of `work`, in ms."""
    spent = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return 1e3 * min(spent) / num


async def parts(num: int = 512) -> dict[str, float]:
    """Return CPU milliseconds per rollout of each part, alone."""
    asked = list(requests(num))
    engine = RolloutEngine(environment(), Slow(0), max_concurrent=64)
    began = time.process_time()
    results = await engine.run_all(asked)
    played_ms = 1e3 * (time.process_time() - began) / num
    encoded = list(map(request_encoder(), asked))
    rows = [result_to_rows(result) for result in results]
    folder = Path(tempfile.mkdtemp())
    count = 0

    def write() -> None:
        # Transactions of 64, as they are when results arrive fast.
        nonlocal count
        count += 1
        with Run.create(folder / str(count), kind="train", config={}) as run:
            for start in range(0, num, 64):
                some = [row for each in rows[start : start + 64] for row in each]
                run.add_encoded(some, replace_failed=True, replaced=())

    states = [state for result in results for state in result.states]
    model = torch.nn.Linear(4096, 8192)
    shared = SharedWeights()
    shared.write(model.named_parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    found = {
        "worker: play it": played_ms,
        "worker: read the request": per_item(lambda: list(map(request_from_bytes, encoded)), num),
        "worker: encode the result": per_item(lambda: list(map(result_to_rows, results)), num),
        "head: encode the request": per_item(lambda: list(map(request_encoder(), asked)), num),
        "head: check the result": per_item(
            lambda: [result_from_rows(*pair) for pair in zip(rows, asked, strict=True)], num
        ),
        "head: read it for training": per_item(
            lambda: [result_from_rows(*pair)[0].states for pair in zip(rows, asked, strict=True)],
            num,
        ),
        "head: store it": per_item(write, num, 3),
        "head: samples for the step": per_item(lambda: rt.build_samples(states, "tree"), num),
        "bytes of a result": statistics.mean(len(msgspec.msgpack.encode(each)) for each in rows),
        "weights to shared memory, s per GB": per_item(
            lambda: shared.write(model.named_parameters()), 1
        )
        / size
        * 1e6,
    }
    shared.close()
    shutil.rmtree(folder)
    return found


def bottleneck(row: dict[str, Any]) -> str:
    """Say what was busy."""
    cores = os.cpu_count() or 1
    if row["head_busy"] + row["workers"] * row["worker_busy"] > 0.9 * cores:
        return "the cores"
    if row["head_busy"] > 0.85:
        return "the head"
    if row["worker_busy"] > 0.85:
        return "the workers' event loops"
    return "the engines" if row["per_s"] > 0.8 * OFFERED else "waiting (nothing was busy)"


def show(results: dict[str, Any]) -> None:
    load = os.getloadavg()[0]
    print(f"alone, CPU ms per rollout ({os.cpu_count()} cores, load {load:.1f}):")
    for what, value in results["parts"].items():
        print(f"  {what:36} {value:10.3f}")
    print("in flight  workers  rollouts/s  head ms  worker ms  head busy  workers busy  limit")
    for row in results["curve"]:
        print(
            f"{row['in_flight']:9,}  {row['workers']:7}  {row['per_s']:10,.0f}  "
            f"{row['head_ms']:7.3f}  {row['worker_ms']:9.3f}  {row['head_busy']:9.0%}  "
            f"{row['worker_busy']:12.0%}  {bottleneck(row)}"
        )


def points(options: argparse.Namespace) -> Sequence[tuple[int, int, int]]:
    """Return rollouts in flight, workers, and rollouts to play."""
    found = [(1000, 1, 3000), (1000, 2, 3000), (1000, 4, 3000), (100, 2, 2000), (4000, 2, 10_000)]
    if options.full:
        found += [
            (10_000, 2, 25_000),
            (10_000, 16, 25_000),
            (10_000, 64, 25_000),
            (100_000, 2, 250_000),
        ]
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="also the largest numbers (minutes)")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mean-s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        asyncio.run(play(options.url, options.worker, options.slots, options.mean_s))
        return 0
    torch.set_num_threads(1)
    alone = asyncio.run(parts())
    curve = []
    for point in points(options):
        curve.append(asyncio.run(measure(*point)))
        if not options.json:
            print(curve[-1], file=sys.stderr, flush=True)
    one, two = (row for row in curve if row["in_flight"] == 1000 and row["workers"] in (1, 2))
    # The cores that head and workers have together: two workers cannot double what one does if the
    # head takes a part of them.
    cores = os.cpu_count() or 1
    possible = min(2.0, cores / (one["head_busy"] + one["worker_busy"]))
    bars = [
        Bar.below("ms CPU of the head per rollout", two["head_ms"], HEAD_MS),
        Bar.at_least(
            "rollouts per second of the writer", 1e3 / alone["head: store it"], WRITER_PER_S
        ),
        Bar.at_most(
            "CPU of a rollout with two workers, of that with one",
            (two["head_ms"] + two["worker_ms"]) / (one["head_ms"] + one["worker_ms"]),
            1.2,
        ),
        Bar.at_least(
            "of the growth that the cores allow from one worker to two",
            two["per_s"] / one["per_s"] / possible,
            0.8,
        ),
    ]
    return conclude(
        options, bars, {"parts": alone, "curve": curve}, lambda: show(results_of(alone, curve))
    )


def results_of(alone: dict[str, float], curve: list[dict[str, Any]]) -> dict[str, Any]:
    return {"parts": alone, "curve": curve}


if __name__ == "__main__":
    sys.exit(main())
