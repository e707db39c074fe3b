"""A real vLLM server on loopback, small worlds to play in it, and Hugging Face's own logprobs."""

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import torch

import rolltree as rt
from rolltree.inference.models.made import CHAT_TEMPLATE

START_S = 600.0
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _python_path():
    """Return where a server finds `stale_worker`, before what is there already."""
    here = os.path.dirname(__file__)
    return os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def launch(folder, tmp_path, port, *flags, **settings):
    """Start a server that answers as model "m"; return its process, the leader of a group."""
    template, log = tmp_path / "chat.jinja", tmp_path / "server.log"
    template.write_text(CHAT_TEMPLATE)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", "m", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    command += ["--enforce-eager", "--enable-scale-out", "--max-num-seqs", "16"]
    command += ["--logprobs-mode", "processed_logprobs", "--chat-template", str(template)]
    command += ["--worker-extension-cls", "stale_worker.StaleReload"]
    command += ["--weight-transfer-config", '{"backend": "rolltree"}']
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags]
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            env={**os.environ, **SETTINGS, "PYTHONPATH": _python_path(), **settings},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}", server, log)
    except BaseException:
        stop(server)
        raise
    return server


def stop(server, sign=signal.SIGTERM):
    """End a server and all of its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, sign)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextlib.contextmanager
def vllm_server(folder, tmp_path, *flags, **settings):
    """Yield the root URL of a server that answers as model "m"; it is gone afterwards."""
    port = free_port()
    server = launch(folder, tmp_path, port, *flags, **settings)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(server)


def wait_until_up(url, server, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not come up:\n{log.read_text(errors='replace')[-3000:]}")


def teacher_forced(model, prompt_ids, completion_ids, temperature):
    """Return Hugging Face's fp32 logprob of each completion token, float64 `[_C]`."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, completion_ids])).long()[None]
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].double()
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    return logprobs.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].numpy()


def off_by(model, generation, where=slice(None)):
    """Return the mean absolute difference of engine and teacher forcing."""
    expected = teacher_forced(
        model, generation.prompt_ids, generation.completion_ids, generation.temperature
    )
    return float(np.abs(expected - generation.logprobs)[where].mean())


def rollout_off_by(model, state):
    """Return the mean absolute difference over all calls of a rollout."""
    differences = []
    for step in state["trajectory"]:
        tokens = step["tokens"]
        expected = teacher_forced(
            model,
            np.array(tokens["prompt_ids"], np.int32),
            np.array(tokens["completion_ids"], np.int32),
            state["sampling_temperature"],
        )
        differences.append(np.abs(expected - np.array(tokens["completion_logprobs"])))
    return float(np.concatenate(differences).mean())


def changed_copy(model, noise=0.1):
    """Return a copy of a model with every weight changed: its greedy answers differ."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(1 + noise * torch.randn(tensor.shape, generator=generator))
    return other


class Counting(rt.MultiTurnEnv):
    """Three turns of asking for a number."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": f"And number {len(state['trajectory']) + 1}?"}]

    @rt.stop
    async def three_turns(self, state):
        return len(state["trajectory"]) == 3


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def _shot(index, a, b):
    call = {"name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'}
    return [
        {"role": "user", "content": f"add {a} and {b}"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"shot{index}", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": f"shot{index}", "content": str(a + b)},
        {"role": "assistant", "content": f"The sum is {a + b}."},
    ]


def counting_env():
    rows = [{"question": f"Say a number near {n}."} for n in (5, 20)]
    return Counting(dataset=rows, system_prompt="Answer briefly.")


def tool_env():
    """Sums with a tool. Four examples show the form of a call to a model of this size."""
    shots = [_shot(i, a, b) for i, (a, b) in enumerate([(3, 4), (12, 30), (8, 1), (25, 6)])]
    rows = [{"question": f"add {a} and {b}"} for a, b in [(17, 5), (9, 8), (33, 14), (2, 6)]]
    return rt.ToolEnv(
        [add], max_turns=3, dataset=rows, few_shot=[message for shot in shots for message in shot]
    )


async def train_two_steps(folder, path, engine, *, ahead, after=None, **sections):
    """Train on the real model in the run directory `path`; return the report.

    `after(client)` is awaited before the parts are closed.
    """
    from rolltree.training import build_parts, load_train_config, open_run, run_training

    data = {
        "run": {"dir": str(path)},
        "model": {"name": str(folder)},
        "engine": engine,
        "algorithm": {"groups_per_step": 2, "group_size": 4},
        "train": {"num_steps": 2, "async_steps": ahead},
        "sampling": {"max_tokens": 8, "temperature": 1.0},
        "eval": {"before": False, "after": False},
        "checkpoint": {"export": False},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    config = load_train_config(data)

    def length(completion):  # hardly ever the same in a whole group, so each step moves weights
        return len(completion[-1]["content"]) / 50

    env = rt.SingleTurnEnv(
        dataset=[{"question": f"What is {n} + 5?"} for n in range(4)], rubric=rt.Rubric([length])
    )
    parts = build_parts(config)
    try:
        with open_run(config) as run:
            report = await run_training(config, parts, source=env, run=run)
        if after is not None:
            await after(parts.client)
    finally:
        await parts.aclose()
    return report
