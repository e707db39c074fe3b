"""Training on real vLLM that is killed twice: the rewards stay where an undisturbed run's are."""

import math
import signal
import threading

import pytest
import vllm_kit

import rolltree as rt
from rolltree.store import Run
from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training

pytestmark = pytest.mark.timeout(1500)
NUM_STEPS = 4
FLAGS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192")


class Phoenix:
    """vLLM on one port. `kill` is SIGKILL to all of its processes; others take their place."""

    def __init__(self, folder, tmp_path):
        self.arguments = (folder, tmp_path, vllm_kit.free_port(), *FLAGS)
        self.url = f"http://127.0.0.1:{self.arguments[2]}/v1"
        self.num_starts = 0
        self.restart = None
        self.start()

    def start(self):
        self.server = vllm_kit.launch(*self.arguments)
        self.num_starts += 1

    def kill(self):
        vllm_kit.stop(self.server, signal.SIGKILL)
        self.restart = threading.Thread(target=self.start)
        self.restart.start()

    def close(self):
        if self.restart is not None:
            self.restart.join()
        vllm_kit.stop(self.server)


class KillAt(Silent):
    """Kills a server when a third of the rollouts of a step are there."""

    def __init__(self, server, steps):
        self.server, self.steps, self.notices = server, set(steps), []

    def on_rollouts(self, step, num_done, num_total):
        if step in self.steps and num_done >= num_total // 3:
            self.steps.remove(step)
            self.server.kill()

    def on_notice(self, message):
        self.notices.append(message)


def interval(share, num, z=2.58):
    """Return Wilson's interval of a share of `num`, here the 99 % one."""
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / (1 + z * z / num)
    return middle - half, middle + half


async def train(folder, path, url, reporter):
    """Train answers to be short: those that end early have the reward."""

    def short(completion):
        return float(len(completion[-1]["content"]) < 25)

    config = load_train_config(
        {
            "run": {"dir": str(path)},
            "model": {"name": str(folder)},
            "engine": {
                "kind": "servers",
                "urls": [url],
                "served_model": "m",
                "max_concurrent": 4,
            },
            "algorithm": {"groups_per_step": 2, "group_size": 6},
            "train": {"num_steps": NUM_STEPS},
            "sampling": {"max_tokens": 16, "temperature": 1.0},
            "eval": {"before": False, "after": False},
            "checkpoint": {"export": False},
        }
    )
    rows = [{"question": f"What is {n} + 5?"} for n in range(12)]
    env = rt.SingleTurnEnv(dataset=rows, rubric=rt.Rubric([short]))
    parts = build_parts(config)
    try:
        with open_run(config) as run:
            return await run_training(config, parts, source=env, run=run, reporter=reporter)
    finally:
        await parts.aclose()


async def test_killed_twice_the_rewards_are_those_of_an_undisturbed_run(folder, tmp_path):
    server = Phoenix(folder, tmp_path)
    try:
        control = await train(folder, tmp_path / "control", server.url, Silent())
        killer = KillAt(server, (2, 4))
        report = await train(folder, tmp_path / "run", server.url, killer)
    finally:
        server.close()
    rewards = [[step["reward/mean"] for step in each.metrics] for each in (control, report)]
    assert server.num_starts == 3
    assert len(rewards[1]) == NUM_STEPS
    for undisturbed, reward in zip(*rewards, strict=True):
        low, high = interval(undisturbed, 12)
        assert low <= reward <= high
    for step in report.metrics:
        assert step["error/mean"] == 0
        assert step["train/sampling/sampling_logp_difference/mean"] < 1e-3
    with Run.open(tmp_path / "run", "r") as run:
        for row in run.rollouts(phase="train", blobs=False):
            assert row.min_version == row.max_version == row.train_step - 1
