"""`rolltree models`: the models that need no download, and making one ready."""

from __future__ import annotations

from typing import Annotated

import typer


def list_models(
    prepare: Annotated[
        str | None, typer.Argument(help="Make this model ready now, and print its folder.")
    ] = None,
) -> None:
    """List the models that rolltree makes itself, or make one ready."""
    from rolltree.models import resolve_model
    from rolltree.models.load import MADE_MODELS

    if prepare is not None:
        print(resolve_model(prepare))
        return
    for name in sorted(MADE_MODELS):
        print(name)
