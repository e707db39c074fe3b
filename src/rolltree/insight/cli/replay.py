"""`rolltree replay`: play recorded rollouts again in the present version of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rolltree.cli.arguments import compat_option, echo_json, json_object, phase_option, run_argument
from rolltree.values.errors import ConfigError


@click.command("replay")
@run_argument
@click.argument("rollout", required=False, help="A rollout's name. Without it: all of the run.")
@click.option("--env", help="Environment: a name or a path. Default: that of the run.")
@click.option("-a", "--env-args", help="Arguments of the environment, a JSON object.")
@compat_option
@phase_option
@click.option(
    "-n", "--num-rollouts", type=click.IntRange(min=1), help="Without ROLLOUT: only the first ones."
)
@click.option(
    "--ignore", multiple=True, help="Regular expression; matches count as equal. Repeatable."
)
@click.option("--no-score", is_flag=True, help="Leave out rewards, so no judge is called.")
@click.option(
    "--until", type=click.IntRange(min=0), metavar="STEP", help="Stop before this call, from 0."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def replay_rollouts(
    run: Path,
    rollout: str | None,
    env: str | None,
    env_args: str | None,
    compat: bool,
    phase: str | None,
    num_rollouts: int | None,
    ignore: tuple[str, ...],
    no_score: bool,
    until: int | None,
    as_json: bool,
) -> None:
    """Play recorded rollouts again and show the first difference."""
    from rolltree.records import replay, replay_many
    from rolltree.reports import SafeConsole, replay_lines, replays_summary, say

    # Flags without an effect are errors.
    single = {"--until": until is not None}
    many = {"--phase": phase is not None, "-n": num_rollouts is not None}
    _check_flags(rollout is None, single, "is for one rollout. Name it after the run.")
    _check_flags(
        rollout is not None, many, "selects rollouts, but one was named. Leave the flag out."
    )
    options: dict[str, Any] = {"compat": compat, "score": not no_score, "ignore": ignore}
    if env_args is not None:
        options["env_args"] = json_object(env_args, "-a")
    # With --json, stdout gets only the JSON.
    out = SafeConsole(stderr=as_json)
    if rollout is None:
        where = {} if phase is None else {"phase": phase}
        reports = replay_many(run, env, num=num_rollouts, where=where, **options)
        lines = replays_summary(reports)
    else:
        report = replay(run, rollout, env, until=until, **options)
        reports, lines = [report], replay_lines(report)
    for line in lines:
        say(out, line)
    if as_json:
        echo_json([report.as_dict() for report in reports])
    if not all(report.is_equal for report in reports):
        raise click.exceptions.Exit(1)


def _check_flags(is_wrong: bool, given: dict[str, Any], why: str) -> None:
    wrong = [flag for flag, value in given.items() if value]
    if is_wrong and wrong:
        raise ConfigError(f"{wrong[0]} {why}")
