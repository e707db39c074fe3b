"""`rolltree eval`: measure a model on an environment.

Flags that verifiers' `vf-eval` has, too, have the same names. The API key is read from the
environment variable that `-k` names; it is neither stored nor printed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from rolltree.cli.arguments import (
    FiniteRange,
    ModelName,
    compat_option,
    default_run_dir,
    echo_json,
    json_object,
    known_name,
    secret,
)
from rolltree.wings import load_wing

if TYPE_CHECKING:
    from rolltree.inference import ModelClient

PHASE = "eval"
MAY_CHANGE = ("num_examples", "rollouts_per_example", "max_concurrent", "base_url")
"""Settings in which a continued evaluation may differ from its first start."""
NUM_EXAMPLES, ROLLOUTS_PER_EXAMPLE = 5, 3
MAX_TOKENS = 512
"""Limit of an answer from the engine in this process, since some answers never end."""
SPLITS: tuple[Literal["train", "eval"], ...] = ("train", "eval")


def _all_or_some(num_examples: int | None) -> int | None:
    if num_examples is not None and num_examples != -1 and num_examples < 1:
        raise click.BadParameter(f"{num_examples} is not a number of examples. -1 means all.")
    return num_examples


@click.command("eval")
@click.argument("env", help="Environment: a name, or a path to its folder.")
@click.option(
    "-m",
    "--model",
    type=ModelName(),
    default="smollm2-135m",
    help="Model name; without -b a local one.",
)
@click.option(
    "-b",
    "--base-url",
    multiple=True,
    help="OpenAI-compatible URL; repeat it for a pool. Default: an engine in this process.",
)
@click.option("-k", "--api-key-var", help="Environment variable that holds the API key.")
@click.option(
    "-n",
    "--num-examples",
    type=int,
    callback=lambda context, parameter, value: _all_or_some(value),
    help=f"How many examples; -1 for all. Default: the environment's, or {NUM_EXAMPLES}.",
)
@click.option(
    "-r",
    "--rollouts-per-example",
    type=click.IntRange(min=1),
    help=f"Rollouts per example. Default: the environment's, or {ROLLOUTS_PER_EXAMPLE}.",
)
@click.option(
    "-c",
    "--max-concurrent",
    type=click.IntRange(min=1),
    default=32,
    help="Maximum rollouts in flight.",
)
@click.option(
    "-t",
    "--max-tokens",
    type=click.IntRange(min=1),
    help="Maximum tokens of one answer. Default: the server's; of an engine in this process the "
    f"environment's in its train.toml, or {MAX_TOKENS}.",
)
@click.option("-T", "--temperature", type=FiniteRange(min=0.0), help="Sampling temperature.")
@click.option("-S", "--sampling-args", help="More sampling arguments, a JSON object.")
@click.option("-a", "--env-args", help="Arguments of the environment, a JSON object.")
@click.option(
    "-s", "--save-results", "save", is_flag=True, help="Also write results.jsonl and metadata.json."
)
@compat_option
@click.option("--seed", default=0, help="Seed of environments and sampling.")
@click.option("--split", default="eval", help="eval or train.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--run", type=click.Path(path_type=Path), help="Run directory; an existing run is continued."
)
@click.option(
    "--transcripts", type=click.IntRange(min=0), default=0, help="Number of rollouts to print."
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=0,
    help="Retries of an episode after a server error.",
)
@click.option("--retry-failed", is_flag=True, help="Retry all failed rollouts of --run.")
@click.option(
    "--time-limit",
    type=FiniteRange(min=0.0, min_open=True),
    help="Maximum seconds of an episode, without waiting for the server.",
)
@click.option(
    "--deadline",
    type=FiniteRange(min=0.0, min_open=True),
    help="Maximum seconds of a rollout in all: waiting, retries and scoring included.",
)
@click.option(
    "--pass-threshold",
    type=FiniteRange(),
    default=1.0,
    help="Lowest reward that counts as a pass in pass@k.",
)
def evaluate_environment(
    env: str,
    model: str,
    base_url: tuple[str, ...],
    api_key_var: str | None,
    num_examples: int | None,
    rollouts_per_example: int | None,
    max_concurrent: int,
    max_tokens: int | None,
    temperature: float | None,
    sampling_args: str | None,
    env_args: str | None,
    save: bool,
    compat: bool,
    seed: int,
    split: str,
    as_json: bool,
    run: Path | None,
    transcripts: int,
    retries: int,
    retry_failed: bool,
    time_limit: float | None,
    deadline: float | None,
    pass_threshold: float,
) -> None:
    """Evaluate a model on an environment."""
    import asyncio
    from functools import partial
    from itertools import islice

    from rolltree.environments import (
        changed_code,
        eval_defaults,
        load_environment,
        own_max_tokens,
    )
    from rolltree.evaluation import EvalReport, Settings, evaluate_async, write_results
    from rolltree.inference.client import check_sampling_names, sampling_from_args
    from rolltree.reports import (
        EvalView,
        SafeConsole,
        evaluation_facts,
        evaluation_table,
        headlines,
        only_shows,
        say,
        transcript,
    )
    from rolltree.rollouts.decode import decode_results
    from rolltree.store import Run

    # A flag names a variable, since a key on the command line would be in the shell's history.
    api_key = secret(api_key_var, "-k")
    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = json_object(sampling_args, "-S")
    check_sampling_names(sampling)
    sampling.update({key: value for key, value in given.items() if value is not None})
    # Before a model is loaded.
    sampling_from_args(sampling)
    env_arguments = json_object(env_args, "-a")
    chosen_split = known_name(split, SPLITS, "--split")
    if base_url:
        from rolltree.inference.http import checked_url

        for url in base_url:
            # Checked before anything is stored.
            checked_url(url)
    else:
        from rolltree.inference.models import check_loadable

        # Checked before torch is imported, which takes seconds.
        check_loadable(model)
    folder = run or default_run_dir("eval", env, model)
    where = ", ".join(base_url) or None
    errors = SafeConsole(stderr=True, only_shows=True)
    environment = load_environment(env, compat=compat, **env_arguments)
    # Read only if one of the two flags is missing.
    own = {} if None not in (num_examples, rollouts_per_example) else eval_defaults(env)
    if num_examples is None:
        num_examples = own.get("num_examples", NUM_EXAMPLES)
    if rollouts_per_example is None:
        rollouts_per_example = own.get("rollouts_per_example", ROLLOUTS_PER_EXAMPLE)
    limited = ""
    if not base_url and not sampling.keys() & {"max_tokens", "max_completion_tokens"}:
        sampling["max_tokens"], origin = own_max_tokens(env) or (MAX_TOKENS, "the default")
        limited = f"at most {sampling['max_tokens']} tokens an answer, from {origin}; -t changes it"
    size = f"{num_examples} examples, {rollouts_per_example} rollouts each"

    async def measure(stored: Run) -> EvalReport:
        say(errors, f"run {folder}")
        if own:
            say(errors, f"{size}, from the pyproject.toml of {env}")
        if limited:
            say(errors, limited)
            say(errors, f"loading {model}")
        changed = changed_code(environment, stored)
        if changed is not None:
            stored.announce(changed, partial(say, errors))
        async with (
            environment,
            open_client(
                model,
                base_urls=base_url,
                api_key=api_key,
                max_concurrent=max_concurrent,
                seed=seed,
            ) as client,
        ):
            with EvalView(errors, environment.env_id) as view:
                return await evaluate_async(
                    environment,
                    client,
                    num_examples=num_examples,
                    rollouts_per_example=rollouts_per_example,
                    sampling=sampling,
                    max_concurrent=max_concurrent,
                    seed=seed,
                    run=stored,
                    phase=PHASE,
                    split=chosen_split,
                    time_limit_s=time_limit,
                    deadline_s=deadline,
                    retries=retries,
                    retry_failed=retry_failed,
                    settings=Settings(pass_threshold=pass_threshold),
                    on_progress=view.update,
                )

    config = {
        # These identify the run: only those in `MAY_CHANGE` may differ when it is continued.
        "env": env,
        "env_args": env_arguments,
        "model": model,
        "base_url": where,
        "sampling": sampling,
        "seed": seed,
        "split": split,
        "num_examples": num_examples,
        "rollouts_per_example": rollouts_per_example,
        "max_concurrent": max_concurrent,
    }
    with Run.open_or_create(
        folder,
        config=config,
        kind="eval",
        may_change=MAY_CHANGE,
        secrets=[api_key] if api_key else [],
    ) as stored:
        try:
            report = asyncio.run(measure(stored))
        except KeyboardInterrupt:
            say(errors, f"stopped; the same command with --run {folder} continues it")
            raise
        # With --json, stdout gets only the JSON.
        out = errors if as_json else SafeConsole(only_shows=True)
        ids = dict.fromkeys(outcome.request_id for outcome in report.outcomes)
        with only_shows("the transcripts"):
            for request_id in islice(ids, transcripts):
                for result in decode_results(stored.rollouts(request_id=request_id)):
                    out.print(transcript(result))
        out.print(evaluation_table(report), "", evaluation_facts(report))
        with only_shows("what happened"):
            for line in headlines(stored, idle_gpu=report.idle_gpu):
                out.print(line, soft_wrap=True)
        if save:
            results = decode_results(stored.rollouts(phase=PHASE))
            written = write_results(
                stored.path,
                (result for result in results if result.request.request_id in ids),
                report,
                env_args=env_arguments,
                base_url=where,
                rollouts_per_example=rollouts_per_example,
                sampling_args=sampling,
            )
            say(out, f"wrote {written / 'results.jsonl'} and metadata.json")
        if as_json:
            echo_json(report.as_dict())
    # Scripts must notice that nothing was measured, or that nobody was told: stdout is closed.
    if report.num_failed == report.num_rollouts or (out.has_failed and not as_json):
        raise click.exceptions.Exit(1)


@asynccontextmanager
async def open_client(
    model: str,
    *,
    base_urls: Sequence[str],
    api_key: str | None,
    max_concurrent: int,
    seed: int,
    tokenizer: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> AsyncIterator[ModelClient]:
    """Open the client of OpenAI-compatible servers, or of the engine in this process.

    With the folder of a `tokenizer`, prompts for one server are rendered here. `dtype` and
    `device` are the engine's.

    Raises:
        UnknownName: there are no `base_urls` and no local model of this name.
    """
    from rolltree.inference import ChatRenderer, OpenAIClient

    client: ModelClient
    if len(base_urls) > 1:
        pool = load_wing("inference", "EndpointPool")
        client = pool.of(base_urls, model, api_key=api_key, max_connections=max_concurrent)
    elif base_urls:
        renderer = None
        if tokenizer is not None:
            from rolltree.inference.models import load_tokenizer

            renderer = ChatRenderer(load_tokenizer(tokenizer))
        client = OpenAIClient(
            base_urls[0],
            model,
            api_key=api_key,
            renderer=renderer,
            max_connections=max_concurrent,
        )
    else:
        from rolltree.inference.models import check_loadable, load_model

        # Checked before torch is imported.
        check_loadable(model, dtype, device=device)
        from rolltree.inference.local import local_client

        loaded, tokenizer = load_model(model, dtype, device=device)
        client = local_client(
            loaded,
            tokenizer,
            name=model,
            # Bounded, since each row of a batch has its KV cache in memory.
            max_batch=min(max_concurrent, 64),
            pack_weights=True,
            seed=seed,
        )
    try:
        yield client
    finally:
        await client.aclose()
