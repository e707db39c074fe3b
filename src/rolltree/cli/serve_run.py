"""The work behind `rolltree serve`: check the address, load the model, serve it.

Imported when the command runs. Settings are checked before the model is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import msgspec

from rolltree.errors import ConfigError, UnknownName, did_you_mean

if TYPE_CHECKING:
    from rolltree.inference.server.served import ServedLogprobs

_MODES: dict[str, ServedLogprobs] = {"processed_logprobs": "processed", "raw_logprobs": "raw"}


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed flags."""

    model: str
    host: str
    port: int
    allow_remote: bool
    token: str | None
    name: str
    dtype: str
    device: str
    max_batch: int
    max_context: int | None
    logprobs_mode: str
    batch_invariant: bool
    seed: int
    num_threads: int | None


def run_server(options: ServeOptions) -> None:
    """Serve until told to stop.

    Raises:
        ConfigError: the address may not or cannot be used, or the server's packages are missing.
        UnknownName: no such model, dtype or mode.
    """
    if options.logprobs_mode not in _MODES:
        raise UnknownName(
            f"--logprobs-mode is {options.logprobs_mode!r}."
            + did_you_mean(options.logprobs_mode, _MODES)
        )
    try:
        from rolltree.inference.server import ServedModel, ServerOptions, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name} is missing, which the server needs. Install rolltree with "
            "its extra: pip install 'rolltree[torch,serve]'."
        ) from error
    where = ServerOptions(options.host, options.port, options.token, options.allow_remote)

    import torch

    from rolltree.inference.local import local_client
    from rolltree.inference.server.receiver import WeightReceiver
    from rolltree.inference.server.weights import load_weights
    from rolltree.models import load_model

    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    model, tokenizer = load_model(options.model, options.dtype, device=options.device)
    client = local_client(
        model,
        tokenizer,
        name=options.name,
        max_batch=options.max_batch,
        max_context=options.max_context,
        pack_weights=True,
        batch_invariant=options.batch_invariant,
        seed=options.seed,
    )
    served = ServedModel(
        client.engine,
        client.renderer,
        options.name,
        load_weights=functools.partial(load_weights, model),
        receiver=WeightReceiver(model),
        logprobs=_MODES[options.logprobs_mode],
    )
    serve(served, where, on_ready=functools.partial(_announce, options))


def _announce(options: ServeOptions, url: str, token: str) -> None:
    print(f"serving {options.name} at {url}", flush=True)
    if options.token is None:
        print(f"token: {token}", flush=True)
    print("Ctrl-C stops it.", file=sys.stderr)
