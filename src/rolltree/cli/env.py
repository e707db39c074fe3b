"""`rolltree env list` and `check`, and `rolltree init`."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import FiniteRange, compat_option, echo, echo_json, json_object
from rolltree.cli.commands import WingGroup


@click.command("list")
def list_environments() -> None:
    """List the environments that can be loaded by name."""
    from rolltree.environments import known_environments

    for name in known_environments():
        echo(name)


@click.command("check")
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
    type=(FiniteRange(), FiniteRange()),
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
        verdict = f"{num} fault{'s' * (num > 1)}" if (num := len(report.findings)) else "no faults"
        echo(
            f"{report.env_id}: {verdict} in {len(CHECKS)} checks on {report.num_examples} examples"
        )
    # CI must fail if the environment does.
    if report.findings:
        raise click.exceptions.Exit(1)


environments = WingGroup(
    "env",
    [list_environments, check_contract],
    prefix="env",
    help="List environments, or check one for faults.",
)


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
