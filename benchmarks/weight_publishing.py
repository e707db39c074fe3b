"""Seconds to publish new weights to a server: by disk and reload, and by transfer.

    python benchmarks/weight_publishing.py            # rolltree serve; vLLM where it is installed
    python benchmarks/weight_publishing.py --check    # exit 1 when a bar is missed
    python benchmarks/weight_publishing.py --json     # one JSON object instead of the table

SmolLM2-135M in float32 (538 MB) on this machine, server and trainer on the same cores. Disk is what
`engine.publish = "disk"` does: write a folder durably, have it reloaded; transfer is gloo over
loopback. Both end when the server has said that it has the version, and each is followed by a probe
whose logprobs must be the new weights' own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.models import load_model, resolve_model
from rolltree.training.publishing import Publisher
from rolltree.training.servers import ServerTarget, TransferTarget

VLLM = Path(__file__).parents[1] / ".venv-vllm/bin/python"
VLLM_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
TOKEN = "a-token-for-the-benchmark"
ADMIN_TOKEN = "an-admin-token-for-the-benchmark"
SLOWEST = 2.0
"""The bar: a transfer takes at most this many times what the disk takes."""


def serve_command(folder: Path, port: int) -> list[str]:
    words = ["-m", "rolltree", "serve", str(folder), "--port", str(port)]
    return [
        sys.executable,
        *words,
        *("--num-threads", "1", "--served-model-name", "m"),
        *("--api-key-env", "SERVE_TOKEN", "--admin-key-env", "SERVE_ADMIN_TOKEN"),
    ]


def vllm_command(folder: Path, port: int) -> list[str]:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [
        str(VLLM),
        *words,
        *("--served-model-name", "m", "--dtype", "float32", "--host", "127.0.0.1"),
        *("--port", str(port), "--max-model-len", "1024", "--enforce-eager", "--max-num-seqs", "8"),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--api-key", TOKEN),
        *("--worker-extension-cls", "rolltree.inference.vllm.worker.WeightReload"),
        *("--weight-transfer-config", '{"backend": "rolltree"}'),
    ]


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    """Start a server and yield its URL."""
    source = str(Path(__file__).parents[1] / "src")
    added = {
        "SERVE_TOKEN": TOKEN,
        "SERVE_ADMIN_TOKEN": ADMIN_TOKEN,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": source,
        **VLLM_ENV,
    }
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command,
            env={**os.environ, **added},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + 300
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"no server:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


async def measure(name: str, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Publish changing weights `options.repeats` times each way."""
    model, tokenizer = load_model("smollm2-135m", "float32")
    client = OpenAIClient(
        url,
        "m",
        api_key=TOKEN,
        admin_key=ADMIN_TOKEN,
        renderer=ChatRenderer(tokenizer),
        logprobs_mode="processed",
    )
    folder = Path(tempfile.mkdtemp())
    targets = {
        "disk": ServerTarget(model, [client], folder),
        "transfer": TransferTarget(model, [client], address="127.0.0.1"),
    }
    times: dict[str, list[float]] = {way: [] for way in targets}
    worst, version = 0.0, 0
    for _ in range(options.repeats):
        for way, target in targets.items():
            version += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 1e-3 * version)
            publisher = Publisher(model, target, client, tolerance=1e-3)
            began = time.perf_counter()
            await publisher.publish(version)
            times[way].append(time.perf_counter() - began)
            worst = max(worst, (await publisher.verify(version))["publish/probe_error"])
    await targets["transfer"].aclose()
    await client.aclose()
    shutil.rmtree(folder)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"server": name, "bytes": size, "probe_error": worst, **times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per server")
    parser.add_argument("--repeats", type=int, default=3, help="publishes each way")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commands = {"rolltree serve": serve_command}
    if VLLM.exists():
        commands["vLLM"] = vllm_command
    missed = False
    for name, command in commands.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with running(command(Path(resolve_model("smollm2-135m")), port), port) as url:
            result = asyncio.run(measure(name, url, options))
        if options.json:
            print(json.dumps(result))
        else:
            print(f"{name}: {result['bytes'] / 1e6:.0f} MB, load {os.getloadavg()[0]:.1f}")
        for way in ("disk", "transfer"):
            seconds = "  ".join(f"{each:.2f}" for each in result[way])
            if not options.json:
                print(f"  {way:9} {seconds} s, median {statistics.median(result[way]):.2f}")
        if not options.json:
            print(f"  largest difference of a probe's logprobs: {result['probe_error']:.1e}")
        share = statistics.median(result["transfer"]) / statistics.median(result["disk"])
        missed = missed or share > SLOWEST
    if missed:
        print(f"a transfer took more than {SLOWEST} times what the disk took")
    return int(options.check and missed)


if __name__ == "__main__":
    sys.exit(main())
