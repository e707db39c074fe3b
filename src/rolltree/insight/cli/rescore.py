"""`rolltree rescore`: score the rollouts of a run with other rewards, without its model."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import (
    FiniteRange,
    compat_option,
    echo_json,
    json_object,
    phase_option,
    run_argument,
)


@click.command("rescore")
@run_argument
@click.option("--env", help="Environment whose rewards score: a name, or a path to its folder.")
@click.option("-a", "--env-args", help="Arguments of the environment, a JSON object.")
@compat_option
@click.option(
    "--rubric",
    help="Instead of --env: a rubric or reward function, module:name or path/to/file.py:name.",
)
@click.option(
    "--run",
    "target",
    type=click.Path(path_type=Path),
    help="Directory of the new run (default: RUN-rescored); an existing one is continued.",
)
@phase_option
@click.option(
    "-c",
    "--max-concurrent",
    type=click.IntRange(min=1),
    default=64,
    help="Maximum rollouts that are scored at once.",
)
@click.option(
    "--deadline",
    type=FiniteRange(min=0.0, min_open=True),
    help="Maximum seconds that scoring a rollout or a group may take.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=0,
    help="Retries of scoring after an error of a judge's server.",
)
@click.option(
    "--top", type=click.IntRange(0, 100), default=10, help="Number of changed rollouts to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def rescore_run(
    run: Path,
    env: str | None,
    env_args: str | None,
    compat: bool,
    rubric: str | None,
    target: Path | None,
    phase: str | None,
    max_concurrent: int,
    deadline: float | None,
    retries: int,
    top: int,
    as_json: bool,
) -> None:
    """Score the rollouts of a run again, with other rewards, as a new run."""
    from functools import partial

    from rolltree.records import rescore
    from rolltree.reports import EvalView, SafeConsole, rescore_parts, say

    arguments = json_object(env_args, "-a")
    # Progress and notices go to stderr, the report to stdout.
    errors = SafeConsole(stderr=True, only_shows=True)
    try:
        with EvalView(errors, f"rescore {run}") as view:
            report = rescore(
                run,
                environment=env,
                env_args=arguments,
                compat=compat,
                rubric=rubric,
                run_dir=target,
                phase=phase,
                max_concurrent=max_concurrent,
                deadline_s=deadline,
                retries=retries,
                on_notice=partial(say, errors),
                on_progress=view.update,
            )
    except KeyboardInterrupt:
        say(errors, "stopped; the same command continues the new run")
        raise
    if as_json:
        echo_json(report.as_dict())
    else:
        out = SafeConsole()
        for part in rescore_parts(report, num_changes=top):
            out.print(part)
    # Scripts must notice that nothing was scored.
    if report.num_failed + report.num_unplayed == report.num_rollouts:
        raise click.exceptions.Exit(1)
