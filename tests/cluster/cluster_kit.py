"""A stand-in for the driver: a name service in this process, and roles that a test starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rolltree.models import TinyConfig, make_tiny
from rolltree.training import load_train_config
from wait_kit import wait_until

SRC = Path(__file__).parents[2] / "src"
TOKEN = "token-of-the-tests"


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


class Names:
    """Knows who registered, as the driver does; `start` and `kill` are the test's."""

    def __init__(self, config):
        self.config, self.run = config, Path(config.run.dir)
        self.roles, self.beats, self.failures, self.drains = {}, {}, [], set()
        self.processes = {}
        (self.run / "logs").mkdir(parents=True, exist_ok=True)
        names = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(names.config.as_dict())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(names.take(self.path, body))

            def answer(self, value):
                known = self.headers["Authorization"] == f"Bearer {TOKEN}"
                data = json.dumps(value).encode()
                self.send_response(200 if known and value is not None else 409)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path, body):
        name = body.get("name")
        if path == "/register":
            self.roles[name] = body
        elif path == "/fail":
            self.failures.append(body)
        elif path == "/beat":
            if self.roles.get(name, {}).get("pid") != body["pid"]:
                return None
            self.beats[name] = body
            there = list(self.roles.values())
            return {
                "stop": False,
                "drain": name in self.drains,
                "head": next((r["url"] for r in there if r["kind"] == "trainer"), None),
                "engines": [
                    {"name": r["name"], "url": r["url"]} for r in there if r["kind"] == "engine"
                ],
                "workers": [r["name"] for r in there if r["kind"] == "worker"],
            }
        return {"ok": True}

    def start(self, name):
        kind = name.partition("-")[0]
        ranks = self.config.cluster.trainer.ranks
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        words = [*torchrun, "rolltree.cluster.trainer"] if kind == "trainer" else []
        environment = os.environ | {
            "PYTHONPATH": str(SRC),
            "OMP_NUM_THREADS": "1",
            "ROLLTREE_CLUSTER_URL": self.url,
            "ROLLTREE_CLUSTER_TOKEN": TOKEN,
            "ROLLTREE_ROLE": name,
            "ROLLTREE_RUN": str(self.run),
        }
        with open(self.run / "logs" / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *(words or [f"rolltree.cluster.{kind}"])],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name):
        """SIGKILL to the role and all that it started."""
        process = self.processes.pop(name)
        with_children = subprocess.run(
            ["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True
        )
        for pid in (process.pid, *map(int, with_children.stdout.split())):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        process.wait()
        self.forget(name)

    def forget(self, name):
        self.roles.pop(name, None)
        if name == "trainer":
            self.roles = {n: r for n, r in self.roles.items() if r["kind"] != "rank"}

    def start_all(self):
        settings = self.config.cluster
        workers = [f"worker-{n}" for n in range(settings.rollout_workers)]
        for name in (*(f"engine-{n}" for n in range(settings.engines.count)), "trainer", *workers):
            self.start(name)

    def wait(self, limit_s=240.0):
        """Wait until the trainer ends well, starting again what ends, as the driver does."""
        end = time.monotonic() + limit_s
        while (status := self.processes["trainer"].poll()) is None or status:
            assert not self.failures, self.failures
            assert time.monotonic() < end, self.tail("trainer")
            for name, process in list(self.processes.items()):
                if process.poll() is not None:
                    self.forget(name)
                    self.start(name)
            time.sleep(0.05)

    def tail(self, name):
        return (self.run / "logs" / f"{name}.log").read_text()[-6000:]

    def until_stored(self, number):
        def is_there():
            return self.beats.get("trainer", {}).get("metrics", {}).get("stored", 0) >= number

        wait_until(is_there, f"{number} rollouts")

    def close(self):
        for name in list(self.processes):
            self.kill(name)
        self.server.shutdown()
        self.server.server_close()
