"""The one exception tree of rolltree.

    RolltreeError
    ├── ConfigError            a key or value in a config file, flag or argument   (ValueError)
    │   └── UnknownArgument    a keyword argument that a call does not take        (TypeError)
    ├── UnknownName            an unknown name; the message has the nearest one    (LookupError)
    ├── ModelError             a model call that gave no usable answer
    │   ├── ServerError        the server answered with an error status; `status`, `retryable`
    │   ├── ConnectionFailed   the server could not be reached, or hung up
    │   │   └── CallTimeout    no answer before the deadline of the call, retries included
    │   ├── BadResponse        the server answered, but not with what the API promises
    │   │   └── AnswerTooLarge an answer above the client's limit; the rest was not read
    │   ├── PublishFailed      servers did not take new weights; `clients` are theirs
    │   ├── PromptTooLong      the prompt does not fit the context window
    │   └── UnsupportedSetting this engine does not support a requested setting
    ├── TokenError             token data that contradicts itself: lengths, ranges, NaN logprobs
    ├── StoreError             the run directory cannot be read or written
    ├── ClusterError           a role of a run on several processes cannot be started or kept
    ├── TrainingError          training cannot continue: non-finite loss, no rollout to learn from
    │   └── RankLost           a process that trains with this one has ended
    ├── SandboxError           a sandbox could not do what was requested
    │   ├── SandboxFileError   a path that leaves the sandbox, is missing or is not a file
    │   └── SandboxUnavailable this machine cannot isolate untrusted code well enough
    ├── WorldUnavailable       a world's server cannot be reached, hung up or broke its protocol
    ├── ProgramError           an agent program could not be started, or never called its model
    ├── BudgetSpent            an agent has used up its model calls or its tokens
    ├── RolloutTimeout         an episode exceeded its time limit                  (TimeoutError)
    └── Stopped                the program was stopped by SIGTERM; its progress is saved

Each message says what happened, why it matters and what to do next. `types.ErrorRecord` is the
stored record of a failure.
"""

from __future__ import annotations

import traceback as _traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any, Literal, TypeVar

from rolltree.types import ErrorRecord

T = TypeVar("T")


class RolltreeError(Exception):
    """The root: catch it to catch everything that rolltree raises on purpose."""


class ConfigError(RolltreeError, ValueError):
    """A configuration key is unknown, or a value is not what the key takes."""


class UnknownArgument(ConfigError, TypeError):
    """A keyword argument that a call does not take; the message names the nearest one."""


class UnknownName(RolltreeError, LookupError):
    """A name is not registered."""


class ModelError(RolltreeError):
    """A model call gave no usable answer."""


class ServerError(ModelError):
    """The server answered with an error status."""

    def __init__(self, message: str, *, status: int, retryable: bool) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable


class ConnectionFailed(ModelError):
    """The server could not be reached, or hung up."""


class CallTimeout(ConnectionFailed):
    """A call had no answer before its deadline, which counts its retries."""


class BadResponse(ModelError):
    """The server answered, but not with what the API promises."""


class AnswerTooLarge(BadResponse):
    """An answer is larger than the client reads, as it was sent or unpacked."""


class PublishFailed(ModelError):
    """Servers did not take new weights; `clients` are the clients of those that failed."""

    def __init__(self, message: str, *, clients: tuple[Any, ...]) -> None:
        super().__init__(message)
        self.clients = clients


class PromptTooLong(ModelError):
    """The prompt does not fit the context window."""


class UnsupportedSetting(ModelError):
    """The engine in use does not support a requested setting."""


class TokenError(RolltreeError, ValueError):
    """Token data contradicts itself."""


class StoreError(RolltreeError):
    """The run directory cannot be read or written."""


class ClusterError(RolltreeError):
    """A process of a run that uses several cannot be started, or does not stay alive."""


class TrainingError(RolltreeError):
    """Training cannot continue."""


class RankLost(TrainingError):
    """A process that trains with this one has ended, so all of them end."""


class SandboxError(RolltreeError):
    """A sandbox could not do what was requested; say, it was closed."""


class SandboxFileError(SandboxError):
    """A path leaves the sandbox or is not a regular file, perhaps because of code inside it."""


