"""vLLM as the engine of a run on several processes, started through its role by the driver."""

import asyncio

import httpx
import pytest
import vllm_kit

from rolltree.scale.cluster.driver import run_cluster
from rolltree.scale.cluster.report import ask_driver
from rolltree.store import Run
from rolltree.training import Silent, load_train_config

pytestmark = pytest.mark.timeout(1500)


async def test_a_run_whose_engine_is_vllm(folder, tmp_path, monkeypatch):
    for name, value in vllm_kit.SETTINGS.items():
        monkeypatch.setenv(name, value)
    config = load_train_config(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"name": str(folder)},
            "engine": {"max_batch": 4, "max_context": 512},
            "env": {"id": "reverse_text"},
            "sampling": {"max_tokens": 8},
            "algorithm": {"group_size": 2, "groups_per_step": 2},
            "train": {"num_steps": 2, "num_threads": 1},
            "eval": {"before": False, "after": False},
            "checkpoint": {"export": False},
            "cluster": {"rollout_workers": 1, "engines": {"kind": "vllm"}},
        }
    )
    refused = []

    class Asking(Silent):
        def on_step(self, step, metrics):
            asking.append(asyncio.create_task(ask_without_token()))

    async def ask_without_token():
        status = await asyncio.to_thread(ask_driver, tmp_path / "run", "/status")
        (url,) = (role["url"] for role in status["roles"] if role["kind"] == "engine")
        async with httpx.AsyncClient() as http:
            for path in ("/v1/models", "/collective_rpc", "/reset_prefix_cache", "/metrics"):
                refused.append((await http.post(url + path, json={})).status_code)
            refused.append((await http.get(f"{url}/health")).status_code)

    asking = []
    report = await run_cluster(config, reporter=Asking())
    await asyncio.gather(*asking, return_exceptions=True)
    assert refused[:5] == [401, 401, 401, 401, 200]
    assert len(report.metrics) == 2
    with Run.open(tmp_path / "run", "r") as run:
        rows = list(run.columns(["status", "train_step", "min_version", "max_version"]))
    assert sorted(rows) == [("ok", step, step - 1, step - 1) for step in (1, 2) for _ in range(4)]
