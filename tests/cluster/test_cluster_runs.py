"""Whole runs on several processes: what is stored and learned, whoever is killed."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import aiohttp
import pytest
from sockets_kit import listeners

from rolltree.inference.models import TinyConfig, make_tiny
from rolltree.rollouts.decode import decode_results
from rolltree.scale.cluster.driver import run_cluster
from rolltree.scale.cluster.report import ask_driver
from rolltree.store import Run
from rolltree.training import Silent, load_train_config
from rolltree.training.launch import train
from rolltree.values.errors import ClusterError, StoreError

pytestmark = pytest.mark.long
GRADIENT = ("train/grad_norm", "train/loss", "reward/mean", "train/num_records")


def make_config(folder: Path, run: Path, **sections):
    model = folder / "model"
    if not (model / "config.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        sizes = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 64, "max_context": 256}
        make_tiny(model, TinyConfig(**sizes))
    data = {
        "run": {"dir": str(run)},
        "model": {"name": str(model)},
        "engine": {"max_batch": 16, "max_context": 256, "batch_invariant": True},
        "env": {"id": str(Path(__file__).with_name("letters.py"))},
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "optim": {"lr": 5e-3},
        "train": {"num_steps": 4, "num_threads": 1},
        "eval": {"before": False, "after": False},
        "checkpoint": {"every": 2, "export": False},
        "cluster": {"slots_per_worker": 4},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return load_train_config(data)


async def run_all(config, during=None):
    """Drive a run with its real roles; `during` gets a way to kill them."""
    driving = asyncio.create_task(run_cluster(config, reporter=Silent()))
    try:
        if during is not None:
            await during(Roles(config))
        await asyncio.wait_for(driving, 300.0)
    finally:
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    return read(config)


class Roles:
    def __init__(self, config):
        self.dir = Path(config.run.dir)

    async def role(self, name):
        """Return what the driver says of a role; None if it does not answer, or has none."""
        with contextlib.suppress(ClusterError):
            status = await asyncio.to_thread(ask_driver, self.dir, "/status")
            return next((role for role in status["roles"] if role["name"] == name), None)

    async def kill(self, *names):
        status = await asyncio.to_thread(ask_driver, self.dir, "/status")
        for role in status["roles"]:
            if role["name"] in names:
                os.kill(role["pid"], signal.SIGKILL)

    async def until_stored(self, number):
        """Wait until the run holds so many rollouts."""
        end = time.monotonic() + 240.0
        while self.num_stored() < number:
            assert time.monotonic() < end, f"{number} rollouts were not stored"
            await asyncio.sleep(0.1)

    def num_stored(self):
        with contextlib.suppress(StoreError), Run.open(self.dir, "r", check="rows") as run:
            return run.num_rollouts()
        return 0


def read(config):
    """Return per request its seeds and sampled tokens, the steps, and the events' kinds."""
    with Run.open(config.run.dir, "r") as run:
        found = {}
        for result in decode_results(run.rollouts(blobs=True)):
            request = result.request
            assert request.request_id not in found
            ids = [
                list(step["tokens"]["completion_ids"])
                for state in result.states
                for step in state.trajectory
            ]
            found[request.request_id] = (request.seed, request.sampling_seed, ids)
        return found, [[step.metrics[name] for name in GRADIENT] for step in run.steps()]


def alone(config, path):
    """Return what one process does with the same settings."""
    data = config.as_dict()
    del data["cluster"]
    data["run"]["dir"] = str(path)
    once = load_train_config(data)
    train(once, quiet=True)
    return read(once)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def undisturbed(folder):
    return alone(make_config(folder, folder / "none"), folder / "alone")


async def test_two_ranks_and_two_workers_take_the_steps_of_one_process(folder, undisturbed):
    config = make_config(folder, folder / "two", cluster={"trainer": {"ranks": 2}})
    rollouts, steps = await run_all(config)
    assert rollouts == undisturbed[0]
    for step, expected in zip(steps, undisturbed[1], strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


async def test_every_port_of_a_run_is_on_loopback_and_asks_for_the_token(folder):
    config = make_config(
        folder,
        folder / "ports",
        env={"args": {"pause_s": 0.3}},
        cluster={"trainer": {"ranks": 2}, "engines": {"count": 1}},
    )
    kept, found, before = {}, set(), {each.port for each in listeners(os.getpid())}

    async def look(roles):
        await roles.until_stored(3)
        status = await asyncio.to_thread(ask_driver, roles.dir, "/status")
        kept.update({each["name"]: each["url"] for each in status["roles"] if each["url"]})
        found.update(each for each in listeners(os.getpid()) if each.port not in before)
        async with aiohttp.ClientSession() as session:
            for each in found:
                if "rolltree.scale.cluster.trainer" not in each.command or each.port == port(
                    "trainer"
                ):
                    async with session.get(f"http://127.0.0.1:{each.port}/status") as answer:
                        assert answer.status == 401, each
                        guarded.add(each.port)

    def port(name):
        return int(kept[name].rpartition(":")[2])

    guarded = set()
    await run_all(config, look)
    assert [each for each in found if not each.is_loopback] == []
    # The driver's control server, the head's broker and the engine; nothing else has one.
    assert len(guarded) == 3
    assert {port("trainer"), port("engine-0")} < guarded
    # Only the ranks' gloo has sockets without a token; nothing that comes there is unpickled.
    others = [each for each in found if each.port not in guarded]
    assert others
    assert all("rolltree.scale.cluster.trainer" in each.command for each in others)


async def test_killed_roles_lose_nothing_and_repeat_nothing(folder, undisturbed):
    config = make_config(folder, folder / "killed", env={"args": {"pause_s": 0.3}})

    async def kill(roles):
        await roles.until_stored(3)
        await roles.kill("worker-0")
        await roles.until_stored(10)
        await roles.kill("engine-0", "worker-1")
        await roles.until_stored(18)
        await roles.kill("trainer")

    rollouts, steps = await run_all(config, kill)
    # The same requests with the same seeds gave the same tokens, so lengths are those of a run
    # that nobody disturbed, too.
    assert rollouts == undisturbed[0]
    for step, expected in zip(steps, undisturbed[1], strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


async def test_an_engine_that_is_killed_before_its_first_weights_is_waited_for(folder, undisturbed):
    config = make_config(folder, folder / "early")
    killed = []

    async def kill(roles):
        # While it starts, and as soon as the trainer knows its address.
        for is_known in (False, True):
            while True:
                engine = await roles.role("engine-0")
                is_new = engine is not None and engine["pid"] not in (None, *killed)
                if is_new and is_known is (engine["url"] is not None):
                    break
                await asyncio.sleep(0.02)
            assert roles.num_stored() == 0
            killed.append(engine["pid"])
            os.kill(engine["pid"], signal.SIGKILL)

    rollouts, steps = await run_all(config, kill)
    assert len(killed) == 2
    assert rollouts == undisturbed[0]
    assert len(steps) == len(undisturbed[1])


async def test_evaluation_is_played_by_workers_while_training_runs_ahead(folder):
    config = make_config(
        folder,
        folder / "eval",
        train={"num_steps": 1, "async_steps": 1},
        eval={"before": True, "after": True},
        cluster={"rollout_workers": 1},
    )
    rollouts, steps = await run_all(config)
    phases = {name.partition("/")[0] for name in rollouts}
    assert phases == {"train", "eval_before", "eval_after"}
    assert len(steps) == 1
    with Run.open(config.run.dir, "r") as run:
        assert [event.phase for event in run.evaluations()] == ["eval_before", "eval_after"]
        assert run.num_rollouts(phase="eval_after") == 4
