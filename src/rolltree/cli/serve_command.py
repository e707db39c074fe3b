"""`rolltree serve`: an OpenAI-compatible server over the embedded engine.

The token is read from the environment variable that `--api-key-env` names, or generated and printed
once. Torch and the web server are imported when the command runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rolltree.cli.arguments import secret


def serve_model(
    model: Annotated[str, typer.Argument(help="Model: a name or a local folder.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let other machines reach it.")
    ] = False,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", help="Environment variable that holds the token."),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What requests call the model.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16 or float16.")
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    max_batch: Annotated[
        int, typer.Option("--max-batch", help="Requests that decode together.", min=1)
    ] = 64,
    max_context: Annotated[
        int | None, typer.Option("--max-context", help="Most tokens, prompt and answer.", min=2)
    ] = None,
    logprobs_mode: Annotated[
        str, typer.Option("--logprobs-mode", help="processed_logprobs or raw_logprobs.")
    ] = "processed_logprobs",
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="The same bits in any batch; slower (docs/engine)."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="For requests that bring none.")] = 0,
    num_threads: Annotated[
        int | None, typer.Option("--num-threads", help="CPU threads of torch.", min=1)
    ] = None,
) -> None:
    """Serve a model: OpenAI's API, with token ids, logprobs and weight updates as vLLM has them."""
    from rolltree.cli.serve_run import ServeOptions, run_server

    run_server(
        ServeOptions(
            model=model,
            host=host,
            port=port,
            allow_remote=allow_remote,
            token=secret(api_key_env, "--api-key-env"),
            name=served_model_name or model,
            dtype=dtype,
            device=device,
            max_batch=max_batch,
            max_context=max_context,
            logprobs_mode=logprobs_mode,
            batch_invariant=batch_invariant,
            seed=seed,
            num_threads=num_threads,
        )
    )
