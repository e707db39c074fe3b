"""Training on real vLLM, with the commands of docs/inference.md as they stand there."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_kit

from rolltree.store import Run

ROOT = Path(__file__).parents[1]
TRAIN_S = 1200
pytestmark = pytest.mark.timeout(1800)


def commands():
    """Return the two commands of the page: what starts a server, and what trains against it."""
    page = (ROOT / "docs" / "inference.md").read_text(encoding="utf-8")
    section = page[page.index("### As a server") : page.index("### In process")]
    return [block.strip() for block in re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)]


def test_the_page_trains_on_real_vllm(folder, tmp_path):
    server, train = commands()
    assert "vllm.entrypoints" in server
    assert train.startswith("rolltree train examples/demo/demo.toml")
    port = str(vllm_kit.free_port())  # the page's may be in use
    server, train = (
        each.replace("DIR", shlex.quote(str(folder)), 1)
        .replace("8000", port)
        .replace("runs/demo-vllm", str(tmp_path / "run"))
        for each in (server, train)
    )
    kept = ("PATH", "HOME", "PYTHONPATH", "LANG")  # of a fresh shell
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            ["bash", "-c", f"exec env {server}"],
            env=environment,
            cwd=tmp_path,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        vllm_kit.wait_until_up(f"http://127.0.0.1:{port}", running, log)
        done = subprocess.run(
            ["bash", "-c", train],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TRAIN_S,
        )
    finally:
        vllm_kit.stop(running, signal.SIGTERM)
    assert done.returncode == 0, done.stderr[-3000:] + log.read_text(errors="replace")[-3000:]
    with Run.open(tmp_path / "run", "r") as run:
        steps = [step.metrics for step in run.steps()]
    assert len(steps) == 3
    for step in steps:
        assert step["train/sampling/sampling_logp_difference/mean"] < 3e-5, step
        assert step["publish/probe_error"] < 1e-4, step
        assert step["publish/probe_step"] > 1e-3, step
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
