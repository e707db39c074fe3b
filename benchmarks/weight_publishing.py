"""Seconds to publish new weights to a server: by shared memory, by transfer, and by disk.

    python benchmarks/weight_publishing.py            # rolltree serve; vLLM if it is installed
    python benchmarks/weight_publishing.py --check    # exit 1 when a bar is missed
    python benchmarks/weight_publishing.py --json     # one JSON object instead of the table

SmolLM2-135M in float32 (538 MB) on this machine, server and trainer on the same cores. The ways are
those of `engine.publish`: shared memory is copied into and mapped by the server, transfer is gloo
over loopback, disk writes a folder durably and has it reloaded. They take turns, so each round is a
pair of measurements of any two. Each publish ends when the server has said that it has the version,
and is followed by a probe whose logprobs must be the new weights' own. The first round, in which
connections and memory are made, is shown and not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from verdict import Bar, conclude, make_parser

from rolltree.inference import ChatRenderer, OpenAIClient
from rolltree.inference.models import load_model, resolve_model
from rolltree.scale.servers import PublishName, Servers, weight_way
from rolltree.training.publishing import Publisher

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
"""The bar: a transfer takes at most this many times what the disk takes, as a median of pairs."""
WAYS: tuple[PublishName, ...] = ("shared", "transfer", "disk")


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
        *("--worker-extension-cls", "rolltree.scale.vllm.worker.WeightReload"),
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
    targets = {way: Servers([client], weight_way(model, folder, publish=way)) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in targets}
    worst, version = 0.0, 0
    for _ in range(1 + options.repeats):
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
    for target in targets.values():
        await target.aclose()
    await client.aclose()
    shutil.rmtree(folder)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"server": name, "bytes": size, "probe_error": worst, **times}


def ratio(result: dict[str, Any], way: str, other: str) -> float:
    """Return the median of a way's seconds by those of another in the same round."""
    pairs = zip(result[way][1:], result[other][1:], strict=True)
    return statistics.median(first / second for first, second in pairs)


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        megabytes = result["bytes"] / 1e6
        print(f"{result['server']}: {megabytes:.0f} MB, load {os.getloadavg()[0]:.1f}")
        for way in WAYS:
            first, *rest = result[way]
            seconds = "  ".join(f"{each:.2f}" for each in rest)
            middle = statistics.median(rest)
            print(f"  {way:9} first {first:.2f}, then {seconds} s, median {middle:.2f}")
        print(f"  largest difference of a probe's logprobs: {result['probe_error']:.1e}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="publishes each way")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commands = {"rolltree serve": serve_command}
    if VLLM.exists():
        commands["vLLM"] = vllm_command
    results, bars = [], []
    for name, command in commands.items():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with running(command(Path(resolve_model("smollm2-135m")), port), port) as url:
            result = asyncio.run(measure(name, url, options))
        results.append(result)
        for way, other, bound in (("shared", "disk", 1), ("shared", "transfer", 1)):
            what = f"of the time of {other} by shared memory ({name})"
            bars.append(Bar.below(what, ratio(result, way, other), bound))
        what = f"of the time of disk by transfer ({name})"
        bars.append(Bar.at_most(what, ratio(result, "transfer", "disk"), SLOWEST))
    return conclude(options, bars, results, lambda: show(results))


if __name__ == "__main__":
    sys.exit(main())
