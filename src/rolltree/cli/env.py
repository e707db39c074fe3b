"""`rolltree env list`, `rolltree env check` and `rolltree init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolltree.cli.arguments import json_object, tell


def list_environments() -> None:
    """List the environments that can be loaded by name."""
    from rolltree.environments import known_environments

    for name in known_environments():
        tell(name)


def check_contract(
    env: Annotated[str, typer.Argument(help="Environment: a name or a path.")],
    env_args: Annotated[
        str | None,
        typer.Option("--env-args", "-a", help="Arguments of the environment, a JSON object."),
    ] = None,
    num_examples: Annotated[
        int, typer.Option("--num-examples", "-n", help="How many examples to play.", min=1)
    ] = 16,
    reward_range: Annotated[
        tuple[float, float],
        typer.Option("--reward-range", help="Lowest and highest intended reward."),
    ] = (0.0, 1.0),
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="Check to leave out; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Play an environment with scripted answers; exit status 1 if a check fails."""
    import asyncio
    import json
    from dataclasses import asdict

    from rolltree.environments import load_environment
    from rolltree.environments.check import CHECKS, check_environment

    args = json_object(env_args, "-a")
    report = asyncio.run(
        check_environment(
            lambda: load_environment(env, **args),
            num_examples=num_examples,
            reward_range=reward_range,
            allow=allow or (),
        )
    )
    if as_json:
        print(json.dumps(asdict(report), indent=2, default=str))
    else:
        for finding in report.findings:
            tell(f"{finding.check}: {finding.message}")
        for note in report.notes:
            tell(f"note: {note}")
        said = f"{len(report.findings)} faults" if report.findings else "no faults"
        tell(f"{report.env_id}: {said} in {len(CHECKS)} checks on {report.num_examples} examples")
    if report.findings:
        raise typer.Exit(1)


def new_environment(
    name: Annotated[str, typer.Argument(help="Name, such as word-count.")],
    kind: Annotated[
        str, typer.Option("--kind", help="Template: single, multi or tool.")
    ] = "single",
    folder: Annotated[Path, typer.Option("--path", help="Parent folder.")] = Path("environments"),
) -> None:
    """Write the files of a new environment."""
    from rolltree.environments.scaffold import scaffold

    for file in scaffold(name, kind, folder):
        tell(file)
    where = name if folder == Path("environments") else folder / name.replace("-", "_")
    tell(f"next: rolltree env check {where}")