class SandboxUnavailable(SandboxError):
    """This machine cannot isolate untrusted code as well as requested."""


class WorldUnavailable(RolltreeError):
    """The server of a world could not be reached, hung up, or broke its protocol."""


class ProgramError(RolltreeError):
    """An agent program could not be started, or ended without a model call."""


class BudgetSpent(RolltreeError):
    """An agent has used up its budget of model calls or tokens."""


class RolloutTimeout(RolltreeError, TimeoutError):
    """An episode exceeded its time limit."""


class Stopped(RolltreeError):
    """The program was stopped by SIGTERM; its progress is saved."""


INFRASTRUCTURE = frozenset(
    (
        *("ConnectionFailed", "CallTimeout", "ServerError", "BadResponse"),
        *("APIConnectionError", "APITimeoutError", "InternalServerError"),  # the openai package's
        *("SandboxError", "WorldUnavailable"),
    )
)
"""The types of `ErrorRecord`s that say nothing about the episode: the server of the model, a judge
or a world, or a sandbox did not work. Such a rollout is lost: it does not count, and is run again
with its seeds. A machine that cannot isolate code (`SandboxUnavailable`) is not among them, since
it would fail again."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"`, or the list of known names if none is similar.

    >>> did_you_mean("tempreature", ["temperature", "top_p"])
    " Did you mean 'temperature'?"
    """
    names = sorted(known)
    # The search is slow in the length of a name, which may come from an untrusted source.
    close = get_close_matches(name[:200], names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else " None are known."


def look_up(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return a row of a table.

    Raises:
        UnknownName: the table has no row of this name.
    """
    if name not in table:
        raise UnknownName(f"there is no {kind} {name!r}.{did_you_mean(name, table)}")
    return table[name]


def refuse_unknown(
    what: str, unknown: Mapping[str, object], takes: Callable[..., object] | type
) -> None:
    """Check that a call had no keyword arguments beyond those that a function or class takes.

    Raises:
        UnknownArgument: an argument is unknown; the message names the nearest known one.
    """
    for name in unknown:
        # A class passes arguments that it does not take to its base, so all constructors count.
        classes = takes.__mro__ if isinstance(takes, type) else ()
        functions = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
        known: set[str] = set()
        for function in functions or [takes]:
            parameters = signature(function).parameters.values()
            known |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        hint = did_you_mean(name, known - {"self"})
        raise UnknownArgument(f"{what} has no argument {name!r}; it would be ignored.{hint}")


def import_extra(module: str, what: str, extra: str, instead: str = "") -> Any:
    """Return the module of an optional package, which `what` needs and `extra` installs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package {module.replace('_', '-')}, which cannot be imported "
            f"({error}). Install it: pip install '{extra}'{instead}."
        ) from error


def message_of(error: BaseException) -> str:
    """Return the message of an exception; never raises.

    >>> message_of(KeyError(7))
    '7'
    """
    try:
        return str(error)
    except Exception:  # noqa: BLE001  say, a KeyError of an integer that is too long to print
        return f"({type(error).__name__} without a readable message)"


def as_sentence(said: object) -> str:
    """Return a message that another sentence can follow: with a full stop if it has no end mark.

    >>> as_sentence(KeyError("id"))
    "'id'."
    """
    text = str(said).rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def record_error(
    error: BaseException,
    phase: Literal["setup", "model", "environment", "scoring", "cleanup", "timeout", "cancelled"],
) -> ErrorRecord:
    """Turn an exception into data, with both ends of a long message or traceback.

    They are cut because every rollout that fails at a dead server stores its own copy.
    """
    lines = "".join(_traceback.format_exception(error)).splitlines(keepends=True)
    # Without the lines that only underline the previous one.
    traceback = "".join(line for line in lines if line.strip(" ~^\n"))
    message = message_of(error)
    if isinstance(error, SystemExit):
        message = f"the code called exit({message}), which would have ended the whole program"
    return ErrorRecord(
        type=type(error).__name__,
        message=_both_ends(message, 10_000),
        traceback=_both_ends(traceback, 4_000),
        phase=phase,
    )


def _both_ends(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4
    return f"{text[:head]}\n... ({len(text) - limit:,} characters)\n{text[-tail:]}"
