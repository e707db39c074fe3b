"""`rolltree init`: the files of a new environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def new_environment(
    name: Annotated[str, typer.Argument(help="Its name, such as word-count.")],
    kind: Annotated[
        str, typer.Option("--kind", help="What it begins as: single, multi or tool.")
    ] = "single",
    folder: Annotated[Path, typer.Option("--path", help="Where its folder is made.")] = Path(
        "environments"
    ),
) -> None:
    """Write the files of a new environment, ready to run and to change."""
    from rolltree.environments.scaffold import scaffold

    for file in scaffold(name, kind, folder):
        print(file)
    where = name if folder == Path("environments") else folder / name.replace("-", "_")
    print(f"next: rolltree env check {where}")
