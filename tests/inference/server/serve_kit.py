"""A real `rolltree serve` in a process of its own."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass

TOKEN = "a-token-for-tests"
ADMIN_TOKEN = "an-admin-token-for-tests"


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str  # ends in /v1
    model: str
    token: str = TOKEN
    admin_token: str = ADMIN_TOKEN

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


def start(
    model: str, *flags: str, token: str | None = TOKEN, name: str | None = None, port: int = 0
) -> Served:
    """Start a server on a port (0: a free one) and wait until it is ready."""
    words = [model, "--port", str(port), "--num-threads", "1", *flags]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if token is not None:
        words += ["--api-key-env", "SERVE_TOKEN", "--admin-key-env", "SERVE_ADMIN_TOKEN"]
        env |= {"SERVE_TOKEN": token, "SERVE_ADMIN_TOKEN": ADMIN_TOKEN}
    if name is not None:
        words += ["--served-model-name", name]
    process = subprocess.Popen(
        [sys.executable, "-m", "rolltree", "serve", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    line = read_line(process, 120)
    found = re.fullmatch(r"serving (.+) at (http://\S+)\n", line)
    if found is None:
        process.kill()
        raise AssertionError(f"no server: {line!r} {process.communicate()[1]}")
    return Served(process, found[2], found[1])


def read_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    assert process.stdout is not None
    end = time.monotonic() + timeout_s
    ready, _, _ = select.select([process.stdout], [], [], end - time.monotonic())
    return process.stdout.readline() if ready else ""


def stop(served: Served) -> None:
    served.process.terminate()
    try:
        served.process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        served.process.kill()
        served.process.communicate()


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
