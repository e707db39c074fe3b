"""A rollout worker whose model is a script: `python scripted_worker.py HEAD NAME`."""

import asyncio
import os
import random
import sys
from types import SimpleNamespace

import rolltree as rt
from rolltree.rollouts import RolloutEngine
from rolltree.scale.cluster.messages import FleetState
from rolltree.scale.cluster.worker import Engines, HeadClient, Worker
from rolltree.testing import ScriptedClient

SLOTS = 8
SECONDS_PER_TOKEN = 0.02


def length(question):
    """How long the answer is; most are short, and a few take a second."""
    return 1 + int(random.Random(question).paretovariate(1.2) * 4) % 60


def environment():
    rows = [{"question": "0"}]
    return rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([lambda completion: 1.0]), env_id="long")


def model():
    def answer(messages):
        return "x" * length(messages[-1]["content"])

    return ScriptedClient(answer, token_delay_s=SECONDS_PER_TOKEN)


class ScriptedWorker(Worker):
    async def work(self):
        self._engines = Engines(self._head, await self._when_ready(FleetState, "/fleet"))
        self._rollouts = RolloutEngine(environment(), model(), max_concurrent=SLOTS)
        await self._work(None)

    def _follow(self, pool):
        pass


async def main(url, name):
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}"}
    link = SimpleNamespace(name=name, headers=headers)
    answer = {"head": url}
    beats = SimpleNamespace(answer=answer, say=print, advance=int, hurry=int)
    config = SimpleNamespace(cluster=SimpleNamespace(slots_per_worker=SLOTS))
    async with HeadClient(link, beats) as head:
        await ScriptedWorker(link, config, beats, head).work()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
