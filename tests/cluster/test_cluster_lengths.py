"""Workers that are killed while they play: what is stored is what an undisturbed run stores."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import scripted_worker
from scripted_worker import length

from rolltree.rollouts.requests import example_request
from rolltree.scale.cluster.broker import Broker, Head
from rolltree.scale.cluster.messages import EngineState, FleetState, Served
from rolltree.scale.cluster.remote import RemoteRollouts
from rolltree.store import Run
from rolltree.values.types import SamplingParams
from wait_kit import until

TOKEN, NUM, KILLS = "token-of-the-tests", 96, 8
ENGINE = EngineState(url="http://scripted/v1", is_ready=True, version=0, epoch=0)
FLEET = FleetState(version=0, labels=("0",), engines=(ENGINE,))
WORKER = Path(__file__).with_name("scripted_worker.py")


def requests():
    for n in range(NUM):
        prompt = [{"role": "user", "content": f"{n}"}]
        yield example_request(
            "long",
            {"prompt": prompt, "example_id": n, "task": "t"},
            group_id=f"g{n:03d}",
            seed=n,
            sampling=SamplingParams(max_tokens=100),
            phase="train",
            train_step=1,
        )


@pytest.mark.long
async def test_lengths_are_those_of_an_undisturbed_run_whoever_is_killed(tmp_path):
    broker = Broker("127.0.0.1", TOKEN, silent_s=2.0)
    broker.start()
    draw, workers = random.Random(0), {}

    def start(name):
        words = [sys.executable, str(WORKER), broker.url, name]
        workers[name] = subprocess.Popen(words, env=os.environ | {"TOKEN": TOKEN})

    def kill(name):
        workers[name].kill()
        workers[name].wait()

    async def kill_again_and_again():
        for _ in range(KILLS):
            # While it plays: those that take long are hit most.
            goal = min(NUM - 1, broker.counts.stored + 5)
            await until(lambda goal=goal: broker.counts.stored >= goal, limit_s=60.0)
            await asyncio.sleep(draw.uniform(0, 0.3))
            name = draw.choice(sorted(workers))
            kill(name)
            start(name)

    with Run.create(tmp_path / "run", kind="train", config={}) as run:
        served = Served(model="scripted", end_ids=(0,), vocab_size=256)
        broker.attach(Head(run, "long", served, lambda: FLEET, lambda url: None))
        source, client = scripted_worker.environment(), scripted_worker.model()
        rollouts = RemoteRollouts(source, client, broker, run, max_concurrent=NUM)
        for name in ("worker-0", "worker-1"):
            start(name)
        killing = asyncio.create_task(kill_again_and_again())
        try:
            found = [result async for batch in rollouts.run_ready(requests()) for result in batch]
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            assert killing.cancelled() or killing.exception() is None
        finally:
            for name in workers:
                kill(name)
            broker.close()
        rows = list(run.columns(["example_id", "num_completion_tokens"], phase="train"))
    assert broker.metrics()["requeued"] > 0
    # One more: the end of the answer.
    assert sorted(rows) == [(n, length(f"{n}") + 1) for n in range(NUM)]
    said = [state.completion[-1]["content"] for result in found for state in result.states]
    assert sorted(map(len, said)) == sorted(length(f"{n}") for n in range(NUM))
