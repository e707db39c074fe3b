"""An engine: `python -m rolltree.scale.cluster.engine`.

It starts `rolltree serve` or vLLM as a child process, registers its address, and reports progress
while the server answers. The token is passed in the environment, so process lists do not show it.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rolltree.scale.cluster.beat import DIRECT, ENDED, Beats, Link, run_role
from rolltree.scale.cluster.roles import CLUSTER_TOKEN
from rolltree.training import TrainConfig
from rolltree.training.sections import ClusterSection
from rolltree.values.errors import ClusterError, ConfigError
from rolltree.web.guard import url_at

_START_S = 600.0
_HEALTH_S = 10.0
_LOOK_S = 1.0


def serve_command(config: TrainConfig, host: str, port: int) -> list[str]:
    """Return the command of `rolltree serve` with the settings of the `engine` section."""
    section = config.engine
    words = [
        *(sys.executable, "-m", "rolltree", "serve", config.model.name),
        *("--served-model-name", config.model.name, "--device", config.model.device),
        *("--host", host, "--port", str(port), "--seed", str(config.run.seed)),
        *("--api-key-env", CLUSTER_TOKEN, "--admin-key-env", CLUSTER_TOKEN),
        *("--max-batch", str(section.max_batch)),
    ]
    given: dict[str, Any] = {
        "--max-context": section.max_context,
        "--batch-invariant": section.batch_invariant,
        "--record-experts": section.record_experts,
        "--allow-remote": not host.startswith("127."),
    }
    for flag, value in given.items():
        # True gives a flag without a value; False and None leave the option out.
        words += [flag] * (value is True) if isinstance(value, bool | None) else [flag, str(value)]
    return words


def vllm_command(config: TrainConfig, host: str, port: int) -> list[str]:
    """Return the command of vLLM, with the extension that reloads every weight.

    Raises:
        ConfigError: a setting of the engine does not exist in vLLM.
    """
    section = config.engine
    if section.batch_invariant:
        raise ConfigError(
            "engine.batch_invariant is set, but cluster.engines.kind = 'vllm' has no such mode. "
            "Leave it out, or use cluster.engines.kind = 'serve'."
        )
    from rolltree.inference.models import resolve_model

    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(resolve_model(config.model.name))),
        *("--served-model-name", config.model.name, "--host", host, "--port", str(port)),
        *("--worker-extension-cls", "rolltree.scale.vllm.worker.WeightReload"),
        *("--middleware", "rolltree.web.guard.RequireToken"),
        *("--seed", str(config.run.seed), "--max-num-seqs", str(section.max_batch)),
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        *("--weight-transfer-config", '{"backend": "rolltree"}'),
    ]
    if config.model.device == "cpu":
        # vLLM on a CPU crashes on a seeded request with chunked prefill (docs/inference.md, vLLM).
        longest = str(max(8192, section.max_context or 0))
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", longest]
        words += ["--dtype", "float32", "--enforce-eager"]
    if section.max_context is not None:
        words += ["--max-model-len", str(section.max_context)]
    return words + ["--enable-return-routed-experts"] * section.record_experts


_COMMANDS: dict[str, Callable[[TrainConfig, str, int], list[str]]] = {
    "serve": serve_command,
    "vllm": vllm_command,
}


def _run(link: Link, config: TrainConfig, cluster: ClusterSection) -> int:
    """Run the engine until it ends; return its exit status.

    Raises:
        ConfigError: the settings cannot be used.
        ClusterError: the server does not answer.
    """
    # A new port at every start, so that an engine is not taken for its predecessor.
    port = _free_port(link.host)
    command = _COMMANDS[cluster.engines.kind](config, link.host, port)
    # vLLM reads its key from its own variable, and accepts weight updates only in dev mode.
    environment = os.environ | {"VLLM_API_KEY": link.token, "VLLM_SERVER_DEV_MODE": "1"}
    print("starting", *command, flush=True)
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    url = url_at(link.host, port)
    end = time.monotonic() + _START_S
    while not _is_healthy(url):
        if (status := process.poll()) is not None:
            return status or ENDED
        if time.monotonic() > end:
            process.kill()
            raise ClusterError(f"the engine did not answer at {url} within {_START_S:g} s.")
        time.sleep(0.1)
    beats = Beats(link, "engine", url)
    beats.say("serving")
    beats.start()
    while (status := process.poll()) is None:
        # A stopped server does not answer, and the driver reports that the loop does not advance.
        if _is_healthy(url):
            beats.advance()
        time.sleep(_LOOK_S)
    return status or ENDED


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _is_healthy(url: str) -> bool:
    try:
        with DIRECT.open(f"{url}/health", timeout=_HEALTH_S) as answer:
            return int(answer.status) == 200
    except (OSError, http.client.HTTPException):
        return False


if __name__ == "__main__":
    sys.exit(run_role(Link(), _run))
