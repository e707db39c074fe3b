"""`rolltree serve`: an OpenAI-compatible server over the embedded engine.

The tokens are read from the environment variables that `--api-key-env` and `--admin-key-env` name,
or generated and printed once. Torch and the web server are imported when the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rolltree.cli.arguments import FiniteRange, ModelName, echo, known_name, secret

if TYPE_CHECKING:
    from rolltree.gateway.serve.model_server import ServedLogprobs

MODES: dict[str, ServedLogprobs] = {"processed_logprobs": "processed", "raw_logprobs": "raw"}


@click.command("serve")
@click.argument("model", type=ModelName(), help="Model: a name or a local folder.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(min=0, max=65535), default=8000, help="Port; 0 takes a free one."
)
@click.option("--allow-remote", is_flag=True, help="Accept connections from other machines.")
@click.option("--api-key-env", help="Environment variable that holds the token.")
@click.option("--admin-key-env", help="Environment variable that holds the admin token.")
@click.option("--served-model-name", type=ModelName(), help="Model name in requests.")
@click.option("--dtype", default="float32", help="float32, bfloat16 or float16.")
@click.option("--device", default="cpu", help="cpu or cuda.")
@click.option(
    "--max-batch", type=click.IntRange(min=1), default=64, help="Maximum requests decoded together."
)
@click.option(
    "--max-context",
    type=click.IntRange(min=2),
    help="Maximum tokens of prompt and answer together.",
)
@click.option(
    "--logprobs-mode", default="processed_logprobs", help="processed_logprobs or raw_logprobs."
)
@click.option(
    "--batch-invariant",
    is_flag=True,
    help="Bitwise equal results in any batch; slower (docs/engine.md).",
)
@click.option(
    "--record-experts", is_flag=True, help="Return which experts of a mixture each token went to."
)
@click.option("--seed", default=0, help="Seed of requests without one.")
@click.option(
    "--control-in-messages",
    is_flag=True,
    help="Read control tokens in messages as tokens, not as text.",
)
@click.option(
    "--read-timeout",
    type=FiniteRange(min=0.1),
    default=30.0,
    help="Maximum seconds for a request to arrive.",
)
@click.option("--num-threads", type=click.IntRange(min=1), help="CPU threads of torch.")
def serve_model(
    model: str,
    host: str,
    port: int,
    allow_remote: bool,
    api_key_env: str | None,
    admin_key_env: str | None,
    served_model_name: str | None,
    dtype: str,
    device: str,
    max_batch: int,
    max_context: int | None,
    logprobs_mode: str,
    batch_invariant: bool,
    record_experts: bool,
    seed: int,
    control_in_messages: bool,
    read_timeout: float,
    num_threads: int | None,
) -> None:
    """Serve a model over OpenAI's API, with vLLM's token ids, logprobs and weight updates."""
    import functools

    mode = MODES[known_name(logprobs_mode, MODES, "--logprobs-mode")]
    token = secret(api_key_env, "--api-key-env")
    admin_token = secret(admin_key_env, "--admin-key-env")
    from rolltree.inference.models import check_loadable, load_model

    # Checked before torch is imported, which takes seconds.
    check_loadable(model, dtype, device=device)
    from rolltree.gateway.serve import ServedModel, ServerOptions, serve

    # Also before torch, so that an unusable address or key is reported at once.
    where = ServerOptions(host, port, token, allow_remote, admin_token, read_timeout)

    import torch

    from rolltree.inference.local import local_client
    from rolltree.scale.weights.receive import WeightReceiver, load_weights

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
        # Nothing trains here, so the faster copy is worth its memory (design/0002).
        pack_weights=True,
        batch_invariant=batch_invariant,
        record_experts=record_experts,
        seed=seed,
    )
    served = ServedModel(
        client.engine,
        client.renderer,
        name,
        # Loads in place, into the model that the engine uses.
        load_weights=functools.partial(load_weights, loaded),
        receiver=WeightReceiver(loaded),
        logprobs=mode,
    )

    def announce(url: str, used_token: str, used_admin_token: str | None) -> None:
        echo(f"serving {name} at {url}")
        # A given token is in the environment; a generated one is printed only here.
        if token is None:
            print(f"token: {used_token}", flush=True)
        if admin_token is None and used_admin_token is not None:
            print(f"admin token: {used_admin_token}", flush=True)
        echo("Ctrl-C stops it.", error=True)

    serve(served, where, on_ready=announce)
