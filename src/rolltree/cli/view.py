"""`rolltree view`: the web page on stored runs."""

from __future__ import annotations

from pathlib import Path

import click

from rolltree.cli.arguments import tell


@click.command("view")
@click.argument(
    "where",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    help="A run, or a folder of them.",
)
@click.option(
    "--port", type=click.IntRange(min=0, max=65535), default=0, help="Port; 0 takes a free one."
)
@click.option("--no-browser", is_flag=True, help="Only print the link.")
def view_runs(where: Path, port: int, no_browser: bool) -> None:
    """Show runs in the browser, live while they go on; only this machine can reach the page."""
    from rolltree.errors import ConfigError

    try:
        from rolltree.viewer.serve import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"the package {error.name} is missing, which serves the page. Install rolltree with "
            "its extra: pip install 'rolltree[view]'."
        ) from error

    def ready(link: str) -> None:
        print(link, flush=True)
        tell("Ctrl-C stops it.", error=True)

    serve(where, port=port, browser=not no_browser, on_ready=ready)
