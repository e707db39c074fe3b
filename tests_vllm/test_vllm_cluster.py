"""Two vLLM engines of one run: one is killed, another joins, and rollouts stay where they are."""

import asyncio
import signal

import pytest
import vllm_kit
from test_vllm_away import FLAGS

import rolltree as rt
from rolltree.inference import OpenAIClient, RetryPolicy, served_version
from rolltree.store import Run
from rolltree.training import Silent, build_parts, load_train_config, open_run, run_training

pytestmark = pytest.mark.timeout(1500)
NUM_STEPS = 4
# vLLM reuses whole blocks only, of 128 tokens on a CPU.
RULES = " ".join(f"Rule {number}: answer with a number." for number in range(40))


class Engine:
    """vLLM on a port of its own."""

    def __init__(self, folder, tmp_path, name):
        (tmp_path / name).mkdir()
        port = vllm_kit.free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        self._start = (folder, tmp_path / name, port, *FLAGS)
        self._server = None

    def start(self):
        self._server = vllm_kit.launch(*self._start)
        return self

    def stop(self, sign=signal.SIGTERM):
        if self._server is not None:
            vllm_kit.stop(self._server, sign)
            self._server = None

    def prefix_hits(self):
        """Return how many tokens of prompts were found in the cache."""
        lines = vllm_kit.httpx.get(f"{self.url.removesuffix('/v1')}/metrics").text.splitlines()
        name = "vllm:prefix_cache_hits_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


class Notices(Silent):
    def __init__(self):
        self.said, self.steps = [], 0

    def on_notice(self, message):
        self.said.append(message)

    def on_step(self, step, metrics):
        self.steps = step


def joining(old, url):
    """Return a client of another engine like that of `old`."""
    return OpenAIClient(
        url,
        "m",
        renderer=old.renderer,
        token_ids="vllm",
        logprobs_mode="processed",
        vocab_size=old.tokens.vocab_size,
        retry=RetryPolicy(max_retries=0),
    )


async def test_one_of_two_engines_is_killed_and_replaced(folder, tmp_path):
    engines = [Engine(folder, tmp_path, name) for name in ("first", "second", "third")]
    first, second, third = engines
    config = load_train_config(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"name": str(folder)},
            "engine": {"kind": "servers", "urls": [first.url, second.url], "served_model": "m"},
            "algorithm": {"groups_per_step": 4, "group_size": 4},
            "train": {"num_steps": NUM_STEPS},
            "sampling": {"max_tokens": 8, "temperature": 1.0},
            "eval": {"before": False, "after": False},
            "checkpoint": {"export": False},
        }
    )
    may_go_on = asyncio.Event()
    homes = {}  # by step, the engines that each rollout of it was at
    seen = Notices()

    async def length(completion, state):
        step = seen.steps + 1
        where = [call["response"].info["endpoint"] for call in state["trajectory"]]
        homes.setdefault(step, []).append((state["input"]["prompt"][-1]["content"], where))
        if step >= 3:  # the last steps wait until there are two engines again
            await may_go_on.wait()
        return sum(len(message["content"]) for message in completion) / 100

    class Long(vllm_kit.Counting):
        pass

    env = Long(
        dataset=[{"question": f"Say a number near {n}."} for n in range(16)],
        system_prompt=RULES,
        rubric=rt.Rubric([length]),
    )

    async def replace(parts):
        while seen.steps < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        first.stop(signal.SIGKILL)
        parts.engine.remove(parts.client.clients[0])
        await asyncio.to_thread(third.start)
        await parts.engine.add(joining(parts.client.clients[0], third.url))
        may_go_on.set()

    try:
        await asyncio.gather(*(asyncio.to_thread(each.start) for each in (first, second)))
        parts = build_parts(config)
        replacing = asyncio.create_task(replace(parts))
        try:
            with open_run(config) as run:
                report = await run_training(config, parts, source=env, run=run, reporter=seen)
            await replacing
            labels = [await served_version(client.server) for client in parts.client.clients]
            hits = [engine.prefix_hits() for engine in (second, third)]
        finally:
            await parts.aclose()
    finally:
        for engine in engines:
            engine.stop(signal.SIGKILL)

    assert len(report.metrics) == NUM_STEPS
    for step in report.metrics:
        assert step["error/mean"] == 0
        assert step["publish/probe_error"] < 1e-3
        assert step["train/sampling/sampling_logp_difference/mean"] < 1e-3
    assert labels == [str(NUM_STEPS)] * 2
    ways = " ".join(seen.said)
    for engine in engines:
        assert f"{engine.url.removesuffix('/v1')}" in ways
    assert "weights go by shared memory." in ways
    assert f"{third.url.removesuffix('/v1')} has joined, with version" in ways
    # A rollout's calls stay on one engine, and a group's rollouts on the same one.
    for step in (1, NUM_STEPS):
        groups = {}
        for question, where in homes[step]:
            assert len(set(where)) == 1
            groups.setdefault(question, set()).update(where)
        assert all(len(where) == 1 for where in groups.values())
    assert {where[0] for _, where in homes[NUM_STEPS]} <= {second.url, third.url}
    assert min(hits) > 128
    with Run.open(tmp_path / "run", "r") as run:
        for row in run.rollouts(phase="train", blobs=False):
            assert row.status == "ok"
            assert row.min_version == row.max_version == row.train_step - 1
