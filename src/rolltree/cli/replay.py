"""`rolltree replay`: play recorded rollouts again in the present version of the environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rolltree.cli.arguments import compat_option, echo_json, json_object, secret
from rolltree.cli.eval import open_client
from rolltree.cli.runs import phase_option, run_argument
from rolltree.errors import ConfigError

if TYPE_CHECKING:
    from rolltree.records import ReplayReport


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
@click.option("--pdb", is_flag=True, help="Open the debugger in the environment at that point.")
@click.option("--continue", "goes_on", is_flag=True, help="Let a model continue from there.")
@click.option("-m", "--model", help="With --continue: model name; without -b a local one.")
@click.option("-b", "--base-url", multiple=True, help="With --continue: OpenAI-compatible URL.")
@click.option("-k", "--api-key-var", help="Environment variable that holds the API key.")
@click.option(
    "-r", "--branches", type=click.IntRange(min=1), default=1, help="Number of continuations."
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="Run directory of the branches. Default: RUN-branches.",
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
    pdb: bool,
    goes_on: bool,
    model: str | None,
    base_url: tuple[str, ...],
    api_key_var: str | None,
    branches: int,
    into: Path | None,
    as_json: bool,
) -> None:
    """Play recorded rollouts again and show the first difference."""
    from rolltree.records import replay, replay_many, replay_with_debugger
    from rolltree.reports import SafeConsole, replay_lines, replays_summary, say

    # Flags without an effect are errors.
    single = {"--until": until is not None, "--pdb": pdb, "--continue": goes_on}
    many = {"--phase": phase is not None, "-n": num_rollouts is not None}
    live = {"-m": model is not None, "-b": base_url, "-k": api_key_var, "--into": into is not None}
    live["-r"] = branches > 1
    _check_flags(rollout is None, single, "is for one rollout. Name it after the run.")
    _check_flags(
        rollout is not None, many, "selects rollouts, but one was named. Leave the flag out."
    )
    _check_flags(not goes_on, live, "needs --continue, without which no model is called.")
    _check_flags(pdb and goes_on, {"--pdb": True}, "cannot be combined with --continue.")
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
        if goes_on:
            live_options = {
                "model": model or "smollm2-135m",
                "base_urls": base_url,
                "api_key": secret(api_key_var, "-k"),
            }
            target = into or run.with_name(f"{run.name}-branches")
            # Branches go to a separate run; the recorded one does not change.
            report = _branches(run, rollout, env, until, branches, target, live_options, options)
            say(out, f"branches in {target}")
        elif pdb:
            report = replay_with_debugger(run, rollout, env, until=until, **options)
        else:
            report = replay(run, rollout, env, until=until, **options)
        reports, lines = [report], replay_lines(report)
    for line in lines:
        say(out, line)
    if as_json:
        echo_json([report.as_dict() for report in reports])
    # Branches differ on purpose.
    if not goes_on and not all(report.is_equal for report in reports):
        raise click.exceptions.Exit(1)


def _check_flags(is_wrong: bool, given: dict[str, Any], why: str) -> None:
    wrong = [flag for flag, value in given.items() if value]
    if is_wrong and wrong:
        raise ConfigError(f"{wrong[0]} {why}")


def _branches(
    run: Path,
    rollout: str,
    env: str | None,
    until: int | None,
    num: int,
    into: Path,
    live: dict[str, Any],
    options: dict[str, Any],
) -> ReplayReport:
    import asyncio

    from rolltree.records import replay_async
    from rolltree.store import Run

    config = {"branches_of": str(run), "env": env, "model": live["model"]}

    async def played(target: Run) -> ReplayReport:
        async with open_client(**live, max_concurrent=32, seed=0) as client:
            return await replay_async(
                run,
                rollout,
                env,
                until=until,
                client=client,
                num_branches=num,
                into=target,
                **options,
            )

    # The store cuts these out of everything that it writes.
    secrets = [live["api_key"]] if live["api_key"] else []
    with Run.open_or_create(into, config=config, kind="replay", secrets=secrets) as target:
        return asyncio.run(played(target))
