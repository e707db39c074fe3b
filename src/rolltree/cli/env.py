"""`rolltree env list`, `check`, `install` and `migrate`, and `rolltree init`."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import compat_option, echo, echo_json, json_object

SHOWN = 10
"""The number of differences to print."""

environments = click.Group("env", help="List environments, or check one for faults.")


@environments.command("list")
def list_environments() -> None:
    """List the environments that can be loaded by name."""
    from rolltree.environments import known_environments

    for name in known_environments():
        echo(name)


@environments.command("check")
@click.argument("env", help="Environment: a name or a path.")
@click.option("--env-args", "-a", help="Arguments of the environment, a JSON object.")
@click.option(
    "--num-examples",
    "-n",
    type=click.IntRange(min=1),
    default=16,
    help="How many examples to play.",
)
@click.option(
    "--reward-range",
    type=(float, float),
    default=(0.0, 1.0),
    help="Lowest and highest intended reward.",
)
@click.option("--allow", multiple=True, help="Check to leave out; repeatable.")
@compat_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check_contract(
    env: str,
    env_args: str | None,
    num_examples: int,
    reward_range: tuple[float, float],
    allow: tuple[str, ...],
    compat: bool,
    as_json: bool,
) -> None:
    """Play an environment with scripted answers; exit status 1 if a check fails."""
    from dataclasses import asdict

    from rolltree.environments import load_environment
    from rolltree.environments.check import CHECKS, check_environment

    args = json_object(env_args, "-a")
    report = check_environment(
        # A function, since the checks load it more than once.
        lambda: load_environment(env, compat=compat, **args),
        num_examples=num_examples,
        reward_range=reward_range,
        allow=allow,
    )
    if as_json:
        echo_json(asdict(report))
    else:
        for finding in report.findings:
            echo(f"{finding.check}: {finding.message}")
        for note in report.notes:
            echo(f"note: {note}")
        said = f"{num} fault{'s' * (num > 1)}" if (num := len(report.findings)) else "no faults"
        echo(f"{report.env_id}: {said} in {len(CHECKS)} checks on {report.num_examples} examples")
    # CI must fail if the environment does.
    if report.findings:
        raise click.exceptions.Exit(1)


@environments.command("install")
@click.argument("where", help="Folder of the environment, a wheel, or NAME @ URL.")
@click.option("-e", "--editable", is_flag=True, help="Use the folder itself, not a copy of it.")
def install_environment(where: str, editable: bool) -> None:
    """Install an environment and what it needs, without verifiers."""
    from rolltree.compat.packages import install_package

    name = install_package(where, editable=editable)
    echo(f"installed {name}")
    echo(f"next: rolltree eval {name}")


@environments.command("migrate")
@click.argument("path", type=click.Path(path_type=Path), help="Folder or file of the environment.")
@click.option("--write", is_flag=True, help="Write the edits; without it they are only shown.")
@click.option("--force", is_flag=True, help="Write even if it plays differently, with a TODO.")
@click.option("--env-args", "-a", help="Arguments of the environment for the check, JSON.")
@click.option("--no-check", is_flag=True, help="Do not play it before and after.")
def migrate_environment(
    path: Path, write: bool, force: bool, env_args: str | None, no_check: bool
) -> None:
    """Turn an environment written for verifiers 0.1.8 into rolltree's own names."""
    from rolltree.compat.migrate import migrate
    from rolltree.compat.replay import check_migration

    args = json_object(env_args, "-a")
    migration = migrate(path)
    # Without --write, showing the edits is all that happens.
    echo(migration.diff() or "nothing to edit")
    for remark in migration.remarks:
        echo(f"to do: {remark}")
    checked = None if no_check else check_migration(path, migration, args)
    differences = () if checked is None else checked.differences
    # All are counted, and the first ones are listed.
    found, shown = len(differences), differences[:SHOWN]
    if checked is not None:
        for note in checked.notes:
            echo(f"note: {note}")
        for difference in shown:
            echo(f"differs: {difference}")
        said = f"{found} fields differ" if found else "all the same"
        echo(f"played {checked.num_rollouts} rollouts before and after: {said}")
    if write and found and not force:
        echo(
            "nothing was written, because the migrated environment plays differently. Keep the old "
            "one, or pass --force to write it with these differences in a TODO comment."
        )
    elif write:
        counted = f"TODO: since `rolltree env migrate`, {found} fields differ, such as"
        todo = [counted, *(f"  {difference}" for difference in shown)] if found else []
        migration.with_todo(todo).write()
        echo(f"wrote {len(migration.after)} files")
    # Also after --force: scripts must notice that it plays differently.
    if found:
        raise click.exceptions.Exit(1)


@click.command("init")
@click.argument("name", help="Name, such as word-count.")
@click.option("--kind", default="single", help="Template: single, multi or tool.")
@click.option(
    "--path",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("environments"),
    help="Parent folder.",
)
def new_environment(name: str, kind: str, folder: Path) -> None:
    """Write the files of a new environment."""
    from rolltree.environments.scaffold import scaffold

    for file in scaffold(name, kind, folder):
        echo(file)
    # Names are looked up in `environments/`; an environment elsewhere needs its path.
    where = name if folder == Path("environments") else folder / name.replace("-", "_")
    echo(f"next: rolltree env check {where}")
