"""The world that both sides play in: small data for downloads, stand-ins for what needs a network.

It changes `datasets`, `nltk`, `mcp` and `prime_sandboxes`, never verifiers or rolltree.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from data import TABLES, WORDS

HERE = Path(__file__).parent


def set_stage(folder: Path) -> None:
    """Change this process so that nothing is downloaded. `folder` is for its files."""
    sys.path.insert(0, str(HERE / "stand_ins"))
    os.environ.setdefault("OPENAI_API_KEY", "EMPTY")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(folder / "hf")
    _set_datasets()
    _set_nltk(folder / "nltk")
    _set_mcp()
    _set_sandboxes()


def _set_datasets() -> None:
    import datasets

    datasets.disable_progress_bar()
    plain_map = datasets.Dataset.map

    def load_dataset(name: str, config: str | None = None, **settings: Any) -> Any:
        key = (name, config or settings.pop("name", None))
        if key not in TABLES:
            raise FileNotFoundError(f"Couldn't find any data file at {name}.")
        splits, rows = TABLES[key]
        split = settings.pop("split", None)
        found = {part: _dataset(rows(part)) for part in splits}
        if name.startswith("someone/") and settings.get("data_files"):
            return found["train"]
        return found[split] if split else datasets.DatasetDict(found)

    def map_in_process(self: Any, *args: Any, num_proc: int | None = None, **settings: Any) -> Any:
        return plain_map(self, *args, **settings)

    datasets.load_dataset = load_dataset
    datasets.Dataset.map = map_in_process


def _dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets

    made = datasets.Dataset.from_list(rows)
    if "image_1" in made.column_names:
        made = made.cast_column("image_1", datasets.Image())
    return made


def _set_nltk(folder: Path) -> None:
    try:
        import nltk
    except ImportError:
        return
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True, exist_ok=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("\n".join(WORDS) + "\n")
    nltk.data.path.insert(0, str(folder))
    nltk.download = lambda *names, **settings: True
    nltk.pos_tag = lambda tokens, **settings: [(token, "NN") for token in tokens]


def _set_mcp() -> None:
    try:
        from mcp.types import Tool
    except ImportError:
        return
    if not hasattr(Tool, "inputSchema"):  # mcp 2 renamed the field that mcp 1's users read
        Tool.inputSchema = property(lambda self: self.input_schema)


_WORKER_FRAME = re.compile(
    r"""  File \\*"[^"]*python_worker\.py\\*", line \d+, in [^\\\n]*(?:\\n|\n)"""
    r"""(?:    [^\\\n]*(?:\\n|\n))*"""
)


class LocalSandboxes:
    """Stands in for the hosted sandboxes: a folder and a shell on this machine for each."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.open: dict[str, tuple[Path, subprocess.Popen[bytes] | None]] = {}
        self.numbers = itertools.count()

    async def create(self, request: Any) -> Any:
        """Make one and start its start command."""
        name = f"sandbox-{next(self.numbers)}"
        folder = Path(tempfile.mkdtemp(prefix="rolltree-compat-"))
        process = None
        if "python_worker" in request.start_command:
            command = self._inside(request.start_command, folder).replace("pip install", "true")
            process = subprocess.Popen(["bash", "-c", command], start_new_session=True, env=_path())
        self.open[name] = (folder, process)
        return SimpleNamespace(id=name)

    async def wait_for_creation(self, name: str) -> None:
        """Return: a folder is there at once."""

    async def execute_command(self, name: str, command: str) -> Any:
        """Run a shell command in the sandbox's folder."""
        folder, _ = self.open[name]
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._inside(command, folder)),
            cwd=folder,
            env=_path(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        # A frame of the worker names this folder, so the scripted model would answer something else
        # every time; rolltree leaves such frames out.
        shown = _WORKER_FRAME.sub("", out.decode())
        return SimpleNamespace(stdout=shown, stderr=err.decode(), exit_code=0)

    async def delete(self, name: str) -> None:
        """End it and remove its folder."""
        folder, process = self.open.pop(name)
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    async def bulk_delete(self, names: list[str]) -> None:
        """End several."""
        for name in names:
            await self.delete(name)

    @staticmethod
    def _inside(command: str, folder: Path) -> str:
        """Return the command with its files in the sandbox's folder, encoded programs included."""

        def moved(text: str) -> str:
            return text.replace("/tmp/python_", f"{folder}/python_")

        def decoded(match: re.Match[str]) -> str:
            text = moved(base64.b64decode(match[2]).decode())
            return match[1] + base64.b64encode(text.encode()).decode() + match[3]

        command = re.sub(r"""(b64decode\(["'])([A-Za-z0-9+/=]+)(["']\))""", decoded, command)
        return moved(command).replace("bash -lc", "bash -c")


def _path() -> dict[str, str]:
    """Return this process's environment with its own `python` first."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def _set_sandboxes() -> None:
    try:
        import prime_sandboxes
    except ImportError:
        return
    prime_sandboxes.AsyncSandboxClient = LocalSandboxes
    prime_sandboxes.CreateSandboxRequest = SimpleNamespace  # newer ones refuse the shipped command
