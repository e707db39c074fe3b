"""`vf-install`: install an environment from its folder, or from verifiers' own repository."""

from __future__ import annotations

import argparse
from pathlib import Path

from rolltree.verifiers.packages import install_package

REPOSITORY = "git+https://github.com/PrimeIntellect-ai/verifiers.git"


def install_environment(env: str, path: str, from_repo: bool, branch: str) -> None:
    """Install an environment without verifiers itself: `rolltree.verifiers` is in its place.

    Raises:
        ConfigError: there is no such folder.
        InstallFailed: the installer failed.
    """
    folder = env.replace("-", "_")
    if from_repo:
        name = env.replace("_", "-")
        subdirectory = f"environments/{folder}"
        install_package(f"{name} @ {REPOSITORY}@{branch}#subdirectory={subdirectory}")
    else:
        install_package(str(Path(path) / folder), editable=True)


def main() -> None:
    """Read the command line and install."""
    parser = argparse.ArgumentParser(prog="vf-install", description=__doc__)
    parser.add_argument("env", help="name of the environment")
    parser.add_argument("-p", "--path", default="./environments", help="folder of environments")
    parser.add_argument("-r", "--from-repo", action="store_true", help="from verifiers' repository")
    parser.add_argument("-b", "--branch", default="main", help="branch or tag of the repository")
    asked = parser.parse_args()
    install_environment(asked.env, asked.path, asked.from_repo, asked.branch)


if __name__ == "__main__":
    from rolltree.verifiers.scripts import messages

    messages(main)
