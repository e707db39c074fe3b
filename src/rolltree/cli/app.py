"""The `rolltree` program: its commands, its version, and its exit statuses.

An error that rolltree raises is printed as one message without a traceback; the exit status is 2
for wrong settings and 1 for everything else. Ctrl-C gives 130, and SIGTERM gives 75 if everything
was saved (BSD's EX_TEMPFAIL, "try again later").
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rolltree import __version__
from rolltree._helpers.lazy import EXTRAS, import_problem
from rolltree._helpers.redact import shown
from rolltree.cli import docs, doctor, env, eval, show, train
from rolltree.cli.arguments import echo
from rolltree.cli.commands import WingGroup
from rolltree.values.errors import ConfigError, RolltreeError, Stopped, UnknownName
from rolltree.wings import absence

STOPPED_STATUS = 75


def os_error_message(error: OSError) -> str:
    """Return the message for an error of the operating system that ended a command."""
    where = f"{error.filename}: " if error.filename else ""
    what = f"{where}{error.strerror or error}, so the command stopped"
    if error.errno == errno.EBADF and not error.filename:
        return "stdout is closed, so nothing can be shown. Use > /dev/null to drop the output."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}. What was stored is safe; free some space and run the command again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}. Choose a folder that this user may write to, or change its rights."
    return f"{what}. Check the path and the machine, and run the command again."


@contextlib.contextmanager
def messages() -> Iterator[None]:
    """Turn the errors that rolltree raises on purpose into a message and an exit status."""
    try:
        yield
    except Stopped as stopped:
        echo(stopped, error=True)
        raise click.exceptions.Exit(STOPPED_STATUS) from None
    except RolltreeError as error:
        echo(f"error: {error}", error=True)
        status = 2 if isinstance(error, ConfigError | UnknownName) else 1
        raise click.exceptions.Exit(status) from None
    except ImportError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if (absent := absence(error)) is not None:
            echo(f"error: {absent}", error=True)
            raise click.exceptions.Exit(2) from None
        # A failed import in rolltree itself is a bug and keeps its traceback. One in an environment
        # means that a package is to be installed.
        if extra is None and (_is_ours(error) or not isinstance(error, ModuleNotFoundError)):
            raise
        if (error.name or "").startswith("verifiers.v1"):
            echo(f"error: {_VERIFIERS_V1}", error=True)
            raise click.exceptions.Exit(2) from None
        message = (
            import_problem("this command", error.name or "", error, extra)
            if extra is not None
            else f"the environment imports the package {error.name}, which is not installed. "
            "Install it, or everything that the environment's project lists: rolltree env install "
            "PATH."
        )
        echo(f"error: {message}", error=True)
        raise click.exceptions.Exit(2) from None
    except OSError as error:
        # Without errno it is not from the operating system: libraries raise OSError for their own
        # errors.
        if error.errno is None:
            raise
        echo(f"error: {os_error_message(error)}", error=True)
        raise click.exceptions.Exit(1) from None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


_VERIFIERS_V1 = (
    "this environment is written for verifiers 0.4 (verifiers.v1), whose tasksets rolltree cannot "
    "run; it runs environments for 0.1.8. `rolltree docs compat` says what to do: for its "
    "tasksets harbor, openenv and textarena use rt.HarborEnv, rt.OpenEnv and rt.TextArenaEnv."
)


def _is_ours(error: ImportError) -> bool:
    """Whether the import that failed is in one of rolltree's own files."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames if not frame.filename.startswith("<frozen")]
    return bool(files) and Path(__file__).parents[1] in Path(files[-1]).parents


class Program(WingGroup):
    """Commands whose errors are printed as messages."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn its errors into messages."""
        with messages():
            return super().invoke(ctx)


app = Program(
    "rolltree",
    commands=[
        *(doctor.examine, docs.show_page, train.run_demo, env.new_environment, env.environments),
        *(eval.evaluate_environment, train.train_model, train.fork_stored_run),
        *(show.show_run, train.list_models),
    ],
    help="Reinforcement learning of LLM agents on the exact tokens the engine saw and sampled.",
    context_settings={"show_default": True},
)
click.version_option(__version__, message="rolltree %(version)s", help="Show the version.")(app)


class SafeFormatter(logging.Formatter):
    """Formats log records safely for a terminal, since they may quote the text of models."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text."""
        return shown(super().format(record))


def main() -> None:
    """Run the program; the entry point of the console script."""
    _fill_closed()
    # Warnings may quote text of models and environments, so they are made safe like all output.
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    try:
        with messages():  # click prints help outside of `Program.invoke`
            app(prog_name="rolltree")
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except Exception:  # noqa: BLE001  a bug in rolltree or in an environment's code
        echo(traceback.format_exc().rstrip("\n"), error=True)
        sys.exit(1)
    finally:
        _drop_unwritten()


def _fill_closed() -> None:
    """Put something in the place of standard streams that are closed, as after `>&-`.

    Otherwise a file, such as a run's database, would get the number of a stream, and whatever is
    printed there. Output to a closed stdout is an error, and to a closed stderr is dropped.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number, which is `fd`
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _drop_unwritten() -> None:
    """Drop output that cannot be written, so that Python's final flush keeps the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            # Python flushes at exit, too, and would change the status to 120 if the reader is gone.
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
