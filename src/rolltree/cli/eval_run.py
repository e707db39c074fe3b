"""The work behind `rolltree eval`: environment, run, client, evaluation, report, in that order.

Imported when the command runs; it decides nothing that is not in its options.
"""

from __future__ import annotations

import asyncio
import json
from itertools import islice

from rich.console import Console

from rolltree.cli.clients import open_client
from rolltree.cli.eval_command import MAY_CHANGE, EvalOptions
from rolltree.environments import Environment, load_environment
from rolltree.evaluation import EvalReport, Settings, evaluate, write_results
from rolltree.reports import EvalView, evaluation_facts, evaluation_table, say, transcript
from rolltree.rollouts.record import decode_results
from rolltree.store import Run, to_plain

PHASE = "eval"


def run_evaluation(options: EvalOptions) -> int:
    """Evaluate, print the report, and return the exit status: 1 when every rollout failed."""
    errors = Console(stderr=True)
    environment = load_environment(options.env, **options.env_args)
    with Run.open_or_create(
        options.run,
        config=options.config(),
        kind="eval",
        may_change=MAY_CHANGE,
        secrets=[options.api_key] if options.api_key else [],
    ) as run:
        try:
            report = asyncio.run(_evaluate(environment, options, run, errors))
        except KeyboardInterrupt:
            say(errors, f"stopped; the same command with --run {options.run} continues it")
            raise
        _show(report, run, options, errors)
    return 1 if report.num_failed == report.num_rollouts else 0


async def _evaluate(
    environment: Environment, options: EvalOptions, run: Run, errors: Console
) -> EvalReport:
    async with environment:
        say(errors, f"run {options.run}")
        async with open_client(
            options.model,
            base_urls=options.base_urls,
            api_key=options.api_key,
            max_concurrent=options.max_concurrent,
            seed=options.seed,
        ) as client:
            with EvalView(errors, environment.env_id) as view:
                return await evaluate(
                    environment,
                    client,
                    num_examples=options.num_examples,
                    rollouts_per_example=options.rollouts_per_example,
                    sampling=options.sampling,
                    max_concurrent=options.max_concurrent,
                    seed=options.seed,
                    run=run,
                    phase=PHASE,
                    split=options.split,
                    time_limit_s=options.time_limit_s,
                    retries=options.retries,
                    retry_failed=options.retry_failed,
                    settings=Settings(pass_threshold=options.pass_threshold),
                    on_progress=view.update,
                )


def _show(report: EvalReport, run: Run, options: EvalOptions, errors: Console) -> None:
    ids = dict.fromkeys(outcome.request_id for outcome in report.outcomes)
    out = errors if options.as_json else Console()
    for request_id in islice(ids, options.num_transcripts):
        for result in decode_results(run.rollouts(request_id=request_id)):
            out.print(transcript(result))
    out.print(evaluation_table(report), "", evaluation_facts(report))
    if options.save:
        stored = decode_results(run.rollouts(phase=PHASE))
        folder = write_results(
            run.path,
            (result for result in stored if result.request.request_id in ids),
            report,
            env_args=options.env_args,
            base_url=", ".join(options.base_urls) or None,
            rollouts_per_example=options.rollouts_per_example,
            sampling_args=options.sampling,
        )
        say(out, f"wrote {folder / 'results.jsonl'} and metadata.json")
    if options.as_json:
        print(json.dumps(to_plain(report.as_dict()), indent=2))
