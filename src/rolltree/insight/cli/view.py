"""`rolltree view`: the web page for stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rolltree.cli.arguments import echo, where_option

if TYPE_CHECKING:
    from rolltree.insight.page.export import ExportedPage

# Attachments grow by a third in base64, and many mail servers have a limit of 25 MB.
MAIL_BYTES = 18_000_000


@click.command("view")
@click.argument(
    "path",
    metavar="[RUN_OR_FOLDER]",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    help="A run, or a folder of them.",
)
@click.option(
    "--port", type=click.IntRange(min=0, max=65535), default=0, help="Port; 0 takes a free one."
)
@click.option("--no-browser", is_flag=True, help="Only print the link.")
@click.option(
    "--export",
    "target",
    metavar="FILE.html",
    type=click.Path(path_type=Path),
    help="Write the run as one HTML file instead, with its most informative rollouts.",
)
@click.option(
    "--tokenizer",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Show tokens by the tokenizer.json of this folder. Default: that of each run's model.",
)
@where_option
@click.option("--sort", help="Order of the exported rollouts; -reward begins with the highest.")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), help="Rollouts to export. Default: 24 if filtered."
)
def view_runs(
    path: Path,
    port: int,
    no_browser: bool,
    target: Path | None,
    tokenizer: Path | None,
    where: tuple[str, ...],
    sort: str | None,
    limit: int | None,
) -> None:
    """Show runs in the browser, live while in progress; only this machine can reach the page."""
    # The server and --export have their own flags; a flag of the unused one is an error.
    if tokenizer is not None:
        from rolltree.records.tokenizer import choose_tokenizer

        choose_tokenizer(tokenizer)
    choice: dict[str, Any] = {"where": where, "sort": sort, "limit": limit}
    if target is not None:
        if port or no_browser:
            raise click.UsageError(
                "--export writes a file and starts no server; leave out --port and --no-browser."
            )
        from rolltree.insight.page.export import export_page

        _report_export(target, export_page(path, target, **choice))
        return
    if any(choice.values()):
        raise click.UsageError(
            "--where, --sort and --limit choose what --export writes; add --export FILE.html."
        )
    _serve(path, port, browser=not no_browser)


def _report_export(target: Path, page: ExportedPage) -> None:
    """Print what an exported file holds, how large it is, and what was left out."""
    echo(f"wrote {target}, {page.num_bytes / 1e6:.1f} MB, which opens in a browser by itself:")
    kinds = ", ".join(f"{num:,} {why}" for why, num in page.reasons.items())
    echo(
        f"{page.num_rollouts:,} of {page.of_rollouts:,} rollouts{kinds and f' ({kinds})'}, "
        f"{page.num_groups:,} of {page.of_groups:,} groups"
    )
    if page.num_without_tokens:
        echo(
            f"{page.num_without_tokens:,} of them without their tokens, for lack of room; use "
            "--limit to export fewer rollouts with all their tokens"
        )
    if page.num_bytes > MAIL_BYTES:
        echo("it is larger than most mail servers accept; use --limit to export fewer rollouts")


def _serve(path: Path, port: int, *, browser: bool) -> None:
    from rolltree.values.errors import ConfigError

    try:
        from rolltree.insight.page.serve import serve_viewer
    except ModuleNotFoundError as error:
        # Any other missing module is a bug in rolltree.
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(
            f"the page is served by the package {error.name}, which is not installed. Install "
            "rolltree with its extra: pip install 'rolltree[view]'."
        ) from error

    def ready(link: str) -> None:
        # Not with `echo`, which would redact the page's token in the link.
        print(link, flush=True)
        echo("Ctrl-C stops it.", error=True)

    serve_viewer(path, port=port, browser=browser, on_ready=ready)
