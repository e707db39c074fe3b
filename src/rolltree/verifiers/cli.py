"""`rolltree env install`: an environment's package, without verifiers."""

from __future__ import annotations

import click

from rolltree.cli.arguments import echo
from rolltree.verifiers.packages import install_package


@click.command("install")
@click.argument("where", help="Folder of the environment, a wheel, or NAME @ URL.")
@click.option("-e", "--editable", is_flag=True, help="Use the folder itself, not a copy of it.")
def install_environment(where: str, editable: bool) -> None:
    """Install an environment and what it needs, without verifiers."""
    name = install_package(where, editable=editable)
    echo(f"installed {name}")
    echo(f"next: rolltree eval {name}")
