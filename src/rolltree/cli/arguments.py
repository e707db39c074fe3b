"""Values of command-line flags: JSON objects, choices, secrets, default run directories."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from rolltree._helpers.redact import remember, secrets_in, shown
from rolltree.values.errors import ConfigError, UnknownName, did_you_mean

compat_option = click.option(
    "--compat",
    is_flag=True,
    help="Let `import verifiers` give rolltree's classes, even if that package is installed.",
)
run_argument = click.argument("run", type=click.Path(path_type=Path), help="A run directory.")
phase_option = click.option("--phase", help="Only this phase.")
where_option = click.option(
    "--where",
    multiple=True,
    help="Conditions on rollouts: 'reward < 0.5 and metrics/tries >= 2'. Repeatable.",
)


class FiniteRange(click.FloatRange):
    """A number in a range; NaN, which is in every range of click's, and infinity are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ModelName(click.types.StringParamType):
    """A model's name, which is not empty: a folder `""` would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name."""
        if not str(value).strip():
            self.fail("it is empty. Name a model, as in smollm2-135m.", param, ctx)
        return super().convert(value, param, ctx)


Name = TypeVar("Name", bound=str)


def echo(text: object, *, error: bool = False) -> None:
    """Print a line on stdout, or on stderr, made safe for a terminal."""
    _print(shown(str(text)), sys.stderr if error else sys.stdout)


def _print(text: str, file: TextIO) -> None:
    with until_reader_leaves():
        print(text, file=file, flush=True)


def until_reader_leaves() -> contextlib.AbstractContextManager[None]:
    """End the block quietly when nobody reads its output, as after `| head`."""
    return contextlib.suppress(BrokenPipeError)


def echo_json(value: object) -> None:
    """Print JSON on stdout, without secrets; its escapes make it safe for a terminal."""
    from rolltree._helpers.redact import redact
    from rolltree.store import to_plain

    _print(json.dumps(redact(to_plain(value)), indent=2), sys.stdout)


def json_object(text: str | None, flag: str) -> dict[str, Any]:
    """Return the JSON object in a flag's value, or an empty one without the flag.

    Its secrets are remembered: an error of an environment may quote its arguments.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    # JSON that is nested too deeply raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag} is not JSON ({error}). Write it like {flag} '{{\"key\": 1}}'."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{flag} is JSON, but not an object. Write it like {flag} '{{\"key\": 1}}'."
        )
    remember(*secrets_in(value))
    return value


def known_name(text: str, known: Iterable[Name], flag: str) -> Name:
    """Return a flag's value if it is one of the known names.

    Raises:
        UnknownName: it is not one of them.
    """
    names = list(known)
    for name in names:
        if name == text:
            return name
    raise UnknownName(f"{flag} is {text!r}.{did_you_mean(text, names)}")


def secret(variable: str | None, flag: str) -> str | None:
    """Return the value of the environment variable that a flag names, or None without the flag.

    It is remembered, so nothing that is printed later shows it.

    Raises:
        ConfigError: the variable is not set, or the flag was given a key instead of a name.
    """
    if variable is None:
        return None
    # A key that was pasted by mistake usually has other characters. An error must not repeat it.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ConfigError(
            f"{flag} takes the name of an environment variable, not the key itself, so that keys "
            f"stay out of shell histories. Write {flag} OPENAI_API_KEY."
        )
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            f"{flag} names the environment variable {variable}, which is not set, so the server "
            f"would refuse the requests. Set {variable} in this shell (export), and run the "
            "command again."
        )
    remember(value)
    return value


def default_run_dir(kind: str, *names: str) -> Path:
    """Return `runs/<kind>-<names>-<time>`, safe as a file name."""
    # The last two parts of a path, or of a name such as owner/model, tell runs apart.
    parts = [kind, *("-".join(Path(name).parts[-2:]) for name in names)]
    stem = "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-") for part in parts if part)
    return Path("runs") / f"{stem}--{time.strftime('%Y%m%d-%H%M%S')}"
