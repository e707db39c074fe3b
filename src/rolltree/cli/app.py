"""The `rolltree` program: its commands, its version, and its exit statuses.

An error that rolltree raises is printed as one message without a traceback; the exit status is 2
for wrong settings and 1 for everything else. Ctrl-C gives 130, and SIGTERM after which everything
was saved gives 75 (BSD's EX_TEMPFAIL, "try again later").
"""

from __future__ import annotations

import errno
import functools
import logging
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rolltree import __version__
from rolltree.cli import env, eval, runs, serve, train
from rolltree.cli.arguments import tell
from rolltree.errors import ConfigError, RolltreeError, Stopped, UnknownName
from rolltree.redact import shown

STOPPED_STATUS = 75
_EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "safetensors", "matplotlib", "peft"), "rolltree[train]"
    ),
    **dict.fromkeys(("starlette", "uvicorn"), "rolltree[torch,serve]"),
    **dict.fromkeys(("datasets", "gymnasium"), "rolltree[envs]"),
}
"""The extra that brings a package, for commands that import it."""

app = typer.Typer(
    name="rolltree",
    help="Reinforcement learning of LLM agents on the exact tokens the engine saw and sampled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def weather(error: OSError) -> str:
    """Return what an error of the operating system means for a command."""
    where = f"{error.filename}: " if error.filename else ""
    what = f"{where}{error.strerror or error}, so the command could not go on"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}. What was stored is safe; free some space and run the command again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}. Choose a folder that this user may write to, or change its rights."
    return f"{what}. Check the path and the machine, and run the command again."


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the errors that rolltree raises on purpose into a message and an exit status."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except Stopped as stopped:
            tell(stopped, error=True)
            raise typer.Exit(STOPPED_STATUS) from None
        except RolltreeError as error:
            tell(f"error: {error}", error=True)
            raise typer.Exit(2 if isinstance(error, ConfigError | UnknownName) else 1) from None
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            message = (
                f"the package {error.name} is missing, which this command needs. Install rolltree "
                f"with its extra: pip install '{extra}'."
            )
            tell(f"error: {message}", error=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.errno is None:  # no weather: a library's own use of the class
                raise
            tell(f"error: {weather(error)}", error=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run


_COMMANDS: dict[str, Callable[..., None]] = {
    "eval": eval.evaluate_environment,
    "train": train.train_model,
    "fork": train.fork_run,
    "serve": serve.serve_model,
    "runs": runs.list_stored_runs,
    "show": runs.show_run,
    "export": runs.export_run,
    "models": serve.list_models,
    "init": env.new_environment,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(guarded(_command))

_ENV_COMMANDS: dict[str, Callable[..., None]] = {
    "list": env.list_environments,
    "check": env.check_contract,
}
env_app = typer.Typer(help="List environments, or check one for faults.")
for _name, _command in _ENV_COMMANDS.items():
    env_app.command(_name)(guarded(_command))
app.add_typer(env_app, name="env", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of the program itself."""


class ShownFormatter(logging.Formatter):
    """Log records as a person may be shown them: messages and tracebacks quote models."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text."""
        return shown(super().format(record))


def main() -> None:
    """Run the program; the console script."""
    handler = logging.StreamHandler()
    handler.setFormatter(ShownFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    try:
        app()
    except Exception:  # noqa: BLE001  a mistake, of rolltree or of an environment's code
        tell(traceback.format_exc().rstrip("\n"), error=True)
        sys.exit(1)
