"""`rolltree serve`: an OpenAI-compatible server over the embedded engine; `rolltree models`.

The tokens are read from the environment variables that `--api-key-env` and `--admin-key-env` name,
or generated and printed once. Torch and the web server are imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rolltree.cli.arguments import one_of, secret, tell

if TYPE_CHECKING:
    from rolltree.inference.server.model_server import ServedLogprobs

MODES: dict[str, ServedLogprobs] = {"processed_logprobs": "processed", "raw_logprobs": "raw"}


def serve_model(
    model: Annotated[str, typer.Argument(help="Model: a name or a local folder.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Accept connections from other machines.")
    ] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", help="Environment variable that holds the token."),
    ] = None,
    admin_key_env: Annotated[
        str | None,
        typer.Option("--admin-key-env", help="Variable with the token that replaces weights."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name in requests.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16 or float16.")
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    max_batch: Annotated[
        int, typer.Option("--max-batch", help="Maximum requests decoded together.", min=1)
    ] = 64,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", help="Maximum tokens of prompt and answer together.", min=2),
    ] = None,
    logprobs_mode: Annotated[
        str, typer.Option("--logprobs-mode", help="processed_logprobs or raw_logprobs.")
    ] = "processed_logprobs",
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="Bitwise equal results in any batch; slower (docs/engine.md)."
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of requests without one.")] = 0,
    control_in_messages: Annotated[
        bool,
        typer.Option(
            "--control-in-messages",
            help="Control tokens that messages spell out become those tokens.",
        ),
    ] = False,
    read_timeout: Annotated[
        float,
        typer.Option("--read-timeout", help="Seconds for a request to arrive.", min=0.1),
    ] = 30.0,
    num_threads: Annotated[
        int | None, typer.Option("--num-threads", help="CPU threads of torch.", min=1)
    ] = None,
) -> None:
    """Serve a model by OpenAI's API, with vLLM's token ids, logprobs and weight updates."""
    import functools

    mode = MODES[one_of(logprobs_mode, MODES, "--logprobs-mode")]
    token = secret(api_key_env, "--api-key-env")
    admin_token = secret(admin_key_env, "--admin-key-env")
    from rolltree.inference.server import ServedModel, ServerOptions, serve

    where = ServerOptions(host, port, token, allow_remote, admin_token, read_timeout)

    import torch

    from rolltree.inference.local import local_client
    from rolltree.inference.server.weights import WeightReceiver, load_weights
    from rolltree.models import load_model

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    name = served_model_name or model
    loaded, tokenizer = load_model(model, dtype, device=device)
    client = local_client(
        loaded,
        tokenizer,
        control_in_messages=control_in_messages,
        name=name,
        max_batch=max_batch,
        max_context=max_context,
        pack_weights=True,
        batch_invariant=batch_invariant,
        seed=seed,
    )
    served = ServedModel(
        client.engine,
        client.renderer,
        name,
        load_weights=functools.partial(load_weights, loaded),
        receiver=WeightReceiver(loaded),
        logprobs=mode,
    )

    def announce(url: str, used_token: str, used_admin_token: str | None) -> None:
        tell(f"serving {name} at {url}")
        if token is None:
            print(f"token: {used_token}", flush=True)
        if admin_token is None and used_admin_token is not None:
            print(f"admin token: {used_admin_token}", flush=True)
        tell("Ctrl-C stops it.", error=True)

    serve(served, where, on_ready=announce)


def list_models(
    prepare: Annotated[
        str | None, typer.Argument(help="Prepare this model and print its folder.")
    ] = None,
) -> None:
    """List the built-in models, or prepare one."""
    from rolltree.models import resolve_model
    from rolltree.models.load import MADE_MODELS

    if prepare is not None:
        tell(resolve_model(prepare))
        return
    for name in sorted(MADE_MODELS):
        tell(name)
