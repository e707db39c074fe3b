"""Names of the Hugging Face hub: `owner/name`, or `owner/name@revision`.

`huggingface_hub` does the work, so its cache, its token and its variables (`HF_HOME`, `HF_TOKEN`,
`HF_ENDPOINT`, `HF_HUB_OFFLINE`) apply. Whether the hub answers is known within seconds; if it does
not, the client, which would try for a minute or two, uses only its cache.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from rolltree.values.errors import ConfigError, import_extra

WAIT_S = 5.0
"""Seconds that a hub may take for its first answer, with name resolution and connecting."""
_NAME = re.compile(r"([\w-][\w.-]*)/([\w-][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
WEIGHTS = ("*.safetensors",)
PICKLED_WEIGHTS = ("*.bin",)
TOKENIZER = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""Files of a model repository: without code, and without weights of other frameworks."""
_COMMAND = {"model": "hf download", "dataset": "hf download --repo-type dataset"}


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, at a branch, tag or commit."""

    repo: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def command(self) -> str:
        """The command that downloads it, on a machine that reaches the hub."""
        at = "" if self.revision is None else f" --revision {self.revision}"
        return f"{_COMMAND[self.kind]} {self.repo}{at}"

    @property
    def cache_folder(self) -> Path:
        """The folder in which the client stores it."""
        return hub_cache() / f"{self.kind}s--{self.repo.replace('/', '--')}"


def hub_name(name: str, kind: Literal["model", "dataset"] = "model") -> HubName | None:
    """Return a text as a name on the hub; None if it does not have that form.

    >>> hub_name("Qwen/Qwen3-0.6B@main")
    HubName(repo='Qwen/Qwen3-0.6B', revision='main', kind='model')
    """
    match = _NAME.fullmatch(name)
    return HubName(f"{match[1]}/{match[2]}", match[3], kind) if match else None


def hub_cache() -> Path:
    """Return the folder of the client's cache, without importing it."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def cached(name: HubName) -> Path | None:
    """Return the folder of a repository in the cache, without a request; None if it is missing."""
    revision = name.revision or "main"
    for commit in (revision, _text(name.cache_folder / "refs" / revision)):
        folder = name.cache_folder / "snapshots" / commit
        if commit and folder.is_dir():
            return folder
    return None


def check_available(name: HubName) -> None:
    """Check that a repository is in the cache, or that the hub answers.

    Raises:
        ConfigError: neither is so; the message says what to download, and where to put it.
    """
    if cached(name) is None and not answers():
        raise ConfigError(unavailable(name, _why_offline()))


def model_folder(name: HubName, *, weights: bool = True) -> Path:
    """Return the folder of a model, downloaded into the client's cache first if it is missing.

    Raises:
        ConfigError: it is not in the cache, and the hub does not answer, does not have it, or asks
            for a token.
    """
    folder = _snapshot(name, [*TOKENIZER, *(WEIGHTS if weights else ())])
    # Repositories from before safetensors; layouts.py reads their weights without running code.
    if weights and not any(any(folder.glob(each)) for each in WEIGHTS):
        folder = _snapshot(name, [*TOKENIZER, *PICKLED_WEIGHTS])
    return folder


def _snapshot(name: HubName, patterns: Sequence[str]) -> Path:
    what = f"{name}, a name of the Hugging Face hub,"
    huggingface_hub = import_extra("huggingface_hub", what, "rolltree[train]")
    is_online = answers()
    try:
        # Progress bars go to stderr, where they would disturb a live view.
        with contextlib.redirect_stderr(io.StringIO()):
            folder = huggingface_hub.snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=list(patterns),
                local_files_only=not is_online,
            )
    # The many errors of the package, of its HTTP client, and of the system.
    except Exception as error:
        why = str(error).strip().partition("\n")[0] if is_online else _why_offline()
        raise ConfigError(unavailable(name, f"{type(error).__name__}: {why}")) from error
    return Path(folder)


def unavailable(name: HubName, why: str) -> str:
    """Return a message that says what happened, what to download, and where to put it."""
    return (
        f"{name} is neither a folder here nor in the cache of the Hugging Face hub "
        f"({hub_cache()}), and it could not be downloaded ({why}). Check the name; a private or "
        "gated one needs a token (`hf auth login`, or HF_TOKEN). Without a network, run "
        f"`{name.command}` on a machine that has one, and copy its folder "
        f"{name.cache_folder.name} to {name.cache_folder.parent}; or download with "
        "`--local-dir FOLDER`, copy that, and name the folder."
    )


def is_offline() -> bool:
    """Whether environment variables forbid requests to the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(each, "").upper() in ("1", "ON", "YES", "TRUE") for each in names)


def _why_offline() -> str:
    return (
        "HF_HUB_OFFLINE is set"
        if is_offline()
        else f"no answer from {endpoint()} within {WAIT_S:.0f} s"
    )


def endpoint() -> str:
    """Return the address of the hub."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def answers() -> bool:
    """Whether requests to the hub are allowed, and it answers. It is asked once per process."""
    return not is_offline() and _reached(endpoint())


@functools.cache
def _reached(url: str) -> bool:
    replies: list[bool] = []
    # In a thread that may be left behind: resolving a name has no time limit.
    asking = Thread(target=lambda: replies.append(_asked(url)), daemon=True, name="rolltree-hub")
    asking.start()
    asking.join(WAIT_S)
    return bool(replies) and replies[0]


def _asked(url: str) -> bool:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, method="HEAD"), timeout=WAIT_S):
            return True
    except HTTPError as error:
        # An error status is an answer, too, unless it comes from a proxy that refuses.
        return error.code not in (403, 407, 502, 503, 504)
    except (OSError, ValueError):
        return False


@contextmanager
def cache_only() -> Iterator[None]:
    """Let `datasets` and `huggingface_hub` use only their caches inside the block."""
    import datasets.config
    import huggingface_hub.constants

    modules: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
