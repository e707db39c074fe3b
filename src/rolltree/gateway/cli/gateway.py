"""`rolltree gateway`: sessions for agent programs, in front of a model or a server.

Keys are read from the environment variables that flags name; the admin key is generated and printed
once if none is given. Torch and the web server are imported when the command runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rolltree.cli.arguments import FiniteRange, ModelName, echo, secret
from rolltree.cli.eval import open_client
from rolltree.values.seeds import derive_seed

if TYPE_CHECKING:
    from rolltree.store import Run

KIND = "gateway"
_STARTS = "gateway_starts"


@click.command("gateway")
@click.argument(
    "model", type=ModelName(), help="Model: a name, a local folder, or an OpenAI-compatible URL."
)
@click.option("-m", "--model-name", type=ModelName(), help="Model to ask at a URL.")
@click.option(
    "--tokenizer",
    help="Folder of the model behind a URL: prompts are rendered here and sent as tokens.",
)
@click.option("-k", "--api-key-var", help="Environment variable with the key of the URL.")
@click.option("--dtype", help="Of the embedded engine: float32 (the default), bfloat16, float16.")
@click.option("--device", help="Of the embedded engine: cpu (the default) or cuda.")
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="Run directory that closed sessions are stored in; an existing run is continued.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(min=0, max=65535), default=8000, help="Port; 0 takes a free one."
)
@click.option("--allow-remote", is_flag=True, help="Accept connections from other machines.")
@click.option("--allowed-host", multiple=True, help="Another name:port that it is reached by.")
@click.option("--unix-socket", type=click.Path(path_type=Path), help="Listen on this path, too.")
@click.option("--admin-key-env", help="Variable with the key that opens and closes sessions.")
@click.option("--max-calls", type=click.IntRange(min=1), help="Maximum model calls of a session.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="Maximum sampled tokens of a session."
)
@click.option("--time-limit", type=FiniteRange(min=0.1), help="Maximum seconds of a session.")
@click.option(
    "--train-calls",
    help="Calls of sessions to train: task (the default), all, or conditions as JSON.",
)
@click.option("--seed", default=0, help="Seed of requests without one.")
def serve_sessions(
    model: str,
    model_name: str | None,
    tokenizer: str | None,
    api_key_var: str | None,
    dtype: str | None,
    device: str | None,
    run: Path | None,
    host: str,
    port: int,
    allow_remote: bool,
    allowed_host: tuple[str, ...],
    unix_socket: Path | None,
    admin_key_env: str | None,
    max_calls: int | None,
    max_tokens: int | None,
    time_limit: float | None,
    train_calls: str | None,
    seed: int,
) -> None:
    """Serve a model to agent programs, and record their calls as trajectories."""
    import asyncio
    import contextlib
    import signal

    from rolltree.store import Run
    from rolltree.values.errors import ConfigError

    is_url = model.startswith(("http://", "https://"))
    api_key = secret(api_key_var, "-k")
    admin_key = secret(admin_key_env, "--admin-key-env")
    if is_url and model_name is None:
        raise ConfigError(f"-m is missing: which model should be asked at {model}?")
    ignored = [
        flag
        for flag, given in (("-m", model_name), ("--tokenizer", tokenizer), ("-k", api_key_var))
        if given is not None and not is_url
    ]
    if ignored:
        raise ConfigError(
            f"{ignored[0]} is for the server at a URL, but {model} is loaded in this process, so "
            "it would be ignored. Leave it out."
        )
    if is_url and (dtype or device):
        raise ConfigError(
            f"{'--dtype' if dtype else '--device'} is for a model in this process, but {model} is "
            "a server's URL, so it would be ignored. Give it to the server."
        )
    engine = {"dtype": dtype or "float32", "device": device or "cpu"}
    if is_url:
        from rolltree.inference.http import checked_url

        checked_url(model)
    else:
        from rolltree.inference.models import check_loadable

        check_loadable(model, **engine)
    from rolltree.gateway import Gateway, SessionLimits
    from rolltree.gateway.serve import ServerOptions
    from rolltree.gateway.trained_calls import checked_rule

    # Checked before a model is loaded.
    ServerOptions(host, port, admin_key, allow_remote)
    rule = checked_rule(_rule_in(train_calls or "task"))

    async def serve(stored: Run | None) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        # The signals only wake `serve`, so that everything is closed in order.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        # The gateway is closed before the client, which its calls in flight use.
        async with (
            open_client(
                model_name or model,
                base_urls=[model] if is_url else [],
                api_key=api_key,
                # Sessions come as they like: an engine's own limit is lower.
                max_concurrent=256,
                seed=seed,
                tokenizer=tokenizer,
                **engine,
            ) as client,
            Gateway(
                client,
                run=stored,
                host=host,
                port=port,
                allow_remote=allow_remote,
                allowed_hosts=allowed_host,
                unix_socket=unix_socket,
                admin_key=admin_key,
                limits=SessionLimits(max_calls, max_tokens, time_limit),
                train_calls=rule,
            ) as gateway,
        ):
            echo(f"serving sessions of {client.model} at {gateway.url}")
            # Not with `echo`, which would redact it. A key that was given need not be printed.
            if admin_key is None:
                print(f"admin key: {gateway.admin_key}", flush=True)
            if gateway.sessions:
                echo(f"{len(gateway.sessions)} sessions of an earlier start are open")
            echo("Ctrl-C stops it; open sessions continue at the next start.", error=True)
            await stop.wait()

    # The run stays open longer than the event loop, until the last session is stored.
    with contextlib.ExitStack() as opened:
        stored = None
        if run is not None:
            config = {"model": model, "model_name": model_name, "tokenizer": tokenizer}
            secrets = [key for key in (api_key, admin_key) if key]
            stored = opened.enter_context(
                Run.open_or_create(run, config=config, kind=KIND, secrets=secrets)
            )
            seed = seed_of_start(stored, seed)
        asyncio.run(serve(stored))


def _rule_in(text: str) -> Any:
    """Return the conditions that a text has as JSON, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def seed_of_start(run: Run, seed: int) -> int:
    """Return the engine's seed for one more start of a gateway on `run`, and count the start.

    The engine counts requests from 0 in every process. With one seed for all starts, sessions that
    ask the same would get the answers again that earlier ones got, and count as new samples.
    """
    number = run.meta.get(_STARTS, 0)
    run.set_meta(_STARTS, number + 1)
    return derive_seed(seed, "start", number) if number else seed
