"""Loads an environment by its name, and installs its package without `verifiers`.

pip would install the newest verifiers, with which such environments no longer run. `BROUGHT`, the
extra `rolltree[compat]`, has the dependencies of verifiers 0.1.8 that environments import without
declaring them.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolltree._helpers.untrusted import read_toml
from rolltree.environments import Environment
from rolltree.environments import load_environment as load
from rolltree.values.errors import ConfigError, RolltreeError, UnknownName, as_sentence

BROUGHT = {
    "datasets": "datasets>=3",
    "griffe": "griffelib>=2",
    "nest_asyncio": "nest-asyncio>=1.6",
    "openai": "openai[aiohttp]>=2.14",
    "pydantic": "pydantic>=2.11",
    "requests": "requests>=2.31",
    "tenacity": "tenacity>=8.5",
}
"""Modules that came with verifiers, and what to install for each."""
_PROVIDED = ("verifiers", "rolltree")
Install = Callable[[Sequence[str]], None]


class InstallFailed(RolltreeError):
    """The installer failed; its output is on stderr."""


def install_package(where: str, *, editable: bool = False, install: Install | None = None) -> str:
    """Install an environment and what it needs, but never verifiers; return its name.

    `where` is a folder, a wheel or an archive, or `NAME @ URL`.

    Raises:
        ConfigError: there is nothing to install at `where`, or no installer.
        InstallFailed: the installer failed.
    """
    name = _package_name(where)
    path = Path(where)
    target = str(path.resolve()) if path.exists() else where
    install = install or pip_install
    # First without dependencies: these are read from the metadata of the installed package.
    install(["--no-deps", *(["--editable"] if editable else []), target])
    invalidate_caches()
    needed = requirements(name)
    named = {_plain(_name_of(line)) for line in needed}
    for module, line in BROUGHT.items():
        if _plain(_name_of(line)) not in named and find_spec(module) is None:
            needed.append(line)
    if needed:
        install(needed)
        invalidate_caches()
    return name


def requirements(name: str) -> list[str]:
    """Return an installed package's requirements, without extras, verifiers and rolltree."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return []
    return [line for line in lines if _name_of(line) not in _PROVIDED and "extra ==" not in line]


def pip_install(words: Sequence[str]) -> None:
    """Install into this interpreter's environment, with pip or else uv.

    Raises:
        ConfigError: neither is installed.
        InstallFailed: the installer failed.
    """
    # Environments made by uv have no pip.
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    elif shutil.which("uv") is not None:
        command = ["uv", "pip", "install", "--quiet", "--python", sys.executable]
    else:
        raise ConfigError(
            "there is neither pip nor uv in this environment, so nothing can be installed. Install "
            f"pip: {sys.executable} -m ensurepip."
        )
    done = subprocess.run([*command, *words], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise InstallFailed(
            f"{' '.join(command[:3])} could not install {' '.join(words)}; its message is above. "
            "Nothing else was changed."
        )


def _package_name(where: str) -> str:
    path = Path(where)
    if path.is_dir():
        return _name_in(path)
    if path.is_file():
        return path.name.partition("-")[0]
    name, at, url = where.partition("@")
    if at and "://" in url:
        return _name_of(name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", where):
        raise ConfigError(
            f"there is no folder {where}, and rolltree does not download from environment hubs. "
            f"Fetch its source, for example with `prime env pull {where}`, and install the folder."
        )
    raise ConfigError(
        f"there is nothing to install at {where}. Pass the environment's folder, a wheel, or a URL "
        "as 'NAME @ git+https://...'."
    )


def _name_in(folder: Path) -> str:
    file = folder / "pyproject.toml"
    try:
        return str(read_toml(file.read_text(encoding="utf-8"))["project"]["name"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} does not name a project ({type(error).__name__}: {error}), so {folder} cannot "
            f"be installed. It can be used as it is: rolltree eval {folder}."
        ) from error


def _name_of(requirement: str) -> str:
    found = re.match(r"\s*[\w.-]+", requirement)
    return found.group().strip().lower() if found else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


logger = logging.getLogger("rolltree.verifiers")


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """Return the environment `env_id`; an owner before a slash is ignored.

    Raises:
        ValueError: there is no such environment, or something that it imports is missing.
        RuntimeError: its `load_environment` raised; the message says what.
    """
    try:
        return load(env_id, **env_args)
    except (ImportError, UnknownName) as error:
        # verifiers imports the module and fails on the missing function, a RuntimeError; a name
        # that does not exist is a ValueError.
        if isinstance(error, UnknownName) and _is_module(env_id):
            raise RuntimeError(
                f"Failed to load environment '{env_id}': a different module has that name, "
                "without load_environment(). Give the environment its own name, say "
                f"'{env_id}-env'."
            ) from error
        raise ValueError(
            f"Could not import '{env_id}' environment: {as_sentence(error)} Ensure the package for "
            f"the '{env_id}' environment is installed."
        ) from error
    except Exception as error:  # as verifiers does
        raise RuntimeError(f"Failed to load environment '{env_id}': {error!s}") from error


def _is_module(env_id: str) -> bool:
    try:
        return find_spec(env_id.split("/")[-1].replace("-", "_")) is not None
    except (ImportError, ValueError):
        return False
